"""Damaged and hostile tokenizer files cause errors that name the file, never a crash or a hang."""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from exl_core import files
from exl_core.errors import TokenizerError, WeightFileError
from exl_core.tokenizer import hf_json, spm
from exl_core.tokenizer.decoders import piece_rule
from exl_core.tokenizer.detect import load_tokenizer
from exl_core.tokenizer.gguf_fields import read_gguf_fields, read_gguf_header
from exl_core.tokenizer.library import library_errors

WriteDirectory = Callable[..., Path]
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
DEEP = "[" * 200_000 + "]" * 200_000
MANY_DIGITS = '{"a": %s}' % ("9" * 5000)


@pytest.fixture
def parsed(byte_level_backend: Callable[[], Backend]) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(byte_level_backend().to_str())
    return data


@pytest.mark.parametrize("name", SIDE_FILES)
@pytest.mark.parametrize("content", [DEEP, MANY_DIGITS], ids=["deep", "digits"])
def test_unreadable_json_is_an_error(
    write_directory: WriteDirectory, parsed: dict[str, Any], name: str, content: str
) -> None:
    folder = write_directory({"tokenizer.json": parsed, name: content})
    with pytest.raises(TokenizerError, match="is not valid JSON") as caught:
        load_tokenizer(folder)
    assert caught.value.where == str(folder / name)


@pytest.mark.parametrize("name", [*SIDE_FILES, "tokenizer.json", "tokenizer.model"])
def test_directories_links_and_fifos_are_not_treated_as_missing(
    write_directory: WriteDirectory,
    parsed: dict[str, Any],
    train_sentencepiece: Callable[..., bytes],
    name: str,
) -> None:
    contents: dict[str, object] = {"tokenizer.json": parsed}
    if name == "tokenizer.json":
        contents = {"tokenizer.model": train_sentencepiece("bpe")}
    if name == "tokenizer.model":
        contents = {}
    folder = write_directory(contents)
    path = folder / name
    path.mkdir()
    with pytest.raises(TokenizerError, match="not a regular file") as caught:
        load_tokenizer(folder)
    assert caught.value.where == str(path)
    path.rmdir()
    os.mkfifo(path)  # opening it would block
    with pytest.raises(TokenizerError, match="not a regular file"):
        load_tokenizer(folder)
    path.unlink()
    path.symlink_to(folder / "gone")
    with pytest.raises(TokenizerError, match="cannot be read"):
        load_tokenizer(folder)


@pytest.mark.parametrize("piece", [b"<unk>", b"</s>"])
def test_pieces_that_are_no_utf8_are_an_error(
    write_directory: WriteDirectory, train_sentencepiece: Callable[..., bytes], piece: bytes
) -> None:
    model = train_sentencepiece("bpe")
    broken = model.replace(piece, piece[:1] + b"\xff" + piece[2:], 1)
    assert broken != model
    with pytest.raises(TokenizerError, match="not a model that the sentencepiece library can read"):
        load_tokenizer(write_directory({"tokenizer.model": broken}))


def test_files_have_a_size_limit(
    write_directory: WriteDirectory, parsed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_directory({"tokenizer.json": parsed, "config.json": "{}"})
    (folder / "config.json").write_bytes(b"{}" + b" " * files.CONFIG_LIMIT_BYTES)
    with pytest.raises(TokenizerError, match="too large"):
        load_tokenizer(folder)
    (folder / "config.json").unlink()
    monkeypatch.setattr(hf_json, "FILE_LIMIT_BYTES", 100)
    with pytest.raises(TokenizerError, match="too large"):
        load_tokenizer(folder)
    monkeypatch.setattr(spm, "FILE_LIMIT_BYTES", 100)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(TokenizerError, match="too large"):
        load_tokenizer(folder)


@pytest.mark.parametrize("key", ["9" * 5000, "٣", "²", "-1", ""])
def test_a_key_that_is_not_an_id_is_an_error(
    write_directory: WriteDirectory, parsed: dict[str, Any], key: str
) -> None:
    config = {"added_tokens_decoder": {key: {"content": "x"}}}
    folder = write_directory({"tokenizer.json": parsed, "tokenizer_config.json": config})
    with pytest.raises(TokenizerError, match="is not a token") as caught:
        load_tokenizer(folder)
    assert len(str(caught.value)) < 1000


WORDS = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "[U]"}
UNIGRAM = {"type": "Unigram", "unk_id": None, "vocab": [["b", 0.0]]}
BAD_TRIE = struct.pack("<I", 64) + b"\xff" * 64 + b"ab"


@pytest.mark.parametrize(
    "changes",
    [
        {"model": UNIGRAM, "added_tokens": [], "pre_tokenizer": None, "decoder": None},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {
            "normalizer": {
                "type": "Precompiled",
                "precompiled_charsmap": base64.b64encode(BAD_TRIE).decode(),
            }
        },
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "X", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
    ],
    ids=["unigram", "charsmap", "trie", "post-processor"],
)
def test_any_library_exception_while_loading_is_an_error(
    write_directory: WriteDirectory, parsed: dict[str, Any], changes: dict[str, Any]
) -> None:
    folder = write_directory({"tokenizer.json": {**parsed, **changes}})
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(folder).encode("hi")
    assert caught.value.where == str(folder / "tokenizer.json")


def test_an_unencodable_word_is_an_error(
    write_directory: WriteDirectory, parsed: dict[str, Any]
) -> None:
    changes: dict[str, Any] = {
        "model": WORDS,
        "added_tokens": [],
        "pre_tokenizer": None,
        "decoder": None,
    }
    tokenizer = load_tokenizer(write_directory({"tokenizer.json": {**parsed, **changes}}))
    assert tokenizer.encode("a") == [0]
    with pytest.raises(TokenizerError, match="cannot write this text"):
        tokenizer.encode("hi")


@pytest.mark.parametrize("passing", [KeyboardInterrupt, SystemExit, MemoryError])
def test_interrupts_pass_through_library_errors(passing: type[BaseException]) -> None:
    with pytest.raises(passing), library_errors("unused", "made"):
        raise passing


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, object]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


@pytest.mark.parametrize(
    "steps",
    [
        [replace("a", "a" * 1000)] * 3,
        [replace("a", "aa")] * 60,
        [replace("", "xxxx")] * 6,
        [replace(".", "aaaa", "Regex")] * 6,
        [replace("x*", "x", "Regex")] * 60,
        [replace(r"\B", "x", "Regex")] * 60,
        [{"type": "Sequence", "normalizers": [replace("a", "a" * 20)] * 2}] * 2,
    ],
)
def test_exploding_replacements_are_refused(
    write_directory: WriteDirectory, parsed: dict[str, Any], steps: list[dict[str, object]]
) -> None:
    normalizer = {"type": "Sequence", "normalizers": steps}
    # The library normalizes added tokens while it opens a file: a check after that is too late.
    added = {**parsed["added_tokens"][0], "id": 10**6, "content": "aaaa", "normalized": True}
    data = {**parsed, "normalizer": normalizer, "added_tokens": [*parsed["added_tokens"], added]}
    folder = write_directory({"tokenizer.json": data})
    with pytest.raises(TokenizerError, match="far too long"):
        load_tokenizer(folder)
    text = json.dumps(data).replace('"normalizer"', r'"norm\u0061lizer"')
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerError, match="far too long"):
        load_tokenizer(folder)
    decoder = {"type": "Sequence", "decoders": [step for step in steps if "pattern" in step]}
    if decoder["decoders"] and "String" in str(steps):
        with pytest.raises(TokenizerError, match="far too long"):
            piece_rule(decoder, "made")


def test_replacements_of_real_models_are_accepted(
    write_directory: WriteDirectory, parsed: dict[str, Any]
) -> None:
    steps = [
        {"type": "Prepend", "prepend": "▁"},
        replace(" ", "▁"),
        replace("``", '"'),
        replace("\n", "<n>"),
        *[replace(" {2,}", " ", "Regex")] * 20,
        *[replace(r"\s+", " ", "Regex")] * 20,
        replace("(b)|c", "b", "Regex"),
    ]
    normalizer = {"type": "Sequence", "normalizers": steps}
    folder = write_directory({"tokenizer.json": {**parsed, "normalizer": normalizer}})
    assert load_tokenizer(folder).encode("a b")


def test_a_truncated_normalizer_is_an_error(write_directory: WriteDirectory) -> None:
    folder = write_directory({"tokenizer.json": '{"normalizer": {"type":'})
    with pytest.raises(TokenizerError, match="the normalizer is not valid JSON"):
        load_tokenizer(folder)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


EVIL = string(b"\x1b[31mred")


@pytest.mark.parametrize(
    ("counts", "body"),
    [
        ((0, 1), EVIL + struct.pack("<I", 99)),
        ((0, 2), (EVIL + struct.pack("<IB", 0, 0)) * 2),
        ((0, 1), EVIL + struct.pack("<IIQ", 9, 4, 2**40)),
        ((0, 1), EVIL + struct.pack("<IIQQ", 9, 8, 1, 2**40)),
        ((1, 0), EVIL + struct.pack("<I", 99)),
        ((1, 0), EVIL + struct.pack("<IQ", 2, 1)),
    ],
)
def test_control_characters_of_file_names_are_escaped_in_messages(
    tmp_path: Path, counts: tuple[int, int], body: bytes
) -> None:
    path = tmp_path / "evil.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + body + bytes(2 * len(counts)))
    with pytest.raises(WeightFileError) as caught:
        read_gguf_header(path)
    assert "\x1b" not in str(caught.value)
    assert r"'\x1b[31mred'" in str(caught.value)
    if counts[1]:
        with pytest.raises(WeightFileError):
            read_gguf_fields(path)
