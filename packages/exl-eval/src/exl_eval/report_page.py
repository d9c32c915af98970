"""A report as one HTML page that needs nothing else: no network, no script, no other file.

The page is a template of this package (`data/report.html`), rendered with everything escaped: names
and messages come from files that a stranger wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment
from markupsafe import Markup

from exl_core.errors import printable
from exl_eval.report import Report, Row, write_atomically
from exl_eval.report_plots import Line, Point, bars, color_index, scatter, steps


@dataclass(frozen=True, slots=True)
class Plot:
    """`svg` is our own text; `note` says how to read it."""

    title: str
    svg: Markup
    note: str


def write_report(report: Report, folder: Path) -> dict[str, object]:
    """`report.html` and `report.json` in the folder; returns what the latter holds."""
    created = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    record = {**report.as_dict(), "created": created}
    write_atomically(folder / "report.json", json.dumps(record, allow_nan=False) + "\n")
    write_atomically(folder / "report.html", render_page(report, created))
    return record


def render_page(report: Report, created: str) -> str:
    """`created`: when, as the page says it."""
    environment = SandboxedEnvironment(autoescape=True, undefined=StrictUndefined)
    source = files("exl_eval").joinpath("data/report.html").read_text(encoding="utf-8")
    numbered = list(enumerate(report.rows, start=1))
    return environment.from_string(source).render(
        title=_title(report),
        created=created,
        facts=_facts(report),
        has_reference=report.reference is not None,
        rows=[_cells(number, row) for number, row in numbered],
        plots=_plots(numbered, report),
    )


def _title(report: Report) -> str:
    count = len(report.rows)
    text = report.options.text.name.rpartition("/")[-1]
    return f"{count} model{'s' * (count != 1)} on {printable(text)}"


def _facts(report: Report) -> list[tuple[str, str]]:
    """What defines the figures, from a record: what was asked for may be a default."""
    options = report.options
    facts = [("Text", printable(options.text.name))]
    for row in report.rows:
        record = row.parts.get("perplexity")
        if record is not None:
            facts += [
                ("SHA-256", str(record["text_sha256"])),
                ("Scored", f"{record['windows']} windows of {record['ctx']} tokens"),
                ("Style", f"{record['style']}, BOS {record['bos']}"),
            ]
            break
    if report.reference is not None:
        facts.append(("Reference", printable(report.reference)))
    speed = options.speed
    facts.append(("Machine", options.machine))
    facts.append(
        ("Speed", f"{speed.prefill[0]} prompt tokens, {speed.decode} decoded, batch 1, median")
    )
    return facts


def _cells(number: int, row: Row) -> dict[str, Any]:
    """A row of the table: text, or None where nothing is known."""
    described = row.parts.get("description", {})
    text, against = row.parts.get("perplexity"), row.parts.get("divergence")
    speed = row.parts.get("speed")
    kld: Any = None if against is None else against["kld"]
    return {
        "number": number,
        "color": color_index(number),
        "name": printable(row.name),
        "spec": printable(row.spec),
        "failure": row.failure and printable(row.failure),
        "is_reference": row.is_reference,
        "format": described.get("format"),
        "size": _bytes(described.get("file_bytes")),
        "bits": _figure(described.get("bits_per_weight"), 2),
        "perplexity": text and _with_error(text["perplexity"], text["stderr"], 3),
        "kld": kld and _with_error(kld["mean"], kld["stderr"], 4),
        "kld_p99": kld and _figure(kld["p99"], 3),
        "same_top": against and f"{100 * _float(against['same_top']):.1f} %",
        "decode": speed and _figure(speed["decode_tok_s"], 0),
        "prefill": speed and _figure(speed["prefill_tok_s"], 0),
        "floor": speed and f"{100 * _float(speed['floor_share']):.0f} %",
        "memory": speed and _bytes(speed["weights_bytes"]),
    }


def _plots(rows: Sequence[tuple[int, Row]], report: Report) -> list[Plot]:
    """Only of what is known of at least one model."""
    plots = []
    points = [
        Point(n, _size(row), _float(part["perplexity"]), _float(part["stderr"]))
        for n, row in rows
        if (part := row.parts.get("perplexity")) is not None
    ]
    if points:
        svg = scatter(points, x_label="size of the files, MB", y_label="perplexity")
        note = "Lower and further left is better. Bars are standard errors of each figure alone."
        plots.append(Plot("Size and perplexity", Markup(svg), note))
    points = [
        Point(n, _size(row), _float(kld["mean"]), _float(kld["stderr"]))
        for n, row in rows
        if (kld := _kld(row)) is not None and _float(kld["mean"]) > 0
    ]
    if points:
        svg = scatter(points, x_label="size of the files, MB", y_label="mean KL, nats")
        note = f"KL(reference || model) by token, against {printable(report.reference or '')}."
        plots.append(Plot("Size and divergence", Markup(svg), note))
    for key, title in (("decode_tok_s", "Decoding"), ("prefill_tok_s", "Prompt")):
        points = [
            Point(n, _float(part[key]), 0.0)
            for n, row in rows
            if (part := row.parts.get("speed")) is not None
        ]
        if points:
            svg = bars(points, label=f"{title.lower()}, tokens a second")
            note = "One sequence. Longer is better."
            plots.append(Plot(f"{title} speed", Markup(svg), note))
    lines = [Line(n, bits) for n, row in rows if (bits := _layer_bits(row))]
    if lines:
        svg = steps(lines, x_label="layer", y_label="bits per weight")
        note = "As stored, with scales. Embedding and head are left out."
        plots.append(Plot("Bits by layer", Markup(svg), note))
    return plots


def _kld(row: Row) -> Mapping[str, object] | None:
    part = row.parts.get("divergence")
    found: Any = None if part is None else part["kld"]
    return None if found is None else dict(found)


def _layer_bits(row: Row) -> tuple[float, ...]:
    layers: Any = row.parts.get("description", {}).get("layers", ())
    blocks = [layer for layer in layers if layer["name"].startswith("layer ")]
    ordered = sorted(blocks, key=lambda layer: int(layer["name"].removeprefix("layer ")))
    return tuple(float(layer["bits_per_weight"]) for layer in ordered)


def _size(row: Row) -> float:
    return _float(row.parts["description"]["file_bytes"]) / 1e6


def _float(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def _figure(value: object, digits: int) -> str | None:
    return None if value is None else f"{_float(value):,.{digits}f}"


def _with_error(value: object, error: object, digits: int) -> str:
    return f"{_float(value):.{digits}f} ± {_float(error):.{digits}f}"


def _bytes(value: object) -> str | None:
    if value is None:
        return None
    count = _float(value)
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
