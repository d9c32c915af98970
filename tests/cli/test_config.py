"""The user's file of settings: defaults, profiles, errors; and the short help pages."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from exl_cli.chat.presets import is_preset_name, save_preset
from exl_cli.config import profile, toml_lines
from exl_core.errors import RequestError
from support.commands import Command

SETTINGS = """
temp = 0.0
[generate]
max-tokens = 3
[profiles.writer]
max-tokens = 6
stop = [","]
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of settings that the command reads."""
    path = tmp_path / "settings.toml"
    path.write_text(SETTINGS, encoding="utf-8")
    monkeypatch.setenv("EXL_CONFIG", str(path))
    return path


def reply(exl: Command, model: Path, *args: object) -> dict[str, object]:
    done = exl("generate", model, "-p", "1, 2, 3,", "--json", *args)
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_the_file_has_defaults_and_the_command_line_wins(
    exl: Command, file: Path, smollm2_path: Path
) -> None:
    assert reply(exl, smollm2_path)["text"] == " 4,"
    assert reply(exl, smollm2_path, "-n", 2)["text"] == " 4"


def test_the_file_may_begin_with_a_byte_order_mark(exl: Command, file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + SETTINGS.encode())
    done = exl("config", "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["settings"]["temp"] == 0.0
    file.write_bytes(b"\xef\xbb\xbf" * 2 + SETTINGS.encode())
    assert "is not valid TOML" in exl("config").error_line(2)


def test_a_profile_wins_over_the_rest_of_the_file(
    exl: Command, file: Path, smollm2_path: Path
) -> None:
    found = reply(exl, smollm2_path, "--profile", "writer")
    assert (found["text"], found["stopped_by"]) == (" 4", ",")


@pytest.mark.parametrize(
    ("text", "context"),
    [
        ("[eval]\nctx = 33", 33),
        ("ctx = 32\n[eval]\nctx = 33", 33),
        ("[eval.perplexity]\nctx = 34\n[eval]\nctx = 33", 34),
    ],
)
def test_tables_of_groups_and_of_their_commands_are_read(
    exl: Command, file: Path, tiny_llama_dir: Path, text: str, context: int
) -> None:
    file.write_text(text, encoding="utf-8")
    assert exl("config").code == 0
    (file.parent / "text.txt").write_text("one two three " * 30, encoding="utf-8")
    source = ("--text", file.parent / "text.txt", "--windows", 1, "--json")
    done = exl("eval", "perplexity", "-m", tiny_llama_dir, *source)
    assert done.code == 0, done.err
    assert json.loads(done.out)["ctx"] == context


def test_one_text_is_a_list_of_one(exl: Command, file: Path, smollm2_path: Path) -> None:
    file.write_text('stop = ","\ntemp = 0', encoding="utf-8")
    assert reply(exl, smollm2_path)["stopped_by"] == ","


def test_the_file_names_the_model_of_commands_that_name_none(
    exl: Command, file: Path, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXL_MODEL", "")  # restored after the test, which sets it
    monkeypatch.delenv("EXL_MODEL")
    file.write_text('model = "no-such-model-here"', encoding="utf-8")
    assert "no-such-model-here: no such model" in exl("generate", "-p", "x").error_line(3)


@pytest.mark.parametrize("of_environment", [None, "model-of-the-environment"])
def test_the_model_of_a_profile_wins(
    exl: Command, file: Path, monkeypatch: pytest.MonkeyPatch, of_environment: str | None
) -> None:
    monkeypatch.setenv("EXL_MODEL", of_environment or "")
    if of_environment is None:
        monkeypatch.delenv("EXL_MODEL")
    text = 'model = "model-of-the-file"\n[profiles.writer]\nmodel = "model-of-the-profile"'
    file.write_text(text, encoding="utf-8")
    line = exl("generate", "-p", "x", "--profile", "writer").error_line(3)
    assert "model-of-the-profile: no such model" in line
    line = exl("generate", "-p", "x", "--profile", "writer", "-m", "typed").error_line(3)
    assert "typed: no such model" in line


def test_the_model_of_the_environment_wins_over_the_file(
    exl: Command, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXL_MODEL", "model-of-the-environment")
    file.write_text('model = "model-of-the-file"', encoding="utf-8")
    line = exl("generate", "-p", "x").error_line(3)
    assert "model-of-the-environment: no such model" in line


def test_a_saved_preset_is_a_profile_and_is_shown(
    exl: Command, file: Path, smollm2_path: Path
) -> None:
    values = {"temp": 0.0, "stop": ["5"], "max-tokens": 6, "system": 'a "b"\n\x1b\x7fé'}
    save_preset("short", values)
    assert profile("short") == values
    assert json.loads(exl("config", "--json").out)["presets"] == {"short": values}
    save_preset("short", {"temp": 0.0, "stop": ["5"], "max-tokens": 6})
    found = reply(exl, smollm2_path, "--preset", "short")
    assert (found["text"], found["stopped_by"]) == (" 4, ", "5")
    (file.parent / "presets" / "bad.toml").write_text("tempp = 1", encoding="utf-8")
    assert "bad.toml: there is no option --tempp" in exl("config").error_line(2)


def test_preset_of_a_name_that_is_not_utf8_is_refused(file: Path) -> None:
    with pytest.raises(RequestError, match="model of the preset is not valid text"):
        save_preset("short", {"model": "tiny\udcff.gguf"})


def test_settings_are_written_as_they_were_read() -> None:
    settings = {
        "temp": 0.5,
        "stop": ['"', "line\n", "\x7f", "ü"],
        "json": True,
        "chat": {"max-tokens": 8},
        "profiles": {"writer": {"temp": 1.0, "system": "Be\tbrief."}},
    }
    assert tomllib.loads("\n".join(toml_lines(settings))) == settings


@pytest.mark.parametrize("text", ["notes.json", "a/b", "~/x", "", ".", "-a", "two words"])
def test_the_name_of_a_preset_is_no_path(text: str) -> None:
    assert not is_preset_name(text)


def test_config_shows_the_file(exl: Command, file: Path) -> None:
    done = exl("config")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{file}\ntemp = 0.0\n")
    assert "\n\n[generate]\nmax-tokens = 3\n" in done.out
    assert tomllib.loads(done.out.split("\n", 1)[1]) == tomllib.loads(file.read_text())
    assert json.loads(exl("config", "--json").out)["settings"]["generate"] == {"max-tokens": 3}
    file.unlink()
    assert exl("config").out == f"{file} (does not exist)\n"


@pytest.mark.parametrize(
    ("text", "command", "message"),
    [
        ("temp = ", ("config",), "is not valid TOML"),
        ("tempp = 1", ("config",), "there is no option --tempp. Did you mean 'temp'"),
        ("[generat]\ntemp = 1", ("config",), "no command 'exl generat'. Did you mean 'generate'"),
        ("[eval.perplexty]", ("config",), "'exl eval perplexty'. Did you mean 'perplexity'"),
        ("[eval.x.y]\na = 1", ("config",), "no command 'exl eval x' (expected perplexity, "),
        ("[eval]\nbits = 3", ("config",), "no option --bits of 'exl eval'"),
        ("[chat]\nbits = 3", ("config",), "there is no option --bits of 'exl chat'"),
        ("[doctor]\njson = true", ("config",), "'exl doctor' reads no settings"),
        ("[eval.compare]\njson = true", ("config",), "'exl eval compare' reads no settings"),
        ("[perplexity]\nctx = 8", ("config",), "'exl eval perplexity' is [eval.perplexity]"),
        ("[model]\nctx = 8", ("inspect", "x"), "'exl inspect model' is [inspect.model]"),
        ("temp = 2026-11-28", ("config", "--json"), "temp has a value that no option has"),
        ("stop = ['a', inf]", ("config", "--json"), "stop has a value that no option has"),
        ("[chat]\nstop = { a = 1 }", ("config",), "[chat]: stop has a value that no option has"),
        ("[profiles]\na = 1", ("config",), "[profiles.a]: is not a table"),
        ("profiles = 3", ("config",), "[profiles]: is not a table"),
        ("profiles = 3", ("generate", "--profile", "a"), "[profiles]: is not a table"),
        ("[profiles.a]\nstopp = 1", ("config",), "[profiles.a]: there is no option --stopp"),
        ("[profiles.writer]", ("generate", "--profile", "writter"), "Did you mean 'writer'"),
        (
            "[profiles]\nw = 5",
            ("generate", "--profile", "w"),
            "[profiles.w]: is not a table (got 5)",
        ),
        ("[profiles]\nw = 5", ("generate", "--profile", "v"), "(expected a table [profiles.NAME]"),
        ('temp = "warm"', ("generate", "-p", "x"), "Input should be a valid number"),
        ('temp = "warm"', ("generate", "-p", "x"), "settings.toml or from a profile)"),
        ("model = 3", ("generate", "-p", "x"), "settings.toml: model has a value that no model"),
        ("model = 3", ("config",), "settings.toml: model has a value that no model"),
        ("profiles.a.model = []", ("generate", "--profile", "a"), "[profiles.a]: model has a val"),
        ("generate = 3", ("config",), "is a command and no option (expected a table of options"),
        ("[generate]\ntempp = 1", ("generate", "-p", "x"), "no option --tempp of 'exl generate'"),
        (
            "[eval.perplexity]\nbits = 3",
            ("eval", "perplexity"),
            "no option --bits of 'exl eval p",
        ),
        ("max_tokns = 3", ("generate", "-p", "x"), "no option --max-tokns. Did you mean 'max-tok"),
        ("tempp = 3", ("generate", "--help"), "settings.toml: there is no option --tempp"),
        ("[generat]\ntemp = 1", ("chat",), "no command 'exl generat'. Did you mean 'generate'"),
        ("[perplexity]\nctx = 8", ("chat",), "'exl eval perplexity' is [eval.perplexity]"),
        ("[eval]\nctxx = 3", ("eval", "perplexity"), "there is no option --ctxx of 'exl eval'"),
        ("[eval.x]\nctx = 3", ("eval", "perplexity"), "there is no command 'exl eval x'"),
        (
            "[profiles.a]\nstopp = 1",
            ("generate", "--profile", "a"),
            "[profiles.a]: there is no option --stopp",
        ),
        ("top_p = 1\ntop-p = 1", ("config",), "top-p is set twice, with - and with _"),
        ("[[eval]]\nctx = 3", ("config",), "expected a table of options under [eval]"),
    ],
)
def test_mistakes_in_the_file_are_named(
    exl: Command, file: Path, text: str, command: tuple[str, ...], message: str
) -> None:
    file.write_text(text, encoding="utf-8")
    assert message in exl(*command).error_line(2)


def test_underscore_counts_as_dash_in_keys_but_not_in_names_of_profiles(
    exl: Command, file: Path, smollm2_path: Path
) -> None:
    text = "temp = 0\nmax_tokens = 3\n[serve_lite]\nctx_size = 9\n[profiles.two_tokens]\n"
    file.write_text(f"{text}max_tokens = 2", encoding="utf-8")
    assert reply(exl, smollm2_path)["text"] == " 4,"
    assert reply(exl, smollm2_path, "--profile", "two_tokens")["text"] == " 4"
    assert json.loads(exl("config", "--json").out)["settings"] == {
        "temp": 0,
        "max-tokens": 3,
        "serve-lite": {"ctx-size": 9},
        "profiles": {"two_tokens": {"max-tokens": 2}},
    }


def test_settings_that_only_other_commands_have_are_no_mistakes(exl: Command, file: Path) -> None:
    settings = "bits = 2\nwindows = 3\n[profiles.w]\nwindows = 4\n[chat]\nstats = true\n"
    file.write_text(f"{settings}[eval]\nstride = 1\n[eval.divergence]\nwindows = 1", "utf-8")
    for args in (("config",), ("generate", "--profile", "w", "--help"), ("eval", "perplexity")):
        assert "there is no" not in exl(*args, "--help").err


def test_preset_with_an_unknown_setting_is_refused(exl: Command, file: Path) -> None:
    save_preset("bad", {"tempp": 1})
    line = exl("generate", "-p", "x", "--profile", "bad").error_line(2)
    assert "bad.toml: there is no option --tempp. Did you mean 'temp'" in line


@pytest.mark.parametrize("verb", ["generate", "chat", "run"])
def test_long_help_pages_show_the_common_options_first(exl: Command, verb: str) -> None:
    short, full = exl(verb, "--help").out, exl(verb, "--help-all").out
    for option in ("--temp", "--system", "--help-all"):
        assert option in short
        assert option in full
    assert "--dry-multiplier" not in short
    assert "--dry-multiplier" in full
    assert len(short.splitlines()) < len(full.splitlines()) / 2
