"""Report that compares models: description, perplexity, divergence from a reference, and speed.

Each part of each model is saved as a record in a folder as soon as it is measured, so a stopped run
can be resumed. A model that cannot be measured becomes a row with the reason. This module knows
measurements and records; `report_page.py` defines their presentation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from exl_core.errors import ExlError, RequestError, WriteError
from exl_core.files import (
    CONFIG_LIMIT_BYTES,
    check_writable,
    is_present,
    read_bytes,
    write_atomically,
)
from exl_core.session.describe import ModelDescription, describe_model
from exl_core.session.load import LoadedModel
from exl_core.session.resolve import resolve_model
from exl_eval.divergence import DivergenceOptions, measure_divergence
from exl_eval.layer_speed import measure_layers
from exl_eval.machine import peak_memory_bytes
from exl_eval.perplexity import PerplexityOptions, measure_perplexity
from exl_eval.result import SCHEMA_VERSION
from exl_eval.speed import SpeedOptions, measure_speed
from exl_eval.styles import PAPER
from exl_eval.texts import Text

OnStep = Callable[[int, int, str], None]
"""Called before each part: parts done, parts in all, what is measured."""

_PARTS = ("description", "perplexity", "divergence", "speed")


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Settings of a report. `text` is scored in the `paper` style. `machine` describes the hardware
    and its settings; records of another machine are not reused."""

    text: Text
    ctx: int | None = None
    windows: int | None = None
    bos: str = "default"
    special_text: bool | None = None
    speed: SpeedOptions = field(default_factory=SpeedOptions)
    machine: str = "cpu"


@dataclass(frozen=True, slots=True)
class Row:
    """One model. `parts` has the record of each part that was measured; `failure` is the reason why
    others are missing."""

    spec: str
    name: str
    is_reference: bool
    parts: Mapping[str, Mapping[str, object]]
    failure: str | None = None

    def as_dict(self) -> dict[str, object]:
        return {
            "model": self.spec,
            "name": self.name,
            "is_reference": self.is_reference,
            "failure": self.failure,
            **{part: self.parts.get(part) for part in _PARTS},
        }


@dataclass(frozen=True, slots=True)
class Report:
    options: ReportOptions
    reference: str | None
    rows: tuple[Row, ...]

    def as_dict(self) -> dict[str, object]:
        options = self.options
        return {
            "schema_version": SCHEMA_VERSION,
            "measurement": "report",
            "text": options.text.name,
            "text_sha256": options.text.sha256,
            "ctx": options.ctx,
            "windows": options.windows,
            "bos": options.bos,
            "special_text": options.special_text,
            "machine": options.machine,
            "reference": self.reference,
            "models": [row.as_dict() for row in self.rows],
        }


def make_report(
    models: Sequence[str],
    reference: str | None,
    options: ReportOptions,
    records: Path,
    *,
    open_model: Callable[[str], LoadedModel],
    known_failure: Callable[[Exception], ExlError | None],
    on_step: OnStep | None = None,
) -> Report:
    """Measures all models, and reuses the parts found in `records`.

    `known_failure` turns an exception caused by the machine (out of memory, an unreadable file)
    into an ExlError, which becomes a row of the report. It returns None for a bug: the exception
    then ends the run and the saved records stay. So does a record that cannot be written.
    """
    check_writable(records / "any.json")
    work = _Work(reference, options, records, open_model)
    rows = []
    for number, spec in enumerate(models):

        def step(
            part: str, detail: str = "", done: int = number * len(_PARTS), spec: str = spec
        ) -> None:
            if on_step is not None:
                what = f"{spec}: {part}{detail}"
                on_step(done + _PARTS.index(part), len(models) * len(_PARTS), what)

        try:
            rows.append(work.measure(spec, step))
        except WriteError:
            raise
        except (ExlError, MemoryError, OSError, RuntimeError) as error:
            known = error if isinstance(error, ExlError) else known_failure(error)
            if known is None:
                raise
            rows.append(work.failed(spec, str(known)))
    return Report(options, reference, tuple(rows))


class _Work:
    """State shared by all models of a report: the reference, loaded once, and the records."""

    def __init__(
        self,
        reference: str | None,
        options: ReportOptions,
        records: Path,
        open_model: Callable[[str], LoadedModel],
    ) -> None:
        self._options = options
        self._records = records
        self._open = open_model
        self._reference_spec = reference
        self._reference: LoadedModel | None = None
        self._reference_key = None if reference is None else _identity(reference)
        self._parts: dict[str, Mapping[str, object]] = {}  # of the current model

    def measure(self, spec: str, step: Callable[..., None]) -> Row:
        self._parts = {}
        identity = _identity(spec)
        is_reference = identity == self._reference_key
        step("description")
        description = describe_model(spec)
        self._parts["description"] = _describe(description)
        path = self._records / f"{description.name}-{self._key(identity)}.json"
        self._parts.update(_read_record(path))
        loaded: LoadedModel | None = None
        failures = []
        for part in _PARTS[1:]:
            no_reference = self._reference_spec is None or is_reference
            if part in self._parts or (part == "divergence" and no_reference):
                continue
            step(part)
            loaded = loaded or self._open(spec)
            try:
                self._parts[part] = self._measured(part, loaded, step)
            except ExlError as error:  # the other parts may work
                failures.append(f"{part}: {error}")
                continue
            _write_record(path, self._parts)
        failure = " ".join(failures) or None
        return Row(spec, description.name, is_reference, dict(self._parts), failure)

    def failed(self, spec: str, reason: str) -> Row:
        """Row of a model that failed, with the parts measured before the failure."""
        description = self._parts.get("description", {})
        name = str(description.get("name", Path(spec).name))
        return Row(spec, name, False, dict(self._parts), reason)

    def _measured(
        self, part: str, loaded: LoadedModel, step: Callable[..., None]
    ) -> Mapping[str, object]:
        options = self._options

        def on_window(done: int, total: int, _so_far: float) -> None:
            step(part, f", window {done}/{total}")

        windows = (
            PAPER.name,
            options.ctx,
            None,
            options.windows,
            options.bos,
            options.special_text,
        )
        if part == "perplexity":
            text = PerplexityOptions(*windows)
            return measure_perplexity(loaded, options.text, text, on_window).as_dict()
        if part == "divergence":
            against = DivergenceOptions(*windows)
            reference = self._loaded_reference()
            found = measure_divergence(loaded, reference, options.text, against, on_window)
            return found.as_dict()
        before = peak_memory_bytes()
        speed = measure_speed(loaded, options.speed, start_memory_bytes=before)
        return {**speed.as_dict(), "layers": measure_layers(loaded, options.speed).as_dict()}

    def _loaded_reference(self) -> LoadedModel:
        if self._reference is None:
            assert self._reference_spec is not None
            self._reference = self._open(self._reference_spec)
        return self._reference

    def _key(self, identity: str) -> str:
        options = self._options
        defining = (
            *(SCHEMA_VERSION, identity, self._reference_key, options.text.sha256, options.ctx),
            *(options.windows, options.bos, options.special_text, repr(options.speed)),
            options.machine,
        )
        return _hash(json.dumps(defining))[:16]


def _identity(spec: str) -> str:
    """Hash of the paths, sizes and modification times of a model's files."""
    path = resolve_model(spec).resolve()
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    facts = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return _hash(json.dumps(facts))


def _describe(model: ModelDescription) -> dict[str, object]:
    return {
        "name": model.name,
        "format": model.format,
        "architecture": model.config.arch.name,
        "parameters": model.parameters,
        "file_bytes": model.file_bytes,
        "bits_per_weight": model.bits_per_weight,
        "layers": [
            {"name": layer.name, "bits_per_weight": layer.bits_per_weight, "bytes": layer.bytes}
            for layer in model.layers
        ],
    }


def _read_record(path: Path) -> dict[str, Mapping[str, object]]:
    """Parts measured by an earlier run; empty if there is no readable record."""
    if not is_present(path, RequestError):
        return {}
    try:
        kept = json.loads(read_bytes(path, RequestError, CONFIG_LIMIT_BYTES))
    except ValueError:
        return {}
    parts = kept.get("parts") if isinstance(kept, dict) else None
    if not isinstance(parts, dict):
        return {}
    return {part: parts[part] for part in _PARTS[1:] if isinstance(parts.get(part), dict)}


def _write_record(path: Path, parts: Mapping[str, object]) -> None:
    record = {"schema_version": SCHEMA_VERSION, "measurement": "report model", "parts": parts}
    write_atomically(path, [json.dumps(record).encode()])


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
