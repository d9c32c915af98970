"""What the verbs of `exl eval` share: which text, in which windows, and how both are shown.

Declarations and text; no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from exl_core.errors import RequestError
from exl_eval.texts import KNOWN_DATASETS, Text, read_dataset, read_text

if TYPE_CHECKING:
    from exl_core.load import LoadedModel
    from exl_eval.result import ModelFacts, TextFacts

_TEXT = "Text"

TextFile = Annotated[
    Path | None,
    typer.Option(
        "--text",
        metavar="FILE",
        help="The text: a UTF-8 file, or rows of a .jsonl or .parquet file.",
        rich_help_panel=_TEXT,
    ),
]
Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        metavar="NAME",
        help=f"A data set of the hub in place of a file: {', '.join(KNOWN_DATASETS)}, owner/name "
        "or owner/name:config.",
        rich_help_panel=_TEXT,
    ),
]
Split = Annotated[
    str | None,
    typer.Option(
        "--split",
        metavar="NAME",
        help="Part of the data set. Without it: test, or validation of c4.",
        rich_help_panel=_TEXT,
    ),
]
Column = Annotated[
    str,
    typer.Option(
        "--column", metavar="NAME", help="Where a row has its text.", rich_help_panel=_TEXT
    ),
]
Rows = Annotated[
    int | None,
    typer.Option(
        "--rows",
        metavar="N",
        min=1,
        help="Only the first N rows. Without it: all, which is too much of c4.",
        rich_help_panel=_TEXT,
    ),
]
StyleCtx = Annotated[
    int | None,
    typer.Option("--ctx", metavar="N", min=2, help="Tokens in a window. Without it: the style's."),
]
Windows = Annotated[
    int | None,
    typer.Option("--windows", metavar="N", min=1, help="Only the first N windows."),
]
Bos = Annotated[
    str,
    typer.Option(
        "--bos",
        metavar="RULE",
        help="none; once: before the whole text; each: before every window, in place of its last "
        "token; replace: in place of every window's first token; default: what the style does with "
        "a tokenizer that adds BOS by itself, or with one that does not.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of the random draws.")]
Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="FILE",
        help="Keep each window that is done in FILE, and go on from there if it has some.",
    ),
]


@dataclass(frozen=True, slots=True)
class Loading:
    """How the models of a command are loaded."""

    device: str
    threads: int | None
    is_quiet: bool
    exact: bool

    def load(self, spec: str | None) -> LoadedModel:
        from exl_cli.load import load_quietly

        return load_quietly(
            spec,
            device=self.device,
            threads=self.threads,
            is_quiet=self.is_quiet,
            exact=self.exact,
        )


def read(
    text: Path | None,
    dataset: str | None,
    *,
    split: str | None,
    column: str,
    rows: int | None,
) -> Text:
    """One text, from one place."""
    if (text is None) == (dataset is None):
        raise RequestError(
            "no text" if text is None else "two texts are given",
            expected="--text FILE or --dataset NAME",
            next_step="--help shows both.",
        )
    if dataset is not None:
        return read_dataset(dataset, split=split, column=column, rows=rows)
    if split is not None:
        raise RequestError("a file has no parts", expected="--split with --dataset", got=split)
    assert text is not None
    return read_text(text, column=column, rows=rows)


@contextmanager
def saying_what_is_kept(file: Path | None) -> Iterator[None]:
    """Whoever stops a run with Ctrl-C is told that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        if file is not None and sys.stderr is not None:
            print(
                f"exl: the windows so far are kept; the same command goes on: {file}",
                file=sys.stderr,
                flush=True,
            )
        raise


def text_facts(text: TextFacts) -> dict[str, str]:
    from exl_cli.render import format_bytes

    stride = "" if text.stride is None else f", stride {text.stride}"
    token = "" if text.bos_id is None else f" (token {text.bos_id})"
    special = "" if text.special_text else ", special tokens are read as text"
    documents = "" if text.documents == 1 else f", {text.documents} documents"
    return {
        "style": f"{text.style}, context {text.ctx}{stride}, BOS {text.bos}{token}{special}",
        "text": f"{text.text}, {format_bytes(text.text_bytes)}, {text.text_tokens} tokens"
        f"{documents}",
        "text sha256": text.text_sha256,
        "tokenizer sha256": text.tokenizer_sha256,
    }


def windows_text(text: TextFacts) -> str:
    return f"{text.windows} {'window' if text.windows == 1 else 'windows'} of {text.ctx}"


class Run(Protocol):
    """What a record of a run says of what ran, and on what."""

    @property
    def model(self) -> str: ...
    @property
    def kv_format(self) -> str: ...
    @property
    def exact(self) -> bool: ...
    @property
    def device(self) -> str: ...
    @property
    def threads(self) -> int: ...


def running_text(run: Run) -> str:
    machine = f"{run.threads} threads" if run.device == "cpu" else run.device
    return f"{run.model}, {run.kv_format} cache{', exact' * run.exact}, {machine}"


def model_text(model: ModelFacts) -> str:
    from exl_cli.render import format_bytes

    return (
        f"{model.model}, {format_bytes(model.weights_bytes)} in memory, {model.kv_format} cache"
        f"{', token by token' * model.token_by_token}{', exact' * model.exact}, {model.device}"
    )
