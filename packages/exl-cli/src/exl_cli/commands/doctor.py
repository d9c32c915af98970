"""`exl doctor`: check that everything exl needs is installed and that the kernels are correct.

The checks are independent and return findings instead of raising, so that a machine without torch
still gets a full page. A failed check includes the command that repairs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from exl_cli import options, output
from exl_cli.interrupt import exits_at_once
from exl_core.errors import printable

if TYPE_CHECKING:
    from exl_cli.checks import Check

EXAMPLES = (
    ("exl doctor", "all checks on one page"),
    ("exl doctor --json", "machine-readable output, for a bug report"),
)
SCHEMA_VERSION = 1
_MARKS = {
    "ok": "[green]ok[/green]",
    "note": "[yellow]note[/yellow]",
    "broken": "[bold red]broken[/bold red]",
}


def doctor(json: options.Json = False) -> None:
    """Check versions, instruction sets, the kernel library and GPUs, and self-test each kernel.

    Prints the missing parts and the command that installs each. The exit code is 1 if a part that
    exl needs is broken.
    """
    with exits_at_once():  # the checks import libraries too
        from exl_cli.checks import run_checks

        checks = run_checks()
    is_well = all(check.state != "broken" for check in checks)
    if json:
        output.write_json(
            {
                "schema_version": SCHEMA_VERSION,
                "ok": is_well,
                "checks": [check.as_dict() for check in checks],
            }
        )
    else:
        _show(checks)
    if not is_well:
        raise typer.Exit(1)


def _show(checks: list[Check]) -> None:
    from rich.markup import escape

    from exl_cli.render import columns_table, print_answer

    table = columns_table("check", "", "finding")
    for check in checks:
        finding = escape(printable(check.finding))
        if check.fix is not None:
            finding += f"\n[bold]→ {escape(printable(check.fix))}[/bold]"
        table.add_row(check.name, _MARKS[check.state], finding)
    broken = [check.name for check in checks if check.state == "broken"]
    verdict = f"Broken: {', '.join(broken)}." if broken else "Everything that exl needs is there."
    print_answer(table, verdict)
