"""Who runs next. Decides from lengths and page counts; sees neither tensors nor text.

Sequences run in order of arrival, at most `max_batch` at a time, and none overtakes another. One
pass takes the newest token of every decoding sequence and, beside them, up to `prefill_chunk`
tokens of prompts, oldest first. A sequence starts when pages for all its tokens are to be had, with
one to spare for those that already run; what the cache holds of its prefix is not computed again,
and what another sequence is about to compute of it is waited for.

A reply that grows into a new page when none is left takes the pages of the youngest running
sequence, which goes back to the head of the queue with all it has generated and is computed again
later. Since a sequence is queued only if it fits the whole pool alone (`check_fits`), the oldest
one always makes progress: nothing deadlocks and nothing fails for lack of pages.

A guided sequence and its negative sequence start, wait and end together and count as two in the
batch; the rows of both that give logits are in one pass. `running` and `waiting` list the guided
one only.

The caller's order: `prepare`, `drafting` and `reserve` if it drafts, `plan`; then it does the
copies and the pass, appends what it sampled (the same to a negative sequence), and calls
`advance`; only then `rewind` and `remove` (which may come earlier for a sequence whose pass is not
to be trusted).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace

from exl_core.cache.format import PAGE_SIZE, pages_for
from exl_core.cache.page_pool import PagePool
from exl_core.engine.paging import Paging
from exl_core.engine.plan import BatchPlan
from exl_core.engine.sequence import SequenceState
from exl_core.errors import RequestError
from exl_core.model.segment import LogitRows, PageCopy, Segment

LEAST_CHUNK = 32
"""Tokens of prompts; a pass that has no memory for so few has none for a sequence."""

WORTH_WAITING = 64
"""Tokens of a prompt: to compute fewer twice takes less than a pass."""


class Scheduler:
    def __init__(
        self,
        pool: PagePool,
        *,
        max_batch: int,
        prefill_chunk: int,
        page_size: int = PAGE_SIZE,
        score_chunk: int | None = None,
    ) -> None:
        """`score_chunk`: most tokens of prompts in one pass that give logits; None: any number."""
        self.pool = pool
        self.max_batch = max_batch
        self.prefill_chunk = prefill_chunk
        self.page_size = page_size
        self.score_chunk = prefill_chunk if score_chunk is None else score_chunk
        self.running: list[SequenceState] = []  # in order of arrival
        self.waiting: deque[SequenceState] = deque()  # likewise; all arrived after those that run
        self.num_requeued = 0
        self._most_running = max_batch  # beside others, for as long as memory is short
        self._paging = Paging(pool, page_size)
        self._is_prepared = False

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool holds."""
        return self.pool.num_pages * self.page_size

    @property
    def pending_copies(self) -> tuple[PageCopy, ...]:
        """What the next plan begins with; nothing reads what they make before."""
        return tuple(self._paging.copies)

    def check_fits(
        self, request_id: str, num_tokens: int, negative_tokens: int | None = None
    ) -> None:
        """Refuse what could not run even alone. The last token is sampled and never cached.

        `negative_tokens` is the length of its negative sequence. A draft never goes beyond these
        lengths.
        """
        lengths = [num_tokens] if negative_tokens is None else [num_tokens, negative_tokens]
        needed = sum(pages_for(length - 1, self.page_size) for length in lengths)
        if needed > self.pool.num_pages:
            total, most = sum(lengths), self.capacity + len(lengths)
            raise RequestError(
                f"prompt and reply of {total} tokens do not fit the cache",
                where=request_id,
                expected=f"at most {most} tokens ({self.pool.num_pages} pages)",
                got=f"{total} ({needed} pages)",
                next_step="Ask for fewer tokens, or make the cache larger.",
            )
        if len(lengths) > self.max_batch:
            raise RequestError(
                "guidance runs two sequences at once",
                where=request_id,
                expected=f"at most max_batch, {self.max_batch}",
                got=len(lengths),
                next_step="Make max_batch 2 or more.",
            )

    def add(self, sequence: SequenceState, negative: SequenceState | None = None) -> None:
        """Queue it. Both must have passed `check_fits`."""
        if negative is not None:
            sequence.negative = negative
        self.waiting.append(sequence)
        self._is_prepared = False

    def remove(self, sequence: SequenceState, *, is_trusted: bool = True) -> None:
        """Done or cancelled: its pages are given back; those of a trusted one may be reused."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._lift(sequence, is_trusted=is_trusted)
        else:
            self.waiting.remove(sequence)
        self._is_prepared = False

    def rewind(self, sequence: SequenceState, length: int) -> None:
        """Cut it to its first `length` tokens, and as many from its negative sequence. What is
        cached of these is kept, but for the last: it is computed again, for its logits."""
        num_cut = len(sequence.token_ids) - length
        for member in sequence.members:
            keep = len(member.token_ids) - num_cut
            if num_cut < 0 or keep < 1:
                raise AssertionError(f"{sequence.request_id}: no rewinding to {keep} tokens")
            self._paging.rewind(member, keep)
        self._is_prepared = False

    def fail_running(self) -> list[SequenceState]:
        """After a pass that broke off: what ran is dropped, and no page's content is trusted."""
        failed = self.running
        self.running = []
        for sequence in failed:
            for member in sequence.members:
                member.page_ids, member.past_len = [], 0
        self._paging.copies.clear()
        self.pool.reset()
        self._is_prepared = False
        return failed

    def make_smaller(self, plan: BatchPlan) -> bool:
        """There was no memory for that pass: the next ones have half as many tokens of prompts, or
        else a sequence less. False if it had but one sequence, which nothing makes smaller."""
        rows = [
            len(segment.token_ids)
            for sequence, segment in zip(plan.sequences, plan.segments, strict=True)
            if sequence.is_scored or segment.logit_rows is not LogitRows.ALL
        ]
        longest = max(rows, default=1)
        if longest > LEAST_CHUNK:
            self.prefill_chunk = max(LEAST_CHUNK, min(self.prefill_chunk, longest) // 2)
        elif len(self.running) > 1:
            self._requeue(self.running.pop())
            self._most_running = sum(len(sequence.members) for sequence in self.running)
        else:
            return False
        self._is_prepared = False
        return True

    def defragment(self, *, is_forced: bool = False) -> list[tuple[int, int]]:
        """When nothing is left to do: moves of pages (from, to), all at once, if they pay.

        They are in the pool's books already; whoever has the memory does them before the next pass.
        """
        if self.running or self.waiting:
            return []
        self._paging.drop_copies()
        if not is_forced and not self.pool.defragmentation_pays():
            return []
        return self.pool.defragment()

    def prepare(self) -> None:
        """Pages for those that run, at the cost of the youngest; then start those that wait."""
        self._secure_pages()
        self._admit()
        self._is_prepared = True

    def drafting(self) -> list[SequenceState]:
        """Sequences whose next rows could be a draft: they decode without guidance."""
        self._ensure_prepared()
        return [s for s in self.running if s.negative is None and s.num_missing == 1]

    def reserve(self, sequence: SequenceState, count: int) -> int:
        """Pages for a draft of `count` tokens behind what the sequence has; how many find room.

        At nobody's cost: no page is taken that another running sequence needs for its next token.
        What the draft leaves unused is given back by `advance`.
        """
        count = min(count, sequence.max_len - len(sequence.token_ids) - 1)
        if count <= 0:
            return 0
        needs = sum(
            self._paging.num_wanted(member, 1)
            for other in self.running
            if other is not sequence
            for member in other.members
            if self._paging.num_wanted(member, 1) > 0
        )
        spare = self.pool.num_available - needs
        more = min(self._paging.num_wanted(sequence, count), spare)
        if more > 0:
            self._paging.extend(sequence, more)
        return min(count, self._draft_room(sequence))

    def plan(
        self,
        drafts: Mapping[str, tuple[int, ...]] | None = None,
        only: Collection[SequenceState] | None = None,
    ) -> BatchPlan:
        """Decide the next pass. It is empty only when there is nothing to do.

        `drafts` by request id; of each, as much is taken as `reserve` found room for. `only`: of
        these sequences, whose pass is on its way already: what is to be copied waits for the next.
        """
        self._ensure_prepared()
        self._is_prepared = False
        decoding: list[tuple[SequenceState, Segment]] = []
        prefilling: list[tuple[SequenceState, Segment]] = []
        budget, score_budget = self.prefill_chunk, self.score_chunk
        for sequence in self.running:
            if only is not None and sequence not in only:
                continue
            members = sequence.members
            missing = [member.num_missing for member in members]
            if max(missing) > 1:
                room = min(budget, score_budget) if sequence.is_scored else budget
                counts = _share(room, missing)
                budget -= sum(counts)
                score_budget -= sum(counts) if sequence.is_scored else 0
                prefilling += [
                    (member, self._segment(member, count))
                    for member, count in zip(members, counts, strict=True)
                    if count
                ]
            else:
                draft = drafts.get(sequence.request_id, ()) if drafts and len(members) == 1 else ()
                decoding += [(member, self._segment(member, 1, draft)) for member in members]
        chosen = decoding + prefilling
        return BatchPlan(
            segments=tuple(segment for _, segment in chosen),
            sequences=tuple(sequence for sequence, _ in chosen),
            copies=self.pending_copies if only is None else (),
        )

    def next_segments(self, plan: BatchPlan) -> list[Segment] | None:
        """The pass after this one, all but its tokens: one of each sequence, the one that is drawn
        for it. None where something else may come: a sequence is about to end or may start, wants
        another page or is told its token by others."""
        members = sum(len(sequence.members) for sequence in self.running)
        if len(plan.sequences) != members or (self.waiting and members < self.max_batch):
            return None
        segments = []
        for sequence, now in zip(plan.sequences, plan.segments, strict=True):
            past_len, rows = len(sequence.token_ids), len(now.token_ids)
            if (
                sequence.request.negative_prompt_ids is not None
                or sequence.request.hooks
                or now.logit_rows is not LogitRows.LAST
                or now.past_len + rows != past_len
                or past_len + 1 >= sequence.max_len
                or past_len >= len(now.page_ids) * self.page_size
            ):
                return None
            segments.append(replace(now, token_ids=(0,), past_len=past_len))
        return segments

    def advance(self, plan: BatchPlan) -> None:
        """The pass is done, and what was sampled from it is appended.

        What it computed of the tokens that stand is in the cache, but never the newest token, which
        the next pass starts with. Pages that it filled can be found.
        """
        del self._paging.copies[: len(plan.copies)]
        running = {id(member) for sequence in self.running for member in sequence.members}
        for sequence, segment in zip(plan.sequences, plan.segments, strict=True):
            if id(sequence) not in running:
                continue
            count = len(segment.token_ids)
            sequence.past_len = min(segment.past_len + count, len(sequence.token_ids) - 1)
            self._paging.register(sequence, segment.past_len // self.page_size)
            if count > 1 and segment.logit_rows is not LogitRows.ALL:
                self._paging.note(sequence)
            self._paging.trim(sequence)

    def _ensure_prepared(self) -> None:
        if not self._is_prepared:
            self.prepare()

    def _draft_room(self, sequence: SequenceState) -> int:
        """Tokens behind the newest one for which it has pages."""
        return len(sequence.page_ids) * self.page_size - len(sequence.token_ids)

    def _segment(self, sequence: SequenceState, count: int, draft: tuple[int, ...] = ()) -> Segment:
        past_len = sequence.past_len
        end = past_len + count
        room = min(self._draft_room(sequence), sequence.max_len - len(sequence.token_ids) - 1)
        draft = draft[: max(room, 0)]
        if draft or sequence.is_scored:
            logit_rows = LogitRows.ALL
        else:
            logit_rows = LogitRows.LAST if end == len(sequence.token_ids) else LogitRows.NONE
        return Segment(
            token_ids=(*sequence.token_ids[past_len:end], *draft),
            past_len=past_len,
            page_ids=tuple(sequence.page_ids[: pages_for(end + len(draft), self.page_size)]),
            logit_rows=logit_rows,
            adapters=sequence.request.adapters,
            embeddings=sequence.request.embeddings,
        )

    def _secure_pages(self) -> None:
        """A page for every token that runs now, oldest first, at the cost of the youngest."""
        i = 0
        while i < len(self.running):  # the list shrinks from its end meanwhile
            members = self.running[i].members
            if all(self._paging.extend(m, max(self._paging.num_wanted(m), 0)) for m in members):
                i += 1
            else:
                self._requeue(self.running.pop())  # perhaps this one itself: then we are done

    def _requeue(self, sequence: SequenceState) -> None:
        self._lift(sequence)
        self.waiting.appendleft(sequence)
        self.num_requeued += 1

    def _lift(self, sequence: SequenceState, *, is_trusted: bool = True) -> None:
        for member in sequence.members:
            self._paging.lift(member, is_trusted=is_trusted)

    def _admit(self) -> None:
        num_running = sum(len(sequence.members) for sequence in self.running)
        while self.waiting:
            members = self.waiting[0].members
            num_running += len(members)
            spare = 1 if self.running else 0
            most = min(self.max_batch, self._most_running) if self.running else self.max_batch
            if num_running > most or self._comes_soon(members):
                return
            if not self._paging.place(members, spare=spare):
                return
            self.running.append(self.waiting.popleft())

    def _comes_soon(self, members: tuple[SequenceState, ...]) -> bool:
        """More of what one of these begins with is being computed for a sequence that runs."""
        computing = [
            other
            for sequence in self.running
            for other in sequence.members
            if other.num_missing >= WORTH_WAITING
        ]
        return any(_shares_more(member, other) for member in members for other in computing)


def _shares_more(sequence: SequenceState, other: SequenceState) -> bool:
    """`other` computes enough beyond what it has that `sequence` could use."""
    end = other.past_len + WORTH_WAITING
    return (
        end <= sequence.reusable_len
        and sequence.key_root == other.key_root
        and sequence.token_ids[:end] == other.token_ids[:end]
    )


def _share(budget: int, missing: list[int]) -> list[int]:
    """How many rows each member of a group computes now.

    The last row of each, which gives logits, only together with those of the others.
    """
    if sum(missing) <= budget:
        return missing
    counts = []
    for num_missing in missing:
        counts.append(min(budget, num_missing - 1))
        budget -= counts[-1]
    return counts
