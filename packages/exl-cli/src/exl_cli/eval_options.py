"""Options and output that the commands of `exl eval` share: the text, its windows, their display.

Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol

import typer

from exl_cli.model_options import ModelOptions
from exl_core.errors import RequestError
from exl_eval.texts import KNOWN_DATASETS, Text, read_dataset, read_text

if TYPE_CHECKING:
    from exl_core.parallel.plan import RankCount
    from exl_core.session.load import LoadedModel
    from exl_core.session.open import ModelFiles
    from exl_eval.result import ModelFacts, TextFacts

_TEXT = "Text"

TextFile = Annotated[
    Path | None,
    typer.Option(
        "--text",
        metavar="FILE",
        help="Text to measure on: a UTF-8 file, or rows of a .jsonl or .parquet file.",
        rich_help_panel=_TEXT,
    ),
]
Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        metavar="NAME",
        help=f"Data set of the hub instead of a file: {', '.join(KNOWN_DATASETS)}, owner/name "
        "or owner/name:config.",
        rich_help_panel=_TEXT,
    ),
]
Split = Annotated[
    str | None,
    typer.Option(
        "--split",
        metavar="NAME",
        help="Split of the data set. Default: test; for c4, validation.",
        rich_help_panel=_TEXT,
    ),
]
Column = Annotated[
    str,
    typer.Option(
        "--column", metavar="NAME", help="Column of a row with its text.", rich_help_panel=_TEXT
    ),
]
Rows = Annotated[
    int | None,
    typer.Option(
        "--rows",
        metavar="N",
        min=1,
        help="Use only the first N rows. Default: all rows, which is too much for c4.",
        rich_help_panel=_TEXT,
    ),
]
SpecialText = Annotated[
    bool | None,
    typer.Option(
        "--special-text/--no-special-text",
        help="Whether special tokens that the text spells out, such as <unk>, become these tokens. "
        "Default: yes, but for the style llama.cpp.",
        rich_help_panel=_TEXT,
    ),
]
StyleCtx = Annotated[
    int | None,
    typer.Option("--ctx", metavar="N", min=2, help="Tokens per window. Default: the style's."),
]
Windows = Annotated[
    int | None,
    typer.Option("--windows", metavar="N", min=1, help="Use only the first N windows."),
]
Bos = Annotated[
    str,
    typer.Option(
        "--bos",
        metavar="RULE",
        help="Where BOS is put. none: nowhere; once: before the whole text; each: before every "
        "window, which loses its last token; replace: instead of the first token of every window; "
        "default: as the style does, which depends on whether the tokenizer adds BOS.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of the random draws.")]
Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="FILE",
        help="Save each finished window to FILE, and skip windows that FILE already has.",
    ),
]


Replicas = Annotated[
    int | None,
    typer.Option(
        "--replicas",
        metavar="N",
        min=1,
        max=1024,
        help="Score the windows with N processes that have the whole model each: on the GPUs of "
        "this machine, or with shares of its CPUs. On the CPU the figures stay the same.",
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Run the replicas as actors of a Ray cluster. 'local' starts one on this machine, "
        "'auto' finds a running one.",
    ),
]


class Where(NamedTuple):
    """Replicas that do the work: a number of processes, or actors of a Ray cluster."""

    replicas: int | None
    ray: str | None

    @classmethod
    def of(cls, replicas: int | None, ray: str | None) -> Where | None:
        """None for this process alone."""
        return None if replicas is None and ray is None else cls(replicas, ray)


@dataclass(frozen=True, slots=True)
class Loading:
    """How the models of a command are loaded."""

    device: str
    threads: int | None
    is_quiet: bool
    exact: bool
    batch_invariant: bool
    held_bytes: int | None = None
    """Limit on the memory for weights; layers beyond it are read again in every pass."""
    changes: ModelOptions = field(default_factory=ModelOptions)
    ctx: int | None = None
    """Tokens per window, if the caller chose them; may exceed the model's own context."""
    tensor_parallel: RankCount = 1
    """Processes among which the model is divided."""

    def load(self, model: ModelFiles | str | None) -> LoadedModel:
        from exl_cli.load import load_quietly

        return load_quietly(
            model,
            device=self.device,
            threads=self.threads,
            is_quiet=self.is_quiet,
            exact=self.exact,
            batch_invariant=self.batch_invariant,
            options=replace(
                self.changes.load_options(),
                held_bytes=self.held_bytes,
                tensor_parallel=self.tensor_parallel,
            ),
            ctx=self.ctx,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """Options that name the text of a measurement."""

    text: TextFile = None
    dataset: Dataset = None
    split: Split = None
    column: Column = "text"
    rows: Rows = None
    special_text: SpecialText = None

    @property
    def is_given(self) -> bool:
        return self.text is not None or self.dataset is not None

    def read(self) -> Text:
        """The text, from a file or from a data set; exactly one of them must be given."""
        if self.dataset is not None and self.text is None:
            return read_dataset(self.dataset, split=self.split, column=self.column, rows=self.rows)
        if self.text is None or self.dataset is not None:
            raise RequestError(
                "no text" if self.text is None else "two texts are given",
                expected="--text FILE or --dataset NAME",
                next_step="--help shows both.",
            )
        if self.split is not None:
            raise RequestError(
                "a file has no splits", expected="--split with --dataset", got=self.split
            )
        if self.text == Path("-") and not self.text.exists():
            raise RequestError(
                "the text of a measurement is not read from stdin",
                where="--text",
                expected="a file",
                got="-",
                next_step="Save the text to a file first.",
            )
        return read_text(self.text, column=self.column, rows=self.rows)


@contextmanager
def report_kept_file(file: Path | None) -> Iterator[None]:
    """After Ctrl-C, print that the finished windows are kept in `file`."""
    try:
        yield
    except KeyboardInterrupt:
        if file is not None and sys.stderr is not None:
            print(
                f"exl: finished windows are kept; the same command resumes: {file}",
                file=sys.stderr,
                flush=True,
            )
        raise


def with_error(value: float, stderr: float | None, kind: str) -> str:
    """A figure and its standard error, in the format `kind`. A single token has no such error."""
    return f"{value:{kind}}" + ("" if stderr is None else f" ± {stderr:{kind.lstrip('+')}}")


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
    """Fields of a run's record that name the model, its settings and the machine."""

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
