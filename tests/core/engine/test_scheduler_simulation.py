"""Random simulation of the scheduler: no page is lost or has wrong contents."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from support.async_scheduling import AsyncSimulation
from support.profiles import examples, first_by_default
from support.scheduling import Simulation

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=20)


def simulate(
    num_events: int, seed: int, *, is_hybrid: bool = False, has_async: bool = False
) -> Counter[str]:
    """Run random simulations with pools of various sizes until `num_events` events occurred."""
    random = Random(seed)
    total = Counter[str]()
    while total["events"] < num_events:
        pages, max_batch = random.randint(2, 12), random.randint(1, 6)
        slots = max_batch + random.randint(0, 12) if is_hybrid else 0
        chunk, draft = random.randint(1, 12), random.randint(0, 6)
        if has_async:
            sim: Simulation = AsyncSimulation(pages, max_batch, chunk, slots)
        else:
            sim = Simulation(pages, max_batch, chunk, draft, slots)
        num_events_here = random.randint(50, 600)
        arrivals = random.uniform(0.05, 0.6)  # from mostly idle to crowded
        num_turns = 0
        while sim.num_events() < num_events_here:
            num_turns += 1
            assert num_turns < 50 * num_events_here, "something happens"
            act(sim, random, arrivals)
        sim.drain()
        total += sim.count
        stats = sim.s.pool.stats
        total["requeued"] += sim.s.num_requeued
        total["evicted"] += stats.evicted
        if sim.s.memory.states is not None:
            of_states = sim.s.memory.states.stats
            total["snapshots"] += of_states.saved
            total["used snapshots"] += of_states.used
            total["evicted snapshots"] += of_states.evicted
        total["hits"] += stats.hits
        total["partial hits"] += stats.partial_hits
        total["events"] += sim.num_events()
    return total


def act(sim: Simulation, random: Random, arrivals: float) -> None:
    luck = random.random()
    if random.random() < 0.1:
        sim.prepare()
    if luck < arrivals and len(sim.live) < 8:
        for _ in range(random.choice((1, 1, 1, 2, 3, 5))):
            negative = tokens(random) if random.random() < 0.2 else None
            serial = random.choice((0, 0, 0, 0, 1, 2))
            sim.arrive(tokens(random), random.randint(1, 12), serial, negative)
    elif luck < arrivals + 0.03 and sim.live:
        sim.cancel(random.randrange(len(sim.live)), is_trusted=random.random() < 0.7)
    elif luck > 0.997:
        sim.fail()
    elif luck > 0.985 and sim.s.memory.states is not None:
        sim.interrupt(random)
    else:
        sim.step(random)
    if not sim.live:
        sim.defragment(is_forced=random.random() < 0.1)


def tokens(random: Random) -> list[int]:
    """Random prompt, mostly of one token, so that many prompts share prefixes."""
    return [int(random.random() < 0.1) for _ in range(random.randint(1, 20))]


def check_coverage(
    total: Counter[str], *, is_hybrid: bool = False, has_async: bool = False
) -> None:
    # A hybrid copies a part of a page only if there is a snapshot of exactly that part.
    copies = ("partial hits",) if is_hybrid else ("partial hits", "plans of several copies")
    of_states = ("snapshots", "used snapshots", "evicted snapshots", "interruption")
    of_drafts = ("drafted", "accepted")
    of_launches = ("used rows", "unused rows", "failed launch", "distrusted launch")
    assert {
        *("arrival", "cancellation", "stop", "failure", "rewind", "pair", "refusal"),
        *("defragmentation", "requeued", "evicted", "hits", *copies),
        *(of_launches if has_async else of_drafts),
        *(of_states if is_hybrid else ()),
    } <= {kind for kind, count in total.items() if count >= total["events"] / 1000}, total


@pytest.mark.parametrize("num_events", first_by_default([4000, 10_000]))
def test_thousands_of_events_lose_no_page(num_events: int) -> None:
    total = simulate(num_events, seed=1)
    assert total["events"] >= num_events
    check_coverage(total)


@pytest.mark.parametrize("num_events", first_by_default([4000, 10_000]))
def test_thousands_of_events_of_a_hybrid_lose_no_state(num_events: int) -> None:
    check_coverage(simulate(num_events, seed=1, is_hybrid=True), is_hybrid=True)


@pytest.mark.parametrize("num_events", first_by_default([4000, 10_000]))
@pytest.mark.parametrize("is_hybrid", [False, True])
def test_launched_passes_lose_no_page_and_no_state(num_events: int, is_hybrid: bool) -> None:
    kind = {"is_hybrid": is_hybrid, "has_async": True}
    check_coverage(simulate(num_events, seed=1, **kind), **kind)


@pytest.mark.thorough
@pytest.mark.parametrize("has_async", [False, True])
@pytest.mark.parametrize("is_hybrid", [False, True])
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_more_events_lose_no_page(seed: int, is_hybrid: bool, has_async: bool) -> None:
    kind = {"is_hybrid": is_hybrid, "has_async": has_async}
    check_coverage(simulate(50_000, seed, **kind), **kind)


class SchedulerMachine(RuleBasedStateMachine):
    """The same operations, with minimization of failures by hypothesis."""

    @initialize(
        pages=st.integers(2, 8),
        max_batch=st.integers(1, 5),
        prefill_chunk=st.integers(1, 9),
        max_draft=st.none() | st.integers(0, 5),
        snapshots=st.none() | st.integers(0, 8),
    )
    def start(
        self,
        pages: int,
        max_batch: int,
        prefill_chunk: int,
        max_draft: int | None,
        snapshots: int | None,
    ) -> None:
        """`max_draft` None: launched passes instead of drafts."""
        slots = 0 if snapshots is None else max_batch + snapshots
        if max_draft is None:
            self.sim: Simulation = AsyncSimulation(pages, max_batch, prefill_chunk, slots)
        else:
            self.sim = Simulation(pages, max_batch, prefill_chunk, max_draft, slots)

    @rule(
        prompt=TOKENS,
        more=st.integers(1, 12),
        serial=st.integers(0, 1),
        negative=st.none() | TOKENS,
    )
    def arrive(self, prompt: list[int], more: int, serial: int, negative: list[int] | None) -> None:
        self.sim.arrive(prompt, more, serial, negative)

    @rule()
    def prepare(self) -> None:
        self.sim.prepare()

    @rule(seed=st.integers(0, 1000))
    def step(self, seed: int) -> None:
        self.sim.step(Random(seed))

    @precondition(lambda self: self.sim.live)
    @rule(data=st.data(), is_trusted=st.booleans())
    def cancel(self, data: st.DataObject, is_trusted: bool) -> None:
        i = data.draw(st.integers(0, len(self.sim.live) - 1))
        self.sim.cancel(i, is_trusted=is_trusted)

    @precondition(lambda self: self.sim.live)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        """At any time between two passes, not only after one."""
        runner = data.draw(st.sampled_from(self.sim.live))
        num_new = len(runner.token_ids) - len(runner.request.prompt_ids)
        self.sim.s.rewind(runner, len(runner.token_ids) - data.draw(st.integers(0, num_new)))
        self.sim.check()

    @rule(luck=st.integers(0, 9))
    def fail(self, luck: int) -> None:
        if luck == 9:  # rarely
            self.sim.fail()

    @rule(is_forced=st.booleans())
    def defragment(self, is_forced: bool) -> None:
        self.sim.defragment(is_forced=is_forced)

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            self.sim.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=examples(60),
    stateful_step_count=40,
)
