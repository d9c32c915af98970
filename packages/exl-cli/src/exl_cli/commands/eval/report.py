"""`exl eval report`: one HTML page and one JSON file for a set of models.

`exl_eval/report.py` measures and stores the records. `exl_eval/report_page.py` writes the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl_cli import eval_options, options, output
from exl_cli.interrupt import exits_at_once
from exl_cli.model_options import ModelOptions
from exl_cli.option_groups import spread
from exl_core.errors import ExlError, RequestError

if TYPE_CHECKING:
    from exl_eval.report import Report

EXAMPLES = (
    ("exl eval report q4.gguf q8.gguf --text wiki.txt --windows 20", "two models on one page"),
    ("exl eval report 3bit 4bit --reference fp16 --text wiki.txt", "with divergence from fp16"),
    ("exl eval report models/* --text wiki.txt --out today --json", "machine-readable output"),
)

Models = Annotated[list[str], typer.Argument(metavar="MODEL...", help="Models to compare.")]
Reference = Annotated[
    str | None,
    typer.Option(
        "--reference", metavar="MODEL", help="Unquantized model to measure divergence from."
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Directory for report.html, report.json and the records. A figure with a record there "
        "is not measured again.",
    ),
]
Prefill = Annotated[
    int, typer.Option("--prefill", metavar="N", min=1, help="Tokens of the timed prompt.")
]
Decode = Annotated[
    int, typer.Option("--decode", metavar="N", min=1, help="Tokens to decode in the timed run.")
]


@spread
def report(
    *,
    models: Models,
    reference: Reference = None,
    source: eval_options.TextOptions,
    ctx: eval_options.StyleCtx = None,
    windows: eval_options.Windows = None,
    bos: eval_options.Bos = "default",
    prefill: Prefill = 512,
    decode: Decode = 128,
    out: Out = Path("exl-report"),
    json: options.Json = False,
    quiet: options.Quiet = False,
    changes: ModelOptions,
    device: options.Device = "auto",
    threads: options.Threads = None,
    exact: options.Exact = False,
    batch_invariant: options.EvalBatchInvariant = True,
) -> None:
    """Report size, perplexity, divergence and speed of several models, also by layer, on one page.

    The page needs no network and no other file. A model that cannot be measured has a row with the
    reason, and the exit code is then 1. Figures are stored once measured: repeating the command
    resumes an interrupted run.
    """
    _check_each_once(models)
    content = source.read()
    with exits_at_once():
        from exl_cli.machine import machine_failure
        from exl_cli.render import repeats_progress
        from exl_eval.report import ReportOptions, make_report
        from exl_eval.report_page import check_folder
        from exl_eval.speed import SpeedOptions
    choices = ReportOptions(
        text=content,
        ctx=ctx,
        windows=windows,
        bos=bos,
        special_text=source.special_text,
        speed=SpeedOptions(prefill=(prefill,), decode=decode),
        machine=_machine(device, threads, changes, exact=exact, batch_invariant=batch_invariant),
    )
    loading = eval_options.Loading(
        device, threads, True, exact, batch_invariant, changes=changes, ctx=ctx
    )
    check_folder(out)
    with repeats_progress(is_quiet=quiet) as on_step:
        found = make_report(
            models,
            reference,
            choices,
            out / "records",
            open_model=loading.load,
            known_failure=machine_failure,
            on_step=on_step,
        )
    _finish(found, out, is_json=json)


def _finish(found: Report, out: Path, *, is_json: bool) -> None:
    """Writes the files, prints the result, and raises ExlError if a model was not measured."""
    from exl_eval.report_page import write_report

    record = write_report(found, out)
    if is_json:
        output.write_json(record)
    else:
        _show(found, out)
    failed = [row.name for row in found.rows if row.failure is not None]
    if failed:
        raise ExlError(
            f"{len(failed)} of {len(found.rows)} models could not be measured",
            got=", ".join(failed),
            next_step="The page has the reasons.",
        )


def _check_each_once(models: Sequence[str]) -> None:
    repeated = sorted({model for model in models if models.count(model) > 1})
    if repeated:
        raise RequestError("a model is given twice", got=", ".join(repeated))


def _machine(
    device: str, threads: int | None, changes: ModelOptions, *, exact: bool, batch_invariant: bool
) -> str:
    """Backend, threads and mode: speeds depend on them, and figures do slightly."""
    from exl_core.session.load import changes_of, resolve_device
    from exl_core.settings import available_cpus

    backend = resolve_device(device, is_exact=exact)
    shown = backend if backend != "cpu" else f"cpu, {threads or available_cpus()} threads"
    is_variant = backend == "cpu" and not batch_invariant
    changed = changes_of(changes.load_options())
    shown += ", exact" * exact + ", not batch-invariant" * is_variant
    return f"{shown}, {changed}" if changed else shown


def _show(found: Report, out: Path) -> None:
    from exl_cli.render import columns_table, from_file, print_answer

    table = columns_table("model", "MB", "bits", "perplexity", "mean KL", "decode tok/s", "failure")
    for row in found.rows:
        described = row.parts.get("description", {})
        text, against = row.parts.get("perplexity", {}), row.parts.get("divergence")
        kld = against["kld"] if against is not None else None
        table.add_row(
            from_file(row.name),
            _number(described.get("file_bytes"), 1, 1e-6),
            _number(described.get("bits_per_weight"), 2),
            _number(text.get("perplexity"), 4),
            _number(kld["mean"] if isinstance(kld, dict) else None, 5),
            _number(row.parts.get("speed", {}).get("decode_tok_s"), 1),
            from_file(row.failure or ""),
        )
    print_answer(table, f"{out / 'report.html'} and {out / 'report.json'}")


def _number(value: object, digits: int, factor: float = 1.0) -> str:
    return f"{value * factor:.{digits}f}" if isinstance(value, int | float) else "-"
