"""The old converter's flags become options of `exl convert`."""

from __future__ import annotations

from pathlib import Path

import pytest

from exl_exllamav2 import notices
from exl_exllamav2.convert import WORK, command_of
from exl_exllamav2.errors import RefusedError


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


def test_measuring_alone_is_refused_by_name() -> None:
    with pytest.raises(RefusedError, match=r"output_measurement.*exl_measurement"):
        command_of(["-i", "in", "-o", "out", "-om", "m.json"])


def test_flags_without_effect_warn_once(capsys: pytest.CaptureFixture[str]) -> None:
    notices.forget_warnings()
    for _ in range(2):
        command_of(["-i", "in", "-o", "out", "-mr", "4"])
    assert capsys.readouterr().err.count("measurement_rows") == 1
