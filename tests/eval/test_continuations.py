"""Batched scores of continuations against one forward pass of transformers for each."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from exl_core.cache.page_pool import PageCopy
from exl_core.cache.state import StateCopy
from exl_core.errors import RequestError
from exl_core.model.runner import Runner
from exl_core.model.segment import Segment
from exl_core.session.load import LoadedModel, LoadOptions, load_model
from exl_eval import continuations
from exl_eval.continuations import Pair, score_continuations
from support import tiny_models

Pairing = tuple[LoadedModel, LlamaForCausalLM]


@pytest.fixture(scope="module")
def pair_of_models(tmp_path_factory: pytest.TempPathFactory) -> Pairing:
    theirs = tiny_models.tiny_llama(max_position_embeddings=700)
    folder = tiny_models.save(theirs, tmp_path_factory.mktemp("tiny"))
    return load_model(str(folder), LoadOptions(exact=True, threads=1)), theirs


def ids(count: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 250, (count,), generator=generator).tolist())


def expected(model: LlamaForCausalLM, pair: Pair) -> tuple[float, bool]:
    fed = torch.tensor([[*pair.context, *pair.continuation[:-1]]])
    with torch.inference_mode():
        logits = model(fed).logits[0, len(pair.context) - 1 :].double()
    wanted = torch.tensor(pair.continuation)
    chosen = logits.log_softmax(1).gather(1, wanted[:, None]).sum()
    return float(chosen), bool((logits.argmax(1) == wanted).all())


def greedy(model: LlamaForCausalLM, context: tuple[int, ...], count: int) -> tuple[int, ...]:
    found: list[int] = []
    for _ in range(count):
        with torch.inference_mode():
            logits = model(torch.tensor([[*context, *found]])).logits[0, -1]
        found.append(int(logits.argmax()))
    return tuple(found)


def test_scores_match_transformers_around_page_boundaries_and_with_shared_contexts(
    pair_of_models: Pairing,
) -> None:
    loaded, theirs = pair_of_models
    pairs = [
        Pair(ids(length, length), ids(count, count))
        for length in (1, 2, 255, 256, 257, 258, 513)
        for count in (1, 5, 60)
    ]
    pairs.append(Pair(ids(256, 256), greedy(theirs, ids(256, 256), 4)))
    pairs.append(Pair(ids(1, 1), ids(700, 3)))  # the whole context length
    done: list[int] = []
    scored = score_continuations(loaded.model, pairs, on_scored=done.append)
    assert sum(done) == len(pairs)
    for pair, one in zip(pairs, scored, strict=True):
        log_prob, is_greedy = expected(theirs, pair)
        assert one.log_prob == pytest.approx(log_prob, abs=2e-3 * len(pair.continuation))
        assert one.is_greedy == is_greedy
    assert scored[-2].is_greedy
    assert sum(one.is_greedy for one in scored) < len(scored) / 2


def test_scores_do_not_depend_on_pass_and_cache_size(
    pair_of_models: Pairing, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, _ = pair_of_models
    pairs = [Pair(ids(300, k % 3), ids(1 + 7 * k, k)) for k in range(12)]
    wide = score_continuations(loaded.model, pairs)
    monkeypatch.setattr(continuations, "_PAGES", 3)
    monkeypatch.setattr(continuations, "_PASS_ROWS", 23)
    done: list[int] = []
    narrow = score_continuations(loaded.model, pairs, on_scored=done.append)
    assert len(done) > 3
    for one, other in zip(wide, narrow, strict=True):
        assert other.log_prob == pytest.approx(one.log_prob, rel=1e-4)


def test_a_context_is_computed_once(
    pair_of_models: Pairing, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, _ = pair_of_models
    rows: list[int] = []

    class Counting(Runner):
        def run(
            self,
            segments: Sequence[Segment],
            copies: Sequence[PageCopy] = (),
            out: Tensor | None = None,
            state_copies: Sequence[StateCopy] = (),
        ) -> Tensor:
            rows.append(sum(len(segment.token_ids) for segment in segments))
            return super().run(segments, copies, out, state_copies)

    monkeypatch.setattr(continuations, "Runner", Counting)
    score_continuations(loaded.model, [Pair(ids(300, 1), ids(5, k)) for k in range(10)])
    assert rows == [299, 50]


def test_empty_and_overlong_pairs_are_refused(pair_of_models: Pairing) -> None:
    loaded, _ = pair_of_models
    with pytest.raises(RequestError, match="empty"):
        score_continuations(loaded.model, [Pair((), (5,))])
    with pytest.raises(RequestError, match="at most 701 tokens"):
        score_continuations(loaded.model, [Pair(ids(2, 1), ids(700, 1))])
    assert score_continuations(loaded.model, []) == []
