"""Fault injection: a step of one request, the victim, raises at a chosen call.

`break_request` wraps the objects that belong to one live request (sampler, filters, decoder,
matchers, healing) in proxies. A proxy forwards everything and raises at the n-th use of one method
or property. `break_functions` and `FaultyTable` cover module functions and ops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from exl_core.engine.engine import Engine
from exl_core.ops.backends.reference.table import ReferenceTable
from exl_core.ops.sampling import NextStep, RowSettings, Sampled, SampleSettings

VICTIM_TOP_K = 77
"""`FaultyTable` knows the victim's rows by this setting of its sampler."""

PARTS = {
    "sampler": ("_sampler", ("can_begin", "begin", "finish", "sample", "verify", "accept")),
    "sampler back": ("_sampler", ("rewind",)),
    "filters": ("filters", ("start", "mask", "accept", "is_finished", "rewind")),
    "decoder": ("_decoder", ("feed", "feed_bytes", "copy", "flush")),
    "stop strings": ("_matcher", ("feed", "finish")),
    "banned strings": ("_banned", ("feed", "flush", "num_held")),
    "healing": ("_healing", ("mask", "grown_by")),
}
STEPS = ("start", "start_mask", "begin", "take", "progress")
FUNCTIONS = ("score_prompt", "with_log_probs", "guide")
OPS = ("sample", "sample_rows")
POINTS = (
    *((attribute, name) for attribute, names in PARTS.values() for name in names),
    *(("filter", name) for name in ("mask", "accept", "is_complete", "is_finished", "rewind")),
    *(("reply", name) for name in STEPS),
    *(("function", name) for name in FUNCTIONS),
    *(("op", name) for name in OPS),
    ("hook", "call"),
)


@dataclass
class Fault:
    """Raises `error` at the `nth` use (from 1) of `point` and at every later one.

    Without a point nothing is raised. `uses` counts how often each point was passed.
    """

    point: tuple[str, str] | None = None
    nth: int = 1
    error: BaseException = field(default_factory=lambda: RuntimeError("scripted"))
    uses: Counter[tuple[str, str]] = field(default_factory=Counter)
    has_fired: bool = False

    def use(self, owner: str, name: str) -> None:
        self.uses[owner, name] += 1
        if (owner, name) == self.point and self.uses[self.point] >= self.nth:
            self.has_fired = True
            raise self.error


class Proxy:
    """Forwards to `target`, an object of one request, and injects the fault."""

    def __init__(self, target: Any, owner: str, fault: Fault) -> None:
        self._target, self._owner, self._fault = target, owner, fault

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value):
            self._fault.use(self._owner, name)
            return value

        def call(*operands: Any, **rest: Any) -> Any:
            self._fault.use(self._owner, name)
            result = value(*operands, **rest)
            return Proxy(result, self._owner, self._fault) if name == "copy" else result

        return call


class FaultyTable(ReferenceTable):
    """Reference table whose sampling fails if a row of the victim is involved."""

    def __init__(self, fault: Fault | None = None) -> None:
        super().__init__(threads=1)
        self.fault = fault

    def sample(self, logits: Tensor, settings: SampleSettings) -> Sampled:  # type: ignore[override]
        if self.fault is not None and settings.top_k == VICTIM_TOP_K:
            self.fault.use("op", "sample")
        return ReferenceTable.sample(logits, settings)

    def sample_rows(  # type: ignore[override]
        self, logits: Tensor, rows: Sequence[RowSettings], next_step: NextStep | None = None
    ) -> list[Sampled]:
        if self.fault is not None and any(row.top_k == VICTIM_TOP_K for row in rows):
            self.fault.use("op", "sample_rows")
        return ReferenceTable.sample_rows(logits, rows, next_step)


def break_request(engine: Engine, request_id: str, fault: Fault) -> None:
    """Wrap the parts of a live request in proxies."""
    reply = engine._replies[request_id]
    for attribute in {attribute for attribute, _ in PARTS.values()}:
        part = getattr(reply, attribute)
        if part is not None:
            setattr(reply, attribute, Proxy(part, attribute, fault))
    if reply.filters is not None:
        filters = vars(reply.filters)["_target"]
        filters._filters = tuple(Proxy(one, "filter", fault) for one in filters._filters)
    for name in STEPS:
        setattr(reply, name, _failing("reply", name, getattr(reply, name), fault))


def break_functions(patch: pytest.MonkeyPatch, request_id: str, fault: Fault) -> None:
    """Inject the fault into functions that the engine calls for one request at a time.

    Calls for the victim are recognized by its request id, `num_top` or guidance scale.
    """
    from exl_core.engine import reply, request_logits

    score, log_probs = vars(request_logits)["score_prompt"], vars(reply)["with_log_probs"]
    guide = vars(reply)["guide"]

    def score_prompt(sequence: Any, *rest: Any) -> Any:
        if sequence.request_id == request_id:
            fault.use("function", "score_prompt")
        return score(sequence, *rest)

    def with_log_probs(tokens: Any, logits: Any, num_top: int) -> Any:
        if num_top == VICTIM_TOP_K:
            fault.use("function", "with_log_probs")
        return log_probs(tokens, logits, num_top)

    def guided(positive: Any, negative: Any, scale: float) -> Any:
        if scale == VICTIM_TOP_K:
            fault.use("function", "guide")
        return guide(positive, negative, scale)

    patch.setattr(request_logits, "score_prompt", score_prompt)
    patch.setattr(reply, "with_log_probs", with_log_probs)
    patch.setattr(reply, "guide", guided)


def _failing(owner: str, name: str, call: Callable[..., Any], fault: Fault) -> Callable[..., Any]:
    def step(*operands: Any, **rest: Any) -> Any:
        fault.use(owner, name)
        return call(*operands, **rest)

    return step
