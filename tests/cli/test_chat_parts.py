"""Unit tests of a chat's transcripts, settings and slash commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from exl_cli.chat import commands, transcript
from exl_cli.chat.conversation import Conversation
from exl_cli.chat.settings import NAMES, ChatOptions, ChatSettings
from exl_cli.chat.terminal import CommandCompleter
from exl_cli.reply_options import ReplyOptions
from exl_cli.sampling_options import SamplingOptions
from exl_core.errors import ExlError, RequestError
from support.scripted import ByteTokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
GOOD = {
    "format": "exl-chat",
    "version": 1,
    "system": None,
    "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
}


@pytest.fixture
def settings() -> ChatSettings:
    return ChatSettings(SamplingOptions(), ChatOptions())


# Transcripts


@given(st.none() | TEXT, st.lists(st.tuples(TEXT, TEXT, TEXT), max_size=4))
def test_a_transcript_loads_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, system: str | None, said: list[tuple[str, str, str]]
) -> None:
    conversation = Conversation(system)
    for question, answer, reasoning in said:
        conversation.say(question)
        conversation.answer(answer, reasoning)
    path = tmp_path_factory.mktemp("chat") / "chat.json"
    transcript.save(conversation, path, "a model")
    assert transcript.load(path) == (system, conversation.turns)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"version": 2},
        {"system": 7},
        {"messages": None},
        {"messages": GOOD["messages"][:1]},  # type: ignore[index]
        {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]},
        {"messages": [{"role": "user", "content": 1}, {"role": "assistant", "content": "b"}]},
        {"messages": ["a", "b"]},
    ],
    ids=str,
)
def test_bad_transcript_is_a_one_line_error(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "chat.json"
    path.write_text(json.dumps({**GOOD, **change}), encoding="utf-8")
    with pytest.raises(RequestError) as caught:
        transcript.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"[" * 100_000])
def test_transcript_that_is_not_a_json_object_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "chat.json"
    path.write_bytes(data)
    with pytest.raises(RequestError):
        transcript.load(path)
    with pytest.raises(ExlError, match="no-such-file"):
        transcript.load(tmp_path / "no-such-file")


# Settings


def test_every_setting_accepts_its_shown_value(settings: ChatSettings) -> None:
    before = settings.shown()
    assert {"temp", "xtc-probability", "dry-base", "max-response-tokens", "stats"} <= set(before)
    assert tuple(before) == NAMES
    assert settings.shown("temp") == settings.shown("--temp") == {"temp": "0.8"}
    with pytest.raises(RequestError, match="nearest is temp"):
        settings.shown("tmep")
    for name, value in before.items():
        settings.set(name, value)
    assert settings.shown() == before


def test_settings_reach_the_sampler(settings: ChatSettings) -> None:
    for name, value in {"temp": "0.5", "top-k": "7", "mirostat": "5", "dynatemp": "0.5,2"}.items():
        settings.set(name, value)
    settings.set("temp_last", "on")
    params = settings.params()
    assert (params.temperature, params.top_k, params.mirostat_tau) == (0.5, 7, 5.0)
    assert (params.min_temp, params.max_temp, params.temperature_last) == (0.5, 2.0, True)
    settings.set("mirostat", "off")
    assert settings.params().mirostat_tau is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tmep", "1", "nearest is temp"),
        ("temp", "warm", "a number"),
        ("temp", "-1", "out of range"),
        ("top-k", "1.5", "a whole number"),
        ("stats", "maybe", "on or off"),
        ("dynatemp", "2,1", "range of temperatures"),
        ("max-response-tokens", "0", "token limit is 0"),
        ("__class__", "x", "no setting"),
    ],
)
def test_invalid_setting_is_refused_and_changes_nothing(
    settings: ChatSettings, name: str, value: str, message: str
) -> None:
    before = settings.shown()
    with pytest.raises(RequestError, match=message):
        settings.set(name, value)
    assert settings.shown() == before


def test_reply_options_are_set_shown_and_cleared(settings: ChatSettings) -> None:
    for name, value in (("ban", "red"), ("ban", "off white"), ("bias", "7=-inf"), ("bias", "A=2")):
        settings.set(name, value, ByteTokenizer())
    settings.set("min-tokens", "5")
    settings.set("token-healing", "on")
    assert settings.shown("ban") == {"ban": "'red', 'off white'"}
    assert settings.shown("bias") == {"bias": "'7=-inf', 'A=2'"}
    assert settings.replying.fields() == {
        "min_tokens": 5,
        "banned_strings": ("red", "off white"),
        "token_healing": True,
    }
    for name in ("ban", "bias"):
        settings.set(name, "off")
        assert settings.shown(name) == {name: "off"}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("bias", "two words=1", "is not one token"),
        ("bias", "7", "is not a token and a number"),
        ("bias", "99999=1", "does not have"),
        ("min-tokens", "2000", "more than the limit"),
        ("negative-prompt", "Be rude.", "began without guidance"),
        ("guidance-scale", "2", "began without guidance"),
    ],
)
def test_bad_reply_options_change_nothing(
    settings: ChatSettings, name: str, value: str, message: str
) -> None:
    before = settings.shown()
    with pytest.raises(RequestError, match=message):
        settings.set(name, value, ByteTokenizer())
    assert settings.shown() == before


def test_guidance_can_be_changed_where_the_chat_began_with_it() -> None:
    replying = ReplyOptions(negative_prompt="Be rude.", guidance_scale=1.5)
    settings = ChatSettings(SamplingOptions(), ChatOptions(), replying)
    settings.set("guidance-scale", "2")
    settings.set("negative-prompt", "Be terse.")
    assert settings.shown("guidance-scale") == {"guidance-scale": "2"}
    with pytest.raises(RequestError, match="without --negative-prompt"):
        settings.set("negative-prompt", "off")


def test_each_reply_has_its_own_seed() -> None:
    def seeds() -> list[int | None]:
        settings = ChatSettings(SamplingOptions(seed=2**63 - 1), ChatOptions())
        return [settings.params().seed for _ in range(3)]

    assert seeds() == seeds() == [2**63 - 1, 0, 1]


# Commands


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/help", ("help", "")),
        ("/?", ("help", "")),
        ("/exit", ("bye", "")),
        ("/show temp", ("show", "temp")),
        ("/quit", ("bye", "")),
        ("/list", ("models", "")),
        ("/set temp 0.5", ("set", "temp 0.5")),
        ("/system two\nlines", ("system", "two\nlines")),
        ("/etc/hosts", None),
        ("/ help", None),
        ("hello /help", None),
    ],
)
def test_which_lines_are_commands(text: str, command: tuple[str, str] | None) -> None:
    assert commands.parse(text, is_piped=False) == command


def test_misspelled_command_suggests_the_nearest() -> None:
    with pytest.raises(RequestError, match="/retry"):
        commands.parse("/rety", is_piped=False)


@pytest.mark.parametrize("text", ["/save x", "/load x", "/set temp 0", "/hlep", "/system x"])
def test_commands_that_touch_files_or_settings_are_text_over_a_pipe(text: str) -> None:
    assert commands.parse(text, is_piped=True) is None
    assert commands.parse("/clear", is_piped=True) == ("clear", "")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("/re", ["/retry"]),
        ("/s", ["/set", "/show", "/system", "/save", "/stats"]),
        ("/mod", ["/model", "/models"]),
        ("/show par", ["/show parameters"]),
        ("/set max", ["/set max-response-tokens"]),
        ("/load cha", ["/load chat.json"]),
        ("hello", []),
        ("", []),
        ("/system max", []),
    ],
)
def test_tab_completes(
    typed: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.json").touch()
    document = Document(typed)
    found = CommandCompleter().get_completions(document, CompleteEvent(completion_requested=True))
    whole = [typed[: len(typed) + one.start_position] + one.text for one in found]
    assert whole == expected
