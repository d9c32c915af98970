"""Simulation of a scheduler whose next pass is launched before the host has the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import torch

from exl_core.engine.async_step import AsyncStep
from exl_core.engine.logits import PassLogits
from exl_core.engine.plan import BatchPlan
from exl_core.errors import OutOfMemoryError
from exl_core.model.runner import NextPart, NextPass, Runner
from exl_core.model.segment import LogitRows, Segment
from exl_core.ops.sampling import PartLogits
from support.scheduling import Memory, Simulation


class MemoryRunner:
    """Runner that computes launched passes in a simulated memory.

    `plan` is the pass before, `tokens` are those that it samples. If `fails`, the launched pass
    runs out of memory after it has changed the states of some layers.
    """

    has_graphs = True
    store = SimpleNamespace(device=torch.device("cpu"))

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.plan = BatchPlan((), ())
        self.tokens: list[int] = []
        self.fails = False

    def next_pass(self, segments: Sequence[Segment]) -> NextPass:
        token_ids = torch.zeros(len(segments), dtype=torch.int64)
        return NextPass(token_ids, [NextPart(segments, token_ids)])

    def run_on(self, part: NextPart) -> PartLogits:
        segments = part.segments
        if self.fails:
            for one in segments:
                if one.state_slot is not None:
                    self.memory.states[one.state_slot] = -1
            raise OutOfMemoryError("scripted")
        known = [
            replace(one, token_ids=(token,))
            for one, token in zip(segments, self.tokens, strict=True)
        ]
        self.memory.run(BatchPlan(tuple(known), self.plan.sequences))
        return PartLogits(torch.empty(len(segments), 1))


class AsyncSimulation(Simulation):
    """The same operations without drafts, with launched passes. Replies end at any length."""

    def __init__(self, pages: int, max_batch: int, prefill_chunk: int, slots: int = 0) -> None:
        super().__init__(pages, max_batch, prefill_chunk, 0, slots)
        self.runner = MemoryRunner(self.memory)
        self.async_step = AsyncStep(cast("Runner", self.runner), self.s)

    def run_pass(self, random: Random) -> BatchPlan:
        launched = self.async_step._launched
        plan = self.async_step.plan()
        self.count["unused rows"] += len(launched.rows) if launched is not None else 0
        if plan is None:
            return super().run_pass(random)
        self.async_step.take(plan)
        self.check_plan(plan, is_whole=False)
        self.count["used rows"] += len(plan.segments)
        self.count["unused rows"] -= len(plan.segments)
        return plan

    def next_tokens(self, plan: BatchPlan, random: Random) -> list[int] | None:
        if any(sequence.negative is not None for sequence in plan.sequences):
            return None  # a pair gets the same token
        logits = PassLogits(torch.empty(0))
        next_step = self.async_step.next_step(plan, logits) if plan.segments else None
        if next_step is None or random.random() < 0.05:
            return None  # without memory for the logits no pass is launched
        self.runner.plan, luck = plan, random.random()
        self.runner.tokens = [random.randint(0, 1) for _ in plan.segments]
        self.runner.fails = luck < 0.03
        next_step.launch()
        if luck < 0.03:
            self.count["failed launch"] += 1
            return None
        if luck < 0.06:  # sampling failed after the launch
            self.async_step.distrust(plan)
            self.count["distrusted launch"] += 1
            return None
        return self.runner.tokens

    def finish_some(self, plan: BatchPlan, random: Random) -> None:
        for runner, segment in zip(plan.sequences, plan.segments, strict=True):
            is_sampled = segment.logit_rows is not LogitRows.NONE
            if runner in self.live and is_sampled and random.random() < 0.1:
                self.end(runner, is_trusted=True)
                self.count["stop"] += 1

    def fail(self) -> None:
        super().fail()
        self.async_step.drop()

    def plan_failing(self) -> BatchPlan:
        return self.async_step.plan() or super().plan_failing()

    def interrupt(self, random: Random) -> None:
        if self.async_step._launched is None:
            super().interrupt(random)

    def end(self, runner: Any, *, is_trusted: bool) -> None:
        super().end(runner, is_trusted=is_trusted)
        if not self.live:
            self.async_step.drop()
