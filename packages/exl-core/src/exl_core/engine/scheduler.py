"""Who runs next. Decides from lengths and page counts; sees neither tensors nor text.

Sequences run in order of arrival, at most `max_batch` at a time, and none overtakes another. One
pass takes the newest token of every decoding sequence and, beside them, up to `prefill_chunk`
tokens of prompts, oldest first. A sequence starts when pages for all its tokens are to be had, with
one to spare for those that already run; what the cache holds of its prefix is not computed again.

A reply that grows into a new page when none is left takes the pages of the youngest running
sequence, which goes back to the head of the queue with all it has generated and is computed again
later. Since a sequence is queued only if it fits the whole pool alone (`check_fits`), the oldest
one always makes progress: nothing deadlocks and nothing fails for lack of pages.
"""

from __future__ import annotations

from collections import deque

from exl_core.cache.format import PAGE_SIZE, pages_for
from exl_core.cache.page_pool import PagePool
from exl_core.engine.plan import BatchPlan
from exl_core.engine.sequence import Sequence
from exl_core.errors import RequestError
from exl_core.model.segment import LogitRows, Segment


class Scheduler:
    def __init__(
        self, pool: PagePool, *, max_batch: int, prefill_chunk: int, page_size: int = PAGE_SIZE
    ) -> None:
        self.pool = pool
        self.max_batch = max_batch
        self.prefill_chunk = prefill_chunk
        self.page_size = page_size
        self.running: list[Sequence] = []  # in order of arrival
        self.waiting: deque[Sequence] = deque()  # likewise; all arrived after those that run
        self.num_requeued = 0

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool holds."""
        return self.pool.num_pages * self.page_size

    def check_fits(self, request_id: str, num_tokens: int) -> None:
        """Refuse what could not run even alone. The last token is sampled and never cached."""
        needed = pages_for(num_tokens - 1, self.page_size)
        if needed > self.pool.num_pages:
            raise RequestError(
                f"prompt and reply of {num_tokens} tokens do not fit the cache",
                where=request_id,
                expected=f"at most {self.capacity + 1} tokens ({self.pool.num_pages} pages)",
                got=f"{num_tokens} ({needed} pages)",
                next_step="Ask for fewer tokens, or make the cache larger.",
            )

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence, *, is_trusted: bool = True) -> None:
        """Done or cancelled: its pages are given back; those of a trusted one may be reused."""
        if not is_trusted:
            self.pool.forget(sequence.page_ids)
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)

    def fail_running(self) -> list[Sequence]:
        """After a pass that broke off: what ran is dropped, and no page's content is trusted."""
        failed = self.running
        self.running = []
        for sequence in failed:
            sequence.page_ids, sequence.past_len = [], 0
        self.pool.reset()
        return failed

    def plan(self) -> BatchPlan:
        """Decide the next pass. It is empty only when there is nothing to do."""
        self._secure_pages()
        self._admit()
        decoding: list[tuple[Sequence, Segment]] = []
        prefilling: list[tuple[Sequence, Segment]] = []
        budget = self.prefill_chunk
        for sequence in self.running:
            if sequence.num_missing == 1:
                decoding.append((sequence, self._segment(sequence, 1)))
            elif budget:
                count = min(budget, sequence.num_missing)
                budget -= count
                prefilling.append((sequence, self._segment(sequence, count)))
        chosen = decoding + prefilling
        return BatchPlan(tuple(s for _, s in chosen), tuple(s for s, _ in chosen))

    def advance(self, plan: BatchPlan) -> None:
        """The pass is done: its tokens are in the cache, and pages that it filled can be found."""
        for sequence, segment in zip(plan.sequences, plan.segments, strict=True):
            count = len(segment.token_ids)
            first = sequence.past_len // self.page_size
            sequence.past_len += count
            last = sequence.past_len // self.page_size
            if last > first:
                keys = sequence.extend_keys(last, self.page_size)
                for i in range(first, last):
                    sequence.page_ids[i] = self.pool.register(sequence.page_ids[i], keys[i])

    def _segment(self, sequence: Sequence, count: int) -> Segment:
        past_len = sequence.past_len
        end = past_len + count
        return Segment(
            token_ids=tuple(sequence.token_ids[past_len:end]),
            past_len=past_len,
            page_ids=tuple(sequence.page_ids[: pages_for(end, self.page_size)]),
            logit_rows=LogitRows.LAST if end == len(sequence.token_ids) else LogitRows.NONE,
        )

    def _secure_pages(self) -> None:
        """A page for every token that runs now, oldest first, at the cost of the youngest."""
        i = 0
        while i < len(self.running):  # the list shrinks from its end meanwhile
            sequence = self.running[i]
            needed = pages_for(len(sequence.token_ids), self.page_size) - len(sequence.page_ids)
            page_ids = self.pool.allocate(needed)
            if page_ids is None:
                self._requeue(self.running.pop())  # perhaps `sequence` itself: then we are done
                continue
            sequence.page_ids += page_ids
            i += 1

    def _requeue(self, sequence: Sequence) -> None:
        self._release(sequence)
        self.waiting.appendleft(sequence)
        self.num_requeued += 1

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_batch:
            sequence = self.waiting[0]
            num_tokens = len(sequence.token_ids)
            # At least the last token is computed: its logits are what the reply starts from.
            num_full = (num_tokens - 1) // self.page_size
            found = self.pool.find(sequence.extend_keys(num_full, self.page_size))
            needed = pages_for(num_tokens, self.page_size) - len(found)
            taken = len(found) - self.pool.num_held_among(found) + needed
            spare = 1 if self.running else 0
            if taken + spare > self.pool.num_available:
                return
            self.waiting.popleft()
            self.pool.hold(found)  # first, so that they are not evicted to make room
            fresh = self.pool.allocate(needed)
            assert fresh is not None, "the pages were counted just above"
            sequence.page_ids = found + fresh
            sequence.past_len = len(found) * self.page_size
            if sequence.cached_tokens is None:
                sequence.cached_tokens = sequence.past_len
            self.running.append(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.page_ids)
        sequence.page_ids, sequence.past_len = [], 0
