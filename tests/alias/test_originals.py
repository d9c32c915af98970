"""Original programs of exllamav2 run as they are, on SmolLM2 on the CPU.

They come from the folder that `EXL_OLD_PROGRAMS` names; `originals.py` says what it holds. The
tests of `test_programs.py` make the same calls on a tiny model where there is no such folder.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from alias.originals import (
    PROGRAMS,
    Program,
    copy_checkout,
    errors_of,
    exec_command,
    run_exec,
    run_in_terminal,
)

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_an_example_runs(
    program: Program, request: pytest.FixtureRequest, lora_dir: Path, tmp_path: Path
) -> None:
    path = copy_checkout("exllamav2", tmp_path) / program.path
    model = request.getfixturevalue(program.model)
    options = [option.replace("=LORA", f"={lora_dir}") for option in program.options]
    done = run_exec(
        *("--model", f"*={model}", *options, path.name, *program.args),
        folder=path.parent,
        stdin=program.stdin,
    )
    assert done.returncode == program.code, done.stderr
    assert re.search(program.prints, done.stdout), done.stdout
    if program.code:
        assert re.search(program.last_error, done.stderr.splitlines()[-1]), done.stderr
    else:
        assert len(errors_of(done)) == program.warnings, done.stderr


@pytest.mark.parametrize(
    "name", ["inference_lmfe", "inference_formatron", "deprecated/lm_format_enforcer"]
)
def test_an_example_with_filters_prints_json(name: str, model_dir: Path, tmp_path: Path) -> None:
    """The program itself parses each filtered reply, and fails where one is no JSON.

    A random reply may be cut off by the program's limit of tokens, which is the program's own
    failure: such a run counts as passed only if the text is the beginning of an object.
    """
    path = copy_checkout("exllamav2", tmp_path) / "examples" / f"{name}.py"
    done = run_exec("--model", f"*={model_dir}", path.name, folder=path.parent)
    if done.returncode == 0:
        assert len(re.findall(r"['\"]secret_identity['\"]:", done.stdout)) >= 2
        return
    assert "json.decoder.JSONDecodeError" in done.stderr, done.stderr
    assert re.search(r"Unterminated string|Expecting .* delimiter|Expecting value", done.stderr)


def test_eight_long_prompts_share_their_prefix(llama3_chat_dir: Path, tmp_path: Path) -> None:
    """inference_dedup: one story and eight questions in a cache of 8,192 tokens."""
    folder = copy_checkout("exllamav2", tmp_path) / "examples"
    done = run_exec("--model", f"*={llama3_chat_dir}", "inference_dedup.py", folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Q: ") == done.stdout.count("A: ") == 8
    assert re.search(r"Total time: [\d.]+ seconds", done.stdout)


def test_bulk_inference(llama3_chat_dir: Path, tmp_path: Path) -> None:
    """The data set is cached as twelve rows, as the program itself caches it."""
    folder = copy_checkout("exllamav2", tmp_path) / "examples"
    cache = folder / "dataset_cache"
    cache.mkdir()
    rows = [{"prompt": f"Name {n} colours."} for n in range(1, 13)]
    name = "alespalla_chatbot_instruction_prompts-test.jsonl"
    (cache / name).write_text(json.dumps(rows), encoding="utf-8")
    done = run_exec("--model", f"*={llama3_chat_dir}", "bulk_inference.py", folder=folder)
    assert done.returncode == 0, done.stderr
    assert len(set(re.findall(r"^Completion (\d+):$", done.stdout, re.M))) == 12
    completions = json.loads((folder / "output_prompts.json").read_text(encoding="utf-8"))
    assert len(completions) == 12
    assert all(isinstance(text, str) and text for text in completions)
    speeds = re.findall(r"Avg\. output tokens/second: ([\d.]+)", done.stdout)
    assert float(speeds[-1]) > 0


def test_the_demo_of_the_dynamic_generator(model_dir: Path, tmp_path: Path) -> None:
    """dynamic_gen in a pseudo-terminal: 48 jobs, then one key."""
    folder = copy_checkout("exllamav2", tmp_path) / "examples"
    command = exec_command("--model", f"*={model_dir}", "dynamic_gen.py")
    code, shown = run_in_terminal(command, folder, until=b"Press any key", answer=b"q")
    if "No module named 'blessed'" in shown:
        pytest.skip("blessed is not installed")
    assert code == 0, shown[-2000:]
    plain = re.sub(r"\x1b(\[[0-9;?]*[A-Za-z]|\(B)", "", shown)
    ended = set(re.findall(r"(\d+):(?:stop_token|stop_string|max_new_tokens) ", plain))
    assert len(ended) == 48
