"""`ModelDrafter`: its proposals, the passes that it runs for them, and its behavior after errors.

The draft model is scripted. Its logits depend on every token and position that it reads from its
pages, so that a confusion of pages changes the proposal or raises.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.cache.page_pool import NO_KEY, PageContents, PagePool, page_keys
from exl_core.errors import RequestError
from exl_core.sampling.params import SamplerParams
from exl_core.speculate.draft_model import ModelDrafter
from exl_core.speculate.drafter import NO_DRAFT, Draft, DraftJob
from support.profiles import first_by_default
from support.scripted import (
    VOCAB_SIZE,
    HashRule,
    Rule,
    ScriptedModel,
    ScriptedShape,
    always,
    certain,
    reply_with,
)

GREEDY = SamplerParams(temperature=0.0)
PAGE = 256


def drafter_for(rule: Rule, *, num_pages: int = 8, **options: Any) -> ModelDrafter:
    settings: dict[str, Any] = {
        "max_tokens": 4,
        "min_probability": 0.0,
        "vocab_size": VOCAB_SIZE,
        "kv_format": KVFormat.FP32,
        **options,
    }
    max_seq_len = int(settings.pop("max_seq_len", 2048))
    draft_vocab = int(settings.pop("draft_vocab", VOCAB_SIZE))
    model = ScriptedModel(rule, ScriptedShape(draft_vocab, max_seq_len))
    return ModelDrafter(model, num_pages=num_pages, **settings)


def job(
    token_ids: Sequence[int],
    page_ids: Sequence[int] = (0, 1, 2),
    *,
    request_id: str = "r",
    max_tokens: int = 4,
    sampler: SamplerParams = GREEDY,
) -> DraftJob:
    keys = page_keys(token_ids)
    return DraftJob(request_id, token_ids, tuple(page_ids), keys, max_tokens, sampler)


def rows_of(drafter: ModelDrafter) -> list[int]:
    model = drafter.model
    assert isinstance(model, ScriptedModel)
    rows, model.rows_of_pass = model.rows_of_pass, []
    return rows


def continuation(rule: Rule, token_ids: Sequence[int], count: int) -> tuple[int, ...]:
    history = list(token_ids)
    for _ in range(count):
        history.append(int(rule(history).argmax()))
    return tuple(history[len(token_ids) :])


def text(length: int, seed: int = 0) -> list[int]:
    draws = random.Random(seed)
    return [draws.randrange(250) for _ in range(length)]


def test_greedy_drafts_equal_greedy_decoding_of_the_draft_model() -> None:
    rule = HashRule()
    drafter = drafter_for(rule)
    tokens = text(30)
    [draft] = drafter.propose([job(tokens)])
    assert draft == Draft(continuation(rule, tokens, 4), None)
    assert rows_of(drafter) == [30, 1, 1, 1], "the last guess is not computed"


def test_only_missing_tokens_are_computed() -> None:
    rule = HashRule()
    drafter = drafter_for(rule)
    tokens = text(30)
    [draft] = drafter.propose([job(tokens)])
    rows_of(drafter)
    tokens += [*draft.token_ids, 9]  # all accepted: the last guess and the new token are missing
    [draft] = drafter.propose([job(tokens)])
    assert draft.token_ids == continuation(rule, tokens, 4)
    assert rows_of(drafter) == [2, 1, 1, 1]
    tokens += [draft.token_ids[0], (draft.token_ids[1] + 1) % 250]  # the second guess was rejected
    [draft] = drafter.propose([job(tokens)])
    assert draft.token_ids == continuation(rule, tokens, 4)
    assert rows_of(drafter) == [1, 1, 1, 1]
    del tokens[20:]
    [draft] = drafter.propose([job(tokens)])
    assert draft.token_ids == continuation(rule, tokens, 4)
    assert rows_of(drafter) == [1, 1, 1, 1], "cut back: the newest token again, for its logits"


def test_a_long_prompt_is_computed_in_chunks() -> None:
    rule = HashRule()
    drafter = drafter_for(rule, prefill_chunk=100)
    tokens = text(320)
    [draft] = drafter.propose([job(tokens)])
    assert draft.token_ids == continuation(rule, tokens, 4)
    assert rows_of(drafter) == [100, 100, 100, 20, 1, 1, 1]


def test_sequences_are_drafted_in_one_batch() -> None:
    rule = HashRule()
    drafter = drafter_for(rule)
    first, second = text(30, 1), text(40, 2)
    jobs = [job(first, [3]), job(second, [5], request_id="s", max_tokens=2)]
    drafts = drafter.propose(jobs)
    assert [d.token_ids for d in drafts] == [
        continuation(rule, first, 4),
        continuation(rule, second, 2),
    ]
    assert rows_of(drafter) == [70, 2, 1, 1]


def test_a_cached_prefix_is_not_computed_again() -> None:
    rule = HashRule()
    drafter = drafter_for(rule)
    prefix = text(2 * PAGE, 1)
    drafter.propose([job([*prefix, 1], [4, 2, 5], request_id="first")])
    drafter.forget("first")
    rows_of(drafter)
    tokens = [*prefix, 7, 8, 9]
    [draft] = drafter.propose([job(tokens, [4, 2, 6])])
    assert draft.token_ids == continuation(rule, tokens, 4)
    assert rows_of(drafter) == [3, 1, 1, 1]


def test_a_page_missed_by_two_sequences_is_computed_once() -> None:
    rule = HashRule()
    drafter = drafter_for(rule)
    prefix = text(PAGE)
    first, second = [*prefix, 1, 2], [*prefix, 3]
    jobs = [job(first, [4, 2]), job(second, [4, 6], request_id="s")]
    drafts = drafter.propose(jobs)
    assert drafts[0].token_ids == continuation(rule, first, 4)
    assert drafts[1].token_ids == continuation(rule, second, 4)
    assert rows_of(drafter) == [PAGE + 2, 1, 2, 2, 2]


def test_a_page_overwritten_by_another_request_is_recomputed() -> None:
    rule = HashRule()
    drafter = drafter_for(rule)
    mine, other = text(40, 1), text(40, 2)
    drafter.propose([job(mine, [3])])
    drafter.propose(
        [job(other, [3], request_id="other")]
    )  # overwrites the page of the first request
    rows_of(drafter)
    [draft] = drafter.propose([job(mine, [3])])
    assert draft.token_ids == continuation(rule, mine, 4)
    assert rows_of(drafter)[0] == 40


def test_drafting_stops_at_the_end_of_the_context_and_of_the_pages() -> None:
    rule = HashRule()
    drafter = drafter_for(rule, max_seq_len=32)
    assert [len(drafter.propose([job(text(n))])[0].token_ids) for n in (28, 30, 32)] == [4, 3, 1]
    assert drafter.propose([job(text(33))]) == [NO_DRAFT]
    drafter = drafter_for(rule)
    assert [len(drafter.propose([job(text(n), [0])])[0].token_ids) for n in (254, 256)] == [3, 1]


def test_a_job_with_a_limit_of_zero_gets_an_empty_draft() -> None:
    drafter = drafter_for(HashRule())
    assert drafter.propose([job(text(30), max_tokens=0)]) == [NO_DRAFT]
    assert drafter.propose([]) == []
    assert rows_of(drafter) == []


def test_sequences_with_tokens_outside_the_draft_vocabulary_are_not_drafted() -> None:
    rule = HashRule()
    drafter = drafter_for(rule)
    strange = [*text(30), 1_000_000_007, 5]
    tokens = text(20, 1)
    drafts = drafter.propose([job(strange, [1], request_id="image"), job(tokens, [2])])
    assert drafts == [NO_DRAFT, Draft(continuation(rule, tokens, 4))]


def test_a_draft_ends_below_the_minimum_probability() -> None:
    unsure = torch.zeros(VOCAB_SIZE)

    def rule(history: Sequence[int]) -> Tensor:
        return certain(7) if len(history) < 32 else unsure

    assert drafter_for(rule, min_probability=0.25).propose([job(text(30))]) == [Draft((7, 7))]
    assert drafter_for(rule, min_probability=0.25).propose([job(text(32))]) == [NO_DRAFT]
    [draft] = drafter_for(rule, min_probability=0.001).propose([job(text(30))])
    assert len(draft.token_ids) == 4


def test_sampled_tokens_come_with_their_distributions() -> None:
    rule = HashRule()
    sampler = SamplerParams(temperature=0.7, top_k=20, seed=5)
    tokens = text(30)
    [draft] = drafter_for(rule).propose([job(tokens, sampler=sampler)])
    [again] = drafter_for(rule).propose([job(tokens, sampler=sampler)])
    assert draft.token_ids == again.token_ids, "the same seed"
    assert draft.probabilities is not None
    assert len(draft.probabilities) == len(draft.token_ids) == 4
    history = list(tokens)
    for token_id, drawn_from in zip(draft.token_ids, draft.probabilities, strict=True):
        likeliest = rule(history).topk(20)
        expected = torch.zeros(VOCAB_SIZE)
        expected[likeliest.indices] = (likeliest.values / 0.7).softmax(0)
        torch.testing.assert_close(drawn_from, expected)
        assert drawn_from[token_id] > 0
        history.append(token_id)


def test_drafter_and_sampler_use_different_random_numbers_for_one_seed() -> None:
    drafter = drafter_for(always(torch.zeros(VOCAB_SIZE)), max_tokens=200)
    [draft] = drafter.propose([job([1], [0], max_tokens=200, sampler=SamplerParams(seed=9))])
    generator = torch.Generator().manual_seed(9)
    same = [
        int(torch.rand((), generator=generator, dtype=torch.float64) * VOCAB_SIZE)
        for _ in range(200)
    ]
    agreeing = sum(a == b for a, b in zip(draft.token_ids, same, strict=True))
    assert agreeing < 8  # 200 / 258 by chance


def test_penalties_include_earlier_guesses() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[:4] = torch.tensor([4.0, 3.9, 3.8, 3.7])
    sampler = SamplerParams(temperature=0.0, repetition_penalty=1.5)
    drafter = drafter_for(always(logits))
    tokens = [9, 9]
    [draft] = drafter.propose([job(tokens, sampler=sampler)])
    assert draft.token_ids == (0, 1, 2, 3)
    tokens += [0, 9]  # the second guess was rejected, so that 1 did not occur
    [draft] = drafter.propose([job(tokens, sampler=sampler)])
    assert draft.token_ids[:3] == (1, 2, 3)


@pytest.mark.parametrize("draft_vocab", [200, 300])
def test_vocabularies_with_different_padding(draft_vocab: int) -> None:
    rule = HashRule(vocab_size=draft_vocab)
    drafter = drafter_for(rule, draft_vocab=draft_vocab)
    tokens = [t % 200 for t in text(30)]
    [draft] = drafter.propose([job(tokens, sampler=SamplerParams(seed=1))])
    assert draft.probabilities is not None
    for drawn_from in draft.probabilities:
        assert drawn_from.shape == (VOCAB_SIZE,)
        assert float(drawn_from.sum()) == pytest.approx(1.0)
    padding = certain(299, 300) if draft_vocab == 300 else certain(199, 200)
    [draft] = drafter_for(always(padding), draft_vocab=draft_vocab).propose([job(tokens)])
    assert all(token_id < VOCAB_SIZE for token_id in draft.token_ids)


def test_after_an_interrupted_pass_no_page_is_reused() -> None:
    rule = HashRule()
    drafter = drafter_for(rule)
    tokens = text(40)
    drafter.propose([job(tokens)])
    tokens += [1, 2, 3]
    assert isinstance(drafter.model, ScriptedModel)
    drafter.model.failure = RuntimeError("broken")
    with pytest.raises(RuntimeError, match="broken"):
        drafter.propose([job(tokens)])
    [draft] = drafter.propose([job(tokens)])
    assert draft.token_ids == continuation(rule, tokens, 4)


def test_nan_logits_end_the_draft_only() -> None:
    drafter = drafter_for(always(torch.full((VOCAB_SIZE,), float("nan"))))
    assert drafter.propose([job(text(30))]) == [NO_DRAFT]


def test_a_draft_model_equal_to_the_target_is_always_right() -> None:
    drafter = drafter_for(reply_with([1, 2, 3, 4, 5, 6]))
    [draft] = drafter.propose([job([9, 1, 2])])
    assert draft.token_ids == (3, 4, 5, 6)


def test_moved_pages_keep_their_contents() -> None:
    rule = HashRule()
    drafter = drafter_for(rule)
    tokens = text(PAGE + 20)
    drafter.propose([job(tokens, [5, 2])])
    rows_of(drafter)
    drafter.moved([(5, 2), (2, 0)])
    [draft] = drafter.propose([job(tokens, [2, 0])])
    assert draft.token_ids == continuation(rule, tokens, 4)
    assert rows_of(drafter) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "settings", [{"max_tokens": 0}, {"min_probability": 1.5}, {"kv_format": "q8"}]
)
def test_invalid_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        drafter_for(HashRule(), **settings)


class Life:
    """Requests that arrive, grow, are rewound, lose pages and end, over a small page pool."""

    def __init__(self, seed: int) -> None:
        self.draws = random.Random(seed)
        self.pool = PagePool(7)
        self.prefixes = [text(2 * PAGE, 100 + i) for i in range(2)]
        self.live: dict[str, tuple[list[int], list[int]]] = {}  # tokens, pages
        self.count = 0

    def change(self) -> None:
        for request_id in list(self.live):
            tokens, _ = self.live[request_id]
            choice = self.draws.random()
            if choice < 0.15:
                del tokens[-self.draws.randrange(1, 30) :]
            tokens += [self.draws.randrange(250) for _ in range(self.draws.randrange(1, 6))]
            self.release(request_id)
            if choice > 0.9:
                del self.live[request_id]
        while len(self.live) < 3:
            self.count += 1
            shared = self.draws.choice(self.prefixes)[: self.draws.randrange(200, 2 * PAGE)]
            tokens = [*shared, *(self.draws.randrange(250) for _ in range(5))]
            self.live[f"r{self.count}"] = (tokens, [])
        for request_id in list(self.live):
            if not self.hold(request_id):
                del self.live[request_id]

    def release(self, request_id: str) -> None:
        _, pages = self.live[request_id]
        self.pool.release(pages)
        pages.clear()

    def hold(self, request_id: str) -> bool:
        tokens, pages = self.live[request_id]
        keys = page_keys(tokens[:-1])
        found = self.pool.find(keys)
        self.pool.hold(found)
        rest = self.pool.allocate(-(-(len(tokens) + 4) // PAGE) - len(found))
        if rest is None:
            self.pool.release(found)
            return False
        pages += [*found, *rest]
        previous = NO_KEY
        for index, key in enumerate(keys):
            filled = tuple(tokens[index * PAGE : (index + 1) * PAGE])
            contents = PageContents(previous, filled, key)
            pages[index] = self.pool.register(pages[index], contents)
            previous = key
        return True


@pytest.mark.parametrize("seed", first_by_default(range(4)))
def test_drafts_after_random_operations_equal_those_of_a_fresh_drafter(seed: int) -> None:
    rule = HashRule()
    drafter = drafter_for(rule, num_pages=7)
    life = Life(seed)
    computed = whole = 0
    for _ in range(60):
        life.change()
        asked = [i for i in life.live if life.draws.random() < 0.8]
        jobs = [job(*life.live[i], request_id=i) for i in asked]
        for each, draft in zip(jobs, drafter.propose(jobs), strict=True):
            assert draft.token_ids == continuation(rule, each.token_ids, 4)
            whole += len(each.token_ids)
        computed += sum(rows_of(drafter))
    assert computed < 0.5 * whole
