"""Time of each layer in a pass over a prompt and, on a CPU, in a decode step.

An observer reads the clock before and after each layer. On a GPU it waits for the device at both
places. A GPU decodes with CUDA graphs, in which the time of a single layer cannot be measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch
from torch import Tensor

from exl_core.model.observe import Observer, Part
from exl_core.model.runner import make_batch
from exl_core.model.segment import Segment
from exl_core.session.load import LoadedModel
from exl_eval.speed import SpeedOptions, check_options
from exl_eval.workload import Workload


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Median times by layer.

    prompt_tokens  tokens of the pass over a prompt
    prefill_s      seconds of each layer in that pass
    decode_s       seconds of each layer in a step of one token; None on a GPU
    """

    prompt_tokens: int
    prefill_s: tuple[float, ...]
    decode_s: tuple[float, ...] | None

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class _LayerClock(Observer):
    """Seconds of each layer of one pass."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def before(self, part: Part, states: Tensor) -> Tensor:
        if part.kind == "attention":
            self._started = _now(states.device)
        return states

    def after(self, part: Part, states: Tensor) -> Tensor:
        if part.kind == "mlp":
            self.seconds.append(_now(states.device) - self._started)
        return states


def measure_layers(loaded: LoadedModel, options: SpeedOptions) -> LayerTimes:
    """Times `options.repeat` passes after one unmeasured pass: the first prompt length of the
    options, up to their rows per pass, and steps of one token after `options.depth` tokens."""
    check_options(options, loaded.config)
    rows = min(options.prefill[0], options.pass_rows)
    work = Workload(loaded.model, options.kv_format, tokens=max(rows, options.depth + 1), batch=1)
    prefill = _times(loaded, work, work.prompt_segments(rows), options.repeat)
    decode = None
    if all(stage.ops.device.type == "cpu" for stage in loaded.model.stages):
        newest = work.fill(options.depth)
        step = work.decode_segments(newest, options.depth)
        decode = _times(loaded, work, step, options.repeat)
    return LayerTimes(rows, prefill, decode)


def _times(
    loaded: LoadedModel, work: Workload, segments: Sequence[Segment], repeat: int
) -> tuple[float, ...]:
    passes = []
    for _ in range(repeat + 1):
        clock = _LayerClock()
        loaded.model.forward(make_batch(segments, work.store.page_size), work.store, clock)
        passes.append(clock.seconds)
    return tuple(median(of_layer) for of_layer in zip(*passes[1:], strict=True))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
