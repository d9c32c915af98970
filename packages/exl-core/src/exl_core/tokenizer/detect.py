"""Loads the tokenizer of a model directory or GGUF file, with the settings of the files beside it.

`tokenizer.json` has precedence over `tokenizer.model`, because only the former contains tokens that
were added later. A `.gguf` file contains its own tokenizer. The model's name is never used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from exl_core.errors import ModelNotFoundError, TokenizerError
from exl_core.files import is_present
from exl_core.tokenizer.base import ControlIds, Tokenizer
from exl_core.tokenizer.check import check_control_ids
from exl_core.tokenizer.control_ids import (
    SideFiles,
    eos_ids,
    read_side_files,
    role_id,
)

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_MODEL = "tokenizer.model"


def load_tokenizer(path: Path, gguf_fields: Mapping[str, object] | None = None) -> Tokenizer:
    """Loads the tokenizer of a model directory or of a `.gguf` file.

    `gguf_fields`: the file's metadata, if the caller has already read it.
    """
    if path.is_dir():
        return _load_directory(path)
    if not path.exists():
        raise ModelNotFoundError("there is no such file or directory", where=path)
    if path.suffix.lower() != ".gguf":
        raise TokenizerError(
            "no tokenizer can be read from this file",
            where=path,
            expected="a model directory or a .gguf file",
        )
    from exl_core.tokenizer.gguf_fields import read_gguf_fields
    from exl_core.tokenizer.gguf_vocab import tokenizer_from_gguf_fields

    fields = read_gguf_fields(path) if gguf_fields is None else gguf_fields
    return tokenizer_from_gguf_fields(fields, str(path))


def _load_directory(folder: Path) -> Tokenizer:
    for name, loader in ((TOKENIZER_JSON, _load_json), (TOKENIZER_MODEL, _load_model)):
        path = folder / name
        if is_present(path, TokenizerError):
            tokenizer = loader(path, read_side_files(folder))
            check_control_ids(tokenizer.control, tokenizer.vocab_size, str(folder))
            return tokenizer
    raise TokenizerError(
        "the directory holds no tokenizer",
        where=folder,
        expected=f"{TOKENIZER_JSON} or {TOKENIZER_MODEL}",
        next_step="Copy the tokenizer's files from the original model into it",
    )


def _load_json(path: Path, files: SideFiles) -> Tokenizer:
    from exl_core.tokenizer import hf_json

    backend = hf_json.open_backend(path)
    hf_json.add_declared_tokens(backend, files.declared_tokens(), path)
    before, after = hf_json.probe_added_around(backend, path)
    bos_id = role_id(files, "bos", backend.token_to_id)
    if bos_id is None and len(before) == 1:
        bos_id = before[0]
    says_bos, says_eos = files.flag("add_bos_token"), files.flag("add_eos_token")
    unk_id = hf_json.model_unk_id(backend)
    control = ControlIds(
        bos_id=bos_id,
        eos_ids=eos_ids(files, backend.token_to_id),
        unk_id=role_id(files, "unk", backend.token_to_id) if unk_id is None else unk_id,
        pad_id=role_id(files, "pad", backend.token_to_id),
        adds_bos=bos_id is not None and (bos_id in before if says_bos is None else says_bos),
        adds_eos=bool(after) if says_eos is None else says_eos,
    )
    return hf_json.LibraryTokenizer(
        backend, hf_json.rule_of(backend, str(path)), control, str(path)
    )


def _load_model(path: Path, files: SideFiles) -> Tokenizer:
    from exl_core.tokenizer import spm

    processor = spm.open_processor(spm.read_model(path), path)
    special = spm.special_pieces(processor)
    added: dict[str, int] = {}
    for token in files.declared_tokens():
        if token.token_id < processor.get_piece_size():
            if token.is_special:
                special[token.text] = token.token_id
        elif token.is_special is False:
            added[token.text] = token.token_id
        else:  # `added_tokens.json` does not state it, and usually lists chat markers
            special[token.text] = token.token_id
    known = {**added, **special}

    def id_of(text: str) -> int | None:
        return known.get(text)

    bos_id = role_id(files, "bos", id_of)
    if bos_id is None and processor.bos_id() >= 0:
        bos_id = processor.bos_id()
    ends = eos_ids(files, id_of)
    if not ends and processor.eos_id() >= 0:
        ends = (processor.eos_id(),)
    pad_id = role_id(files, "pad", id_of)
    control = ControlIds(
        bos_id=bos_id,
        eos_ids=ends,
        unk_id=processor.unk_id(),
        pad_id=processor.pad_id() if pad_id is None and processor.pad_id() >= 0 else pad_id,
        # Default of the Llama and Gemma tokenizers, if the configuration has no such key.
        adds_bos=bos_id is not None and files.flag("add_bos_token") is not False,
        adds_eos=files.flag("add_eos_token") is True,
    )
    return spm.SentencePieceTokenizer(
        processor,
        control,
        str(path),
        special=special,
        added=added,
        prefixes_every_run=files.flag("legacy") is not False,
    )
