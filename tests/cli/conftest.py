"""Fixtures that run the command on tiny models.

`exl` runs it in this process, where errors are easy to inspect. `exl_process` starts a process,
for signals, pipes and terminals.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

import exl_cli.main
from exl_cli.main import main
from support import tiny_models
from support.commands import Command, Outcome

COMMAND = (sys.executable, "-m", "exl_cli")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session", autouse=True)
def one_command_tree() -> Iterator[None]:
    """Builds typer's command tree once per session. Each run would spend 0.04 s on it otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exl_cli.main, "get_command", cache(get_command))
        yield


@pytest.fixture
def exl(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """`exl(*args, stdin=b"...")` runs in this process. Stdin is a file, not a terminal."""

    def run(*args: object, stdin: bytes = b"") -> Outcome:
        source = tmp_path / "stdin"
        source.write_bytes(stdin)
        capfd.readouterr()
        with source.open(encoding="utf-8") as file:
            monkeypatch.setattr(sys, "stdin", file)
            code = main([str(arg) for arg in args])
        out, err = capfd.readouterr()
        return Outcome(code, out, err)

    return run


@pytest.fixture
def exl_process() -> Command:
    """Like `exl`, in a process of its own."""

    def run(*args: object, stdin: bytes = b"", timeout_s: float = 120) -> Outcome:
        done = subprocess.run(
            [*COMMAND, *(str(arg) for arg in args)],
            input=stdin,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
        return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A safetensors directory with tokenizer and chat template. Read-only: tests that change it
    use `damaged_dir`."""
    folder = tiny_models.save(
        tiny_models.tiny_llama(max_position_embeddings=512), tmp_path_factory.mktemp("tiny-llama")
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}', encoding="utf-8")
    return folder


@pytest.fixture
def damaged_dir(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_llama_dir, tmp_path / "model"))
