"""Output for people: progress bars, the speed line, tables, numbers with units.

Progress goes to stderr, and only if stderr is a terminal. Rich honors `NO_COLOR`. The tables of
`inspect` and `doctor` are the answer of the command and go to stdout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from exl_cli import output
from exl_core.errors import printable

if TYPE_CHECKING:
    from exl_core.engine.events import FinishEvent

_PLAIN_WIDTH = 120

ByteProgress = Callable[[int, int], None]


def is_watched(*, is_quiet: bool) -> bool:
    """Is stderr a terminal, and progress not switched off?"""
    return not is_quiet and sys.stderr is not None and sys.stderr.isatty()


def stderr_console() -> Console:
    return Console(stderr=True, highlight=False)


def print_note(line: str) -> None:
    """Print a line to stderr, above a progress bar if one is shown.

    Rich redirects `sys.stderr` while a bar is shown and moves the bar below the line. A console of
    our own would bypass that.
    """
    if sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)


@contextmanager
def _bar(
    first: str, *columns: ProgressColumn, is_quiet: bool, per_second: int = 10
) -> Iterator[Callable[..., None] | None]:
    """A progress bar with the description `first`, removed when done. Yields its update function,
    or None if progress is not shown."""
    if not is_watched(is_quiet=is_quiet):
        yield None
        return
    bar = Progress(
        *columns, console=stderr_console(), transient=True, refresh_per_second=per_second
    )
    with bar:
        yield partial(bar.update, bar.add_task(first, total=None))


@contextmanager
def bytes_progress(what: str, *, is_quiet: bool) -> Iterator[ByteProgress | None]:
    """A progress bar over bytes. None if progress is not shown."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=False),
        TimeElapsedColumn(),
    )
    with _bar(what, *columns, is_quiet=is_quiet) as update:
        yield update and (lambda done, total: update(completed=done, total=total))


@contextmanager
def windows_progress(
    figure: str, *, is_quiet: bool
) -> Iterator[Callable[[int, int, float], None] | None]:
    """A progress bar over windows, with the figure so far and the time left. None if progress is
    not shown."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with _bar("first window", *columns, is_quiet=is_quiet) as update:
        yield update and (
            lambda done, total, value: update(
                completed=done,
                total=total,
                description=f"window {done}/{total}, {figure} {value:.4g}",
            )
        )


@contextmanager
def repeats_progress(*, is_quiet: bool) -> Iterator[Callable[[int, int, str], None] | None]:
    """A progress bar over repetitions, with the name of the current measurement. None if progress
    is not shown."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
    )
    # Only twice a second: drawing takes time of a core from the measurement.
    with _bar("measuring", *columns, is_quiet=is_quiet, per_second=2) as update:
        yield update and (
            lambda done, total, what: update(completed=done, total=total, description=what)
        )


@contextmanager
def stages_progress(*, is_quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A progress bar that each stage reuses, with the time left of the stage. None if progress is
    not shown."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("so far"),
        TimeElapsedColumn(),
    )
    if not is_watched(is_quiet=is_quiet):
        yield None
        return
    bar = Progress(*columns, console=stderr_console(), transient=True, refresh_per_second=2)
    with bar:
        task = bar.add_task("starting", total=None)

        def show(what: str, done: int, total: int) -> None:
            if bar.tasks[0].description != what:  # a new stage: forget the previous one's speed
                bar.reset(task, description=what, total=total or None)
            bar.update(task, completed=done, total=total or None)

        yield show


def print_speed(reply: FinishEvent, load_s: float | None) -> None:
    parts = [
        f"{reply.prompt_tokens} prompt tokens at {reply.prefill_tok_s:.0f} tok/s",
        f"{len(reply.token_ids)} generated at {reply.decode_tok_s:.1f} tok/s",
    ]
    if reply.cached_tokens:
        parts.insert(1, f"{reply.cached_tokens} of them cached")
    if reply.drafting is not None:
        parts.append(f"{reply.drafting.accepted} of {reply.drafting.drafted} draft tokens accepted")
    if load_s is not None:
        parts.append(f"loaded in {load_s:.2f} s")
    parts.append(f"finish: {reply.reason.value}")
    stderr_console().print(f"[dim]{' · '.join(parts)}[/dim]", soft_wrap=True)


def facts_table(facts: Mapping[str, str]) -> Table:
    """A table of names and values without borders."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, from_file(value))
    return table


def from_file(text: str) -> Text:
    """Table cell for untrusted text: markup and control characters in it have no effect."""
    return Text(printable(text))


def columns_table(*titles: str) -> Table:
    """An empty table with these column titles."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def print_answer(*parts: RenderableType) -> None:
    """Print tables to stdout, as wide as the terminal, or with a fixed width to a file or pipe."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    console = Console(highlight=False, width=None if is_terminal else _PLAIN_WIDTH)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    lines = capture.get().splitlines()
    output.write_text("".join(f"{line.rstrip()}\n" for line in lines))


def format_bytes(count: float) -> str:
    """A size in decimal units with three digits: 98.1 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def format_count(count: float) -> str:
    """A count with four digits and its unit: 134.5M, 1.24B."""
    for unit in ("", "k", "M"):
        if count < 1000:
            return f"{count:.4g}{unit}"
        count /= 1000
    return f"{count:.4g}B"
