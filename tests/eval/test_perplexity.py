"""Perplexity against its formulas, on a model that looks up its logits in a table."""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from exl_core.errors import ExlError, RequestError
from exl_eval.perplexity import PerplexityOptions, measure_perplexity
from exl_eval.styles import WindowOptions, lay_out, settle_bos
from exl_eval.texts import as_text
from exl_eval.vocabulary import hash_tokenizer
from exl_eval.windows import Window
from support.tables import VOCAB_SIZE, ByteTokenizer, loaded_with, random_table

TEXT = "The quick brown fox jumps over the lazy dog. " * 4


@pytest.fixture
def table() -> torch.Tensor:
    return random_table(5)


def nll_by_hand(table: torch.Tensor, windows: list[Window]) -> list[float]:
    log_probs = table.double().log_softmax(1)
    return [-float(log_probs[a, b]) for window in windows for a, b in pairwise(window.token_ids)]


def windows_of(ctx: int, bos: str) -> list[Window]:
    options = WindowOptions(ctx=ctx, bos=bos)
    return list(lay_out(as_text(TEXT), ByteTokenizer(), options, 512).windows)


@pytest.mark.parametrize("ctx", [2, 16, 33])
@pytest.mark.parametrize("bos", ["none", "once", "each"])
def test_perplexity_and_error_follow_the_formulas(table: torch.Tensor, ctx: int, bos: str) -> None:
    seen: list[tuple[int, int, float]] = []
    options = PerplexityOptions(ctx=ctx, bos=bos)
    result = measure_perplexity(
        loaded_with(table), TEXT, options, lambda *progress: seen.append(progress)
    )

    windows = windows_of(ctx, bos)
    nll = nll_by_hand(table, windows)
    mean = math.fsum(nll) / len(nll)
    variance = math.fsum((value - mean) ** 2 for value in nll) / len(nll)
    stderr = math.sqrt(variance / (len(nll) - 1))

    assert result.tokens == len(nll) == len(windows) * (ctx - 1)
    assert result.text.windows == len(windows)
    assert result.nll == pytest.approx(mean, rel=1e-6)
    assert result.nll_stderr == pytest.approx(stderr, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(mean), rel=1e-5)
    assert result.stderr == pytest.approx(math.exp(mean) * stderr, rel=1e-5)
    assert [done for done, _, _ in seen] == list(range(1, len(windows) + 1))
    assert seen[-1] == (len(windows), len(windows), result.perplexity)


@pytest.mark.parametrize("style", ["paper", "llama.cpp", "hf-stride"])
def test_figures_by_position_follow_the_definition(table: torch.Tensor, style: str) -> None:
    """Position: number of tokens before the predicted one. Bucket i: positions 2^i to 2^(i+1)-1."""
    stride = 8 if style == "hf-stride" else None
    options = PerplexityOptions(style=style, ctx=24, stride=stride)
    result = measure_perplexity(loaded_with(table), TEXT, options)
    log_probs = table.double().log_softmax(1)
    expected: dict[int, list[float]] = {}
    for window in lay_out(as_text(TEXT), ByteTokenizer(), options, 512).windows:
        for position in range(window.first, len(window.token_ids)):
            before, token = window.token_ids[position - 1 : position + 1]
            bucket = position.bit_length() - 1
            expected.setdefault(bucket, []).append(-float(log_probs[before, token]))

    assert [bucket.first for bucket in result.by_position] == [1 << i for i in sorted(expected)]
    for found in result.by_position:
        values = torch.tensor(expected[found.first.bit_length() - 1], dtype=torch.float64)
        assert found.last == 2 * found.first - 1
        assert found.tokens == len(values)
        assert found.nll == pytest.approx(float(values.mean()), rel=1e-6)
        if len(values) > 1:
            error = float(values.std()) / math.sqrt(len(values))
            assert found.nll_stderr == pytest.approx(error, rel=1e-5)
        else:
            assert found.nll_stderr is None
    assert sum(bucket.tokens for bucket in result.by_position) == result.tokens
    total = math.fsum(bucket.nll * bucket.tokens for bucket in result.by_position)
    assert total / result.tokens == pytest.approx(result.nll, rel=1e-9)


def test_uniform_predictions_give_the_vocabulary_size_as_perplexity() -> None:
    result = measure_perplexity(
        loaded_with(torch.zeros(VOCAB_SIZE, VOCAB_SIZE)), TEXT, PerplexityOptions(ctx=32)
    )
    assert result.perplexity == pytest.approx(VOCAB_SIZE, rel=1e-6)
    assert result.stderr == pytest.approx(0.0, abs=1e-2)


def test_windows_option_limits_the_number_of_windows(table: torch.Tensor) -> None:
    result = measure_perplexity(loaded_with(table), TEXT, PerplexityOptions(ctx=16, windows=3))
    assert (result.text.windows, result.tokens) == (3, 45)


def test_the_record_contains_all_settings(table: torch.Tensor) -> None:
    record = measure_perplexity(
        loaded_with(table), TEXT, PerplexityOptions(ctx=16, windows=2)
    ).as_dict()
    assert record["schema_version"] == 1
    assert record["text_sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    assert record["text_tokens"] == len(TEXT)
    assert (record["style"], record["bos"], record["ctx"]) == ("paper", "none", 16)
    assert (record["model"], record["kv_format"]) == ("table", "fp16")
    assert record["tokenizer_sha256"] == hash_tokenizer(ByteTokenizer())


def test_tokenizer_hash_differs_between_vocabularies() -> None:
    class Swapped(ByteTokenizer):
        def _piece(self, token_id: int) -> bytes | None:
            return super()._piece({65: 66, 66: 65}.get(token_id, token_id))

    assert hash_tokenizer(ByteTokenizer()) == hash_tokenizer(ByteTokenizer(adds_bos=True))
    assert hash_tokenizer(ByteTokenizer()) != hash_tokenizer(Swapped())


def test_unknown_bos_rule_is_refused() -> None:
    with pytest.raises(RequestError, match="default or none or once or each"):
        settle_bos("twice", ByteTokenizer())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PerplexityOptions(ctx=256), "shorter than one window"),
        (PerplexityOptions(ctx=513), "2 to 512"),
        (PerplexityOptions(ctx=16, windows=1000), "fewer windows"),
    ],
    ids=["short text", "long context", "many windows"],
)
def test_unsuitable_options_are_refused(
    table: torch.Tensor, options: PerplexityOptions, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        measure_perplexity(loaded_with(table), TEXT, options)


@pytest.mark.parametrize(
    "options", [{"kv_format": "q8"}, {"ctx": "16"}, {"style": None}, {"token_by_token": 1}]
)
def test_options_of_another_type_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        PerplexityOptions(**options)


def test_a_token_of_probability_zero_is_an_error() -> None:
    table = torch.zeros(VOCAB_SIZE, VOCAB_SIZE)
    table[:, ord("q")] = -1e5
    table[:, ord("x")] = 1e5
    with pytest.raises(ExlError, match="probability"):
        measure_perplexity(loaded_with(table), TEXT, PerplexityOptions(ctx=16))
