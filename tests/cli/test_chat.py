"""`exl chat` over a pipe, with a tiny model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from exl_cli.chat import transcript
from exl_cli.chat.commands import FOR_PIPES
from exl_cli.chat.conversation import Conversation
from exl_core.prompt.formats import all_formats
from support.commands import Command


@pytest.fixture
def chat(exl: Command, tiny_llama_dir: Path) -> Command:
    """`chat(b"lines", *args)` with greedy sampling and short replies that only the limit ends."""
    args = ("chat", "-m", tiny_llama_dir, "--temp", "0", "-n", 6)
    return lambda data, *more: exl(*args, *more, stdin=data)


def test_stdout_has_only_replies(chat: Command) -> None:
    done = chat(b"Hello\nAgain\n")
    assert (done.code, done.err) == (0, "")
    first = chat(b"Hello\n")
    assert done.out.startswith(first.out)
    assert len(done.out) > len(first.out) > 1
    assert done.out.endswith("\n")


def test_turns_stay_in_the_prompt_until_clear(chat: Command) -> None:
    twice = chat(b"Hello\nHello\n").out
    cleared = chat(b"Hello\n/clear\nHello\n").out
    once = chat(b"Hello\n").out
    assert cleared == once + once
    assert twice != cleared


def test_bye_ends_the_chat_and_blank_lines_are_skipped(chat: Command) -> None:
    assert chat(b"\n  \nHello\n/bye\nAgain\n").out == chat(b"Hello\n").out


def test_text_that_begins_with_a_slash_is_sent(chat: Command) -> None:
    assert chat(b"/etc/hosts holds what?\n").out != ""


def test_help_names_the_commands_that_act_over_a_pipe(exl: Command) -> None:
    page = " ".join(exl("chat", "--help").out.split())
    about_pipes = page.partition("Over a pipe")[2].partition("is a prompt.")[0]
    assert set(re.findall(r"/([a-z]+)", about_pipes)) == {*FOR_PIPES, "quit"}


def test_empty_stdin_is_not_an_error(chat: Command) -> None:
    done = chat(b"")
    assert (done.code, done.out, done.err) == (0, "", "")


def test_closed_stdin_is_an_error(tiny_llama_dir: Path) -> None:
    for verb in ("chat", "run"):
        run = f"{sys.executable} -m exl_cli {verb} {tiny_llama_dir} <&-"
        done = subprocess.run(["bash", "-c", run], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1
        assert "got a closed stdin" in done.stderr


def test_full_context_drops_the_oldest_turns(chat: Command) -> None:
    done = chat(b"Hello there, how are you?\n" * 20, "-c", 128)
    assert (done.code, done.err) == (0, "")


def test_message_longer_than_the_context_is_reported_and_the_next_answered(chat: Command) -> None:
    done = chat(b"Hello\n" + b"x" * 400 + b"\nHello\n", "-c", 128)
    assert done.code == 1
    lines = done.err.splitlines()
    assert "does not fit into the context" in lines[0]
    assert all(line.startswith("exl: error: ") for line in lines)
    assert len(lines) == 2
    assert "Traceback" not in done.err
    assert done.out == chat(b"Hello\nHello\n", "-c", 128).out


@pytest.mark.parametrize(
    ("ctx_size", "advice"),
    [
        (128, "Shorten it, or raise --ctx-size (the model's own context is 512)."),
        (512, "Shorten it; this is the model's own context."),
    ],
)
def test_long_message_gets_advice_that_the_model_can_follow(
    chat: Command, ctx_size: int, advice: str
) -> None:
    done = chat(b"x" * 2000 + b"\n", "-c", ctx_size)
    assert done.code == 1
    assert done.err.splitlines()[0].endswith(advice)


def test_line_that_is_not_utf8_is_an_error(chat: Command) -> None:
    line = chat(b"\xff\n").error_line(2)
    assert "line 1" in line


def test_a_model_without_template_is_refused(exl: Command, damaged_dir: Path) -> None:
    (damaged_dir / "chat_template.jinja").unlink()
    assert "no chat template" in exl("chat", damaged_dir, stdin=b"Hello\n").error_line(3)


def test_the_formats_are_listed(exl: Command) -> None:
    listed = json.loads(exl("chat", "--list-formats", "--json").out)
    assert [one["name"] for one in listed["formats"]] == list(all_formats())
    table = exl("chat", "--list-formats")
    assert (table.code, table.err) == (0, "")
    assert all(name in table.out for name in ("llama3", "command-r", "teknium/OpenHermes-2.5"))


def test_format_that_differs_from_the_template_warns(chat: Command) -> None:
    done = chat(b"Hello\n", "--format", "vicuna")
    assert done.code == 0
    assert done.out != chat(b"Hello\n").out
    assert done.err.startswith(
        "exl: warning: --format vicuna and the model's own template disagree"
    )
    assert done.err.count("\n") == 1


def test_format_replaces_a_missing_template(exl: Command, damaged_dir: Path) -> None:
    (damaged_dir / "chat_template.jinja").unlink()
    args = ("chat", damaged_dir, "--temp", "0", "-n", 6)
    done = exl(*args, "--format", "llama2", stdin=b"Hello\n")
    assert (done.code, done.err) == (0, "")
    assert len(done.out) > 1
    assert "--format NAME" in exl(*args, stdin=b"Hello\n").error_line(3)


def test_conversation_continues_from_its_file(
    exl: Command, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    args = ("chat", "-m", tiny_llama_dir, "--temp", "0", "-n", 6)
    whole = exl(*args, "--system", "Be brief.", stdin=b"Hello\nAgain\n").out
    first = exl(*args, "--system", "Be brief.", stdin=b"Hello\n").out
    kept = Conversation("Be brief.")
    kept.say("Hello")
    kept.answer(first.strip())
    path = tmp_path / "chat.json"
    transcript.save(kept, path, "tiny")
    assert first + exl(*args, "--load", path, stdin=b"Again\n").out == whole
    other = exl(*args, "--load", path, "--system", "Be long.", stdin=b"Again\n").out
    assert first + other != whole


def test_amnesia_sends_each_prompt_without_history(chat: Command) -> None:
    assert chat(b"Hello\nHello\n", "--amnesia").out == 2 * chat(b"Hello\n").out


def test_every_setting_of_the_sampler_is_an_option(chat: Command) -> None:
    text = chat(b"Hello\n").out
    assert chat(b"Hello\n", "--frequency-penalty", "50", "-n", 30).out != text
    for option in (
        "--dry-multiplier 1 --dry-breakers .?",
        "--mirostat 5",
        "--typical 0.5",
        "--tfs 0.9",
    ):
        assert chat(b"Hello\n", "--temp", "1", "--seed", 1, *option.split()).code == 0


def test_stats_go_to_stderr(chat: Command) -> None:
    plain, stats = chat(b"Hello\n"), chat(b"Hello\n", "--stats")
    assert stats.out == plain.out
    assert re.fullmatch(r"exl: context \d+ tokens .* reply 6 tokens at [\d.]+ tok/s\n", stats.err)
    assert chat(b"Hello\n", "--stats", "-q").err == ""


def test_names_of_the_token_limit_are_aliases(exl: Command, tiny_llama_dir: Path) -> None:
    args = ("chat", "-m", tiny_llama_dir, "--temp", "0")
    names = ("-n", "--max-tokens", "--max-response-tokens")
    outs = {exl(*args, name, "5", stdin=b"Hello\n").out for name in names}
    assert len(outs) == 1


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--format", "lama3"), "llama3"),
        (("--system", "x", "--no-system"), "--no-system"),
        (("--json",), "--list-formats"),
        (("--dynatemp", "2"), "--dynatemp"),
        (("--repeat-penalty", "0"), "repetition_penalty"),
        (("--typical", "0"), "--typical"),
        (("-n", "0"), "-n"),
        (("--stop", ""), "--stop is empty"),
        (("--stop", "\udcff"), "--stop is not valid text"),
        (("--load", "no-such-file"), "no-such-file"),
    ],
)
def test_bad_options_are_refused_before_the_model_is_resolved(
    exl: Command, args: tuple[str, ...], expected: str
) -> None:
    assert expected in exl("chat", "-m", "no-such-model", *args, stdin=b"Hello\n").error_line(2)


def test_a_template_without_system_role_refuses_a_system_prompt(
    exl: Command, damaged_dir: Path
) -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system!') }}{% endif %}x"
    )
    (damaged_dir / "chat_template.jinja").write_text(template, encoding="utf-8")
    line = exl("chat", damaged_dir, "--system", "Be brief.", stdin=b"Hello\n").error_line(3)
    assert "No system!" in line
    assert exl("chat", damaged_dir, "-n", 2, "--no-system", stdin=b"Hello\n").code == 0
