"""Drafter that uses a second, smaller model.

Its cache uses the page numbers of the target model's cache and is filled on demand. Missing tokens
of a sequence are computed first; then all sequences draft in parallel, one token each per pass.
Prefixes that are already in the draft cache are not computed again.

Draft tokens are sampled from the draft model's distribution with the request's settings, from a
separate random stream. Random numbers shared with the verifying sampler would correlate proposal
and acceptance. Greedy requests get the draft model's most likely tokens. The decision to continue a
draft depends on the draft model's confidence before a token is sampled, never on the sampled token:
dropping tokens by their value would change the distribution of the verified ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from exl_core.cache.format import KVFormat, pages_for
from exl_core.cache.page_pool import PageKey
from exl_core.cache.store import KVStore
from exl_core.errors import RequestError, UnsupportedModelError
from exl_core.model.protocol import Model
from exl_core.model.runner import Runner, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.ops.table import OpTable
from exl_core.sampling.params import SamplerParams
from exl_core.sampling.sampler import Sampler
from exl_core.sampling.steps import draw
from exl_core.speculate.draft_pages import DraftPages
from exl_core.speculate.drafter import NO_DRAFT, Draft, DraftJob

DEFAULT_PROBABILITY = 0.25
_OTHER_STREAM = 0x5DEECE66D
"""Mixed into a request's seed, so that drafting and sampling use different random numbers."""


class DraftModel(Model, Protocol):
    @property
    def ops(self) -> OpTable: ...


class ModelDrafter:
    """Draft model of one engine.

    vocab_size       vocabulary of the target model; the draft model's may be padded differently
    num_pages        pages of the target model's cache
    store            memory of at least `num_pages` pages that the caller owns; None allocates it
    max_tokens       most tokens of a draft
    min_probability  a draft ends where the most likely token is less likely than this
    prefill_chunk    most rows of a pass that computes missing tokens
    """

    def __init__(
        self,
        model: DraftModel,
        *,
        vocab_size: int,
        num_pages: int,
        kv_format: KVFormat = KVFormat.FP16,
        max_tokens: int = 5,
        min_probability: float = DEFAULT_PROBABILITY,
        prefill_chunk: int = 512,
        store: KVStore | None = None,
    ) -> None:
        if max_tokens < 1 or not 0.0 <= min_probability <= 1.0:
            raise RequestError(
                "a draft model cannot work with these settings",
                where="drafter",
                expected="max_tokens of at least 1, min_probability of 0 to 1",
                got=f"max_tokens {max_tokens}, min_probability {min_probability}",
            )
        if model.config.state_bytes:
            raise UnsupportedModelError(
                "a draft model with recurrent layers is not supported",
                where="drafter",
                expected="attention in every layer",
            )
        self.max_tokens = max_tokens
        self.min_probability = min_probability
        self.model = model
        self.store = store_for(model, kv_format, num_pages) if store is None else store
        self._runner = Runner(model, self.store)
        self._pages = DraftPages(num_pages, self.store.page_size)
        self._vocab_size = vocab_size
        self._prefill_chunk = prefill_chunk
        self._guessers: dict[str, _Guesser] = {}

    def propose(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        drawing = [self._begin(job) for job in jobs]
        active = [each for each in drawing if each.limit > 0]
        try:
            active = self._catch_up(active)
            while active:
                active = [each for each in active if each.guess(self.min_probability)]
                self._advance(active)
        except BaseException:  # an interrupted pass has written only some of the pages
            self._pages.clear()
            raise
        return [each.draft() for each in drawing]

    def forget(self, request_id: str) -> None:
        self._guessers.pop(request_id, None)

    def moved(self, moves: Iterable[tuple[int, int]]) -> None:
        moves = list(moves)
        self.store.move_pages(moves)
        self._pages.moved(moves)

    def _begin(self, job: DraftJob) -> Drawing:
        count = len(job.token_ids)
        # The last draft token is not computed, so it needs neither a page slot nor a position.
        capacity = min(len(job.page_ids) * self.store.page_size, self.model.config.max_seq_len)
        limit = min(job.max_tokens, self.max_tokens, capacity - count + 1)
        keys = self._pages.keys_of(job.token_ids, job.page_keys, job.key_root)
        guesser = self._guessers.get(job.request_id)
        if guesser is None:
            guesser = _Guesser(job.sampler, self.model.ops, self._vocab_size)
            self._guessers[job.request_id] = guesser
        return Drawing(job, keys, guesser, limit)

    def _catch_up(self, waiting: list[Drawing]) -> list[Drawing]:
        """Compute missing tokens; returns the sequences that have logits to draft from."""
        ready: list[Drawing] = []
        while waiting:
            segments, chosen = self._missing(waiting)
            if not segments:
                break
            logits = iter(self._logits(segments))
            for each, segment in zip(chosen, segments, strict=True):
                self._wrote(each, segment)
                if segment.logit_rows is LogitRows.LAST:
                    each.logits = next(logits)
                    ready.append(each)
            waiting = [each for each in waiting if each.logits is None]
        return ready

    def _missing(self, waiting: list[Drawing]) -> tuple[list[Segment], list[Drawing]]:
        """Segments of one pass over missing tokens, and their sequences.

        Of two sequences that lack the same page, only one computes it. Sequences with tokens that
        the draft model does not have are never drafted for.
        """
        segments: list[Segment] = []
        chosen: list[Drawing] = []
        written: set[int] = set()
        budget = self._prefill_chunk
        for each in waiting:
            job, end = each.job, len(each.job.token_ids)
            start = min(self._num_cached(each), end - 1)
            chunk = tuple(job.token_ids[start : start + budget])
            pages = self._pages_until(start + len(chunk), job)
            touched = set(pages[start // self.store.page_size :])
            is_strange = max(job.token_ids[start:]) >= self.model.config.vocab_size
            if not chunk or is_strange or touched & written:
                continue
            budget -= len(chunk)
            written |= touched
            is_last = start + len(chunk) == end
            rows = LogitRows.LAST if is_last else LogitRows.NONE
            segments.append(Segment(chunk, start, pages, rows))
            chosen.append(each)
        return segments, chosen

    def _advance(self, active: list[Drawing]) -> None:
        """Compute the newest draft token of each sequence, which adds it to the cache."""
        if not active:
            return
        segments = []
        for each in active:
            past_len = len(each.job.token_ids) + len(each.token_ids) - 1
            pages = self._pages_until(past_len + 1, each.job)
            segments.append(Segment((each.token_ids[-1],), past_len, pages, LogitRows.LAST))
        for each, segment, row in zip(active, segments, self._logits(segments), strict=True):
            self._drew(each, segment)
            each.logits = row

    def _logits(self, segments: Sequence[Segment]) -> Tensor:
        """Logits of one pass as a copy on the CPU, where draft tokens are sampled."""
        return self._runner.run(segments).cpu()

    def _pages_until(self, end: int, job: DraftJob) -> tuple[int, ...]:
        """Pages of a pass whose last row is before position `end`."""
        return job.page_ids[: pages_for(end, self.store.page_size)]

    def _num_cached(self, each: Drawing) -> int:
        job = each.job
        return self._pages.num_cached(job.token_ids, job.page_ids, each.keys, job.key_root)

    def _drew(self, each: Drawing, segment: Segment) -> None:
        """Called after a pass over a draft token."""
        self._wrote(each, segment)

    def _wrote(self, each: Drawing, segment: Segment) -> None:
        root = each.job.key_root
        self._pages.write(segment.past_len, segment.token_ids, segment.page_ids, each.keys, root)


class _Guesser:
    """Samples draft tokens of one request from the draft model's logits."""

    def __init__(self, params: SamplerParams, ops: OpTable, vocab_size: int) -> None:
        # Skewed sampling has no explicit distribution, so the most likely token is proposed.
        self.is_certain = params.is_greedy or params.skew != 0.0
        self._sampler = Sampler(params, ops)
        self._vocab_size = vocab_size
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed ^ _OTHER_STREAM)
        self._history: list[int] = []

    def follow(self, token_ids: Sequence[int]) -> None:
        """Set the history to the current sequence, dropping rejected draft tokens."""
        history = self._history
        common = min(len(history), len(token_ids))
        if history[:common] != list(token_ids[:common]):
            common = next(i for i in range(common) if history[i] != token_ids[i])
        del history[common:]
        self._sampler.rewind(common)
        history.extend(token_ids[common:])

    def guess(self, logits: Tensor) -> tuple[int, Tensor | None]:
        """A draft token and the distribution it was sampled from, float32 [vocab_size], or None."""
        logits = logits[: self._vocab_size]  # larger ids are padding of the draft model
        if self.is_certain:
            token_id, drawn_from = self._likeliest(logits), None
        else:
            drawn_from = self._sampler.probabilities(logits, self._history)
            uniform = torch.rand((), generator=self._generator, dtype=torch.float64)
            token_id = draw(drawn_from, float(uniform))
            drawn_from = F.pad(drawn_from, (0, self._vocab_size - len(drawn_from)))
        self._history.append(token_id)
        return token_id, drawn_from

    def _likeliest(self, logits: Tensor) -> int:
        if not self._sampler.params.is_greedy:
            return int(logits.argmax())
        return self._sampler.sample(logits, self._history).token_id


class Drawing:
    """Draft of one job in progress."""

    def __init__(
        self, job: DraftJob, keys: Sequence[PageKey], guesser: _Guesser, limit: int
    ) -> None:
        self.job = job
        self.keys = keys
        self.limit = limit
        self.logits: Tensor | None = None
        self.token_ids: list[int] = []
        self._guesser = guesser
        self._probabilities: list[Tensor] = []
        if limit > 0:
            guesser.follow(job.token_ids)

    def guess(self, min_probability: float) -> bool:
        """Add a token if the draft model is confident enough. True if another one may follow."""
        logits = self.logits
        if logits is None or _largest_probability(logits, min_probability) < min_probability:
            return False
        try:
            token_id, drawn_from = self._guesser.guess(logits)
        except Exception:  # noqa: BLE001 - a draft is optional; the request's own sampler will fail too
            return False
        self.token_ids.append(token_id)
        if drawn_from is not None:
            self._probabilities.append(drawn_from)
        return len(self.token_ids) < self.limit

    def draft(self) -> Draft:
        if not self.token_ids:
            return NO_DRAFT
        probabilities = None if self._guesser.is_certain else tuple(self._probabilities)
        return Draft(tuple(self.token_ids), probabilities)


def _largest_probability(logits: Tensor, wanted: float) -> float:
    """Largest probability of the draft model before any sampling step; 1 if `wanted` is 0."""
    if wanted == 0.0:
        return 1.0
    return float(1.0 / (logits - logits.amax()).exp_().sum())
