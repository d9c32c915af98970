"""Shell completion: models and formats, by the function that a real shell runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from exl_core.session.hub import download
from exl_core.session.names import HubName
from exl_core.session.pulled import cache_folder
from support.hub import Hub

SHELLS = {
    "bash": (
        'eval "$(exl --show-completion; true)"\n'
        "COMP_WORDS=({words}); COMP_CWORD={last}\n"
        '_exl_completion exl; printf "%s\\n" "${{COMPREPLY[@]}}"\n'
    ),
    "zsh": (
        "_TYPER_COMPLETE_ARGS='{line}' _EXL_COMPLETE=complete_zsh exl\n"
        "exl --show-completion; true\n"
    ),
    "fish": ("exl --show-completion | source\ncomplete -C '{line}'\n"),
}


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """A folder for PATH with the command `exl`."""
    command = tmp_path / "bin" / "exl"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m exl_cli "$@"\n')
    command.chmod(0o755)
    return command.parent


def completed(shell: str, line: str, bin_folder: Path) -> str:
    """Output of a shell that completes the last word of `line`."""
    words = line.split(" ")
    script = SHELLS[shell].format(
        words=" ".join(f"'{word}'" for word in words), last=len(words) - 1, line=line
    )
    return run_in(shell, script, bin_folder)


def run_in(shell: str, script: str, bin_folder: Path) -> str:
    """Output of a script. typer asks which shell has started it, so the shell must not replace
    itself by the last command."""
    ours = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "HF_HUB_CACHE": str(cache_folder())}
    done = subprocess.run(
        [shell, "-c", script],
        env={**os.environ, **ours, "SHELL": f"/bin/{shell}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def test_bash_gets_its_completion_script(bin_folder: Path) -> None:
    """Whatever shell has started the tests."""
    script = run_in("bash", "exl --show-completion; true", bin_folder)
    assert "complete -o default -F _exl_completion exl" in script


@pytest.mark.thorough
@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_models_formats_and_commands(
    shell: str, hub: Hub, bin_folder: Path
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    for name in ("owner/first-GGUF", "other/second-GGUF"):
        hub.add(name, {"m-Q4_K_M.gguf": b"x"})
        download(HubName(name))
    assert "owner/first-GGUF" in completed(shell, "exl run own", bin_folder)
    assert "second-GGUF" in completed(shell, "exl chat sec", bin_folder)
    assert "owner/first-GGUF" not in completed(shell, "exl rm oth", bin_folder)
    assert "chatml" in completed(shell, "exl chat --format chat", bin_folder)
    assert "--temp" in completed(shell, "exl generate --tem", bin_folder)
    assert "generate" in completed(shell, "exl gen", bin_folder)
