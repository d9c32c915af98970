"""Error lines are a single line without control characters; invalid settings are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from exl_core.errors import ExlError, RequestError, printable
from exl_core.settings import MAX_THREADS, available_cpus, read_settings, state_folder


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXL_ISA", raising=False)
    monkeypatch.delenv("EXL_THREADS", raising=False)


def test_an_error_line_has_where_what_expected_got_and_next_step() -> None:
    error = ExlError("is wrong", where="file", expected=1, got=2, next_step="Try again.")
    assert str(error) == "file: is wrong (expected 1, got 2). Try again."


def test_control_characters_are_escaped() -> None:
    error = ExlError(
        "tensor 'a\x1b]0;owned\x07b' is odd\x9b2J", where="na\x08me\x7f", got="two\r\nlines\x85more"
    )
    assert (
        str(error) == r"na\x08me\x7f: tensor 'a\x1b]0;owned\x07b' is odd\x9b2J (got two lines more)"
    )


def test_other_text_is_unchanged() -> None:
    text = "naïve 東京 👩‍🚀 C:\\models"
    assert printable(text) == text


def test_default_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_settings().isa is None
    assert read_settings().threads == available_cpus() >= 1
    monkeypatch.setenv("EXL_THREADS", "")
    assert read_settings().threads == available_cpus()


def test_a_system_without_affinity_counts_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # macOS has none
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert read_settings().threads == 7
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert read_settings().threads == 1
    monkeypatch.setattr(os, "cpu_count", lambda: 4096)
    assert read_settings().threads == MAX_THREADS


@pytest.mark.parametrize("text", ["1", "16", "1024", "0008"])
def test_valid_thread_counts(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("EXL_THREADS", text)
    assert read_settings().threads == int(text)


@pytest.mark.parametrize("text", ["0", "1025", "-1", "2.5", "²", "٣", " 2", "many", "1" * 5000])
def test_invalid_thread_counts_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("EXL_THREADS", text)
    with pytest.raises(RequestError, match=r"EXL_THREADS .*expected 1 to 1024"):
        read_settings()


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXL_ISA", "foo")
    with pytest.raises(RequestError, match=r"EXL_ISA .*got foo"):
        read_settings()


@pytest.mark.parametrize("given", [None, "", "not/absolute"])
def test_the_state_folder_follows_xdg_state_home(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert state_folder() == Path("/state/exl")
    if given is None:
        monkeypatch.delenv("XDG_STATE_HOME")
    else:
        monkeypatch.setenv("XDG_STATE_HOME", given)
    assert state_folder() == Path("/home/somebody/.local/state/exl")
