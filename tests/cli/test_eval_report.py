"""`exl eval report`: options, HTML page, table and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.commands import Command

TEXT = "The quick brown fox jumps over the lazy dog. " * 8
SMALL = ("--ctx", 64, "--windows", 1, "--prefill", 8, "--decode", 4)


@pytest.fixture
def report(exl: Command, tmp_path: Path) -> Command:
    """`report(*args)` on a short text, into `out`."""
    text = tmp_path / "fox.txt"
    text.write_text(TEXT, encoding="utf-8")
    out = tmp_path / "out"
    return lambda *args: exl("eval", "report", *args, "--text", text, "--out", out, *SMALL)


@pytest.mark.thorough
def test_page_and_json(
    report: Command, tiny_llama_dir: Path, damaged_dir: Path, tmp_path: Path
) -> None:
    (damaged_dir / "config.json").write_text("{", encoding="utf-8")
    done = report(tiny_llama_dir, damaged_dir, "--reference", tiny_llama_dir, "--json")
    assert done.code == 1
    assert "1 of 2 models could not be measured" in done.err
    result = json.loads(done.out)
    good, bad = result["models"]
    assert good["perplexity"]["windows"] == 1
    assert good["speed"]["decode_tok_s"] > 0
    assert (good["is_reference"], good["divergence"], good["failure"]) == (True, None, None)
    assert "config.json" in bad["failure"]
    out = tmp_path / "out"
    assert json.loads((out / "report.json").read_bytes()) == result
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "2 models on fox.txt" in page
    assert "is not valid JSON" in page
    assert not [*out.rglob("*.tmp"), *out.rglob("*.partial")]


@pytest.mark.thorough
def test_table(report: Command, tiny_llama_dir: Path) -> None:
    done = report(tiny_llama_dir)
    assert (done.code, done.err) == (0, "")
    assert tiny_llama_dir.name in done.out
    assert "report.html" in done.out


def test_unwritable_folder_is_reported_before_anything_is_measured(
    report: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exl_eval.report.make_report", None)
    (tmp_path / "out").touch()
    assert (
        report("model").error_line(1) == f"{tmp_path}/out: cannot be written (got Not a directory)"
    )
    (tmp_path / "out").unlink()
    (tmp_path / "out" / "report.html").mkdir(parents=True)
    assert "report.html: cannot be written (got Is a directory)" in report("model").error_line(1)


def test_names_that_are_not_utf8_are_escaped_on_the_page(
    exl_process: Command, tmp_path: Path
) -> None:
    text = tmp_path / "fox\udcff.txt"
    text.write_text(TEXT, encoding="utf-8")
    model, out = tmp_path / "model\udcff", tmp_path / "out"
    model.mkdir()
    done = exl_process("eval", "report", model, "--text", text, "--out", out, "--json")
    assert "Traceback" not in done.err
    assert done.code == 1
    assert "model\\udcff" in (out / "report.html").read_text(encoding="utf-8")
    assert json.loads((out / "report.json").read_bytes()) == json.loads(done.out)
    assert json.loads(done.out)["text"] == str(text)


def test_record_that_cannot_be_written_ends_the_report(
    report: Command, tiny_llama_dir: Path, small_files: Callable[[int], None]
) -> None:
    small_files(1000)
    line = report(tiny_llama_dir).error_line(6)
    assert "out/records/" in line
    assert "there is no space left (got File too large)" in line


@pytest.mark.parametrize(
    ("args", "expected", "code"),
    [
        (("a", "a"), "given twice", 2),
        (("/no/model", "--reference", "/no/such/reference"), "/no/such/reference", 3),
        ((), "MODEL", 2),
    ],
)
def test_bad_report_options(
    args: tuple[str, ...], expected: str, code: int, report: Command
) -> None:
    assert expected in report(*args).error_line(code)
