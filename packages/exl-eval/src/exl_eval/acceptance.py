"""Accept rate of drafts, their cost, and the speed-up that they bring.

Every prompt of the set is answered greedily and at temperature 1. Each of the two runs four times:

  recorded   full-length drafts in every round. Gives counters, acceptance probabilities and the
             cost of a draft token (`draft_rounds.py`)
  plain      without drafts, timed
  full       full-length drafts, timed
  adaptive   drafts as generation makes them, timed; they get shorter or pause where they do not pay

A reply ends where the model ends it, or after `max_tokens`. Passes of 1, 2, ... rows are timed
once after each prompt. All compared runs thus alternate, and a slowdown of the machine affects all
of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from exl_core.cache.format import PAGE_SIZE, KVFormat, pages_for
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.request import Report, Request, next_request_id
from exl_core.errors import RequestError
from exl_core.generate.driver import generate
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import LoadedModel
from exl_core.session.open import stop_ids
from exl_core.speculate.draft_model import DEFAULT_PROBABILITY, ModelDrafter
from exl_core.speculate.drafter import Drafter
from exl_core.speculate.mtp import MtpDrafter
from exl_core.speculate.ngram import NgramDrafter
from exl_core.tokenizer.special_text import Trust
from exl_eval.acceptance_result import (
    AcceptanceFigures,
    AcceptanceResult,
    Costs,
    SamplerFigures,
    Speeds,
    figures_of,
)
from exl_eval.draft_rounds import RecordingDrafter, Round, count, record_reply
from exl_eval.prompts import prompt_set
from exl_eval.speed import device_name
from exl_eval.workload import Workload

LONGEST_DRAFT = 16
"""Longest draft length that is recommended. The accept rate of longer drafts cannot be extrapolated
from the recorded ones beyond it."""

OnReply = Callable[[int, int, str], None]
"""Called before each prompt: prompts done, prompts in all, what is measured."""


@dataclass(frozen=True, slots=True)
class AcceptanceOptions:
    """`draft_tokens` is the length of every draft, `max_tokens` the limit of a reply. `prompts` are
    taken from each category, or all of them if it has fewer."""

    draft_tokens: int = 4
    max_tokens: int = 64
    prompts: int = 4
    seed: int = 1
    kv_format: KVFormat = KVFormat.FP16


def measure_acceptance(
    loaded: LoadedModel,
    draft: LoadedModel | None,
    options: AcceptanceOptions,
    on_reply: OnReply | None = None,
) -> AcceptanceResult:
    """Measures all samplers and prompts. Without a draft model, the drafter is the model's layer
    for multi-token prediction if it has been loaded, or else an n-gram lookup."""
    bench = _Bench(loaded, draft, options, on_reply)
    samplers = tuple(
        bench.measure(name, sampler)
        for name, sampler in (
            ("greedy", SamplerParams(temperature=0.0)),
            ("temperature 1", SamplerParams(seed=options.seed)),
        )
    )
    ops = loaded.model.ops
    return AcceptanceResult(
        model=loaded.label,
        kind=_kind(loaded, draft),
        draft_model=None if draft is None else draft.name,
        draft_tokens=options.draft_tokens,
        max_tokens=options.max_tokens,
        prompts=options.prompts,
        seed=options.seed,
        kv_format=options.kv_format.value,
        device=device_name(ops),
        threads=ops.threads,
        exact=loaded.exact,
        samplers=samplers,
    )


def _kind(loaded: LoadedModel, draft: LoadedModel | None) -> str:
    """The drafter: `model`, `mtp` or `ngram`."""
    if draft is not None:
        return "model"
    return "ngram" if loaded.mtp is None else "mtp"


@dataclass(slots=True)
class _Clock:
    """Number of tokens after the first of each reply, and the seconds spent on them."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class _Group:
    """Rounds and times of the prompts of one category."""

    rounds: list[Round]
    plain: _Clock
    drafted: _Clock
    adaptive: _Clock


class _Bench:
    """One engine per kind of run, and the tokenized prompts."""

    def __init__(
        self,
        loaded: LoadedModel,
        draft: LoadedModel | None,
        options: AcceptanceOptions,
        on_reply: OnReply | None,
    ) -> None:
        self._loaded, self._draft, self._options = loaded, draft, options
        self._prompts = {
            category: [self._encode(text) for text in texts[: options.prompts]]
            for category, texts in prompt_set().items()
        }
        longest = max(len(ids) for listed in self._prompts.values() for ids in listed)
        self._tokens = longest + options.max_tokens
        if self._tokens > loaded.config.max_seq_len:
            raise RequestError(
                "prompts and replies do not fit the model's context",
                expected=f"at most {loaded.config.max_seq_len} tokens",
                got=f"{longest} and {options.max_tokens}",
                next_step="Ask for shorter replies (-n).",
            )
        self._recorder = RecordingDrafter(self._drafter(is_full=True))
        self._recorded = self._engine(self._recorder, adapt=False)
        self._plain = self._engine(None)
        self._full = self._engine(self._drafter(is_full=True), adapt=False)
        self._adaptive = self._engine(self._drafter(is_full=False))
        self._depth = self._tokens - options.max_tokens // 2  # the middle of a reply
        self._passes = Workload(
            loaded.model,
            options.kv_format,
            tokens=self._depth + self._longest + 1,
            batch=1,
        )
        self._passes.fill(self._depth)
        self._time_passes()  # warms up
        self._passes_s: list[tuple[float, ...]] = []
        self._on_reply = on_reply
        self._done = 0

    def measure(self, name: str, sampler: SamplerParams) -> SamplerFigures:
        self._recorder.seconds_per_token.clear()
        self._passes_s.clear()
        groups = {
            category: self._measure_category(f"{category}, {name}", prompts, sampler)
            for category, prompts in self._prompts.items()
        }
        drafts_s = self._recorder.seconds_per_token
        passes_s = tuple(median(taken) for taken in zip(*self._passes_s, strict=True))
        costs = Costs(median(drafts_s) if drafts_s else 0.0, passes_s)
        every = _Group(
            [one for group in groups.values() for one in group.rounds],
            *(
                _sum([getattr(group, clock) for group in groups.values()])
                for clock in ("plain", "drafted", "adaptive")
            ),
        )
        return SamplerFigures(
            name=name,
            costs=costs,
            overall=self._figures(every, costs),
            categories={key: self._figures(group, costs) for key, group in groups.items()},
        )

    @property
    def _longest(self) -> int:
        """Longest draft that may be recommended. An n-gram draft ends where its match ends, so
        nothing is known beyond the drafted length."""
        drafted = self._options.draft_tokens
        return (
            drafted if _kind(self._loaded, self._draft) == "ngram" else max(drafted, LONGEST_DRAFT)
        )

    def _figures(self, group: _Group, costs: Costs) -> AcceptanceFigures:
        return figures_of(
            group.rounds,
            count(group.rounds),
            costs,
            Speeds(group.plain.rate, group.drafted.rate, group.adaptive.rate),
            draft_tokens=self._options.draft_tokens,
            longest=self._longest,
        )

    def _measure_category(
        self, what: str, prompts: Sequence[Sequence[int]], sampler: SamplerParams
    ) -> _Group:
        group = _Group([], _Clock(), _Clock(), _Clock())
        timed = (
            (self._plain, group.plain),
            (self._full, group.drafted),
            (self._adaptive, group.adaptive),
        )
        for prompt in prompts:
            if self._on_reply is not None:
                total = 2 * sum(len(listed) for listed in self._prompts.values())
                self._on_reply(self._done, total, what)
            request = self._request(prompt, sampler)
            report = Report(logits=not sampler.is_greedy)
            self._recorded.forget_cache()
            recorded = record_reply(self._recorded, self._recorder, replace(request, report=report))
            group.rounds += recorded.rounds
            for engine, clock in timed:
                engine.forget_cache()
                end = generate(engine, replace(request, request_id=next_request_id()))
                clock.tokens += end.completion_tokens - 1
                clock.seconds += end.decode_s
            self._passes_s.append(self._time_passes())
            self._done += 1
        return group

    def _time_passes(self) -> tuple[float, ...]:
        """Seconds of a pass with 1, 2, ... rows."""
        taken = []
        for rows in range(1, self._longest + 2):
            started = time.perf_counter()
            self._passes.check(rows, self._depth)
            taken.append(time.perf_counter() - started)
        return tuple(taken)

    def _request(self, prompt: Sequence[int], sampler: SamplerParams) -> Request:
        loaded = self._loaded
        return Request(
            tuple(prompt),
            max_tokens=self._options.max_tokens,
            sampler=sampler,
            stop_ids=stop_ids(loaded.tokenizer, loaded.config),
        )

    def _encode(self, text: str) -> list[int]:
        """Token ids of a prompt, formatted with the model's chat template if it has one."""
        loaded = self._loaded
        if loaded.template is None:
            return loaded.tokenizer.encode(text)
        messages = [{"role": "user", "content": text}]
        asked = loaded.template.render(messages, add_generation_prompt=True)
        trust = Trust(asked.trusted, loaded.template.source)
        return loaded.tokenizer.encode(asked, allow_special=True, add_bos=False, trust=trust)

    def _engine(self, drafter: Drafter | None, *, adapt: bool = True) -> Engine:
        options = EngineOptions(
            cache_tokens=self._cache_tokens,
            max_batch=1,
            kv_format=self._options.kv_format,
            adapt_drafts=adapt,
        )
        return Engine(self._loaded.model, self._loaded.tokenizer, options, drafter=drafter)

    @property
    def _cache_tokens(self) -> int:
        return pages_for(self._tokens) * PAGE_SIZE

    def _drafter(self, *, is_full: bool) -> Drafter:
        """`is_full`: a draft model, or the model's own layer, drafts the full length, however low
        its confidence. An n-gram drafter has no such setting: its draft ends where the match
        ends."""
        loaded, draft, options = self._loaded, self._draft, self._options
        if draft is None and loaded.mtp is not None:
            return MtpDrafter(
                loaded.mtp,
                vocab_size=min(loaded.config.vocab_size, loaded.tokenizer.vocab_size),
                max_tokens=options.draft_tokens,
                min_probability=0.0 if is_full else DEFAULT_PROBABILITY,
            )
        if draft is None:
            return NgramDrafter(max_tokens=options.draft_tokens)
        drafter = ModelDrafter(
            draft.model,
            vocab_size=min(loaded.config.vocab_size, loaded.tokenizer.vocab_size),
            num_pages=pages_for(self._tokens),
            kv_format=options.kv_format,
            max_tokens=options.draft_tokens,
        )
        if is_full:
            drafter.min_probability = 0.0
        return drafter


def _sum(clocks: Sequence[_Clock]) -> _Clock:
    return _Clock(sum(one.tokens for one in clocks), sum(one.seconds for one in clocks))
