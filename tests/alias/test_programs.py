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


def test_asynchronous_jobs(run_program: Run) -> None:
    found = run_program("inference_async")
    first, second, third = found["outputs"]
    assert min(len(first), len(third)) > len(second) > 5
    assert {"0", "1", "2"} == set(found["markers"][:12])


def test_guidance_below_zero_and_at_both_ends(run_program: Run) -> None:
    found = run_program("inference_cfg")
    by_scale = dict(zip(found["scales"], found["outputs"], strict=True))
    assert by_scale[1.0] == found["alone"][0]
    assert by_scale[0.0] == found["alone"][1]
    assert len(by_scale) == 5


def test_generators_with_and_without_drafts_share_a_cache(run_program: Run) -> None:
    found = run_program("inference_speculative")
    assert found["plain"] == found["drafted"]
    assert found["last"]["accepted_draft_tokens"] > 0
    assert found["last"]["rejected_draft_tokens"] >= 0
    reply = found["plain"].removeprefix("Implement QuickSort")
    for text in found["streams"]:
        assert text
        assert reply.startswith(text) or text.startswith(reply)


def test_forward_with_padding_rewinds_and_sampling(run_program: Run) -> None:
    import torch

    found = run_program("forward")
    count = found["ids"].shape[-1]
    assert found["steps"][-1] == (9, 9)
    assert [i for i, _ in found["steps"]] == list(range(10))
    assert found["held"] == count - 1
    assert found["whole"].shape == (2, count, 320)
    assert found["whole"].dtype == torch.half
    assert (found["whole"][:, :, 300:] == -65504).all()
    assert torch.equal(found["last"][:, -1].half(), found["again"][:, -1].cpu())
    # Logits of magnitude 1 in half precision, from passes of other sizes.
    assert torch.allclose(found["whole"][:, -1].float().cpu(), found["last"][:, -1], atol=0.02)
    assert found["state"].shape == (1, count, 72)


def test_filters_follow_their_reply(run_program: Run) -> None:
    found = run_program("filters")
    free, number, choice = found["outputs"]
    assert free
    assert number[:2] == "No"
    assert set(number) <= set("0123456789No:")
    assert len(found["digits"].seen) == 5
    assert choice in ("yes", "no", "nothing")
