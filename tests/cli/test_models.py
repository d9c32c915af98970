"""Models by name: `pull`, `list`, `rm`, `show`, `run`, and `--offline`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from support.commands import Command, Outcome
from support.hub import Hub, serving_hub


@pytest.fixture
def tiny_repo(hub: Hub, tiny_llama_dir: Path) -> str:
    """A hub with one model of safetensors that can be run."""
    files = {path.name: path.read_bytes() for path in tiny_llama_dir.iterdir()}
    hub.add("owner/tiny-llama", files)
    return "owner/tiny-llama"


def test_a_pulled_model_is_listed_shown_run_and_removed(exl: Command, tiny_repo: str) -> None:
    pulled = exl("pull", tiny_repo)
    assert (pulled.code, pulled.err) == (0, "")
    assert Path(pulled.out.strip()).is_dir()

    listed = json.loads(exl("list", "--json").out)
    assert [model["name"] for model in listed["models"]] == [tiny_repo]
    assert "owner/tiny-llama   safetensors" in exl("list").out

    shown = json.loads(exl("show", "tiny", "--json").out)
    assert (shown["name"], shown["architecture"]) == ("tiny-llama", "llama")

    reply = exl("run", "tiny", "Hi", "-n", 3, "--temp", 0)
    assert (reply.code, reply.err) == (0, "")
    assert reply.out == exl("generate", "tiny", "--chat", "-p", "Hi", "-n", 3, "--temp", 0).out

    removed = exl("rm", "tiny")
    assert removed.code == 0
    assert removed.err.startswith("removed owner/tiny-llama")
    assert exl("list").out.startswith("No models in ")


def test_a_cache_that_cannot_be_written_is_not_the_network(
    exl: Command, tiny_repo: str, tmp_path: Path
) -> None:
    (tmp_path / "hub-cache").mkdir()
    (tmp_path / "hub-cache/.locks").touch()  # a file in place of a folder
    done = exl("pull", tiny_repo)
    line = done.err.splitlines()[-1]
    assert done.code == 1
    assert line.startswith(f"exl: error: {tmp_path}/hub-cache/.locks/")
    assert "cannot be written (got " in line


def test_a_command_downloads_a_hub_name_that_it_needs(exl: Command, tiny_repo: str) -> None:
    done = exl("inspect", tiny_repo, "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["name"] == "tiny-llama"


def test_offline_needs_the_model_on_this_machine(exl: Command, tiny_repo: str, hub: Hub) -> None:
    done = exl("inspect", tiny_repo, "--offline")
    assert done.code == 3
    assert "is not on this machine, and exl is offline" in done.err
    assert hub.requests == []


def test_the_word_model_may_be_left_out(exl: Command, smollm2_path: Path) -> None:
    assert exl("inspect", smollm2_path).out == exl("inspect", "model", smollm2_path).out
    assert "Usage" in exl("inspect", "--help").out


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("pull", "no name"), 2, "is no name of a model on the hub"),
        (("pull", "owner/gone"), 3, "the hub has no such model"),
        (("rm", "smollm2"), 2, "is an installed package"),
        (("rm", "tiny-lama"), 3, "no such model in the hub's cache. 'exl list' shows them"),
        (("run", "smolm2", "Hi"), 3, "Did you mean 'smollm2'?"),
    ],
)
def test_names_that_mean_nothing(
    exl: Command, hub: Hub, args: tuple[str, ...], code: int, message: str
) -> None:
    done = exl(*args)
    assert (done.code, done.out) == (code, "")
    assert message in done.err


@pytest.mark.thorough
def test_the_client_in_a_process_of_its_own_pulls_and_runs(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exl_process: Command
) -> None:
    with serving_hub() as hub:
        files = {path.name: path.read_bytes() for path in tiny_llama_dir.iterdir()}
        hub.add("owner/tiny-llama", files)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        done: Outcome = exl_process("run", "owner/tiny-llama", "Hi", "-n", 3)
        assert (done.code, done.err) == (0, "")
    assert exl_process("run", "owner/tiny-llama", "Hi", "-n", 3, "--offline").code == 0
    assert (tmp_path / "home" / "hub" / "models--owner--tiny-llama").is_dir()
    assert "HF_HUB_OFFLINE" not in os.environ
