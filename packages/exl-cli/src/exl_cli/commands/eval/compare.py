"""`exl eval compare`: differences of two eval records, for the figures that are comparable."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exl_cli import options, output
from exl_core.errors import RequestError
from exl_core.files import CONFIG_LIMIT_BYTES, read_text_file

if TYPE_CHECKING:
    from exl_eval.compare import Comparison

EXAMPLES = (
    ("exl eval perplexity -m a --text wiki.txt --json > a.json", "write a record"),
    ("exl eval compare a.json b.json", "comparable figures and their differences"),
)


def compare(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="A record printed by --json.")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="A second record.")],
    *,
    json: options.Json = False,
) -> None:
    """Compare two records of 'exl eval', and explain which figures are not comparable.

    Perplexities are comparable if text, style, context, BOS rule and tokenizer agree. Bits per byte
    are comparable if the text agrees. Divergences also need the same reference. The standard error
    of a difference is paired by window if both records have the same windows.
    """
    from exl_eval.compare import compare_records

    found = compare_records(_read(a), _read(b), (str(a), str(b)))
    if json:
        output.write_json(found.as_dict())
    else:
        _show(found, a, b)


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json_module.loads(read_text_file(path, CONFIG_LIMIT_BYTES))
    except (ValueError, RecursionError) as error:
        raise RequestError("is not valid JSON", where=path, got=str(error)[:200]) from error
    if not isinstance(record, dict):
        raise RequestError("holds no record", where=path, got=type(record).__name__)
    return record


def _show(found: Comparison, a: Path, b: Path) -> None:
    from rich.table import Table

    from exl_cli.render import columns_table, facts_table, from_file, print_answer

    verdict = "yes" if found.is_comparable else "no" if not found.differences else "in part"
    parts: list[Table | str] = [
        facts_table(
            {"A": str(a), "B": str(b), "measurement": found.measurement, "comparable": verdict}
        )
    ]
    if found.obstacles:
        table = columns_table("differs", "A", "B", "so")
        for each in found.obstacles:
            cells = (each.field, str(each.a), str(each.b), each.why)
            table.add_row(*(from_file(cell) for cell in cells))
        parts += ["", table]
    if found.differing:
        table = columns_table("compared", "A", "B")
        for name, (ours, theirs) in found.differing.items():
            table.add_row(name, from_file(str(ours)), from_file(str(theirs)))
        parts += ["", table]
    if found.differences:
        table = columns_table("figure", "A", "B", "A - B", "standard error")
        for one in found.differences:
            how = "paired" if one.is_paired else "of both, independent"
            values = (f"{one.a:.6g}", f"{one.b:.6g}", f"{one.difference:+.6g}")
            error = "unknown" if one.stderr is None else f"{one.stderr:.2g}, {how}"
            table.add_row(one.figure, *values, error)
        parts += ["", table]
    print_answer(*parts)
