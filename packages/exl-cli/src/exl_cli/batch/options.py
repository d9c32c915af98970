"""Options of `exl generate` for a file of prompts, and the run. Imports no torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from exl_cli import output
from exl_cli.engine_options import DEFAULT_CACHE_TOKENS
from exl_cli.interrupt import Interrupt, exits_at_once
from exl_core.errors import ExlError, RequestError
from exl_core.files import encode_text, naming_disk_failures

if TYPE_CHECKING:
    from exl_cli.batch.job import PromptJob
    from exl_cli.batch.prompt_file import BatchLine, RecordFile

_PANEL = "Batch"
SCHEMA_VERSION = 1

BatchFile = Annotated[
    Path | None,
    typer.Option(
        "--batch-file",
        metavar="FILE",
        help='Answer every line of a JSON Lines file: {"prompt": "..."} or {"messages": [...]}, '
        "optionally with id and max_tokens. Many are answered at the same time; their records come "
        "in the order of the lines. '-' reads the lines from stdin, all of them before the first "
        "reply.",
        rich_help_panel=_PANEL,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        metavar="FILE",
        help="Write the records of --batch-file there instead of to stdout. Repeating a stopped "
        "command with the same prompts continues after the last record.",
        rich_help_panel=_PANEL,
    ),
]
MaxBatch = Annotated[
    int,
    typer.Option(
        "--max-batch",
        metavar="N",
        min=1,
        max=1024,
        help="Prompts of --batch-file that each replica answers at the same time.",
        rich_help_panel=_PANEL,
    ),
]
CacheTokens = Annotated[
    int | None,
    typer.Option(
        "--cache-tokens",
        metavar="N",
        min=256,
        help="Size in tokens of the key-value cache that these prompts share. Default: the context "
        f"size, at least {DEFAULT_CACHE_TOKENS}.",
        rich_help_panel=_PANEL,
    ),
]
Replicas = Annotated[
    int | None,
    typer.Option(
        "--replicas",
        metavar="N",
        min=1,
        max=1024,
        help="Answer --batch-file with N processes that have the whole model each: on the GPUs of "
        "this machine, or with shares of its CPUs.",
        rich_help_panel=_PANEL,
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Run the replicas as actors of a Ray cluster. 'local' starts one on this machine, "
        "'auto' finds a running one.",
        rich_help_panel=_PANEL,
    ),
]

UNIT_BATCHES = 4
"""Lines that a replica gets at once, in full batches. Its batch runs empty at the end of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """A file of prompts, and how many of them are answered where."""

    batch_file: BatchFile = None
    output: Output = None
    max_batch: MaxBatch = 16
    cache_tokens: CacheTokens = None
    replicas: Replicas = None
    ray: Ray = None

    def check(self, *, has_prompt: bool, is_json: bool) -> None:
        """Raises RequestError for options that contradict each other."""
        if self.batch_file is None:
            for name, value in (
                ("--output", self.output),
                ("--cache-tokens", self.cache_tokens),
                ("--replicas", self.replicas),
                ("--ray", self.ray),
            ):
                if value is not None:
                    raise RequestError(f"{name} is for --batch-file", next_step="Add --batch-file.")
        elif has_prompt:
            raise RequestError("two kinds of prompts are given", got="--batch-file and -p or -f")
        elif is_json and self.output is None:
            raise RequestError(
                "--json would mix its summary with the records",
                next_step="Add --output, or drop --json.",
            )

    def run(self, job: PromptJob, *, is_json: bool, is_quiet: bool) -> None:
        """Answers all prompts. Raises ExlError at the end if some have no reply."""
        from exl_cli.batch.prompt_file import read_batch
        from exl_cli.render import stages_progress

        assert self.batch_file is not None
        lines = read_batch(self.batch_file, job)
        started, tokens = time.perf_counter(), 0
        with ExitStack() as stack:
            records = stack.enter_context(_records(self.output, lines))
            earlier, failed = records.earlier.done, records.earlier.failed
            progress = stack.enter_context(stages_progress(is_quiet=is_quiet))
            interrupt = stack.enter_context(Interrupt())
            for index, record in self._answers(job, lines[earlier:], interrupt, is_quiet=is_quiet):
                records.write(index, record)
                failed += "error" in record
                count = record.get("completion_tokens", 0)
                tokens += count if isinstance(count, int) else 0
                if progress is not None:
                    progress("answering", records.done, len(lines))
        seconds = time.perf_counter() - started
        if is_json:
            output.write_json(
                {
                    "schema_version": SCHEMA_VERSION,
                    "prompts": len(lines),
                    "done": records.done,
                    "done_earlier": earlier,
                    "failed": failed,
                    "completion_tokens": tokens,
                    "seconds": round(seconds, 3),
                }
            )
        if interrupt.is_set:
            raise KeyboardInterrupt
        if not is_quiet and sys.stderr is not None:
            note = f"{records.done - earlier} replies, {tokens} tokens in {seconds:.1f} s"
            print(f"exl: {note}, {tokens / seconds:.0f} tokens/s", file=sys.stderr)
        if failed:
            raise ExlError(
                f"{failed} of {len(lines)} prompts have no reply",
                next_step="Their records have 'error'.",
            )

    def _answers(
        self, job: PromptJob, lines: Sequence[BatchLine], interrupt: Interrupt, *, is_quiet: bool
    ) -> Iterator[tuple[int, dict[str, object]]]:
        if not lines:
            return
        with exits_at_once():
            from exl_cli.batch.worker import BatchJob, BatchLimits
            from exl_cli.replicas import answer_with, opened
        limits = BatchLimits(
            max_batch=self.max_batch, cache_tokens=self.cache_tokens or DEFAULT_CACHE_TOKENS
        )
        batch = BatchJob(job.with_seed(), limits)

        def is_stopped() -> bool:
            return interrupt.is_set

        if self.replicas is None and self.ray is None:
            yield from batch.worker(is_quiet=is_quiet).answer(lines, is_stopped)
            return
        unit = UNIT_BATCHES * self.max_batch
        units = -(-len(lines) // unit)
        with opened(batch, self.replicas, self.ray, units=units, is_quiet=is_quiet) as found:
            yield from answer_with(found, lines, unit, is_stopped)


@contextmanager
def _records(path: Path | None, lines: Sequence[BatchLine]) -> Iterator[RecordFile]:
    """The output, after the records that it has already."""
    from exl_cli.batch.prompt_file import Earlier, RecordFile, read_earlier

    if path is None:
        yield RecordFile(output.write_text, Earlier())
        return
    earlier = read_earlier(path, lines)
    size = earlier.size_bytes
    with naming_disk_failures(path):
        file: BinaryIO = path.open("r+b" if size or path.exists() else "xb")
    try:
        with naming_disk_failures(path):
            file.truncate(size)
            file.seek(size)

        def write_text(text: str) -> None:
            with naming_disk_failures(path):
                file.write(encode_text(text))
                file.flush()

        yield RecordFile(write_text, earlier)
    finally:
        # Each write is flushed at once. What is left in the buffer belongs to a write that failed,
        # whose error has been raised.
        with suppress(OSError):
            file.close()
