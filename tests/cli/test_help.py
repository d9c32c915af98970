"""Help pages are complete, start quickly and do not import torch."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import pairwise

import pytest

from exl_cli.main import main
from support.commands import Command

VERBS = (
    ("generate",),
    ("chat",),
    ("serve-lite",),
    ("convert",),
    ("eval", "perplexity"),
    ("eval", "acceptance"),
    ("eval", "throughput"),
    ("eval", "tasks"),
    ("eval", "report"),
    ("bench",),
    ("inspect", "model"),
    ("exec",),
    ("alias",),
    ("doctor",),
)


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_command_has_help_with_examples(verb: tuple[str, ...], exl: Command) -> None:
    done = exl(*verb, "--help")
    assert (done.code, done.err) == (0, "")
    assert f"exl {' '.join(verb)}" in done.out.partition("Examples:")[2]


@pytest.mark.parametrize("verb", [(), *VERBS], ids=" ".join)
def test_help_pages_fit_a_terminal(
    verb: tuple[str, ...], exl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of a paragraph break at the terminal's width only, and flags have no type."""
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    page = exl(*verb, "--help").out
    assert "bool" not in page
    text = page.partition("\u256d")[0].partition("Usage:")[2].splitlines()
    for line, following in pairwise(text):
        words = following.split()
        if line.strip() and words:
            assert len(line.rstrip()) + 1 + len(words[0]) > 79, line


def test_examples_are_lines_to_copy(exl: Command) -> None:
    examples = exl("generate", "--help").out.partition("Examples:")[2]
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    assert [line[0] == "#" for line in lines] == [True, False] * (len(lines) // 2)


def test_no_arguments_print_the_help(exl: Command) -> None:
    done = exl()
    assert (done.code, done.err) == (0, "")
    assert done.out == exl("--help").out
    for verb in VERBS:
        assert verb[0] in done.out
    for code in ("130", "141"):
        assert code in done.out


@pytest.mark.parametrize("width", ["", "0", "19", "10001", "1" + "0" * 5000, "²", "-5", "wide"])
def test_odd_width_of_the_environment_is_ignored(
    exl: Command, monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    usual = exl("--help").out
    monkeypatch.setenv("COLUMNS", width)
    done = exl("--help")
    assert (done.code, done.out, done.err) == (0, usual, "")


@pytest.mark.parametrize("width", ["20", "133", "10000"])
def test_usable_width_of_the_environment_counts(
    exl: Command, monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", None)
    monkeypatch.setenv("COLUMNS", width)
    assert max(map(len, exl("--help").out.splitlines())) == int(width)


def test_version(exl: Command) -> None:
    done = exl("--version")
    assert done.code == 0
    assert done.out.startswith("exl ")


def test_help_does_not_import_torch() -> None:
    """Prints all pages in one process. The failure names the first page that imports torch."""
    script = (
        "import sys\n"
        "from exl_cli.main import main\n"
        "for page in sys.argv[1:]:\n"
        "    assert main([*page.split(), '--help']) == 0, page\n"
        "    heavy = {'torch', 'numpy', 'exl_core.session.load'} & {*sys.modules}\n"
        "    assert not heavy, (page, heavy)\n"
    )
    pages = ["", *map(" ".join, VERBS)]
    done = subprocess.run(
        [sys.executable, "-c", script, *pages], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_help_starts_in_less_than_a_second() -> None:
    def seconds() -> float:
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "exl_cli", "generate", "--help"], capture_output=True, check=True
        )
        return time.perf_counter() - started

    assert any(seconds() < 1.0 for _ in range(10)), "the other load of the machine changes"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["generate", "--bogus"], "No such option: --bogus"),
        (["generate", "--temp", "warm", "-p", "x"], "--temp"),
        (["generate", "-n", "-2", "-p", "x"], "--max-tokens"),
        (["eval"], "Missing command"),
        (["eval", "divergence"], "CANDIDATE"),
        (["sreve"], "sreve"),
    ],
)
def test_usage_error_is_one_line(args: list[str], expected: str, exl: Command) -> None:
    line = exl(*args).error_line(2)
    assert expected in line
    assert "--help" in line


@pytest.mark.parametrize("args", ["--help", "generate --help", "eval --help", "--version"])
def test_help_for_a_reader_that_has_gone_exits_as_other_output(args: str) -> None:
    run = f"(sleep 0.1; exec {sys.executable} -m exl_cli {args}) | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", run], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("141\n", "")


def test_a_bug_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr("exl_cli.commands.generate.prompts.read_prompt", broken)
    with pytest.raises(ZeroDivisionError):
        main(["generate", "-p", "x"])
