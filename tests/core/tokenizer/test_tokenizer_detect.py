"""Loading a directory's tokenizer: precedence of files, control ids, mismatches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from exl_core.errors import ModelNotFoundError, TokenizerError, WeightFileError
from exl_core.tokenizer.base import Tokenizer
from exl_core.tokenizer.check import check_vocab
from exl_core.tokenizer.detect import load_tokenizer
from exl_core.tokenizer.gguf_fields import read_gguf_fields, read_gguf_header

WriteDirectory = Callable[..., Path]


@pytest.fixture
def tokenizer_json(byte_level_backend: Callable[[], Backend]) -> str:
    return byte_level_backend().to_str()


def test_tokenizer_json_has_precedence_over_tokenizer_model(
    write_directory: WriteDirectory,
    tokenizer_json: str,
    train_sentencepiece: Callable[..., bytes],
) -> None:
    folder = write_directory(
        {"tokenizer.json": tokenizer_json, "tokenizer.model": train_sentencepiece("bpe")}
    )
    assert load_tokenizer(folder).kind == "bpe"
    (folder / "tokenizer.json").unlink()
    assert load_tokenizer(folder).kind == "sentencepiece"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", '{"eos_token": "\\ud800"}'),
        ("tokenizer_config.json", '{"bos_token": "<\\ud800>"}'),
        ("special_tokens_map.json", '{"eos_token": {"content": "\\udfff"}}'),
        ("added_tokens.json", '{"\\ud800": 500}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"3": {"content": "\\ud800"}}}'),
    ],
)
def test_half_of_a_surrogate_pair_as_a_token_is_refused(
    write_directory: WriteDirectory, tokenizer_json: str, name: str, content: str
) -> None:
    folder = write_directory({"tokenizer.json": tokenizer_json})
    (folder / name).write_text(content)
    with pytest.raises(TokenizerError, match="half of a surrogate pair"):
        load_tokenizer(folder)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json or tokenizer\.model"):
        load_tokenizer(tmp_path)


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        load_tokenizer(tmp_path / "missing.gguf")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"x")
    with pytest.raises(TokenizerError, match=r"a model directory or a \.gguf file"):
        load_tokenizer(path)


def test_a_truncated_gguf_file_is_refused(smollm2_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    with smollm2_path.open("rb") as file:
        path.write_bytes(file.read(read_gguf_header(smollm2_path).data_start // 2))
    with pytest.raises(WeightFileError, match="the file ends inside"):
        load_tokenizer(path)


def test_given_metadata_is_not_read_again(smollm2_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "stands-for.gguf"
    path.write_bytes(b"")
    assert load_tokenizer(path, read_gguf_fields(smollm2_path)).vocab_size == 49152


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ()),
        ({"generation_config.json": {"eos_token_id": 5}}, (5,)),
        ({"generation_config.json": {"eos_token_id": [7, 5, 7]}}, (7, 5)),
        ({"config.json": {"eos_token_id": [4, 3]}}, (4, 3)),
        ({"config.json": {"text_config": {"eos_token_id": [9]}}}, (9,)),
        ({"config.json": {"eos_token_id": None}}, ()),
        ({"config.json": {"eos_token_id": -1}}, ()),
        ({"tokenizer_config.json": {"eos_token": "<|end|>"}}, (0,)),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|user|>"}}}, (1,)),
        ({"special_tokens_map.json": {"eos_token": {"content": "<|user|>"}}}, (1,)),
        ({"tokenizer_config.json": {"eos_token": None}}, ()),
        ({"tokenizer_config.json": {"eos_token": "not a token"}}, ()),
        (
            {
                "generation_config.json": {"eos_token_id": [6, 1]},
                "config.json": {"eos_token_id": 1, "text_config": {"eos_token_id": 8}},
                "tokenizer_config.json": {"eos_token": "<|end|>"},
            },
            (6, 1, 8, 0),
        ),
    ],
)
def test_eos_ids_of_all_files_are_combined(
    write_directory: WriteDirectory,
    tokenizer_json: str,
    files: dict[str, object],
    expected: tuple[int, ...],
) -> None:
    folder = write_directory({"tokenizer.json": tokenizer_json, **files})
    assert load_tokenizer(folder).eos_ids == expected


def test_token_names_have_precedence_over_config_ids(
    write_directory: WriteDirectory, tokenizer_json: str
) -> None:
    folder = write_directory(
        {
            "tokenizer.json": tokenizer_json,
            "tokenizer_config.json": {"bos_token": "<|user|>", "add_bos_token": True},
            "config.json": {"bos_token_id": 9, "pad_token_id": 8},
        }
    )
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.pad_id, tokenizer.unk_id) == (1, 8, None)
    assert tokenizer.adds_bos


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": {"eos_token_id": "2"}}, "'eos_token_id' is not a token id"),
        ({"config.json": {"eos_token_id": [2, True]}}, "'eos_token_id' is not a token id"),
        ({"config.json": {"eos_token_id": 10**6}}, "the EOS id is not an id of the tokenizer"),
        ({"config.json": {"bos_token_id": 10**6}}, "the BOS id is not an id of the tokenizer"),
        ({"generation_config.json": "{"}, "is not valid JSON"),
        ({"config.json": b"\xff"}, "is not valid JSON"),
        ({"tokenizer_config.json": [1]}, "holds no JSON object"),
        (
            {"tokenizer_config.json": {"added_tokens_decoder": {"x": {"content": "y"}}}},
            "an entry of added_tokens_decoder is not a token",
        ),
    ],
)
def test_invalid_side_files_are_refused(
    write_directory: WriteDirectory,
    tokenizer_json: str,
    files: dict[str, object],
    message: str,
) -> None:
    folder = write_directory({"tokenizer.json": tokenizer_json, **files})
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(folder)


def test_a_padding_id_outside_the_vocabulary_is_ignored(
    write_directory: WriteDirectory, tokenizer_json: str
) -> None:
    folder = write_directory({"tokenizer.json": tokenizer_json})
    size = load_tokenizer(folder).vocab_size
    for pad_id, expected in ((size - 1, size - 1), (size, None), (10**6, None)):
        write_directory({"config.json": {"pad_token_id": pad_id}})
        assert load_tokenizer(folder).pad_id == expected


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    smollm2_tokenizer: Tokenizer,
) -> None:
    check_vocab(smollm2_tokenizer, 49152, "model")
    check_vocab(smollm2_tokenizer, 50000, "model")  # models pad their vocabulary
    with pytest.raises(TokenizerError, match="more tokens than the model's vocabulary") as caught:
        check_vocab(smollm2_tokenizer, 49151, "model")
    assert (caught.value.expected, caught.value.got) == ("at most 49151", "49152")
    assert caught.value.where == "model"
