"""Files of a model directory beside its weights: configuration, tokenizer, chat template.

For a directory they are copied. For a GGUF file they are made from its metadata and then read back.
Any difference is an error, so that no file is only nearly right.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from exl_core.arch.hf_config import read_hf_config
from exl_core.arch.spec import ArchSpec, ModelConfig
from exl_core.convert.config_json import hf_config
from exl_core.errors import ConfigError, ExlError, TokenizerError
from exl_core.files import open_regular, read_json_object, write_atomically
from exl_core.formats.containers.source import TensorSource
from exl_core.session.open import gguf_fields
from exl_core.tokenizer.base import Tokenizer
from exl_core.tokenizer.detect import TOKENIZER_JSON, TOKENIZER_MODEL, load_tokenizer
from exl_core.tokenizer.hf_json import LibraryTokenizer
from exl_core.tokenizer.spm import SentencePieceTokenizer
from exl_core.tokenizer.spm_json import tokenizer_json

WEIGHT_SUFFIXES = (
    *(".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json"),
    *(".gguf", ".pt", ".pth"),
)
_COPIED_AT_ONCE = 1 << 20
_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces,\n\n\ttabs and 1234567890 digits; don't stop!  ",
    "Grüße aus Köln, 東京 and Москва — naïve façade 🙂👍🏽",
    "def f(x):\n    return x ** 2  # done\r\n",
    "<|im_start|>user\nHello<|im_end|>\n<bos><eos><start_of_turn><s></s>",
    "\x00\ufeff\u200b e\u0301 \U0001f9d1\u200d\U0001f680",
)


@dataclass(frozen=True, slots=True)
class SideFiles:
    """Paths of files to copy, and contents of files to write, by name."""

    copied: tuple[Path, ...]
    written: Mapping[str, bytes]

    @property
    def size_bytes(self) -> int:
        copied = sum(path.stat().st_size for path in self.copied)
        return copied + sum(len(content) for content in self.written.values())

    def write(self, folder: Path) -> None:
        for path in self.copied:
            if path.name not in self.written:
                write_atomically(folder / path.name, _pieces(path))
        for name, content in self.written.items():
            write_atomically(folder / name, [content])


def _pieces(path: Path) -> Iterator[bytes]:
    with open_regular(path, ExlError) as file:
        while piece := file.read(_COPIED_AT_ONCE):
            yield piece


def collect(
    path: Path,
    source: TensorSource,
    config: ModelConfig,
    quantization: Mapping[str, object],
    *,
    is_untied: bool = False,
) -> SideFiles:
    """Files that belong beside the quantized weights of the model at `path`. `is_untied`: the
    configuration says that the head is stored."""
    untied = {"tie_word_embeddings": False} if is_untied else {}
    fields = gguf_fields(source)
    if fields is None:
        copied = (file for file in sorted(path.iterdir()) if file.is_file())
        kept = tuple(file for file in copied if not file.name.endswith(WEIGHT_SUFFIXES))
        settings = dict(read_json_object(path / "config.json", ConfigError))
        settings.pop("compression_config", None)  # of the source; ours is "quantization_config"
        alone = {**_language_model(settings, config.arch), **untied}
        return SideFiles(kept, {"config.json": _json(alone, quantization)})
    tokenizer = load_tokenizer(path, fields)
    written = {
        "config.json": _json({**hf_config(config, path), **untied}, quantization),
        "tokenizer_config.json": _json(_roles(tokenizer)),
        "generation_config.json": _json({"eos_token_id": list(tokenizer.eos_ids)}),
        **_tokenizer_file(tokenizer),
    }
    template = fields.get("tokenizer.chat_template")
    if isinstance(template, str):
        written["chat_template.jinja"] = template.encode()
    return SideFiles((), written)


def _language_model(settings: Mapping[str, object], arch: ArchSpec) -> Mapping[str, object]:
    """The configuration of the language model alone, where `settings` are those of a larger model
    that it is part of. Only the language model is converted."""
    text = settings.get("text_config")
    if not isinstance(text, dict):
        if "vision_config" not in settings:
            return settings
        text = {key: value for key, value in settings.items() if key != "vision_config"}
    own = ("tie_word_embeddings", *(() if text.get("eos_token_id") is not None else _ID_KEYS))
    shared = {key: settings[key] for key in own if key in settings and text.get(key) is None}
    if arch.is_tied_by_outer and "tie_word_embeddings" in settings:
        shared["tie_word_embeddings"] = settings["tie_word_embeddings"]
    return {**text, **shared, "architectures": [arch.hf_names[0]]}


def check(
    folder: Path,
    path: Path,
    source: TensorSource,
    config: ModelConfig,
    *,
    is_untied: bool = False,
) -> None:
    """Raises if the directory `folder` describes another model than the one at `path`."""
    ours = read_hf_config(folder)
    if is_untied:
        config = replace(config, has_tied_embeddings=False)
    found, wanted = (replace(c, eos_ids=(), arch=config.arch) for c in (ours, config))
    if found != wanted or not set(config.eos_ids) <= set(ours.eos_ids):
        raise ConfigError("config.json reads back differently", expected=wanted, got=found)
    _check_tokenizer(load_tokenizer(folder), load_tokenizer(path, gguf_fields(source)))


def _check_tokenizer(ours: Tokenizer, theirs: Tokenizer) -> None:
    roles, expected_roles = (
        (t.bos_id, set(t.eos_ids), t.control.adds_bos, t.control.adds_eos) for t in (ours, theirs)
    )
    if roles != expected_roles:
        raise TokenizerError(
            "control tokens read back differently", expected=expected_roles, got=roles
        )
    for text in PROBES:
        for allow_special in (False, True):
            found, wanted = (t.encode(text, allow_special=allow_special) for t in (ours, theirs))
            if found != wanted or ours.decode(found) != theirs.decode(wanted):
                raise TokenizerError(
                    f"the tokenizer reads {text!r} differently", expected=wanted, got=found
                )


def _roles(tokenizer: Tokenizer) -> dict[str, object]:
    """Content of `tokenizer_config.json`: tokens by role, and which are added to a text."""
    control = tokenizer.control
    ids = {
        "bos_token": control.bos_id,
        "eos_token": next(iter(control.eos_ids), None),
        "unk_token": control.unk_id,
        "pad_token": tokenizer.pad_id,
    }
    texts = {
        role: tokenizer.token_bytes(number, skip_special=False).decode()
        for role, number in ids.items()
        if number is not None
    }
    return {**texts, "add_bos_token": control.adds_bos, "add_eos_token": control.adds_eos}


def _tokenizer_file(tokenizer: Tokenizer) -> dict[str, bytes]:
    """The tokenizer library's own file. The tokenizer was already built from the metadata. Most
    programs, exllamav3 among them, read `tokenizer.json` only."""
    match tokenizer:
        case LibraryTokenizer():
            backend = Backend.from_str(tokenizer.as_json())
            backend.decoder = decoders.ByteLevel()
            return {TOKENIZER_JSON: backend.to_str(pretty=True).encode()}
        case SentencePieceTokenizer():
            files, content = {TOKENIZER_MODEL: tokenizer.as_model()}, tokenizer_json(tokenizer)
            if content is not None and _reads_alike(content, tokenizer):
                files[TOKENIZER_JSON] = content
            return files
    raise TokenizerError("this tokenizer cannot be written", where=tokenizer.where)


def _reads_alike(content: bytes, tokenizer: Tokenizer) -> bool:
    """Whether the library reads the probes as the tokenizer, from this `tokenizer.json`."""
    backend = Backend.from_str(content.decode())
    return all(
        backend.encode(text, add_special_tokens=False).ids
        == tokenizer.encode(text, allow_special=True)
        for text in PROBES
    )


def _json(content: Mapping[str, object], quantization: Mapping[str, object] | None = None) -> bytes:
    added = {} if quantization is None else {"quantization_config": dict(quantization)}
    return json.dumps({**content, **added}, indent=4, ensure_ascii=False).encode()
