"""Tokenizers of the real models, and tiny tokenizers made in memory."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from exl_core.tokenizer.base import Tokenizer
from exl_core.tokenizer.detect import load_tokenizer

DATA = Path(__file__).parent / "data"
TRAINING_TEXT = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps, the fox does not.",
    "I'm sure that you're right: 1234 apples and 56 pears cost $7.89 in all.",
    "def f(x):\n    return x ** 2  # squares\n",
    "Ünïcödé wörds, naïve cafés and straße; Привет, мир! 你好 世界。",
    "hello hello hello world world there's no place like home",
] * 8


@pytest.fixture(scope="session")
def awkward_texts() -> list[str]:
    texts: list[str] = json.loads((DATA / "awkward_texts.json").read_bytes())
    return texts


@pytest.fixture(scope="session")
def reference_ids() -> Callable[[str], list[tuple[list[int], list[int]]]]:
    """Ids of each awkward text by model, without and with special tokens (data/README.md)."""

    def read(name: str) -> list[tuple[list[int], list[int]]]:
        rows = json.loads((DATA / f"{name}_ids.json").read_bytes())
        return [(row[0], row[-1]) for row in rows]

    return read


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="session")
def gemma3_tokenizer(gemma3_path: Path) -> Tokenizer:
    return load_tokenizer(gemma3_path)


@pytest.fixture(scope="session")
def byte_level_backend() -> Callable[[], Backend]:
    """Makes a trained byte-level BPE with chat tokens and unusual added tokens."""
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|user|>"],
        show_progress=False,
    )
    trained.train_from_iterator(TRAINING_TEXT, trainer)
    trained.add_tokens(
        [
            AddedToken("<think>", normalized=False),
            AddedToken("<café>", normalized=False),  # characters of the byte alphabet
            AddedToken("    ", normalized=False),
        ]
    )
    text = trained.to_str()
    return lambda: Backend.from_str(text)


@pytest.fixture(scope="session")
def train_sentencepiece() -> Callable[..., bytes]:
    def train(kind: str, **options: object) -> bytes:
        settings: dict[str, Any] = {
            "vocab_size": 345,
            "character_coverage": 1.0,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "byte_fallback": True,
            "minloglevel": 2,
        }
        out = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TRAINING_TEXT),
            model_writer=out,
            model_type=kind,
            **{**settings, **options},
        )
        return out.getvalue()

    return train


@pytest.fixture
def write_directory(tmp_path: Path) -> Callable[..., Path]:
    """Writes a model directory: text and bytes unchanged, other values as JSON."""

    def write(files: dict[str, object]) -> Path:
        for name, content in files.items():
            path = tmp_path / name
            if isinstance(content, bytes):
                path.write_bytes(content)
            elif isinstance(content, str):
                path.write_text(content, encoding="utf-8")
            else:
                path.write_text(json.dumps(content), encoding="utf-8")
        return tmp_path

    return write
