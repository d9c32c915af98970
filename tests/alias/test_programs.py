"""Programs written for exllamav2 run unchanged: rewritten equivalents of its examples.

Each file of `programs/` makes the calls of the example that it names. `test_originals.py` runs the
original files where they are at hand.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from alias.conftest import Run


def test_inference(run_program: Run, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_program("inference")
    assert len(found["outputs"]) == 4
    for prompt, output in zip(found["prompts"], found["outputs"], strict=True):
        assert output.startswith(prompt)
        assert len(output) > len(prompt)
    out, err = capsys.readouterr()
    assert len(re.findall(r"^speed, bsz \d: [\d.]+ tokens/second$", out, re.M)) == 2
    assert err == ""


def test_a_stream_of_one_job(run_program: Run, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_program("inference_stream")
    last = found["last"]
    assert found["stages"][0] == "started"
    assert last["eos_reason"] == "max_new_tokens"
    assert last["new_tokens"] == 20
    assert found["text"] == last["full_completion"]
    assert last["prompt_tokens"] == found["input_ids"].shape[-1]
    timed = {"time_enqueued", "time_prefill", "time_generate"}
    assert timed | {"cached_pages", "cached_tokens", "serial", "job"} <= last.keys()
    assert "ExLlamaV2DynamicJob #0" in capsys.readouterr().out


def test_the_older_generators(run_program: Run) -> None:
    found = run_program("old_generators")
    assert found["output"] == found["again"]
    assert found["output"].startswith(found["prompt"])
    assert found["held_at_first"] == found["input_ids"].shape[-1] - 1
    assert len(found["counts"]) == 30
    assert sum(found["counts"]) >= 25
    assert len(found["generator"].sequence_ids[0]) == found["input_ids"].shape[-1] + 30
