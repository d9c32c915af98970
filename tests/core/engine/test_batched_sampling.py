"""Batched sampling: one call samples the next tokens of a pass and does not change replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.constrain.choice import OneOf
from exl_core.engine.engine import Engine
from exl_core.engine.events import FailEvent, FinishEvent
from exl_core.engine.logits import LogitRow, PassLogits
from exl_core.engine.request import Report, Request
from exl_core.ops.backends.reference.table import ReferenceTable
from exl_core.ops.sampling import NextStep, RowSettings, Sampled, SampleSettings
from exl_core.sampling.params import SamplerParams
from exl_core.sampling.sampler import LogitsError, Sampler
from support.driving import ask, run_all, submit
from support.guessing import ScriptedDrafter, right
from support.scripted import ByteTokenizer, HashRule, ScriptedModel, ScriptedShape

RULE = HashRule(5, spread=1.5)
SEEDED = SamplerParams(temperature=0.9, top_k=30, seed=7)


class CountingTable(ReferenceTable):
    """Records the rows of each batched call and the number of single samples."""

    def __init__(self) -> None:
        super().__init__(threads=1)
        self.batched: list[list[int]] = []
        self.widths: set[int] = set()
        self.single = 0

    def sample_rows(  # type: ignore[override]  # static in the base class
        self, logits: Tensor, rows: Sequence[RowSettings], next_step: NextStep | None = None
    ) -> list[Sampled]:
        self.batched.append([row.row for row in rows])
        self.widths.add(logits.shape[1])
        return ReferenceTable.sample_rows(logits, rows, next_step)

    def sample(self, logits: Tensor, settings: SampleSettings) -> Sampled:  # type: ignore[override]
        self.single += 1
        return ReferenceTable.sample(logits, settings)


def counting_engine(
    rule: Any = RULE, padding: int = 0, **rest: Any
) -> tuple[Engine, CountingTable]:
    tokenizer, table = ByteTokenizer(), CountingTable()
    shape = ScriptedShape(tokenizer.vocab_size + padding)
    return Engine(ScriptedModel(rule, shape, ops=table), tokenizer, **rest), table


def requests() -> list[Request]:
    """Requests of every kind of sampling, in mixed order."""
    rest: list[dict[str, Any]] = [
        {"sampler": SEEDED},
        {"sampler": SamplerParams(temperature=0)},
        {"sampler": SamplerParams(seed=1, repetition_penalty=1.2)},
        {"sampler": SamplerParams(seed=8, frequency_penalty=0.3, token_bias={70: 2.0})},
        {"sampler": SamplerParams(seed=9, dry_multiplier=0.8, presence_penalty=0.4)},
        {
            "sampler": SamplerParams(seed=2, min_p=0.02),
            "banned_strings": tuple("abcdefghijkl\x01\x02\x03"),
        },
        {"sampler": SamplerParams(seed=3, mirostat_tau=3.0)},
        {"sampler": SEEDED, "constraints": (OneOf(["one", "two", "three"]),)},
        {"sampler": SamplerParams(seed=4, cfg_scale=1.5), "negative_prompt_ids": (66, 67)},
        {"sampler": SEEDED, "hooks": (lambda token: 65 if token.token_id % 5 == 0 else None,)},
        {"sampler": SamplerParams(seed=5), "token_healing": True},
        {"sampler": SEEDED, "report": Report(True, 3, True), "min_tokens": 9},
        {"sampler": SamplerParams(seed=6, top_p=0.9, banned_tokens=frozenset({70, 71}))},
    ]
    return [
        ask(f"Q{i}:", request_id=f"r{i}", max_tokens=12 + i, **one) for i, one in enumerate(rest)
    ]


def replies(engine: Engine) -> dict[str, Any]:
    for request in requests():
        submit(engine, request)
    events: dict[str, list[Any]] = {}
    for event in run_all(engine):
        known = events.setdefault(event.request_id, [])
        if isinstance(event, FinishEvent):
            known.append((event.text, event.token_ids, event.reason, event.healed_id))
        else:
            known.append(type(event).__name__)
        for token in getattr(event, "tokens", ()):
            known.append((token.token_id, token.probability, token.top))
    return events


@pytest.mark.parametrize("has_drafts", [False, True])
def test_replies_equal_those_without_batched_sampling(
    has_drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = {"drafter": ScriptedDrafter(right(RULE))} if has_drafts else {}
    rest: dict[str, Any] = {"clock": lambda: 0.0, **drafter}
    batched = replies(counting_engine(**rest)[0])
    assert any("RewindEvent" in events for events in batched.values())
    monkeypatch.setattr(Sampler, "can_begin", False)
    engine, table = counting_engine(**rest)
    assert replies(engine) == batched
    assert not table.batched
    assert table.single > 0


def test_requests_that_need_settings_only_are_sampled_by_one_call() -> None:
    engine, table = counting_engine(padding=8)
    for i in range(4):
        engine.submit(ask(max_tokens=5, sampler=SEEDED, request_id=f"r{i}"))
    rare = SamplerParams(seed=1, typical=0.9, top_k=30)
    engine.submit(ask(max_tokens=5, sampler=rare, request_id="rare"))
    run_all(engine)
    assert table.single == 5
    assert sum(map(len, table.batched)) == 20
    assert [0, 1, 2, 3] in table.batched
    assert table.widths == {engine.vocab_size}  # without ids unknown to the tokenizer


def test_a_row_of_nan_fails_one_request() -> None:
    def rule(history: Sequence[int]) -> Tensor:
        logits = RULE(history)
        return logits * torch.nan if history[0] == ord("X") and len(history) == 5 else logits

    engine, _ = counting_engine(rule)
    engine.submit(ask("Q:", max_tokens=6, request_id="good"))
    engine.submit(ask("X:", max_tokens=6, request_id="bad"))
    ends = {e.request_id: e for e in run_all(engine) if isinstance(e, FinishEvent | FailEvent)}
    assert isinstance(ends["good"], FinishEvent)
    bad = ends["bad"]
    assert isinstance(bad, FailEvent)
    assert isinstance(bad.error, LogitsError)
    assert "NaN" in str(bad.error)


class DeviceLogits:
    """Stands for logits on another device; counts copies to the CPU."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.copies = 0

    def cpu(self) -> Tensor:
        self.copies += 1
        return self.logits

    def __getitem__(self, index: Any) -> Tensor:
        return self.logits[index]


def test_logits_are_copied_to_the_cpu_once_and_only_if_read() -> None:
    on_device = DeviceLogits(torch.arange(12.0).view(3, 4))
    logits = PassLogits(on_device)  # type: ignore[arg-type]
    table = CountingTable()
    sampled = logits.sample(table, [RowSettings(2, top_k=1), RowSettings(0, top_k=1)], 3)
    assert [one.token_id for one in sampled] == [2, 2]
    assert logits.sample(table, [], 3) == []
    assert len(table.batched) == 1
    assert on_device.copies == 0
    assert LogitRow(logits, 1).read().tolist() == [4.0, 5.0, 6.0, 7.0]
    assert LogitRow(logits, 2).read().tolist() == [8.0, 9.0, 10.0, 11.0]
    assert on_device.copies == 1
