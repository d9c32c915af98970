"""Two ways to run the command: in this process, where errors are cheap to look at, and as a real
process, where signals, pipes and terminals are. Tiny models for both."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import exl_cli.main
from exl_cli.main import main
from support import tiny_models

COMMAND = (sys.executable, "-m", "exl_cli")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@dataclass(frozen=True)
class Outcome:
    """What one run of the command left behind."""

    code: int
    out: str
    err: str

    def error_line(self, code: int) -> str:
        """The one line of an error; everything about its form is checked here."""
        assert self.code == code, self.err
        assert self.out == ""
        assert "Traceback" not in self.err
        assert self.err.count("\n") == 1, self.err
        assert self.err.startswith("exl: error: ")
        return self.err.removeprefix("exl: error: ").removesuffix("\n")


InProcess = Callable[..., Outcome]


@pytest.fixture(scope="session", autouse=True)
def one_command_tree() -> Iterator[None]:
    """The commands that typer makes of the functions, made once: 0.04 s for each run otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exl_cli.main, "get_command", cache(exl_cli.main.get_command))
        yield


@pytest.fixture
def exl(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> InProcess:
    """`exl(*args, stdin=b"...")` in this process; stdin is a file, so that it is no terminal."""

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
def exl_process() -> Callable[..., Outcome]:
    """The same as a process of its own."""

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
    """A safetensors directory with tokenizer and chat template. Read only: copy it to damage it."""
    folder = tiny_models.save(
        tiny_models.tiny_llama(max_position_embeddings=512), tmp_path_factory.mktemp("tiny-llama")
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}', encoding="utf-8")
    return folder


@pytest.fixture
def damaged_dir(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tiny_llama_dir, tmp_path / "model"))
