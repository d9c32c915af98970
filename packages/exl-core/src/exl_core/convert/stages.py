"""Computing stages of a conversion, in order, each resumed from its files in the work directory.

Owns the order of the stages and their files in the work directory. Knows neither how a stage
computes nor the form of the output. A stage is a function of the files before it. A killed process
therefore changes nothing: files on the disk are used, and missing ones are computed again with the
same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from exl_core.arch.spec import ModelConfig
from exl_core.cache.memory import free_memory_bytes
from exl_core.convert.allocate import allocate
from exl_core.convert.calibration import CalibrationRows
from exl_core.convert.events import ConversionStopped, Event, OnEvent, Stage
from exl_core.convert.layers import States, embed_rows, read_layer
from exl_core.convert.measure import MEASURED_ROWS, measure_layer
from exl_core.convert.measurement import Measurement
from exl_core.convert.parallel import Workers, worker_pool
from exl_core.convert.plan import Allocation, ConvertOptions, LayerMeasurement
from exl_core.convert.publish import digest
from exl_core.convert.quantize import QuantizedPart, quantize_ends, quantize_layer
from exl_core.convert.sensitivity import (
    Sensitivity,
    as_tensors,
    from_tensors,
    has_common_start,
    measure_sensitivity,
    with_pairs,
)
from exl_core.convert.tune import STEPS, fits_in_memory, tune_model
from exl_core.convert.work import WorkDir
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.containers.safetensors_writer import Entry

CALIBRATION, CALIBRATION_FACTS = "calibration.safetensors", "calibration.json"
SENSITIVITY = "sensitivity.safetensors"
MEASUREMENT = "measurement.json"
ENDS, ENDS_FACTS = "ends.safetensors", "ends.json"
TUNING = "tuning.json"
TUNED, TUNED_FACTS = "tuned.safetensors", "tuned.json"
SAVING_SHARE = 0.05
"""Largest share of the time that is spent on saving states, which are large. A kill or a
stop loses the work since the last save, and the layer in progress."""

MakeRows = Callable[[Callable[[int, int], None]], CalibrationRows]


class Computed(NamedTuple):
    """Results for the output's record, in addition to the matrices."""

    rows: CalibrationRows
    measurement: Measurement
    allocation: Allocation


@dataclass(slots=True)
class Stages:
    """Computing part of the conversion of one source in one work directory.

    `make_rows` is called once and returns the calibration rows. `should_stop` is called between all
    pieces of work.
    """

    work: WorkDir
    checkpoint: Checkpoint
    config: ModelConfig
    options: ConvertOptions
    bits: float
    source_sha256: str
    make_rows: MakeRows
    on_event: OnEvent
    should_stop: Callable[[], bool]
    given: Measurement | None = None
    saving_share: float = SAVING_SHARE
    _saved_at: float = field(default_factory=time.monotonic)
    _saving_s: float = 0.0

    def run(self) -> Computed:
        """Runs all stages. The tensors of the output are then in the work directory."""
        self._is_tuning_enabled()
        rows = self._calibrate()
        with worker_pool(self._device, self.should_stop) as workers:
            measurement = self.given or self._measure(rows, workers)
            allocation = allocate(measurement.layers, self.bits)
            self._quantize(rows.token_ids, allocation, workers)
            self._tune(rows.token_ids, workers)
        return Computed(rows, measurement, allocation)

    def _calibrate(self) -> CalibrationRows:
        work = self.work
        if not work.has(CALIBRATION_FACTS):
            with self._stage(Stage.CALIBRATE) as step:
                rows = self.make_rows(step)
            work.write_tensors(CALIBRATION, {"token_ids": rows.token_ids})
            facts = {"sha256": rows.sha256, "description": rows.description}
            work.write_facts(CALIBRATION_FACTS, facts)
        facts = work.read_facts(CALIBRATION_FACTS)
        token_ids = work.read_tensors(CALIBRATION)["token_ids"]
        return CalibrationRows(token_ids, str(facts["sha256"]), str(facts["description"]))

    def _measure_sensitivity(self, token_ids: Tensor, workers: Workers) -> Sensitivity:
        """Sensitivity of all matrices. The pairs of a layer, for EXL3, stay in their file."""

        def write_pairs(layer: int, pairs: Mapping[str, Tensor]) -> None:
            self.work.write_tensors(pairs_file(layer), pairs)

        if not self.work.has(SENSITIVITY):
            with self._stage(Stage.SENSITIVITY) as step, self.work.scratch() as scratch:
                sensitivity = measure_sensitivity(
                    self.checkpoint,
                    self.config,
                    token_ids,
                    options=self.options,
                    workers=workers,
                    on_layer=step,
                    on_pairs=write_pairs if self.options.format == "exl3" else None,
                    scratch=scratch,
                )
            self.work.write_tensors(SENSITIVITY, as_tensors(sensitivity))
        return from_tensors(self.work.read_tensors(SENSITIVITY))

    def _measure(self, rows: CalibrationRows, workers: Workers) -> Measurement:
        work, count = self.work, self.config.num_layers
        if not work.has(MEASUREMENT):
            sensitivity = self._measure_sensitivity(rows.token_ids, workers)
            with self._stage(Stage.MEASURE) as step:
                first_layer, saved_state = self._resume_states("measure")
                states = (
                    self._place_states(saved_state["states"])
                    if saved_state
                    else self._embed(rows.token_ids[:MEASURED_ROWS])
                )
                for layer in range(first_layer, count):
                    step(layer, count)
                    measured = measure_layer(
                        read_layer(self.checkpoint, self.config, layer, self._device),
                        self.config,
                        states,
                        sensitivity,
                        options=self.options,
                        workers=workers,
                    )
                    work.write_facts(f"measured-{layer:05d}.json", measured.to_json())
                    is_last = layer + 1 == count
                    self._save_states("measure", layer + 1, {"states": states}, is_last=is_last)
            layers = [
                LayerMeasurement.from_json(work.read_facts(f"measured-{layer:05d}.json"))
                for layer in range(count)
            ]
            measurement = Measurement(
                self.source_sha256, rows.sha256, rows.description, tuple(layers)
            )
            work.write_facts(MEASUREMENT, measurement.to_json())
        self._drop_states("measure")
        work.remove(*(f"measured-{layer:05d}.json" for layer in range(count)))
        return Measurement.read(work.folder / MEASUREMENT)

    def _quantize(self, token_ids: Tensor, allocation: Allocation, workers: Workers) -> None:
        if self.work.has(ENDS_FACTS):
            return
        count, has_pairs = self.config.num_layers, self.options.format == "exl3"
        sensitivity: Sensitivity = {}
        if has_pairs or has_common_start(token_ids):
            # With a given measurement there is none yet.
            sensitivity = self._measure_sensitivity(token_ids, workers)
        with self._stage(Stage.QUANTIZE) as step:
            first_layer, saved_state = self._resume_states("quantize")
            if saved_state:
                states = States(
                    self._place_states(saved_state["source"]),
                    self._place_states(saved_state["quantized"]),
                )
            else:
                states = States(*(self._embed(token_ids) for _ in range(2)))
            for layer in range(first_layer, count):
                step(layer, count)
                pairs = self.work.read_tensors(pairs_file(layer)) if has_pairs else {}
                part = quantize_layer(
                    read_layer(self.checkpoint, self.config, layer, self._device),
                    self.config,
                    allocation,
                    states,
                    workers,
                    options=self.options,
                    sensitivity=with_pairs(sensitivity, pairs),
                )
                self._save_part(*layer_files(layer), part, Stage.QUANTIZE)
                both = {"source": states.source, "quantized": states.quantized}
                self._save_states("quantize", layer + 1, both, is_last=layer + 1 == count)
        with self._stage(Stage.ENDS):
            part = quantize_ends(self.checkpoint, self.config, states, self.options, workers)
            self._save_part(ENDS, ENDS_FACTS, part, Stage.ENDS)
        self._drop_states("quantize")

    def _tune(self, token_ids: Tensor, workers: Workers) -> None:
        if self.work.has(TUNED_FACTS):
            return
        if not self._is_tuning_enabled():
            self.work.write_tensors(TUNED, {})
            self.work.write_facts(TUNED_FACTS, {"digests": {}})
            return
        with self._stage(Stage.TUNE) as step, self.work.scratch() as scratch:
            tensors = TensorFiles(part_entries(self.work, self.config.num_layers))
            first_step, saved_state = self._resume_states("tune")

            def on_step(done: int, state: Mapping[str, Tensor]) -> None:
                self._save_states("tune", done, state)
                step(done, STEPS)

            tuned = tune_model(
                self.checkpoint,
                self.config,
                tensors,
                token_ids,
                options=self.options,
                workers=workers,
                scratch=scratch,
                steps_done=first_step,
                saved_state=saved_state,
                on_step=on_step,
            )
        self.work.write_tensors(TUNED, tuned)
        self.work.write_facts(TUNED_FACTS, {"digests": digests_of(tuned)})
        self._drop_states("tune")

    def _is_tuning_enabled(self) -> bool:
        """Decided once and recorded, because the free memory may differ after a kill."""
        if not self.work.has(TUNING):
            is_enabled = fits_in_memory(self.config, self._device)
            self.work.write_facts(TUNING, {"has_room": is_enabled})
        return bool(self.work.read_facts(TUNING)["has_room"])

    @property
    def _device(self) -> torch.device:
        return torch.device(self.options.device)

    def _embed(self, token_ids: Tensor) -> Tensor:
        return self._place_states(embed_rows(self.checkpoint, self.config, token_ids))

    def _place_states(self, states: Tensor) -> Tensor:
        """Moves states to the computing device if they take at most 1/16 of its free memory."""
        free = free_memory_bytes(self._device)
        is_small = free is not None and states.nbytes <= free // 16
        return states.to(self._device) if is_small else states

    @contextmanager
    def _stage(self, stage: Stage) -> Iterator[Callable[[int, int], None]]:
        """Reports the stage. Yields a function that reports progress (steps done, total) and raises
        ConversionStopped on a stop request."""

        def step(done: int, total: int) -> None:
            if self.should_stop():
                raise ConversionStopped
            self.on_event(Event("step", stage, done, total))

        self.on_event(Event("stage", stage))
        yield step
        if self.should_stop():
            raise ConversionStopped

    def _save_states(
        self, stage: str, at: int, states: Mapping[str, Tensor], *, is_last: bool = False
    ) -> None:
        """Saves the states before layer or step `at` if a save is due, at the end, or at a stop."""
        began = time.monotonic()
        is_due = (began - self._saved_at) * self.saving_share >= self._saving_s
        if is_due or is_last or self.should_stop():
            on_cpu = {name: x.cpu() for name, x in states.items()}
            self.work.write_tensors(f"{stage}-{at:05d}.safetensors", on_cpu)
            older = [name for before, name in self._states_files(stage) if before < at]
            self.work.remove(*older)
            self._saved_at = time.monotonic()
            self._saving_s = self._saved_at - began

    def _resume_states(self, stage: str) -> tuple[int, dict[str, Tensor]]:
        """Layer or step to resume at and the states before it; 0 and no states at the start."""
        files = self._states_files(stage)
        if not files:
            return 0, {}
        layer, name = max(files)
        return layer, self.work.read_tensors(name)

    def _drop_states(self, stage: str) -> None:
        self.work.remove(*(name for _, name in self._states_files(stage)))

    def _states_files(self, stage: str) -> list[tuple[int, str]]:
        paths = self.work.folder.glob(f"{stage}-*.safetensors")
        return [(int(path.stem.rpartition("-")[2]), path.name) for path in paths]

    def _save_part(self, name: str, facts_name: str, part: QuantizedPart, stage: Stage) -> None:
        self.work.write_tensors(name, part.tensors)
        reports = [report.to_json() for report in part.reports]
        facts = {"digests": digests_of(part.tensors), "reports": reports}
        self.work.write_facts(facts_name, facts)
        for report in reports:
            self.on_event(Event("matrix", stage, facts=report))


class TensorFiles(Mapping[str, Tensor]):
    """Tensors in the order of the output. Each access reads one from its file."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = {entry.name: entry for entry in entries}

    def __getitem__(self, name: str) -> Tensor:
        return self._entries[name].read()

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


def layer_files(layer: int) -> tuple[str, str]:
    """Names of the files with the tensors and the facts of a finished layer."""
    return f"layer-{layer:05d}.safetensors", f"layer-{layer:05d}.json"


def pairs_file(layer: int) -> str:
    """Name of the file with the correlations of a layer's outputs."""
    return f"pairs-{layer:05d}.safetensors"


def part_files(num_layers: int) -> list[tuple[str, str]]:
    """Names of these files for all layers, then for embedding, norm and head."""
    return [*(layer_files(layer) for layer in range(num_layers)), (ENDS, ENDS_FACTS)]


def part_entries(work: WorkDir, num_layers: int) -> list[Entry]:
    """All tensors of the output as they were before tuning."""
    return [entry for name, _ in part_files(num_layers) for entry in work.entries(name)]


def finished_entries(work: WorkDir, num_layers: int) -> list[Entry]:
    """All tensors of the output."""
    tuned = {entry.name: entry for entry in work.entries(TUNED)}
    return [tuned.get(entry.name, entry) for entry in part_entries(work, num_layers)]


def finished_digests(work: WorkDir, num_layers: int) -> dict[str, str]:
    """Digest of each tensor by name, taken when it was final and before it was written."""
    digests: dict[str, str] = {}
    for facts in (*(facts for _, facts in part_files(num_layers)), TUNED_FACTS):
        digests |= work.read_facts(facts)["digests"]
    return digests


def matrix_reports(work: WorkDir, num_layers: int) -> list[dict[str, object]]:
    """Layout, size, error and incidents of each quantized matrix."""
    facts = [work.read_facts(facts) for _, facts in part_files(num_layers)]
    return [report for one in facts for report in one["reports"]]


def stage_files(work: WorkDir) -> list[str]:
    """Work files without use once the output exists (not calibration rows and measurement)."""
    kinds = ("layer", "measure", "pairs", "quantize", "tune")
    parts = [path.name for kind in kinds for path in work.folder.glob(f"{kind}-*")]
    return [*parts, SENSITIVITY, ENDS, ENDS_FACTS, TUNED, TUNED_FACTS, TUNING]
