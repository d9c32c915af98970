"""The old converter's flags become options of `exl convert`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from exl_exllamav2 import notices
from exl_exllamav2.activation import SHADOW
from exl_exllamav2.convert import WORK, command_of, status_lines
from exl_exllamav2.errors import RefusedError
from support import tiny_models
from support.conversions import SHAPE


def test_flags_are_translated(tmp_path: Path) -> None:
    old = ["-i", "in", "-o", str(tmp_path), "-cf", "out", "-b", "3.5", "-hb", "8", "-ss", "4096"]
    found = command_of([*old, "-r", "10", "-l", "512", "-c", "text.parquet"])
    assert found == [
        *("in", "-o", "out", "--work", str(tmp_path / WORK), "--bits", "3.5", "--head-bits", "8"),
        *("--calibration", "text.parquet", "--rows", "10", "--length", "512"),
        *("--shard-size", "4096MB"),
    ]


def test_defaults_are_those_of_the_old_converter(tmp_path: Path) -> None:
    found = command_of(["-i", "in", "-o", str(tmp_path)])
    assert found[1:3] == ["-o", str(tmp_path / "model")]
    assert found[-4:] == ["--bits", "4.125", "--head-bits", "6"]


def test_no_resume_removes_intermediate_results_only(tmp_path: Path) -> None:
    (tmp_path / WORK).mkdir()
    (tmp_path / "kept").write_text("x")
    command_of(["-i", "in", "-o", str(tmp_path), "-nr"])
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_usage_error_exits_with_code_2() -> None:
    with pytest.raises(SystemExit) as found:
        command_of(["-i", "in"])
    assert found.value.code == 2


def test_measuring_and_compiling_exclude_each_other() -> None:
    with pytest.raises(SystemExit) as found:
        command_of(["-i", "in", "-o", "out", "-om", "m.json", "-cf", "out"])
    assert found.value.code == 2


def test_a_measurement_of_the_original_is_refused_by_name(tmp_path: Path) -> None:
    old = tmp_path / "measurement.json"
    old.write_text('{"measurement": {}, "last_module_idx": 3}', encoding="utf-8")
    with pytest.raises(RefusedError, match=r"measurement\.json is not available.*-om"):
        command_of(["-i", "in", "-o", "out", "-m", str(old)])


def test_status_lines() -> None:
    lines: list[str] = []
    tell = status_lines(lines.append)
    for event in (
        {"event": "stage", "stage": "measure"},
        {"event": "step", "stage": "measure", "done": 1, "total": 3},
        {"event": "stage", "stage": "quantize"},
        {"event": "done"},
    ):
        tell(event)
    assert lines == [
        f'[STATUS]{{"stage": "{stage}", "completion": {share}}}[/STATUS]'
        for stage, share in (
            *(("Measuring", 0.0), ("Measuring", 0.3333), ("Measuring", 1.0)),
            *(("Quantizing", 0.0), ("Quantizing", 1.0)),
        )
    ]


@pytest.mark.thorough
def test_a_measurement_serves_a_later_conversion(tmp_path: Path) -> None:
    """`-om` writes a measurement and no model; `-m` reads it, and `-so` reports the stages.

    The text begins with BOS, so that the sensitivities of tokens, "Measuring (1)", are measured in
    both."""
    source, text = tmp_path / "source", tmp_path / "text.jsonl"
    tiny_models.save(tiny_models.tiny_llama(**SHAPE), source)
    rows = [json.dumps({"text": f"{n} times {n} is {n * n}. " * 20}) for n in range(40)]
    text.write_text("\n".join(rows), encoding="utf-8")
    common = ["-i", str(source), "-o", str(tmp_path / "work"), "-c", str(text), "-r", "4"]
    measured = _convert(*common, "-l", "64", "-om", str(tmp_path))
    assert measured.returncode == 0, measured.stderr
    assert (tmp_path / "measurement.json").is_file()
    assert not (tmp_path / "work" / "model").exists()
    more = ["-l", "64", "-m", str(tmp_path / "measurement.json"), "-nr", "-so", "-b", "5"]
    done = _convert(*common, *more)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "work" / "model" / "config.json").is_file()
    stages = re.findall(r'^\[STATUS\]\{"stage": "([^"]+)".*\[/STATUS\]$', done.stdout, re.M)
    assert {"Quantizing", "Compiling"} <= set(stages)
    assert "Measuring" not in stages


def _convert(*args: str) -> subprocess.CompletedProcess[str]:
    path = SHADOW / "exllamav2" / "conversion" / "convert_exl2.py"
    return subprocess.run(
        [sys.executable, str(path), *args], capture_output=True, text=True, check=False
    )


def test_flags_without_effect_warn_once(capsys: pytest.CaptureFixture[str]) -> None:
    notices.forget_warnings()
    for _ in range(2):
        command_of(["-i", "in", "-o", "out", "-mr", "4"])
    assert capsys.readouterr().err.count("measurement_rows") == 1
