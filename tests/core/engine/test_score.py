"""Log probabilities through the paged cache, against the formula on the model's own logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.engine import score
from exl_core.engine.score import TextPasses, score_tokens
from exl_core.errors import RequestError
from exl_core.sampling.sampler import LogitsError
from support.scripted import VOCAB_SIZE, HashRule, ScriptedModel, ScriptedShape, certain

TEXT = [(i * i) % 251 for i in range(700)]


def direct(token_ids: Sequence[int]) -> Tensor:
    rule = HashRule()
    rows = torch.stack([rule(token_ids[:i]) for i in range(1, len(token_ids))]).double()
    return rows.log_softmax(1)[torch.arange(len(rows)), torch.tensor(token_ids[1:])]


@pytest.mark.parametrize(
    "kv_format", [KVFormat.FP32, KVFormat.FP16]
)  # exact for the scripted model
@pytest.mark.parametrize("chunk_rows", [1, 33, 256, 512, 10_000])
def test_scores_are_the_log_softmax_of_the_predictions(
    chunk_rows: int, kv_format: KVFormat
) -> None:
    text = TEXT if chunk_rows > 1 else TEXT[:300]
    got = score_tokens(ScriptedModel(HashRule()), text, kv_format=kv_format, chunk_rows=chunk_rows)
    assert got.dtype == torch.float64
    assert torch.allclose(got, direct(text), rtol=0, atol=1e-5)


def test_scores_do_not_depend_on_chunk_rows() -> None:
    whole = score_tokens(ScriptedModel(HashRule()), TEXT, chunk_rows=699)
    for chunk_rows in (7, 100, 256):
        assert torch.equal(
            score_tokens(ScriptedModel(HashRule()), TEXT, chunk_rows=chunk_rows), whole
        )


def test_chunks_are_cut_to_bound_the_memory_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score, "_LOGIT_BYTES", 100 * 4 * VOCAB_SIZE)
    model = ScriptedModel(HashRule())
    progress: list[tuple[int, int]] = []
    score_tokens(model, TEXT[:250], on_progress=lambda done, total: progress.append((done, total)))
    assert model.rows_of_pass == [100, 100, 49]
    assert progress == [(100, 249), (200, 249), (249, 249)]


@pytest.mark.parametrize(
    ("token_ids", "words"),
    [
        ([], "too few"),
        ([1], "too few"),
        ([1] * 102, "too many"),
        ([1, 258], "not in the vocabulary"),
        ([1, -1], "not in the vocabulary"),
    ],
)
def test_texts_that_cannot_be_scored_are_refused(token_ids: list[int], words: str) -> None:
    model = ScriptedModel(HashRule(), ScriptedShape(max_seq_len=100))
    with pytest.raises(RequestError, match=words):
        score_tokens(model, token_ids)
    with pytest.raises(RequestError, match="chunk_rows"):
        score_tokens(model, [1, 2], chunk_rows=0)


def test_a_whole_context_can_be_scored() -> None:
    model = ScriptedModel(HashRule(), ScriptedShape(max_seq_len=100))
    assert score_tokens(model, TEXT[:101]).shape == (100,)  # the last one is only predicted


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinite_logits_are_an_error(value: float) -> None:
    def rule(history: Sequence[int]) -> Tensor:
        logits = certain(97)
        if len(history) == 3:
            logits[98] = value
        return logits

    with pytest.raises(LogitsError, match="token 3"):
        score_tokens(ScriptedModel(rule), [98] * 5)


@pytest.mark.parametrize("first", [1, 2, 40, 299])
def test_tokens_before_the_first_scored_one_are_context_only(first: int) -> None:
    model = ScriptedModel(HashRule())
    passes = TextPasses(model, 300, chunk_rows=64)
    assert torch.allclose(
        passes.score(TEXT[:300], first), direct(TEXT[:300])[first - 1 :], rtol=0, atol=1e-5
    )
    assert sum(model.rows_of_pass) == 299


def test_one_cache_serves_several_texts_in_turn() -> None:
    passes = TextPasses(ScriptedModel(HashRule()), 300)
    for text in (TEXT[:300], TEXT[100:200], TEXT[7:9]):
        assert torch.allclose(passes.score(text), direct(text), rtol=0, atol=1e-5)
