"""Log probabilities of continuations, many at once, as needed to score multiple-choice tasks.

For each pair of context and continuation: the log probability of the continuation, and whether each
of its tokens is the model's likeliest one. A context is computed once for all its continuations.
They share its full pages and copy its last, partly filled page. Scoring uses the paged cache, as
generation does, and batches many pairs into one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from exl_core.cache.format import PAGE_SIZE, KVFormat, pages_for
from exl_core.cache.page_pool import PageCopy
from exl_core.errors import RequestError
from exl_core.model.protocol import Model
from exl_core.model.runner import Runner, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.sampling.sampler import LogitsError

_PAGES = 64
"""Pages of the cache, unless one pair needs more."""
_PASS_ROWS = 512
_LOGIT_BYTES = 256 * 2**20
"""Limit of the memory for the logits of one pass."""
_ROWS_AT_ONCE = 32
"""Rows per reduction over the vocabulary; limits its temporary memory."""


class Pair(NamedTuple):
    """A context and its continuation, neither of them empty. Together they may be one token longer
    than the model's context length, because the last token is only predicted, not fed."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(slots=True)
class Scored:
    """Log probability of a whole continuation. `is_greedy`: each of its tokens is the likeliest."""

    log_prob: float = 0.0
    is_greedy: bool = True


@dataclass(slots=True)
class _Member:
    """A continuation with its index in the list of pairs and its pages."""

    number: int
    continuation: tuple[int, ...]
    page_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class _Unit:
    """A context with continuations that fit the cache together. The context without its last token
    is computed once. Its last token is the first row of each continuation."""

    context: tuple[int, ...]
    members: list[_Member] = field(default_factory=list)
    page_ids: tuple[int, ...] = ()

    @property
    def shared_len(self) -> int:
        return len(self.context) - 1

    def pages_with(self, member: _Member) -> int:
        """Pages that a continuation needs in addition to the context's full pages."""
        length = self.shared_len + len(member.continuation)
        return pages_for(length) - self.shared_len // PAGE_SIZE

    @property
    def num_pages(self) -> int:
        return _pages_of(self.shared_len) + sum(self.pages_with(one) for one in self.members)

    def place(self, first: int) -> list[PageCopy]:
        """Assigns pages, numbered from `first`. Returns the copies of the context's last page."""
        count, full = _pages_of(self.shared_len), self.shared_len // PAGE_SIZE
        self.page_ids = tuple(range(first, first + count))
        first += count
        copies = []
        for member in self.members:
            own = self.pages_with(member)
            member.page_ids = (*self.page_ids[:full], *range(first, first + own))
            if count > full:
                copies.append(PageCopy(self.page_ids[full], first, self.shared_len % PAGE_SIZE))
            first += own
        return copies


def score_continuations(
    model: Model,
    pairs: Sequence[Pair],
    *,
    kv_format: KVFormat = KVFormat.FP16,
    on_scored: Callable[[int], None] | None = None,
) -> list[Scored]:
    """Scores in the order of the pairs. `on_scored` receives the number of newly scored pairs."""
    for pair in pairs:
        _check(pair, model.config.max_seq_len)
    scored = [Scored() for _ in pairs]
    if not pairs:
        return scored
    longest = max(pages_for(len(c) + len(x) - 1) for c, x in pairs)
    num_pages = max(_PAGES, longest + 1)  # + 1: the context's last page and its copy
    units = list(_units(pairs, num_pages))
    store = store_for(model, kv_format, min(num_pages, sum(unit.num_pages for unit in units)))
    runner = Runner(model, store)
    for batch in _batches(units, store.num_pages):
        first = 0
        copies: list[PageCopy] = []
        for unit in batch:
            copies += unit.place(first)
            first += unit.num_pages
        for segments in _context_passes(batch):
            runner.run(segments)
        store.copy_pages(copies)
        rows = max(1, min(_PASS_ROWS, _LOGIT_BYTES // (4 * model.config.vocab_size)))
        for chunks in _continuation_passes(batch, rows):
            _add(scored, chunks, runner.run([chunk.segment for chunk in chunks]))
        if on_scored is not None:
            on_scored(sum(len(unit.members) for unit in batch))
    return scored


class _Chunk(NamedTuple):
    """Consecutive rows of one continuation, and the tokens that follow them."""

    number: int
    segment: Segment
    targets: tuple[int, ...]


def _units(pairs: Sequence[Pair], num_pages: int) -> Iterator[_Unit]:
    """Pairs grouped by context, longest context first, so that running out of memory shows at the
    start."""
    groups: dict[tuple[int, ...], list[_Member]] = {}
    for number, pair in enumerate(pairs):
        groups.setdefault(pair.context, []).append(_Member(number, pair.continuation))
    for context in sorted(groups, key=len, reverse=True):
        unit = _Unit(context)
        for member in groups[context]:
            if unit.members and unit.num_pages + unit.pages_with(member) > num_pages:
                yield unit
                unit = _Unit(context)
            unit.members.append(member)
        yield unit


def _batches(units: Sequence[_Unit], num_pages: int) -> Iterator[list[_Unit]]:
    batch: list[_Unit] = []
    free = num_pages
    for unit in units:
        if batch and unit.num_pages > free:
            yield batch
            batch, free = [], num_pages
        batch.append(unit)
        free -= unit.num_pages
    yield batch


def _context_passes(units: Sequence[_Unit]) -> Iterator[list[Segment]]:
    current: list[Segment] = []
    free = _PASS_ROWS
    for unit in units:
        start = 0
        while start < unit.shared_len:
            end = min(start + free, unit.shared_len)
            held = unit.page_ids[: pages_for(end)]
            current.append(Segment(unit.context[start:end], start, held, LogitRows.NONE))
            free -= end - start
            start = end
            if free == 0:
                yield current
                current, free = [], _PASS_ROWS
    if current:
        yield current


def _continuation_passes(units: Sequence[_Unit], rows: int) -> Iterator[list[_Chunk]]:
    current: list[_Chunk] = []
    free = rows
    for unit in units:
        for member in unit.members:
            fed = (unit.context[-1], *member.continuation[:-1])
            start = 0
            while start < len(fed):
                end = min(start + free, len(fed))
                past_len = unit.shared_len + start
                held = member.page_ids[: pages_for(unit.shared_len + end)]
                segment = Segment(fed[start:end], past_len, held, LogitRows.ALL)
                current.append(_Chunk(member.number, segment, member.continuation[start:end]))
                free -= end - start
                start = end
                if free == 0:
                    yield current
                    current, free = [], rows
    if current:
        yield current


def _add(scored: list[Scored], chunks: Sequence[_Chunk], logits: Tensor) -> None:
    """Adds the log probabilities of `chunks` to `scored`. `logits` [rows, vocab_size] are those of
    all chunks, in order."""
    targets = torch.tensor([i for chunk in chunks for i in chunk.targets], device=logits.device)
    log_probs, is_top = [], []
    for start in range(0, len(targets), _ROWS_AT_ONCE):
        rows = logits[start : start + _ROWS_AT_ONCE]
        ids = targets[start : start + _ROWS_AT_ONCE]
        largest = rows.amax(1, keepdim=True)  # [rows, 1]
        total = (rows - largest).exp_().sum(1, dtype=torch.float64)  # [rows]
        chosen = (rows.gather(1, ids[:, None]) - largest).squeeze(1)  # [rows]
        log_probs.append(chosen.double() - total.log())
        is_top.append(rows.argmax(1) == ids)
    found, tops = torch.cat(log_probs), torch.cat(is_top)
    if not bool(found.isfinite().all()):
        raise LogitsError(
            "a token has no probability above zero",
            where="continuation",
            expected="finite logits",
            next_step="A weight may be damaged: 'exl doctor' tests the kernels of this machine.",
        )
    first = 0
    for chunk in chunks:
        last = first + len(chunk.targets)
        one = scored[chunk.number]
        one.log_prob += float(found[first:last].sum())
        one.is_greedy = one.is_greedy and bool(tops[first:last].all())
        first = last


def _pages_of(length: int) -> int:
    return pages_for(length) if length else 0


def _check(pair: Pair, max_seq_len: int) -> None:
    if not pair.context or not pair.continuation:
        raise RequestError("a context or a continuation is empty", expected="at least one token")
    count = len(pair.context) + len(pair.continuation) - 1
    if count > max_seq_len:
        raise RequestError(
            "a context with its continuation is too long",
            expected=f"at most {max_seq_len + 1} tokens",
            got=count + 1,
        )
