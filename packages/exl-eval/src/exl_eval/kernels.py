"""Time of each op in a forward pass, with its bytes and its share of the memory bandwidth.

One forward pass runs with an op table that records every call. The calls are then timed. Calls of
one op at one shape form one line: an op that each layer calls once gives a line with as many calls
as there are layers.

CPU: the recorded calls are repeated in their order and timed one by one. Weights then come from
memory, not from a cache that the same op has just filled. GPU: single calls are too short to time,
so all calls of a line are timed together, and in a CUDA graph if there are few rows. They read the
matrices of all layers in turn. Together these exceed the L2 cache for any model that needs a GPU.

`kernel_lines.py` counts the bytes and operations of a call. The time of the pass minus the sum of
its ops is interpreter time, operations of torch, or gaps between kernels.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, cast

import torch

from exl_core.errors import RequestError
from exl_core.model.cuda_graphs import BUCKETS
from exl_core.model.runner import make_batch
from exl_core.model.segment import Segment
from exl_core.model.transformer import Transformer
from exl_core.ops.table import OpTable
from exl_core.session.load import LoadedModel
from exl_eval.gpu import count_launches, graph_seconds, queued_seconds
from exl_eval.kernel_lines import COUNTED_OPS, STATE_OPERATIONS, Call, Line, Pass, line_of
from exl_eval.result import KernelPass, KernelResult, KernelRun
from exl_eval.speed import OnMeasured, SpeedOptions, check_options, device_name, memory_bandwidth
from exl_eval.workload import Workload

MIN_SECONDS = 0.2
"""Minimum duration of the measurement on a CPU: times of a single short pass are mostly noise."""


class _Notes:
    """Wraps an op table and records the calls of its ops."""

    before = None  # ops are timed one by one: none prepares the inputs of another

    def __init__(self, ops: OpTable) -> None:
        self._ops = ops
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        made = getattr(self._ops, name)
        if name not in COUNTED_OPS:
            return made

        def noted(*operands: Any, **named: Any) -> Any:
            result = made(*operands, **named)
            again = partial(made, *operands, **named)
            self.calls.append(Call(name, (*operands, *named.values()), result, again))
            return result

        return noted


@torch.inference_mode()
def measure_kernels(
    loaded: LoadedModel, options: SpeedOptions, *, on_measured: OnMeasured | None = None
) -> KernelResult:
    """Times the ops of several passes: for each batch size one decode step of that many sequences
    after `depth` tokens, and for each prompt length one pass over its first tokens, at most
    `pass_rows`. `options.decode` is not used."""
    model, ops = loaded.model, loaded.model.ops
    check_options(options, loaded.config)
    if loaded.plan:
        raise RequestError(
            "the ops of a pass are timed on one device",
            got="; ".join(map(str, loaded.plan)),
            next_step="Take --split none.",
        )

    if model.num_ranks > 1:
        raise RequestError(
            "the ops of a pass are timed in one process", got=f"{model.num_ranks} ranks"
        )

    def one(batch: int, rows: int, past_len: int) -> Pass:
        return Pass(options.kv_format, batch, rows, past_len)

    wanted = [one(size, 1, options.depth) for size in dict.fromkeys(options.batch)]
    prompts = dict.fromkeys(min(prompt, options.pass_rows) for prompt in options.prefill)
    wanted += [one(1, rows, 0) for rows in prompts]
    bandwidth = memory_bandwidth(ops)
    passes = []
    for number, each in enumerate(wanted):
        if on_measured is not None:
            what = f"a step of {each.batch}" if each.past_len else f"a prompt of {each.rows}"
            on_measured(number, len(wanted), what)
        passes.append(_measure_pass(model, each, options.repeat, bandwidth))
    return KernelResult(
        model=loaded.label,
        device=device_name(ops),
        instruction_set=ops.name.removeprefix("cpu-"),
        threads=ops.threads,
        kv_format=options.kv_format.value,
        exact=loaded.exact,
        repeat=options.repeat,
        bytes_per_s=bandwidth,
        passes=tuple(passes),
    )


def _measure_pass(model: Transformer, this: Pass, repeat: int, bandwidth: float) -> KernelPass:
    device, is_gpu = model.ops.device, model.ops.device.type == "cuda"
    work = Workload(
        model,
        this.kv_format,
        tokens=this.past_len + this.rows,
        batch=this.batch,
        pass_rows=this.rows,
    )
    run: Callable[[], object]
    if this.past_len:
        newest = work.fill(this.past_len)
        segments = work.decode_segments(newest, this.past_len)
        run = partial(work.step, newest, this.past_len)
    else:
        segments = work.prompt_segments(this.rows)
        run = partial(work.prefill, this.rows)
    run()
    whole = median(_wall_seconds(run) for _ in range(repeat))
    calls = _noted_calls(model, segments, work)
    lines: dict[Line, list[Call]] = {}
    for call in calls:
        lines.setdefault(line_of(call, this), []).append(call)
    if is_gpu:
        seconds = {
            line: median(_gpu_timer(line, this)([call.again for call in alike], device, repeat))
            for line, alike in lines.items()
        }
    else:
        seconds = _seconds_in_order(calls, this, repeat)
    kernels = tuple(
        KernelRun(
            op=line.op,
            shape=line.shape,
            calls=len(alike),
            bytes=line.bytes,
            operations=line.operations,
            seconds=seconds[line],
            share=line.bytes / bandwidth / seconds[line],
            launches=count_launches(alike[0].again, device) if is_gpu else None,
        )
        for line, alike in lines.items()
    )
    launches = count_launches(run, device) if is_gpu else None
    rows = this.batch * this.rows
    return KernelPass(rows, this.batch, this.past_len, whole, launches, kernels)


def _gpu_timer(
    line: Line, this: Pass
) -> Callable[[Sequence[Callable[[], object]], torch.device, int], list[float]]:
    """How to time calls on a GPU: in a CUDA graph if there are few rows. Recurrent ops copy the
    slots of the sequences from the host, which cannot be captured."""
    is_small = this.batch * this.rows <= BUCKETS[-1]
    return graph_seconds if is_small and line.op not in STATE_OPERATIONS else queued_seconds


def _noted_calls(model: Transformer, segments: list[Segment], work: Workload) -> list[Call]:
    """Calls of one pass, in order."""
    notes = _Notes(model.ops)
    noting = copy.copy(model)
    (stage,) = model.stages
    stage = copy.copy(stage)
    stage.ops = noting.ops = cast(OpTable, notes)
    noting.stages = (stage,)
    noting.forward(make_batch(segments), work.store)
    return notes.calls


def _seconds_in_order(calls: list[Call], this: Pass, repeat: int) -> dict[Line, float]:
    """Mean seconds per call of each line, median over the repetitions."""
    lines = [line_of(call, this) for call in calls]
    counts = Counter(lines)
    found: dict[Line, list[float]] = {line: [] for line in counts}
    done, deadline = 0, time.perf_counter() + MIN_SECONDS
    while done <= repeat or time.perf_counter() < deadline:
        total = dict.fromkeys(found, 0.0)
        for line, call in zip(lines, calls, strict=True):
            total[line] += _wall_seconds(call.again)
        for line, spent in total.items():
            found[line].append(spent / counts[line])
        done += 1
    return {line: median(spent[1:]) for line, spent in found.items()}  # the first warms up


def _wall_seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
