"""Scheduler: chooses the sequences and rows of each pass.

It decides from lengths and page counts and sees neither tensors nor text.

Sequences run in order of arrival, at most `max_batch` at a time, and none overtakes another. One
pass takes the newest token of every decoding sequence and up to `prefill_chunk` prompt tokens,
oldest sequence first. A sequence starts when the pool has pages for all its tokens, and one more
page if others run. A prefix in the cache is not computed again. If another sequence is about to
compute a part of the prefix, the new sequence waits for it.

Preemption: a reply that needs a new page when none is free takes the pages of the youngest running
sequence. That sequence returns to the head of the queue with its reply so far and is recomputed
later. A sequence is queued only if it fits the whole pool alone (`check_fits`), so the oldest one
always makes progress: there is no deadlock, and no request fails for lack of pages.

A guided sequence and its negative sequence start, wait and end together and count as two in the
batch. Their rows that produce logits are in the same pass. `running` and `waiting` list the guided
sequence only.

A model with recurrent layers needs a slot for the state of each sequence (`StatePool`). Chunks of
prompts then end at page borders, where snapshots are taken. A sequence that goes back is computed
again from a snapshot, as a prompt.

With async scheduling, the caller launches the pass of `next_segments` behind the current one, and
calls `launched` before it appends the tokens.

Order of calls in one step: `prepare`; with drafts `drafting` and `reserve`; `plan`. The caller then
runs the copies and the pass, appends the sampled tokens (the same ones to a negative sequence), and
calls `advance`. `rewind` and `remove` follow; only for a sequence whose values must not be reused,
`remove` comes before `advance`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from exl_core.cache.format import PAGE_SIZE, pages_for
from exl_core.cache.page_pool import PageCopy, PagePool
from exl_core.cache.sequence_state import CacheMemory, SequenceState
from exl_core.cache.state import StatePool
from exl_core.engine import paging
from exl_core.engine.plan import BatchPlan
from exl_core.engine.request import Request
from exl_core.engine.sequence import RequestSequence, root_key
from exl_core.errors import RequestError
from exl_core.model.segment import LogitRows, Segment

LEAST_CHUNK = 32
"""Smallest prefill chunk after a pass ran out of memory, in tokens.

If this many rows do not fit, removing a sequence from the batch frees more than a smaller chunk.
"""

WORTH_WAITING = 64
"""Shared prompt tokens worth waiting a pass for; computing fewer of them twice is cheaper."""


class Scheduler:
    def __init__(
        self,
        pool: PagePool,
        *,
        max_batch: int,
        prefill_chunk: int,
        page_size: int = PAGE_SIZE,
        score_chunk: int | None = None,
        states: StatePool | None = None,
    ) -> None:
        """`score_chunk`: most scored prompt tokens in one pass; None: no limit but
        `prefill_chunk`. `states`: slots of recurrent state, one for each sequence of a batch at
        least; None if the model has no recurrent layers."""
        self.pool = pool
        self.max_batch = max_batch
        self.prefill_chunk = prefill_chunk
        self.page_size = page_size
        self.score_chunk = prefill_chunk if score_chunk is None else score_chunk
        self.running: list[RequestSequence] = []  # in order of arrival
        self.waiting: deque[RequestSequence] = deque()  # likewise, after the running ones
        self.num_requeued = 0  # preemptions so far
        self._most_running = max_batch  # lowered after a pass ran out of memory
        self.memory = CacheMemory(pool, page_size, states)
        self._is_prepared = False

    @property
    def capacity(self) -> int:
        """Size of the whole pool in tokens."""
        return self.pool.num_pages * self.page_size

    @property
    def pending_copies(self) -> tuple[PageCopy, ...]:
        """Page copies that the next plan runs first. Nothing reads their targets before that."""
        return tuple(self.memory.copies)

    def check_fits(
        self, request_id: str, num_tokens: int, negative_tokens: int | None = None
    ) -> None:
        """Raise RequestError if a sequence of this length could not run even alone.

        `num_tokens` includes the last token, which is sampled and never cached. `negative_tokens`
        is the length of the negative sequence. Drafts never exceed these lengths.
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

    def new_sequence(
        self, request: Request, token_ids: Iterable[int], max_len: int
    ) -> RequestSequence:
        """Sequence that starts with these tokens. It has no memory, and `add` has not queued it."""
        state = SequenceState(self.memory, list(token_ids), root_key(request.adapters))
        return RequestSequence(request, max_len, state)

    def add(self, sequence: RequestSequence, negative: RequestSequence | None = None) -> None:
        """Queue a sequence. Both must have passed `check_fits`."""
        if negative is not None:
            sequence.negative = negative
        self.waiting.append(sequence)
        self._is_prepared = False

    def remove(self, sequence: RequestSequence, *, is_trusted: bool = True) -> None:
        """Remove a finished or cancelled sequence and release its pages.

        `is_trusted` False: the contents of its pages are not reused.
        """
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence, is_trusted=is_trusted)
        else:
            self.waiting.remove(sequence)
        self._is_prepared = False

    def rewind(self, sequence: RequestSequence, length: int) -> None:
        """Cut a sequence to its first `length` tokens, and its negative sequence by as many tokens.

        Cached values are kept, except those of the last token: it is computed again for its logits.
        """
        num_cut = len(sequence.token_ids) - length
        for member in sequence.members:
            keep = len(member.token_ids) - num_cut
            if num_cut < 0 or keep < 1:
                raise AssertionError(f"{sequence.request_id}: no rewinding to {keep} tokens")
            member.state.rewind(keep)
        self._is_prepared = False

    def fail_running(self) -> list[RequestSequence]:
        """After a pass that raised: drop all running sequences and forget every page's contents."""
        failed = self.running
        self.running = []
        for sequence in failed:
            for member in sequence.members:
                member.state.forget()
        self.memory.reset()
        self._is_prepared = False
        return failed

    def make_smaller(self, plan: BatchPlan) -> bool:
        """After a pass ran out of memory: halve the prefill chunk or preempt the youngest sequence.

        False if neither is possible: the chunk is minimal and only one sequence runs.
        """
        if self.memory.states is not None:
            # An interrupted pass has changed the states of some layers.
            self.memory.drop_state_copies()
            for sequence in self.running:
                for member in sequence.members:
                    member.state.undo()
        rows = [
            len(segment.token_ids)
            for sequence, segment in zip(plan.sequences, plan.segments, strict=True)
            if sequence.is_scored or segment.logit_rows is not LogitRows.ALL
        ]
        longest = max(rows, default=1)
        if longest > LEAST_CHUNK:
            self.prefill_chunk = max(LEAST_CHUNK, min(self.prefill_chunk, longest) // 2)
        elif len(self.running) > 1:
            self._preempt(self.running.pop())
            self._most_running = sum(len(sequence.members) for sequence in self.running)
        else:
            return False
        self._is_prepared = False
        return True

    def defragment(self, *, is_forced: bool = False) -> list[tuple[int, int]]:
        """Page moves (from, to) that place prefixes contiguously; empty while sequences are live.

        The moves are simultaneous. The pool has recorded them already: the caller must move the
        cached values before the next pass. Unless `is_forced`, moves are made only if they pay.
        """
        if self.running or self.waiting:
            return []
        self.memory.drop_copies()
        if not is_forced and not self.pool.defragmentation_pays():
            return []
        return self.pool.defragment()

    def prepare(self) -> None:
        """Allocate pages for the running sequences, preempting if needed; admit waiting ones."""
        self._allocate_pages()
        self._admit()
        self._is_prepared = True

    def drafting(self) -> list[RequestSequence]:
        """Sequences that can take a draft: they decode, without guidance."""
        self._ensure_prepared()
        return [s for s in self.running if s.negative is None and s.num_missing == 1]

    def reserve(self, sequence: RequestSequence, count: int) -> int:
        """Allocate pages for a draft of `count` tokens; return how many tokens have room.

        It takes no page that another running sequence needs for its next token. `advance` releases
        the pages that the draft leaves unused.
        """
        count = min(count, sequence.max_len - len(sequence.token_ids) - 1)
        if count <= 0:
            return 0
        needs = sum(
            max(member.state.num_wanted(1), 0)
            for other in self.running
            if other is not sequence
            for member in other.members
        )
        spare = self.pool.num_available - needs
        more = min(sequence.state.num_wanted(count), spare)
        if more > 0:
            sequence.state.extend(more)
        return min(count, sequence.state.capacity)

    def plan(
        self,
        drafts: Mapping[str, tuple[int, ...]] | None = None,
    ) -> BatchPlan:
        """Plan the next pass. The plan is empty only if no sequence is live.

        `drafts`: draft tokens by request id; each is cut to the room that `reserve` returned.
        """
        self._ensure_prepared()
        self._is_prepared = False
        decoding: list[tuple[RequestSequence, Segment]] = []
        prefilling: list[tuple[RequestSequence, Segment]] = []
        budget, score_budget = self.prefill_chunk, self.score_chunk
        for sequence in self.running:
            members = sequence.members
            missing = [member.num_missing for member in members]
            if max(missing) > 1:
                rows = min(budget, score_budget) if sequence.is_scored else budget
                counts = _split_budget(rows, missing)
                if self.memory.states is not None:
                    counts = _at_borders(members, counts)
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
        if self.memory.states is not None:
            is_ahead = any(member.state.is_ahead for member, _ in chosen)
            assert not is_ahead, "a row of a launched pass is used, or its state is restored"
        return BatchPlan(
            segments=tuple(segment for _, segment in chosen),
            sequences=tuple(sequence for sequence, _ in chosen),
            copies=self.pending_copies,
            state_copies=tuple(self.memory.state_copies),
        )

    def launched_plan(self, rows: Iterable[tuple[RequestSequence, Segment]]) -> BatchPlan:
        """The plan of a pass that was launched already, for the rows that are still of use.
        Pending copies wait for the next plan."""
        self._ensure_prepared()
        self._is_prepared = False
        used = tuple(rows)
        segments = []
        for one, segment in used:
            # A page that became full may have been exchanged for one with the same contents.
            page_ids = tuple(one.page_ids[: len(segment.page_ids)])
            segments.append(segment.with_token(one.token_ids[-1], segment.past_len, page_ids))
        return BatchPlan(tuple(segments), tuple(one for one, _ in used))

    def next_segments(self, plan: BatchPlan) -> list[Segment] | None:
        """Segments of the pass after this one, with token 0 in place of the sampled tokens.

        None if that pass depends on more than the sampled tokens: a sequence may start or is about
        to end, its token may be changed by guidance or a hook, or there is no page for it. A new
        page also waits for pending copies, and that of a recurrent state for its snapshot, which is
        copied at page borders before a later pass changes the state.
        """
        members = sum(len(sequence.members) for sequence in self.running)
        if len(plan.sequences) != members or (self.waiting and members < self.max_batch):
            return None
        # The new page may be in a copy that runs before a later pass.
        has_copies = len(self.memory.copies) > len(plan.copies)
        must_wait = has_copies or self.memory.states is not None
        segments = []
        for sequence, now in zip(plan.sequences, plan.segments, strict=True):
            past_len, rows = len(sequence.token_ids), len(now.token_ids)
            if (
                sequence.request.negative_prompt_ids is not None
                or sequence.request.hooks
                or now.logit_rows is not LogitRows.LAST
                or now.past_len + rows != past_len
                or past_len + 1 >= sequence.max_len
            ):
                return None
            page_ids = now.page_ids
            if past_len >= len(page_ids) * self.page_size:
                if must_wait or not self.reserve(sequence, 1):
                    return None
                page_ids = tuple(sequence.page_ids)
            segments.append(now.with_token(0, past_len, page_ids))
        return segments

    def launched(self, plan: BatchPlan) -> None:
        """Record that the pass of `next_segments(plan)` has been launched, before `advance(plan)`.

        A sequence that ends meanwhile keeps the recurrent state after that pass's row, which is
        that of its newest token.
        """
        if self.memory.states is None:
            return
        for sequence, segment in zip(plan.sequences, plan.segments, strict=True):
            sequence.state.launch(len(segment.token_ids))

    def lose_states(self, plan: BatchPlan) -> None:
        """Record that a launched pass may have added unknown tokens to the recurrent states.

        `advance(plan)`, which follows, takes its sequences back to known states.
        """
        if self.memory.states is None:
            return
        for sequence in plan.sequences:
            sequence.state.lose_state()

    def advance(self, plan: BatchPlan) -> None:
        """Record a completed pass, after the caller has appended the sampled tokens.

        Computed tokens that are still part of their sequence now count as cached. The newest token
        never does: the next pass computes it. Full pages become available for prefix sharing.
        """
        del self.memory.copies[: len(plan.copies)]
        del self.memory.state_copies[: len(plan.state_copies)]
        running = {id(member) for sequence in self.running for member in sequence.members}
        for sequence, segment in zip(plan.sequences, plan.segments, strict=True):
            if id(sequence) not in running:
                continue
            count = len(segment.token_ids)
            is_prompt = count > 1 and segment.logit_rows is not LogitRows.ALL
            sequence.state.advance(count, is_prompt=is_prompt)

    def _ensure_prepared(self) -> None:
        if not self._is_prepared:
            self.prepare()

    def _segment(
        self, sequence: RequestSequence, count: int, draft: tuple[int, ...] = ()
    ) -> Segment:
        past_len = sequence.past_len
        end = past_len + count
        longest = min(sequence.state.capacity, sequence.max_len - len(sequence.token_ids) - 1)
        draft = draft[: max(longest, 0)]
        if draft:
            sequence.state.protect()
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
            state_slot=sequence.state.slot,
        )

    def _allocate_pages(self) -> None:
        """Allocate pages for the next tokens, oldest sequence first, preempting the youngest."""
        i = 0
        while i < len(self.running):  # preemption removes sequences from the end of the list
            members = self.running[i].members
            if all(_has_pages(member.state) for member in members):
                i += 1
            else:
                self._preempt(self.running.pop())  # possibly sequence i itself, which ends the loop

    def _preempt(self, sequence: RequestSequence) -> None:
        self._release(sequence)
        self.waiting.appendleft(sequence)
        self.num_requeued += 1

    def _release(self, sequence: RequestSequence, *, is_trusted: bool = True) -> None:
        for member in sequence.members:
            member.state.release(is_trusted=is_trusted)

    def _admit(self) -> None:
        num_running = sum(len(sequence.members) for sequence in self.running)
        while self.waiting:
            members = self.waiting[0].members
            num_running += len(members)
            spare = 1 if self.running else 0
            most = min(self.max_batch, self._most_running) if self.running else self.max_batch
            if num_running > most or self._is_prefix_underway(members):
                return
            if not paging.start(members, self.pool, spare=spare):
                return
            self.running.append(self.waiting.popleft())

    def _is_prefix_underway(self, members: tuple[RequestSequence, ...]) -> bool:
        """A running sequence is computing more of a prefix that one of `members` could share."""
        computing = [
            other
            for sequence in self.running
            for other in sequence.members
            if other.num_missing >= WORTH_WAITING
        ]
        return any(_computes_prefix(other, member) for member in members for other in computing)


def _has_pages(state: SequenceState) -> bool:
    """The sequence has pages for all its tokens, or got them now."""
    wanted = state.num_wanted()
    return wanted <= 0 or state.extend(wanted)


def _computes_prefix(other: RequestSequence, sequence: RequestSequence) -> bool:
    """The next `WORTH_WAITING` tokens that `other` computes are also a prefix of `sequence`."""
    end = other.past_len + WORTH_WAITING
    return (
        end <= sequence.reusable_len
        and sequence.state.key_root == other.state.key_root
        and sequence.token_ids[:end] == other.token_ids[:end]
    )


def _split_budget(budget: int, missing: list[int]) -> list[int]:
    """Rows that each member of a guided pair computes now.

    The last row of each member, which produces logits, is computed in the same pass as the other's.
    """
    if sum(missing) <= budget:
        return missing
    counts = []
    for num_missing in missing:
        counts.append(min(budget, num_missing - 1))
        budget -= counts[-1]
    return counts


def _at_borders(members: Sequence[RequestSequence], counts: list[int]) -> list[int]:
    """The same counts, or fewer rows where a chunk should end at a page border. Of a guided pair,
    neither then gets its last row."""
    ends = [one.past_len + count for one, count in zip(members, counts, strict=True)]
    cut = [
        one.state.chunk_end(end) - one.past_len if count else 0
        for one, end, count in zip(members, ends, counts, strict=True)
    ]
    if len(members) == 1 or cut == counts:
        return cut
    return [min(count, one.num_missing - 1) for one, count in zip(members, cut, strict=True)]
