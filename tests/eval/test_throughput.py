"""Throughput of a stream of requests: exact times with a fake clock, and refused workload lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from exl_core.cache.store import KVStore
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.errors import RequestError
from exl_core.model.batch import Batch
from exl_eval.requests_file import TimedRequest, parse_workload, read_workload
from exl_eval.throughput import Player, tail
from support.scripted import ByteTokenizer, HashRule, ScriptedModel


class Clock:
    """Fake clock that only sleeping and forward passes advance."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


class TimedModel(ScriptedModel):
    """Model whose passes each take one second of the fake clock."""

    clock: Clock

    def forward(self, batch: Batch, store: KVStore) -> Tensor:
        self.clock.now += 1.0
        return super().forward(batch, store)


def play(*workload: TimedRequest, max_batch: int = 16) -> tuple[Player, float]:
    clock = Clock()
    model = TimedModel(HashRule())
    model.clock = clock
    options = EngineOptions(cache_tokens=4096, max_batch=max_batch)
    engine = Engine(model, ByteTokenizer(), options, clock=clock)
    player = Player(engine, workload, 1, clock=clock, sleep=clock.sleep)
    return player, player.play()


def test_times_count_from_the_arrival() -> None:
    player, seconds = play(
        TimedRequest(1, 0.0, "abc", 3), TimedRequest(2, 0.5, 40, 2), TimedRequest(3, 10.0, "x", 1)
    )
    first, second, third = player.times()
    # Passes end at 1, 2, 3, ... The second request arrives during the first pass.
    assert (first.first_token_s, first.end_s, first.tokens) == (1.0, 3.0, 3)
    assert (second.first_token_s, second.end_s, second.prompt_tokens) == (2.0, 3.0, 40)
    assert (third.first_token_s, third.end_s) == (11.0, 11.0)  # the engine idles until 10.0
    assert player.gaps() == [1.0, 1.0, 1.0]
    assert (seconds, player.passes, player.most_running) == (11.0, 4, 2)


def test_queueing_counts_in_the_time_to_the_first_token() -> None:
    player, seconds = play(
        TimedRequest(1, 0.0, "abc", 4), TimedRequest(2, 0.0, "xyz", 4), max_batch=1
    )
    assert [one.first_token_s for one in player.times()] == [1.0, 5.0]
    assert (seconds, player.most_running) == (8.0, 1)


def test_random_prompts_differ_by_line_and_repeat_by_seed() -> None:
    ids = [
        [one.request.prompt_ids for one in play(*work)[0]._all]
        for work in [(TimedRequest(1, 0.0, 50, 1), TimedRequest(2, 0.0, 50, 1))] * 2
    ]
    assert ids[0] == ids[1]
    assert ids[0][0] != ids[0][1]
    assert max(ids[0][0]) < 258


def test_percentiles_of_a_known_distribution() -> None:
    seconds = torch.arange(101, dtype=torch.float64)[torch.randperm(101)].tolist()
    found = tail(seconds)
    assert (found.p50, found.p90, found.p95, found.p99) == (50.0, 90.0, 95.0, 99.0)
    assert (found.mean, found.max) == (50.0, 100.0)
    assert tail([2.0]).p99 == 2.0


def test_a_request_that_cannot_be_served_is_named_by_its_line() -> None:
    with pytest.raises(
        RequestError, match=r"line 7: prompt and reply do not fit.*2048.*2000 and 49"
    ):
        play(TimedRequest(7, 0.0, 2000, 49))


GOOD = {"prompt": "a", "max_tokens": 1}


def test_requests_are_sorted_by_arrival() -> None:
    rows = [{**GOOD, "arrival_s": 2}, {"prompt_tokens": 5, "max_tokens": 2, "temperature": 0.5}]
    data = "\n\n".join(json.dumps(row) for row in rows).encode()
    assert parse_workload(data, "w") == [
        TimedRequest(3, 0.0, 5, 2, 0.5),
        TimedRequest(1, 2.0, "a", 1),
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "not valid JSON"),
        ("[1]", "no JSON object"),
        ("\xff", "not valid JSON"),
        ("[" * 100000, "not valid JSON"),
        (json.dumps({**GOOD, "max_token": 1}), "unknown field 'max_token'.*max_tokens"),
        (json.dumps({"max_tokens": 1}), "prompt or prompt_tokens"),
        (json.dumps({**GOOD, "prompt_tokens": 1}), "prompt or prompt_tokens"),
        (json.dumps({**GOOD, "prompt": ""}), "prompt is no text"),
        (json.dumps({**GOOD, "prompt": 5}), "prompt is no text"),
        (json.dumps({"prompt": "a"}), "max_tokens is no count"),
        (json.dumps({**GOOD, "max_tokens": True}), "max_tokens is no count"),
        (json.dumps({**GOOD, "max_tokens": 0}), "max_tokens is no count"),
        (json.dumps({"prompt_tokens": 1.5, "max_tokens": 1}), "prompt_tokens is no count"),
        (json.dumps({**GOOD, "arrival_s": -1}), "arrival_s is out of range"),
        (json.dumps({**GOOD, "arrival_s": float("nan")}), "arrival_s is out of range"),
        (json.dumps({**GOOD, "temperature": "hot"}), "temperature is out of range"),
    ],
)
def test_a_malformed_line_is_refused_by_its_number(line: str, expected: str) -> None:
    data = json.dumps(GOOD).encode() + b"\n" + line.encode("latin-1") + b"\n"
    with pytest.raises(RequestError, match=f"(?s)w, line 2: .*{expected}"):
        parse_workload(data, "w")


def test_an_empty_and_a_missing_workload_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no requests"):
        parse_workload(b"\n \n", "w")
    with pytest.raises(RequestError, match="cannot be read"):
        read_workload(tmp_path / "missing.jsonl")


def test_a_model_in_place_of_the_workload_is_answered_with_its_option(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(RequestError, match=r"is a model, not a workload.*-m MODEL"):
            read_workload(path)


def test_the_example_workload_is_installed() -> None:
    example = read_workload(None)
    assert len(example) == 16
    assert [one.arrival_s for one in example] == sorted(one.arrival_s for one in example)
    assert sum(one.max_tokens for one in example) == 984
