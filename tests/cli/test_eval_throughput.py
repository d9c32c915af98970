"""`exl eval throughput`: options, table and JSON."""

from __future__ import annotations

import json
from pathlib import Path

from support.commands import Command

LINES = [
    {"prompt": "one", "max_tokens": 5},
    {"arrival_s": 0.05, "prompt_tokens": 30, "max_tokens": 3},
    {"arrival_s": 0.05, "prompt": "three", "max_tokens": 1, "temperature": 1.0},
]


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def test_json(exl: Command, tiny_llama_dir: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "work.jsonl", *LINES)
    done = exl("eval", "throughput", file, "-m", tiny_llama_dir, "--max-batch", 2, "--json")
    assert (done.code, done.err) == (0, "")
    result = json.loads(done.out)
    assert (result["requests"], result["generated_tokens"], result["prompt_tokens"]) == (3, 9, 38)
    assert result["offered_per_s"] == 60.0
    assert result["most_running"] <= 2
    assert round(result["generated_tok_s"] * result["seconds"], 6) == 9
    assert [one["line"] for one in result["by_request"]] == [1, 2, 3]
    assert [one["tokens"] for one in result["by_request"]] == [5, 3, 1]
    for name in ("first_token", "inter_token", "end_to_end"):
        found = result[name]
        assert 0 < found["p50"] <= found["p90"] <= found["p95"] <= found["p99"] <= found["max"]
    assert result["first_token"]["max"] <= result["end_to_end"]["max"] <= result["seconds"]


def test_table(exl: Command, tiny_llama_dir: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "work.jsonl", LINES[2])
    done = exl("eval", "throughput", file, "-m", tiny_llama_dir)
    assert (done.code, done.err) == (0, "")
    assert "first token" in done.out
    assert "inter-token" not in done.out  # a one-token reply has no such time


def test_malformed_line_and_prompt_that_is_too_long(
    exl: Command, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    bad = write(tmp_path / "bad.jsonl", LINES[0], {"prompt": "x", "max_tokens": "many"})
    line = exl("eval", "throughput", bad, "-m", tiny_llama_dir).error_line(2)
    assert f"{bad}, line 2: max_tokens is no count" in line
    long = write(tmp_path / "long.jsonl", LINES[0], {"prompt_tokens": 500, "max_tokens": 100})
    line = exl("eval", "throughput", long, "-m", tiny_llama_dir).error_line(2)
    assert "line 2" in line
    assert "512" in line
