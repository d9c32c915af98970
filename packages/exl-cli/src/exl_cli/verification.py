"""Output of `exl inspect model --verify`: one line per problem, or a summary."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from exl_cli import output
from exl_cli.render import bytes_progress, format_bytes
from exl_core.errors import ModelError, printable
from exl_core.session.describe import verify_model

if TYPE_CHECKING:
    from exl_core.formats.verify import VerifyReport

SCHEMA_VERSION = 1
_ZEROS = "all values are zero; the file may have been written only in part"


def run(spec: str | None, *, is_json: bool) -> None:
    """Verify the whole model. Problems end the command with the exit code of `ModelError`."""
    with bytes_progress("verifying", is_quiet=False) as progress:
        report = verify_model(spec, progress)
    for name in report.zeros:
        print(f"exl: warning: {printable(name)}: {_ZEROS}", file=sys.stderr, flush=True)
    if is_json:
        output.write_json(as_dict(report))
    elif report.problems:
        output.write_text("".join(f"{problem}\n" for problem in report.problems))
    else:
        output.write_text(
            f"no problems: {report.tensors} tensors, {report.quantized} of them quantized "
            f"matrices, {format_bytes(report.size_bytes)}\n"
        )
    if report.problems:
        raise typer.Exit(ModelError.exit_code)


def as_dict(report: VerifyReport) -> dict[str, object]:
    """The report as `--json` prints it."""
    return {
        "schema_version": SCHEMA_VERSION,
        "tensors": report.tensors,
        "quantized_matrices": report.quantized,
        "bytes": report.size_bytes,
        "problems": [
            {"tensor": problem.tensor, "error": str(problem.error)} for problem in report.problems
        ],
        "zeros": list(report.zeros),
    }
