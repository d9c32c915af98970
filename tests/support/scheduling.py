"""Simulation of a scheduler without a model: small pages, and a memory with checked contents.

The value of a position depends on the adapters and on all tokens up to the position, as keys and
values do. It is computed from the value that is actually stored at the previous position, so that a
wrong copy, a stale page or a wrongly shared page changes all values computed from it.

The recurrent state of a hybrid is the value of its last token, in a slot, computed from the state
before the pass. It includes all tokens of the pass, those of a rejected draft as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from random import Random

from exl_core.arch.spec import ModelConfig
from exl_core.cache.page_pool import PageCopy, PageKey, PagePool, page_keys
from exl_core.cache.state import StateCopy, StatePool
from exl_core.engine.plan import BatchPlan
from exl_core.engine.request import Request
from exl_core.engine.scheduler import Scheduler
from exl_core.engine.sequence import RequestSequence, root_key
from exl_core.errors import RequestError
from exl_core.model.adapters import Adapter, AdapterUse
from exl_core.model.segment import LogitRows, Segment

PAGE = 4
Values = dict[tuple[int, int], int]


class NamedAdapter:
    """Adapter without deltas, known by its number."""

    ends: None = None

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.path = Path()
        self.digest = ""

    def fits(self, config: ModelConfig) -> bool:
        return True

    def deltas(self, layer: int, matrix: str) -> tuple[()]:
        return ()


def use(serial: int, scale: float = 1.0) -> AdapterUse:
    adapter: Adapter = NamedAdapter(serial)
    return AdapterUse(adapter, scale)


def scheduler(
    pages: int, *, max_batch: int = 8, prefill_chunk: int = 8, slots: int = 0
) -> Scheduler:
    """`slots`: slots of recurrent state; 0: the model has no recurrent layers."""
    pool, states = PagePool(pages), StatePool(slots, max_batch) if slots else None
    return Scheduler(
        pool, max_batch=max_batch, prefill_chunk=prefill_chunk, page_size=PAGE, states=states
    )


def sequence(
    s: Scheduler, prompt: Iterable[int], more: int = 4, adapters: tuple[AdapterUse, ...] = ()
) -> RequestSequence:
    ids = tuple(prompt)
    return s.new_sequence(Request(ids, adapters=adapters), ids, len(ids) + more)


def shape(plan: BatchPlan) -> list[tuple[str, int, int, LogitRows]]:
    return [
        (sequence.request_id, s.past_len, len(s.token_ids), s.logit_rows)
        for sequence, s in zip(plan.sequences, plan.segments, strict=True)
    ]


def finish(s: Scheduler, plan: BatchPlan, token: int = 9) -> None:
    """Complete a pass: each sequence whose prompt is computed gets this token."""
    for runner, segment in zip(plan.sequences, plan.segments, strict=True):
        if segment.logit_rows is not LogitRows.NONE:
            runner.token_ids.append(token)
    s.advance(plan)


def run(s: Scheduler, times: int = 1, token: int = 9) -> None:
    for _ in range(times):
        finish(s, s.plan(), token)


def chain(before: int, token_ids: Iterable[int]) -> list[int]:
    """Values of consecutive positions after the value `before`."""
    values = []
    for token_id in token_ids:
        before = hash((before, token_id))
        values.append(before)
    return values


class Memory:
    def __init__(self) -> None:
        self.values: Values = {}
        self.states: dict[int, int] = {}
        self.writers: dict[int, RequestSequence] = {}
        """Sequence that has last written to each page, if it has the page ever since."""

    def after(self, copies: Iterable[PageCopy]) -> Values:
        """Contents after these copies, run in order."""
        values = dict(self.values)
        for source, target, length in copies:
            for i in range(length):
                values[target, i] = values.get((source, i), 0)
        return values

    def states_after(self, copies: Iterable[StateCopy]) -> dict[int, int]:
        """States by slot after these copies, run in order."""
        states = dict(self.states)
        for source, target in copies:
            states[target] = states.get(source, 0)
        return states

    def move(self, moves: Iterable[tuple[int, int]]) -> None:
        before = dict(self.values)
        for source, target in moves:
            for i in range(PAGE):
                self.values[target, i] = before.get((source, i), 0)

    def run(self, plan: BatchPlan) -> None:
        """Run a pass. Each segment's past values must be correct before and after the writes."""
        self.values = self.after(plan.copies)
        self.states = self.states_after(plan.state_copies)
        pairs = list(zip(plan.sequences, plan.segments, strict=True))
        for runner, segment in pairs:
            self.check_past(runner, segment)
        for runner, segment in pairs:
            past_len = segment.past_len
            last = (segment.page_ids[(past_len - 1) // PAGE], (past_len - 1) % PAGE)
            before = self.values[last] if past_len else root_value(runner.state.key_root)
            for i, value in enumerate(chain(before, segment.token_ids), start=past_len):
                self.values[segment.page_ids[i // PAGE], i % PAGE] = value
                self.writers[segment.page_ids[i // PAGE]] = runner
            if segment.state_slot is not None:
                before = self.states[segment.state_slot] if past_len else before
                self.states[segment.state_slot] = chain(before, segment.token_ids)[-1]
        for runner, segment in pairs:
            self.check_past(runner, segment)

    def check_past(self, runner: RequestSequence, segment: Segment) -> None:
        past = runner.token_ids[: segment.past_len]
        for i, value in enumerate(chain(root_value(runner.state.key_root), past)):
            place = (segment.page_ids[i // PAGE], i % PAGE)
            assert self.values.get(place) == value, f"position {i} of {runner.request_id}"


def root_value(root: PageKey) -> int:
    return hash(root)


class Simulation:
    """All operations of an engine on a scheduler, with checks after each of them.

    Tokens come from two letters, so that prefixes are shared, drafts accepted and copies possible
    all the time.
    """

    def __init__(
        self, pages: int, max_batch: int, prefill_chunk: int, max_draft: int, slots: int = 0
    ) -> None:
        self.s = scheduler(pages, max_batch=max_batch, prefill_chunk=prefill_chunk, slots=slots)
        self.max_draft = max_draft
        self.memory = Memory()
        self.live: list[RequestSequence] = []  # in order of arrival
        self.count = Counter[str]()
        self.value_of_key: dict[PageKey, int] = {}
        self.num_requeued = 0  # when the writers of pages were last up to date

    def num_events(self) -> int:
        kinds = ("arrival", "cancellation", "stop", "failure", "rewind")
        stats = self.s.pool.stats
        return sum(self.count[k] for k in kinds) + stats.evicted + self.s.num_requeued

    def arrive(
        self, prompt: list[int], more: int, serial: int, negative_ids: list[int] | None
    ) -> None:
        adapters = (use(serial),) if serial else ()
        new = sequence(self.s, prompt, more, adapters)
        negative = None
        if negative_ids is not None:
            negative = self.s.new_sequence(new.request, negative_ids, len(negative_ids) + more)
        try:
            negative_len = None if negative is None else negative.max_len
            self.s.check_fits(new.request_id, new.max_len, negative_len)
        except RequestError:
            self.count["refusal"] += 1
            return
        self.value_of_key.setdefault(root_key(adapters), root_value(root_key(adapters)))
        self.live.append(new)
        self.s.add(new, negative)
        self.count["arrival"] += 1
        self.count["pair"] += negative is not None
        self.check()

    def prepare(self) -> None:
        """Prepare a step; other operations may come before its plan."""
        self.s.prepare()
        self.check()

    def step(self, random: Random) -> None:
        self.prepare()
        if self.live and random.random() < 0.05:  # a cancellation before the pass
            self.cancel(random.randrange(len(self.live)), is_trusted=True)
        plan = self.run_pass(random)
        tokens = self.next_tokens(plan, random)
        rewinds: list[tuple[RequestSequence, int]] = []
        for i, (runner, segment) in enumerate(zip(plan.sequences, plan.segments, strict=True)):
            if segment.logit_rows is LogitRows.NONE or runner not in self.live:
                continue
            self.sample(runner, segment, random, None if tokens is None else tokens[i])
            num_new = len(runner.token_ids) - len(runner.request.prompt_ids)
            if random.random() < 0.06 and num_new:
                rewinds.append((runner, random.randint(0, num_new)))
        for runner in plan.sequences:
            root = runner.state.key_root
            keys = page_keys(runner.token_ids, PAGE, root=root)
            values = chain(root_value(root), runner.token_ids)
            for i, key in enumerate(keys):
                self.value_of_key[key] = values[(i + 1) * PAGE - 1]
        if self.live and random.random() < 0.02:  # its logits were invalid
            self.distrust(self.live[0], rewinds)
        self.s.advance(plan)
        self.check()
        assert not any(self.draft_room(m) >= PAGE for r in self.s.running for m in r.members)
        for runner, num_cut in rewinds:
            self.s.rewind(runner, len(runner.token_ids) - num_cut)
            self.count["rewind"] += 1
            self.check()
        for runner in [r for r in self.live if len(r.token_ids) >= r.max_len]:
            self.end(runner, is_trusted=True)
            self.count["stop"] += 1
        self.finish_some(plan, random)

    def run_pass(self, random: Random) -> BatchPlan:
        plan = self.s.plan(self.draft(random))
        assert bool(plan.segments) == bool(self.live), "a plan is empty only without live sequences"
        self.check_plan(plan)
        self.update_writers()
        self.memory.run(plan)
        return plan

    def update_writers(self) -> None:
        """Forget who wrote the pages after a preemption, which makes their contents trusted."""
        if self.num_requeued != self.s.num_requeued:
            self.num_requeued = self.s.num_requeued
            self.memory.writers.clear()

    def next_tokens(self, plan: BatchPlan, random: Random) -> list[int] | None:
        """One token for each segment, if they are known before the host appends them."""
        return None

    def finish_some(self, plan: BatchPlan, random: Random) -> None:
        """End sequences before they have their longest length."""

    def draft(self, random: Random) -> dict[str, tuple[int, ...]]:
        drafts = {}
        for runner in self.s.drafting():
            available, had = self.s.pool.num_available, len(runner.page_ids)
            wanted = random.randint(0, self.max_draft)
            granted = self.s.reserve(runner, wanted)
            assert 0 <= granted <= wanted
            self.check()
            others = [m for r in self.s.running if r is not runner for m in r.members]
            needs = sum(max(0, len(m.token_ids) // PAGE + 1 - len(m.page_ids)) for m in others)
            taken = len(runner.page_ids) - had
            assert not taken or available - taken >= needs, "others keep their pages"
            length = random.randint(0, granted + 1)  # sometimes one token too long
            drafts[runner.request_id] = tuple(random.randint(0, 1) for _ in range(length))
        return drafts

    def sample(
        self, runner: RequestSequence, segment: Segment, random: Random, known: int | None = None
    ) -> None:
        """Accept drafted tokens as long as the sampled ones equal them. `known`: the only token."""
        draft = segment.token_ids[1:] if segment.logit_rows is LogitRows.ALL else ()
        for drafted in (*draft, None):
            token = random.randint(0, 1) if known is None else known
            for member in runner.members:
                member.token_ids.append(token)
            self.count["drafted"] += drafted is not None
            if token != drafted:
                break
            self.count["accepted"] += 1
        assert len(runner.token_ids) <= runner.max_len

    def draft_room(self, member: RequestSequence) -> int:
        return len(member.page_ids) * PAGE - len(member.token_ids)

    def distrust(self, runner: RequestSequence, rewinds: list[tuple[RequestSequence, int]]) -> None:
        """Remove an untrusted sequence between the pass and `advance`."""
        self.remove_untrusted(runner)
        rewinds[:] = [rewind for rewind in rewinds if rewind[0] is not runner]
        self.count["cancellation"] += 1

    def remove_untrusted(self, runner: RequestSequence) -> None:
        """Contents are forgotten of those pages that the sequence has written, and of no others."""
        self.update_writers()
        writers, pool = self.memory.writers, self.s.pool
        page_ids = {page for m in runner.members for page in m.page_ids if page in writers}
        before = {page: pool.contents_of(page) for page in page_ids}
        self.s.remove(runner, is_trusted=False)
        self.live.remove(runner)
        for page, contents in before.items():
            is_own = any(writers[page] is member for member in runner.members)
            if not is_own and pool.contents_of(page) is None and contents is not None:
                # The pool keeps no contents that another page begins with.
                others = pool.known_after(contents.previous)
                assert any(contents.begins(other) for other in others)
            elif is_own:
                assert pool.contents_of(page) is None
            self.count["forgotten" if is_own else "kept"] += contents is not None

    def cancel(self, i: int, *, is_trusted: bool) -> None:
        if is_trusted:
            self.end(self.live[i], is_trusted=True)
        else:
            self.remove_untrusted(self.live[i])
            self.check()
        self.count["cancellation"] += 1

    def end(self, runner: RequestSequence, *, is_trusted: bool) -> None:
        self.s.remove(runner, is_trusted=is_trusted)
        self.live.remove(runner)
        self.check()

    def fail(self) -> None:
        """A pass fails: nothing that it wrote may be reused."""
        self.plan_failing()
        self.memory.values.clear()
        self.memory.states.clear()
        for gone in self.s.fail_running():
            self.live.remove(gone)
        assert not self.s.pending_copies
        self.count["failure"] += 1
        self.check()

    def plan_failing(self) -> BatchPlan:
        return self.s.plan()

    def interrupt(self, random: Random) -> None:
        """A pass of a hybrid runs out of memory, after it has changed some states."""
        plan = self.s.plan()
        self.memory.values = self.memory.after(plan.copies)
        if random.random() < 0.5:
            self.memory.states = self.memory.states_after(plan.state_copies)
        for segment in plan.segments:
            if segment.state_slot is not None and random.random() < 0.5:
                self.memory.states[segment.state_slot] = -1
        for runner, segment in zip(plan.sequences, plan.segments, strict=True):
            self.memory.check_past(runner, segment)
        if plan.segments and self.s.make_smaller(plan):
            self.count["interruption"] += 1
            self.check()
        elif plan.segments:
            self.fail()

    def defragment(self, *, is_forced: bool) -> None:
        before = {self.s.pool.contents_of(page) for page in self.s.pool.cached_pages}
        moves = self.s.defragment(is_forced=is_forced)
        assert not (moves and self.live), "pages in use are not moved"
        self.memory.move(moves)
        if moves:
            self.count["defragmentation"] += 1
            cached = self.s.pool.cached_pages
            assert sorted(cached) == list(range(len(cached)))
            assert {self.s.pool.contents_of(page) for page in cached} <= before
        self.check()

    def drain(self) -> None:
        random = Random(0)
        for _ in range(5000):
            if not self.live:
                break
            self.step(random)
        assert not self.live, "every sequence ends"
        pool = self.s.pool
        assert pool.num_available == pool.num_pages, "no page is lost"
        states = self.s.memory.states
        assert states is None or not states.lent_slots, "no slot is lost"

    def check_plan(self, plan: BatchPlan, *, is_whole: bool = True) -> None:
        """`is_whole` False: the plan may lack running sequences."""
        written = Counter[tuple[int, int]]()
        prefill_rows = 0
        pool = self.s.pool
        assert all(copy.length and copy.source != copy.target for copy in plan.copies)
        self.count["plans of several copies"] += len(plan.copies) > 1
        for runner, segment in zip(plan.sequences, plan.segments, strict=True):
            past_len, count = segment.past_len, len(segment.token_ids)
            end = past_len + count
            assert past_len == runner.past_len
            is_draft = segment.logit_rows is LogitRows.ALL
            tokens = segment.token_ids[:1] if is_draft else segment.token_ids
            assert list(tokens) == runner.token_ids[past_len : past_len + len(tokens)]
            assert len(segment.page_ids) == -(-end // PAGE)
            if is_draft:
                assert count > 1
                assert runner.num_missing == 1
                assert end < runner.max_len
            else:
                is_end = end == len(runner.token_ids)
                assert (segment.logit_rows is LogitRows.LAST) == is_end
            if runner.num_missing > 1:
                prefill_rows += count
            for position in range(past_len, end):
                page, offset = segment.page_ids[position // PAGE], position % PAGE
                written[page, offset] += 1
                assert pool.held_pages[page] == 1, "shared pages are not written"
                known = pool.contents_of(page)
                assert known is None or offset >= len(known.token_ids), "nor registered positions"
        assert all(count == 1 for count in written.values())
        assert prefill_rows <= self.s.prefill_chunk
        self.check_pairs(plan)
        if self.live and is_whole:
            assert {id(m) for m in self.live[0].members} & {id(x) for x in plan.sequences}

    def check_pairs(self, plan: BatchPlan) -> None:
        rows = list(zip(plan.sequences, plan.segments, strict=True))
        ends = [runner for runner, segment in rows if segment.logit_rows is not LogitRows.NONE]
        negatives = {id(r.negative): r for r in plan.sequences if r.negative is not None}
        for before, runner in pairwise([None, *ends]):
            if id(runner) in negatives:
                assert before is negatives[id(runner)], "negative logits come second"
        for runner in ends:
            assert runner.negative is None or runner.negative in ends
        assert all(runner in self.live or id(runner) in negatives for runner in ends)

    def check(self) -> None:
        pool = self.s.pool
        members = [m for r in self.s.running for m in r.members]
        counts = Counter(page for m in members for page in m.page_ids)
        assert dict(pool.held_pages) == dict(counts), "pages are held by running sequences"
        everywhere = [*pool.free_pages, *pool.cached_pages, *pool.held_pages]
        assert sorted(everywhere) == list(range(pool.num_pages)), "each page has one state"
        assert not any(m.page_ids or m.past_len for r in self.s.waiting for m in r.members)
        assert [*self.s.running, *self.s.waiting] == self.live, "in order of arrival"
        assert len(members) <= self.s.max_batch
        values = self.memory.after(self.s.pending_copies)
        for member in members:
            assert len(set(member.page_ids)) == len(member.page_ids)
            past = member.token_ids[: member.past_len]
            for i, value in enumerate(chain(root_value(member.state.key_root), past)):
                assert values.get((member.page_ids[i // PAGE], i % PAGE)) == value
        for page in everywhere:
            known = pool.contents_of(page)
            assert known is not None or page not in pool.cached_pages
            if known is not None:
                assert page not in pool.free_pages
                before = self.value_of_key[known.previous]
                for i, value in enumerate(chain(before, known.token_ids)):
                    assert values.get((page, i)) == value, "registered contents are correct"
        self.check_that_no_cached_page_is_useless()
        writers = self.memory.writers
        self.memory.writers = {p: w for p, w in writers.items() if p in w.page_ids}
        self.check_states(members)

    def check_states(self, members: list[RequestSequence]) -> None:
        """Slots belong to running sequences and snapshots, and have their prefixes' states."""
        pool = self.s.memory.states
        slots = [m.state.slot for m in members if m.state.slot is not None]
        if pool is None:
            assert not slots
            return
        assert len(slots) == len(members)
        backups = [b[0] for m in members if (b := m.state._backup) is not None]
        assert sorted([*slots, *backups]) == sorted(pool.lent_slots)
        everywhere = [*pool.free_slots, *pool.lent_slots, *pool.snapshots.values()]
        assert sorted(everywhere) == list(range(pool.num_slots)), "each slot has one use"
        states = self.memory.states_after(self.s.memory.state_copies)
        for member in members:
            length = member.state._state_len  # one more in a launched pass
            assert member.past_len <= length <= len(member.token_ids)
            values = chain(root_value(member.state.key_root), member.token_ids[:length])
            assert not length or states[member.state.slot or 0] == values[-1]
            if member.state._backup is not None:
                slot, length = member.state._backup
                assert length <= member.past_len
                assert not length or states[slot] == values[length - 1]
        known = [self.s.pool.contents_of(page) for page in range(self.s.pool.num_pages)]
        for (previous, rest), slot in pool.snapshots.items():
            value = self.value_of_key[previous]
            assert states[slot] == (chain(value, rest)[-1] if rest else value)
            contents = [c for c in known if c is not None]
            if rest:
                assert any(
                    c.previous == previous and c.token_ids[: len(rest)] == rest for c in contents
                ), "a snapshot goes with the page that it needs"
            else:
                assert any(c.key == previous for c in contents)

    def check_that_no_cached_page_is_useless(self) -> None:
        pool = self.s.pool
        known = {page: pool.contents_of(page) for page in range(pool.num_pages)}
        for page in pool.cached_pages:
            contents = known[page]
            assert contents is not None
            for other, others in known.items():
                assert (
                    other == page
                    or others is None
                    or others.previous != contents.previous
                    or not contents.begins(others)
                )
