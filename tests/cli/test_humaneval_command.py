"""`exl eval humaneval`: consent, table and JSON."""

from __future__ import annotations

import json
from pathlib import Path

from support.commands import Command

PROBLEM = {
    "task_id": "made/0",
    "prompt": "def one():\n",
    "entry_point": "one",
    "test": "def check(candidate):\n    assert candidate() == 1\n",
}


def test_code_runs_only_with_consent(exl: Command, tiny_llama_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps(PROBLEM))
    args = ("eval", "humaneval", path, "-m", tiny_llama_dir, "-n", 4)
    assert "--allow-code-execution" in exl(*args).error_line(2)
    done = exl(*args, "--allow-code-execution", "--json")
    result = json.loads(done.out)
    assert (result["measurement"], result["problems"], result["pass_at_1"]) == ("humaneval", 1, 0)
    assert result["completions"][0]["verdict"] == "failed"
    assert "0.0000 ± 0.0000" in exl(*args, "--allow-code-execution").out
