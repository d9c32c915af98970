"""A whole conversion: from a model and options to an output directory under its final name.

Owns all steps before and after the computing stages (`stages.py`): the checks, the work directory,
the output files, the gate, and the final rename. The caller provides the gate, because its
measurements belong to a package above this one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from exl_core.arch.spec import ModelConfig
from exl_core.convert import preflight, side_files
from exl_core.convert.allocate import allocate
from exl_core.convert.events import Event, OnEvent, Stage
from exl_core.convert.measurement import LIMIT_BYTES, Measurement, MeasurementError
from exl_core.convert.plan import ConvertOptions
from exl_core.convert.publish import (
    SETTINGS_NAME,
    check_written,
    partial_of,
    publish,
    quantization_settings,
    tensor_storage,
    write_weights,
)
from exl_core.convert.stages import (
    SAVING_SHARE,
    Computed,
    MakeRows,
    Stages,
    finished_digests,
    finished_entries,
    matrix_reports,
    stage_files,
)
from exl_core.convert.target import target_of
from exl_core.convert.work import JOB_NAME, WorkDir, check_work, is_bare, locked, open_work
from exl_core.errors import (
    DiskFullError,
    ExlError,
    ProblemsError,
    QualityError,
)
from exl_core.files import is_present, read_bytes, read_json_object, write_json
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.containers.source import TensorSource
from exl_core.session.mtp import find_mtp
from exl_core.session.open import model_name, open_checkpoint

WORK_SUFFIX, LOCK_SUFFIX = ".work", ".lock"
RECORD_NAME, MEASUREMENT_NAME = "exl_conversion.json", "exl_measurement.json"
SELF = "self"
"""Value of `calibration` for text that the model itself generates."""

SCHEMA_VERSION = 1
_COMPILED, _GATE, _PUBLISHING = "compiled.json", "gate.json", "publishing.json"


@dataclass(frozen=True, slots=True)
class Conversion:
    """Options of one conversion. All of them except the paths affect the bytes of the output.

    `calibration` names the origin of the calibration rows. `calibration_sha256` identifies the
    text, if one was given. `measurement` is a file that replaces measuring. If `work` is None, the
    work directory is beside `out` and is removed at the end.
    """

    source: Path
    out: Path
    bits: float
    rows: int
    length: int
    calibration: str
    shard_bytes: int
    stages: ConvertOptions
    calibration_sha256: str | None = None
    measurement: Path | None = None
    work: Path | None = None

    @property
    def work_folder(self) -> Path:
        return self.work or self.out.with_name(self.out.name + WORK_SUFFIX)

    @property
    def lock(self) -> Path:
        return self.out.with_name(self.out.name + LOCK_SUFFIX)

    def facts(self, source_sha256: str) -> dict[str, object]:
        """Values, by option, that must be equal for a conversion to continue an unfinished one."""
        given = self.measurement
        return {
            "source_sha256": source_sha256,
            "out": str(self.out.resolve()),
            "bits": self.bits,
            "rows": self.rows,
            "length": self.length,
            "calibration": self.calibration,
            "calibration_sha256": self.calibration_sha256,
            "measurement_sha256": None
            if given is None
            else hashlib.sha256(read_bytes(given, MeasurementError, LIMIT_BYTES)).hexdigest(),
            "shard_bytes": self.shard_bytes,
            "torch": torch.__version__,
            **_facts_of(self.stages),
        }


def _facts_of(options: ConvertOptions) -> dict[str, object]:
    """The options as facts. EXL2's do not name the format, because it was once the only one."""
    facts = asdict(options)
    if options.format == "exl2":
        del facts["format"], facts["codebook"]
    return facts


@dataclass(frozen=True, slots=True)
class GateOutcome:
    """`figures` go into the record. `fault` names the exceeded limit; None if the result passes."""

    figures: Mapping[str, object]
    fault: str | None


Gate = Callable[[Path, Path], GateOutcome]
"""Compares the model at the second path with the one at the first."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """Callbacks of a conversion. `command` is the command line that runs it, for messages."""

    make_rows: MakeRows
    gate: Gate
    on_event: OnEvent
    should_stop: Callable[[], bool]
    command: str


def convert_model(
    conversion: Conversion,
    hooks: Hooks,
    *,
    force: bool = False,
    saving_share: float = SAVING_SHARE,
) -> Path:
    """Runs a conversion and returns the directory under its final name.

    An unfinished conversion with the same facts goes on where it ended, after an event `resume`.
    One with other facts in the same work directory is a RequestError that names the differences.

    Problems found before any work are raised together: a single one itself, several as a
    ProblemsError. Raises QualityError if the result is too far from its source. The result then
    stays under its partial name, unless `force` publishes it. After a DiskFullError or an exception
    of a stage, the finished work is kept for the next call.
    """
    prepared = _prepare(conversion, hooks)
    _say_what_is_left_out(prepared, hooks)
    folder = conversion.work_folder
    try:
        with (
            locked(conversion.lock, conversion.out, "to this output"),
            open_work(folder, prepared.facts) as work,
        ):
            is_published = _is_published(conversion, prepared.source_sha256)
            if prepared.is_resumed:
                facts = {"work": str(folder), "is_published": is_published}
                hooks.on_event(Event("resume", Stage.CHECK, facts=facts))
            if not is_published:
                computed = _stages(conversion, hooks, prepared, work, saving_share).run()
                _write_output(conversion, hooks, prepared, work)
                _gate_and_publish(conversion, hooks, prepared, work, computed, force=force)
            _remove_work_files(conversion, work)
    except DiskFullError as error:
        raise DiskFullError(
            error.what,
            where=error.where,
            got=error.got,
            next_step=f"Free some, then resume with: {hooks.command}",
        ) from error
    return conversion.out


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The opened and checked source."""

    source: TensorSource
    config: ModelConfig
    checkpoint: Checkpoint
    files: side_files.SideFiles
    source_sha256: str
    facts: dict[str, object]
    given: Measurement | None
    is_resumed: bool


def _prepare(conversion: Conversion, hooks: Hooks) -> _Prepared:
    source, config, quantization = open_checkpoint(conversion.source)
    hooks.on_event(Event("stage", Stage.CHECK))

    def progress(done: int, total: int) -> None:
        hooks.on_event(Event("step", Stage.CHECK, done, total))

    work = conversion.work_folder
    is_resumed = (work / JOB_NAME).is_file()
    sha256 = preflight.hash_source(conversion.source, source, progress)
    is_done = _is_published(conversion, sha256)
    problems: list[ExlError] = []
    target, head_bits = target_of(conversion.stages), conversion.stages.head_bits
    problems += preflight.rate_problems(config, conversion.bits, head_bits, target)
    if not is_resumed and not is_done:  # a resumed conversion has checked the same bytes
        problems += preflight.model_problems(
            conversion.source, source, config, quantization, progress, target=target
        )
    if not is_done:
        problems += preflight.output_problems(
            conversion.out, conversion.source, work, is_resumed=is_resumed
        )
    problems += preflight.shard_problems(config, conversion.shard_bytes)
    given: Measurement | None = None
    try:
        if conversion.measurement is not None:
            given = Measurement.read(conversion.measurement)
            given.check(config, sha256, target, conversion.measurement)
            allocate(given.layers, conversion.bits)
        facts = conversion.facts(sha256)
        check_work(work, facts)
    except ExlError as error:
        problems.append(error)
    _raise(problems)
    checkpoint = Checkpoint(source, config, quantization)
    files = side_files.collect(
        conversion.source,
        source,
        config,
        _settings(conversion),
        is_untied=target.has_untied_config,
    )
    space = preflight.space_needed(
        config,
        checkpoint,
        conversion.stages,
        bits=conversion.bits,
        rows=conversion.rows,
        length=conversion.length,
        writes_rows=conversion.calibration == SELF,
    )
    space = replace(space, out=space.out + files.size_bytes)
    _raise(list(preflight.space_problems(space, conversion.out, work)))
    return _Prepared(source, config, checkpoint, files, sha256, facts, given, is_resumed)


def _say_what_is_left_out(prepared: _Prepared, hooks: Hooks) -> None:
    """Reports a layer for multi-token prediction, which is not converted."""
    if find_mtp(prepared.source, prepared.config) is None:
        return
    name = "layer for multi-token prediction"
    detail = "it is not converted, so --mtp does not work with the result"
    facts = {"incidents": [(name, "left out", detail)]}
    hooks.on_event(Event("left_out", Stage.CHECK, facts=facts))


def _raise(problems: list[ExlError]) -> None:
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ProblemsError(problems)


def _stages(
    conversion: Conversion, hooks: Hooks, prepared: _Prepared, work: WorkDir, saving_share: float
) -> Stages:
    return Stages(
        work=work,
        checkpoint=prepared.checkpoint,
        config=prepared.config,
        options=conversion.stages,
        bits=conversion.bits,
        source_sha256=prepared.source_sha256,
        make_rows=hooks.make_rows,
        on_event=hooks.on_event,
        should_stop=hooks.should_stop,
        given=prepared.given,
        saving_share=saving_share,
    )


def _write_output(conversion: Conversion, hooks: Hooks, prepared: _Prepared, work: WorkDir) -> None:
    """Writes the output under its partial name and reads all of it back."""
    folder, layers = partial_of(conversion.out), prepared.config.num_layers
    target = target_of(conversion.stages)
    hooks.on_event(Event("stage", Stage.WRITE))
    if not (work.has(_COMPILED) and folder.is_dir()):
        work.remove(_COMPILED)
        entries = finished_entries(work, layers)
        write_weights(folder, entries, conversion.shard_bytes, target.weights_stem)
        prepared.files.write(folder)
        if target.codebook is not None:
            storage = {"tensor_storage": tensor_storage(entries)}
            write_json(folder / SETTINGS_NAME, {**_settings(conversion), **storage})
        work.write_facts(_COMPILED, {})
    check_written(folder, finished_digests(work, layers))
    side_files.check(
        folder,
        conversion.source,
        prepared.source,
        prepared.config,
        is_untied=target.has_untied_config,
    )


def _gate_and_publish(
    conversion: Conversion,
    hooks: Hooks,
    prepared: _Prepared,
    work: WorkDir,
    computed: Computed,
    *,
    force: bool,
) -> None:
    folder = partial_of(conversion.out)
    if not work.has(_GATE):
        hooks.on_event(Event("stage", Stage.GATE))
        outcome = hooks.gate(conversion.source, folder)
        work.write_facts(_GATE, {"figures": dict(outcome.figures), "fault": outcome.fault})
    gate = work.read_facts(_GATE)
    hooks.on_event(Event("gate", Stage.GATE, facts=gate))
    record = _conversion_record(conversion, prepared, work, computed)
    write_json(folder / MEASUREMENT_NAME, computed.measurement.to_json(), indent=None)
    is_forced = force and gate["fault"] is not None
    write_json(folder / RECORD_NAME, {**record, "gate": gate, "is_forced": is_forced})
    if gate["fault"] is not None and not force:
        raise QualityError(
            f"the result is too far from its source and has not been published: {gate['fault']}",
            where=folder,
            next_step="Take more bits or another calibration text; to publish it as it is: "
            f"{hooks.command} --force",
        )
    work.write_facts(_PUBLISHING, {})
    publish(folder, conversion.out)


def _conversion_record(
    conversion: Conversion, prepared: _Prepared, work: WorkDir, computed: Computed
) -> dict[str, object]:
    """All decisions and the inputs that they depend on, without times and paths."""
    allocation = computed.allocation
    return {
        "schema_version": SCHEMA_VERSION,
        "source": {"name": model_name(conversion.source), "sha256": prepared.source_sha256},
        "bits": conversion.bits,
        "bits_per_weight": allocation.bits_per_weight,
        "options": {key: value for key, value in prepared.facts.items() if key != "out"},
        "calibration": {
            "description": computed.rows.description,
            "sha256": computed.rows.sha256,
            "rows": computed.rows.token_ids.shape[0],
            "length": computed.rows.token_ids.shape[1],
        },
        "expected_error": allocation.error,
        "matrices": matrix_reports(work, prepared.config.num_layers),
    }


def _settings(conversion: Conversion) -> dict[str, object]:
    return quantization_settings(
        target_of(conversion.stages),
        bits=conversion.bits,
        head_bits=conversion.stages.head_bits,
        rows=conversion.rows,
        length=conversion.length,
        dataset=conversion.calibration,
    )


def _is_published(conversion: Conversion, source_sha256: str) -> bool:
    """Whether the output is published already and only the work files remain to be removed."""
    out, work = conversion.out, conversion.work_folder
    if not out.is_dir() or partial_of(out).exists():
        return False
    if (work / _PUBLISHING).is_file():
        return True
    # A removal of the work files was killed near its end.
    record = out / RECORD_NAME
    if conversion.work is not None or not is_bare(work) or not is_present(record, ExlError):
        return False
    written = read_json_object(record, ExlError)
    source = written.get("source")
    is_same_source = isinstance(source, dict) and source.get("sha256") == source_sha256
    return is_same_source and written.get("bits") == conversion.bits


def _remove_work_files(conversion: Conversion, work: WorkDir) -> None:
    """Removes the work files, except measurement and calibration rows in a directory given by the
    user."""
    # First the lock: a kill during the removal may leave work files, but never the lock alone.
    conversion.lock.unlink(missing_ok=True)
    if conversion.work is None:
        work.remove_all(last=_PUBLISHING)
    else:
        work.remove(*stage_files(work), _COMPILED, _GATE)
