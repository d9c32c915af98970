"""Speed of prefill and decode, and the limit that memory bandwidth sets.

Timed by the wall clock: calls of the engine's `Runner`, which lays out the batch and runs the
forward pass as in generation, and reading back the likeliest next tokens. Not timed: loading,
tokenizing, scheduling, and other kinds of sampling.

  prefill   `batch` prompts of N tokens, from an empty cache to the token that follows each prompt,
            in passes of at most `pass_rows` tokens, as the engine splits them
  decode    N steps of one token for each of `batch` sequences, after `depth` cached tokens. Each
            step is fed the tokens of the previous one. Every sequence has its own pages. On a GPU
            steps are launched before the host has read their input tokens, as in generation

Each measurement first runs unmeasured: once on a CPU, and on a GPU until passes of its shape have
been captured as CUDA graphs. It then runs `repeat` times. The figure is the median; minimum and
maximum are recorded too. Decoding does not depend on the length of the prompts, so it is measured
once per batch size.

The floor: a decode step cannot be faster than reading its weights and the attended keys and values
at the memory bandwidth. The bandwidth is measured in the same run: reads by the CPU's threads, or a
copy within the GPU's memory. The stages of a split model read one after another, each from the
memory of its device. So do experts that the CPU computes for layers on a GPU: they are read at the
bandwidth of the CPU's threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

import torch

from exl_core.arch.layers import Attention, LayerSpec
from exl_core.arch.spec import ModelConfig
from exl_core.cache.format import KVFormat, kv_bytes_per_token
from exl_core.errors import RequestError
from exl_core.model.cuda_graphs import PASSES_BEFORE_CAPTURE
from exl_core.model.transformer import Transformer
from exl_core.ops.table import OpTable
from exl_core.session.load import LoadedModel
from exl_eval.gpu import copy_bandwidth, count_launches
from exl_eval.machine import peak_memory_bytes, read_bandwidth
from exl_eval.result import SpeedResult, SpeedRun, Spread
from exl_eval.workload import PASS_ROWS, Workload

OnMeasured = Callable[[int, int, str], None]
"""Called before each repetition: repetitions done, repetitions in all, what is measured."""


@dataclass(frozen=True, slots=True)
class SpeedOptions:
    """Settings of a measurement. Every prompt length of `prefill` is combined with every size of
    `batch`. Each batch size decodes `decode` steps after `depth` cached tokens. Prompts are
    computed in passes of `pass_rows` tokens."""

    prefill: tuple[int, ...] = (512,)
    decode: int = 128
    batch: tuple[int, ...] = (1,)
    repeat: int = 3
    kv_format: KVFormat = KVFormat.FP16
    depth: int = 1
    pass_rows: int = PASS_ROWS


def check_options(options: SpeedOptions, config: ModelConfig) -> None:
    """Raises `RequestError` for settings that this model cannot run; needs no weights."""
    limit = config.max_seq_len
    lengths = (
        *(("a prompt", "--prefill", count, limit) for count in options.prefill),
        ("the cached text before decoding", "--depth", options.depth, limit - 1),
        ("a decoded sequence", "--decode", options.decode, max(1, limit - options.depth)),
    )
    for what, option, count, longest in lengths:
        if not 1 <= count <= longest:
            raise RequestError(
                f"{what} does not fit the model",
                expected=f"{option} of 1 to {longest}",
                got=count,
            )
    counts = (
        *(("--batch", size) for size in options.batch),
        ("--repeat", options.repeat),
        ("--chunk", options.pass_rows),
    )
    for option, count in counts:
        if count < 1:
            raise RequestError(f"{option} is too small", expected="at least 1", got=count)
    if not options.prefill or not options.batch:
        raise RequestError("nothing to measure", expected="a prompt length and a batch size")
    kv_bytes_per_token(config.kv_shapes, options.kv_format)  # raises for head sizes it cannot hold


def measure_speed(
    loaded: LoadedModel,
    options: SpeedOptions,
    *,
    start_memory_bytes: int,
    on_measured: OnMeasured | None = None,
) -> SpeedResult:
    """Runs all measurements. `start_memory_bytes` is this process's peak memory before the model
    was loaded."""
    config, ops = loaded.config, loaded.model.ops
    check_options(options, config)
    bench = _Bench(loaded, options, on_measured)
    decoded = {size: bench.decode(size) for size in dict.fromkeys(options.batch)}
    grid = [
        (prompt, size, bench.prefill(prompt, size))
        for prompt, size in product(options.prefill, options.batch)
    ]
    peak = peak_memory_bytes()  # before the buffer of the next line
    floor = StepFloor(loaded.model, options)
    cache_bytes = kv_read_bytes(config, options)
    runs = []
    for prompt, size, prefill in grid:
        step_bytes = loaded.model.pass_weight_bytes(size) + size * cache_bytes
        floor_tok_s = size / floor.step_seconds(size)
        runs.append(
            SpeedRun(
                prompt_tokens=prompt,
                decode_tokens=options.decode,
                batch=size,
                prefill=prefill,
                decode=decoded[size].rate,
                bytes_per_token=step_bytes / size,
                floor_tok_s=floor_tok_s,
                floor_share=decoded[size].rate.median / floor_tok_s,
                launches=decoded[size].launches,
            )
        )
    return SpeedResult(
        model=loaded.label,
        device=device_name(ops),
        instruction_set=ops.name.removeprefix("cpu-"),
        threads=ops.threads,
        kv_format=options.kv_format.value,
        depth=options.depth,
        exact=loaded.exact,
        repeat=options.repeat,
        weights_bytes=loaded.weights_bytes,
        decode_weight_bytes=loaded.model.decode_weight_bytes,
        read_bytes_per_s=floor.bytes_per_s,
        load_s=loaded.load_s,
        start_memory_bytes=start_memory_bytes,
        peak_memory_bytes=peak,
        device_peak_bytes=bench.device_peak_bytes,
        device_working_bytes=bench.device_working_bytes,
        runs=tuple(runs),
        parameters=loaded.parameters.total,
        active_parameters=loaded.parameters.active,
        host_bytes=loaded.model.host_bytes,
        host_bytes_per_s=floor.host_bytes_per_s,
    )


class StepFloor:
    """Time that the memory bandwidth of each stage's device sets for a decode step.

    `bytes_per_s` is the bandwidth, of a split model its mean over the weights of a step.
    `host_bytes_per_s` is that of experts in the host's memory; None if there are none.
    """

    def __init__(self, model: Transformer, options: SpeedOptions) -> None:
        self._model = model
        layers = model.config.layers
        self._cache_bytes = [
            kv_read_bytes(model.config, options, [layers[index] for index in stage.layers])
            for stage in model.stages
        ]
        measured: dict[torch.device, float] = {}
        for stage in model.stages:
            if stage.ops.device not in measured:
                measured[stage.ops.device] = memory_bandwidth(stage.ops)
        self._bandwidths = [measured[stage.ops.device] for stage in model.stages]
        host = model.host_table
        self.host_bytes_per_s = None if host is None else memory_bandwidth(host)
        sizes = model.stage_pass_bytes(1)
        self.bytes_per_s = sum(sizes) / self._seconds(sizes)

    def step_seconds(self, batch: int) -> float:
        weights = self._model.stage_pass_bytes(batch)
        caches = self._cache_bytes
        seconds = self._seconds([w + batch * c for w, c in zip(weights, caches, strict=True)])
        if self.host_bytes_per_s is not None:
            seconds += self._model.host_pass_bytes(batch) / self.host_bytes_per_s
        return seconds

    def _seconds(self, sizes: Sequence[int]) -> float:
        return sum(size / rate for size, rate in zip(sizes, self._bandwidths, strict=True))


def kv_read_bytes(
    config: ModelConfig, options: SpeedOptions, layers: Sequence[LayerSpec] | None = None
) -> int:
    """Bytes of keys and values that a decode step reads per sequence, averaged over the steps, and
    of the states that it reads and writes: in all layers, or in some."""
    read = 0
    for layer in config.layers if layers is None else layers:
        if layer.state_shape is not None:  # read and written by each step
            read += 2 * options.decode * layer.state_shape.size_bytes
            continue
        own = layer.mixer.window if isinstance(layer.mixer, Attention) else 0
        window = own or config.max_seq_len
        # Step i sees the `depth` cached tokens, i decoded tokens, and itself.
        seen = sum(min(options.depth + i + 1, window) for i in range(options.decode))
        read += seen * kv_bytes_per_token([layer.kv_shape], options.kv_format)
    return read // options.decode


def memory_bandwidth(ops: OpTable) -> float:
    """Bytes per second read by the table's threads, or moved by a copy on its GPU."""
    return read_bandwidth(ops.threads) if ops.device.type == "cpu" else copy_bandwidth(ops.device)


def device_name(ops: OpTable) -> str:
    """`cpu`, or the GPU's index and name."""
    if ops.device.type == "cpu":
        return "cpu"
    return f"{ops.device}, {torch.cuda.get_device_name(ops.device)}"


@dataclass(frozen=True, slots=True)
class _Decoded:
    """Tokens per second over all sequences, and kernel launches per step (None on a CPU)."""

    rate: Spread
    launches: int | None


class _Bench:
    """Runs each measurement unmeasured first and then `repeat` times."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: SpeedOptions,
        on_measured: OnMeasured | None,
    ) -> None:
        self._model: Transformer = loaded.model
        self._device = loaded.model.ops.device
        self._device_weights_bytes = loaded.weights_bytes - loaded.model.host_bytes
        self._options = options
        self._on_measured = on_measured
        sizes = len(dict.fromkeys(options.batch))
        measurements = len(options.prefill) * len(options.batch) + sizes
        self._unmeasured = 1 if self._device.type == "cpu" else PASSES_BEFORE_CAPTURE
        self._total = measurements * (options.repeat + self._unmeasured)
        self._done = 0
        self.device_peak_bytes: int | None = None
        self.device_working_bytes: int | None = None

    def prefill(self, prompt_tokens: int, batch: int) -> Spread:
        """Prompt tokens per second over all sequences."""
        work = self._workload(prompt_tokens, batch)

        def once() -> float:
            started = time.perf_counter()
            work.prefill(prompt_tokens)
            return batch * prompt_tokens / (time.perf_counter() - started)

        rate = self._repeated(once, f"prefill of {prompt_tokens} tokens, batch {batch}")
        self._note_memory(work)
        return rate

    def decode(self, batch: int) -> _Decoded:
        steps, depth = self._options.decode, self._options.depth
        work = self._workload(depth + steps, batch)
        first = work.fill(depth)

        def once() -> float:
            started = time.perf_counter()
            work.decode(first, depth, steps)
            return batch * steps / (time.perf_counter() - started)

        rate = self._repeated(once, f"decode of {steps} tokens, batch {batch}")
        self._note_memory(work)
        launches = None
        if self._device.type == "cuda":
            launches = count_launches(lambda: work.step(first, depth), self._device)
        return _Decoded(rate, launches)

    def _workload(self, tokens: int, batch: int) -> Workload:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        options = self._options
        return Workload(
            self._model,
            options.kv_format,
            tokens=tokens,
            batch=batch,
            pass_rows=options.pass_rows,
        )

    def _note_memory(self, work: Workload) -> None:
        if self._device.type != "cuda":
            return
        taken = torch.cuda.max_memory_reserved(self._device)
        in_use = torch.cuda.max_memory_allocated(self._device)
        working = in_use - self._device_weights_bytes - work.store.tensor_bytes
        self.device_peak_bytes = max(taken + work.store.mapped_bytes, self.device_peak_bytes or 0)
        self.device_working_bytes = max(working, self.device_working_bytes or 0)

    def _repeated(self, once: Callable[[], float], what: str) -> Spread:
        rates = []
        for _ in range(self._options.repeat + self._unmeasured):
            if self._on_measured is not None:
                self._on_measured(self._done, self._total, what)
            rates.append(once())
            self._done += 1
        # The unmeasured runs warm up caches, clocks and the allocator.
        measured = rates[self._unmeasured :]
        return Spread(median(measured), min(measured), max(measured))
