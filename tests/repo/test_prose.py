"""Plain words: comments, docstrings and documents avoid the phrases that readers had to decode.

The counters hold a floor only. They cannot tell clear prose from unclear prose.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("docs/cli.md", "docs/tree.md")  # from docstrings, which are checked where they stand
CODE = (".py", ".pyi", ".h", ".cpp", ".cu", ".cuh")
MOST_PER_1000_WORDS = {
    r"what": 2.5,
    r"whoever|nobody|somebody": 0.1,
    r"told|tells": 0.2,
    r"lie|lies": 0.2,
    r"so many": 0.1,
    r"asked for": 0.1,
}
C_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*(?:\n[ \t]*//[^\n]*)*|/\*.*?\*/', re.S)
NOT_FILES = {"llama.cpp", "docs/gguf.md"}  # a program, and a file of another project
FILE_NAME = re.compile(r"[\w.\-]+(?:/[\w.\-]+)*\.(?:py|pyi|cpp|cuh|cu|h|sh|md|toml)\b(?!\()")


class Passage(NamedTuple):
    """One comment, docstring or document."""

    where: str  # file:line
    text: str


def tracked_files() -> list[str]:
    command = ("git", "ls-files")
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def is_checked(name: str) -> bool:
    return name not in GENERATED


def comments_of_python(text: str) -> Iterator[tuple[int, str]]:
    """Docstrings, and comments; neighbouring comment lines in one column are one comment."""
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                value = child.value.value
                if isinstance(value, str):
                    yield child.lineno, value
    run: list[str] = []
    start, column = 0, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        row, col = token.start
        is_own_line = not token.line[:col].strip()
        if run and not (is_own_line and row == start + len(run) and col == column):
            yield start, "\n".join(run)
            run = []
        if not run:
            start, column = row, col
        run.append(token.string.lstrip("#").strip())
    if run:
        yield start, "\n".join(run)


def comments_of_c(text: str) -> Iterator[tuple[int, str]]:
    for match in C_TOKEN.finditer(text):
        if match[0].startswith("/"):
            stripped = (line.strip().lstrip("/*").strip() for line in match[0].splitlines())
            yield text.count("\n", 0, match.start()) + 1, "\n".join(stripped)


@cache
def passages() -> tuple[Passage, ...]:
    found = []
    for name in tracked_files():
        path = ROOT / name
        if not is_checked(name):
            continue
        if path.suffix == ".md":
            found.append(Passage(name, path.read_text(encoding="utf-8")))
        elif path.suffix in CODE:
            text = path.read_text(encoding="utf-8")
            parts = comments_of_python if path.suffix.startswith(".py") else comments_of_c
            found += [Passage(f"{name}:{line}", part) for line, part in parts(text)]
    return tuple(found)


def test_every_file_that_is_mentioned_exists() -> None:
    names = ["/" + name for name in tracked_files()]
    mentioned = [(p.where, name) for p in passages() for name in FILE_NAME.findall(p.text)]
    assert len(mentioned) > 100
    assert not [
        f"{where}: {name}"
        for where, name in mentioned
        if not (name in NOT_FILES or "NAME" in name)
        and not any(known.endswith("/" + name.removeprefix("./")) for known in names)
    ]


def test_no_comment_begins_with_of_or_what() -> None:
    begun = re.compile(r"(Of|What)\b")
    assert not [f"{where}: {text[:60]!r}" for where, text in passages() if begun.match(text)]


@pytest.mark.parametrize("phrase", MOST_PER_1000_WORDS)
def test_vague_words_are_rare(phrase: str) -> None:
    words = sum(len(re.findall(r"[A-Za-z']+", p.text)) for p in passages())
    pattern = re.compile(rf"\b(?:{phrase})\b", re.I)
    places = [p.where for p in passages() for _ in pattern.findall(p.text)]
    rate = 1000 * len(places) / words
    assert rate <= MOST_PER_1000_WORDS[phrase], f"{rate:.2f} per 1000 words: {places[:40]}"
