"""Guesses by a second, smaller model.

It keeps a cache of its own over the page numbers of the model's cache, and fills it only when it is
asked: what is missing of a sequence is computed first, then all sequences are drafted side by side,
a token of each in every pass. Prefixes that were drafted for before are not computed again.

Tokens are drawn from the draft's own distribution with the request's settings, by a random stream
of its own: numbers shared with the sampler that checks would tie what is guessed to what is
accepted. Greedy requests get its likeliest tokens. Whether to go on depends on how sure the draft
is of the next token before one is drawn, never on the token drawn: leaving out tokens by what they
are would change the distribution of those that are checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from exl_core.cache.format import KVFormat, pages_for
from exl_core.cache.page_pool import PageKey
from exl_core.errors import RequestError
from exl_core.model.runner import Model, Runner, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.ops.table import OpTable
from exl_core.sampling.params import SamplerParams
from exl_core.sampling.sampler import Sampler
from exl_core.sampling.steps import draw
from exl_core.speculate.draft_pages import DraftPages
from exl_core.speculate.drafter import NO_DRAFT, Draft, DraftJob

_OTHER_STREAM = 0x5DEECE66D
"""Mixed into a request's seed: the same seed must not give the same numbers here and there."""


class DraftModel(Model, Protocol):
    @property
    def ops(self) -> OpTable: ...


class ModelDrafter:
    """One per engine.

    vocab_size       of the model that checks; a smaller or larger one of the draft is padding
    num_pages        of the model's cache
    max_tokens       most tokens of a draft
    min_probability  a draft ends before a token whose likeliest value is less likely than this
    prefill_chunk    most rows of a pass that computes what is missing
    """

    def __init__(
        self,
        model: DraftModel,
        *,
        vocab_size: int,
        num_pages: int,
        kv_format: KVFormat = KVFormat.FP16,
        max_tokens: int = 5,
        min_probability: float = 0.25,
        prefill_chunk: int = 512,
    ) -> None:
        if max_tokens < 1 or not 0.0 <= min_probability <= 1.0:
            raise RequestError(
                "a draft model cannot work with these settings",
                where="drafter",
                expected="max_tokens of at least 1, min_probability of 0 to 1",
                got=f"max_tokens {max_tokens}, min_probability {min_probability}",
            )
        self.max_tokens = max_tokens
        self.min_probability = min_probability
        self.model = model
        self.store = store_for(model, kv_format, num_pages)
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
        except BaseException:  # a pass that broke off has written some pages and not others
            self._pages.clear()
            raise
        return [each.draft() for each in drawing]

    def forget(self, request_id: str) -> None:
        self._guessers.pop(request_id, None)

    def moved(self, moves: Iterable[tuple[int, int]]) -> None:
        moves = list(moves)
        self.store.move_pages(moves)
        self._pages.moved(moves)

    def _begin(self, job: DraftJob) -> _Drawing:
        count = len(job.token_ids)
        # The last guess is not computed: it needs neither a page nor a position.
        room = min(len(job.page_ids) * self.store.page_size, self.model.config.max_seq_len)
        limit = min(job.max_tokens, self.max_tokens, room - count + 1)
        keys = self._pages.keys_of(job.token_ids, job.page_keys)
        guesser = self._guessers.get(job.request_id)
        if guesser is None:
            guesser = _Guesser(job.sampler, self.model.ops, self._vocab_size)
            self._guessers[job.request_id] = guesser
        return _Drawing(job, keys, guesser, limit)

    def _catch_up(self, waiting: list[_Drawing]) -> list[_Drawing]:
        """Compute what the cache lacks; those that can be drafted for, with their first logits."""
        ready: list[_Drawing] = []
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

    def _missing(self, waiting: list[_Drawing]) -> tuple[list[Segment], list[_Drawing]]:
        """One pass. Of two sequences that lack the same page only one computes it; those with
        tokens that the draft does not know are left out for good."""
        segments: list[Segment] = []
        chosen: list[_Drawing] = []
        written: set[int] = set()
        budget = self._prefill_chunk
        for each in waiting:
            job, end = each.job, len(each.job.token_ids)
            start = min(self._pages.num_cached(job.token_ids, job.page_ids, each.keys), end - 1)
            chunk = tuple(job.token_ids[start : start + budget])
            pages = job.page_ids[: pages_for(start + len(chunk), self.store.page_size)]
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

    def _advance(self, active: list[_Drawing]) -> None:
        """The newest guess of each becomes part of its sequence in the cache."""
        if not active:
            return
        segments = []
        for each in active:
            past_len = len(each.job.token_ids) + len(each.token_ids) - 1
            pages = each.job.page_ids[: pages_for(past_len + 1, self.store.page_size)]
            segments.append(Segment((each.token_ids[-1],), past_len, pages, LogitRows.LAST))
        for each, segment, row in zip(active, segments, self._logits(segments), strict=True):
            self._wrote(each, segment)
            each.logits = row

    def _logits(self, segments: Sequence[Segment]) -> Tensor:
        """On the CPU, where they are drawn from, and out of reach of the next pass."""
        return self._runner.run(segments).cpu()

    def _wrote(self, each: _Drawing, segment: Segment) -> None:
        self._pages.write(segment.past_len, segment.token_ids, segment.page_ids, each.keys)


class _Guesser:
    """One request's way from the draft's logits to a token."""

    def __init__(self, params: SamplerParams, ops: OpTable, vocab_size: int) -> None:
        # A skewed draw has no distribution at hand: the likeliest token is proposed as it is.
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
        """The sequence as it is now; what was guessed in vain goes."""
        history = self._history
        common = min(len(history), len(token_ids))
        if history[:common] != list(token_ids[:common]):
            common = next(i for i in range(common) if history[i] != token_ids[i])
        del history[common:]
        self._sampler.rewind(common)
        history.extend(token_ids[common:])

    def guess(self, logits: Tensor) -> tuple[int, Tensor | None]:
        """A token, and what it was drawn from: float32 [vocab_size]."""
        logits = logits[: self._vocab_size]  # ids behind are padding of a larger draft
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


class _Drawing:
    """A job on its way to a draft."""

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
        """Add a token, if the draft is sure enough. True: another may follow."""
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
    """Of the draft's own distribution, before any setting of the request; 1 if nobody asks."""
    if wanted == 0.0:
        return 1.0
    return float(1.0 / (logits - logits.amax()).exp_().sum())
