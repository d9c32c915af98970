"""How fast a model runs: prompts in, tokens out, and how near the memory's floor that is.

What is timed, by the wall clock: calls of the engine's `Runner`, that is laying out the batch and
the forward pass, as generation runs them. Not in it: loading, tokenizing, scheduling and sampling.

  prefill   `batch` prompts of N tokens from an empty cache to the logits of each one's last token,
            in passes of at most PASS_ROWS tokens, as the engine cuts them
  decode    after a prompt of one token, N steps of one token for each of `batch` sequences, each
            with its logits; every sequence has pages of its own

The tokens are fixed. Every measurement runs once unmeasured, then `repeat` times; the median is the
figure and the extremes are kept. Decoding does not depend on the length of the prompts, so it is
measured once for each batch size.

The floor: a decode step cannot take less time than reading the weights that it needs and the keys
and values that it looks at, at the bandwidth that `machine.read_bandwidth` finds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

from exl_core.arch.spec import ModelConfig
from exl_core.cache.format import KVFormat, pages_for
from exl_core.cache.store import KVStore
from exl_core.engine.engine import EngineOptions
from exl_core.errors import RequestError
from exl_core.load import LoadedModel
from exl_core.model.runner import Runner
from exl_core.model.segment import LogitRows, Segment
from exl_core.model.transformer import Transformer
from exl_eval.machine import peak_memory_bytes, read_bandwidth
from exl_eval.result import SpeedResult, SpeedRun, Spread

PASS_ROWS = EngineOptions().prefill_chunk
"""The engine's own limit on prompt tokens in a pass."""

OnMeasured = Callable[[int, int, str], None]
"""Called before each repetition: repetitions done, repetitions in all, what is measured."""


@dataclass(frozen=True, slots=True)
class SpeedOptions:
    """Every length of `prefill` with every size of `batch`; `decode` steps for each batch size."""

    prefill: tuple[int, ...] = (512,)
    decode: int = 128
    batch: tuple[int, ...] = (1,)
    repeat: int = 3
    kv_format: KVFormat = KVFormat.FP16


def check_options(options: SpeedOptions, config: ModelConfig) -> None:
    """Raises `RequestError` for what this model cannot run; needs no weights."""
    limit = config.max_seq_len
    lengths = (
        *(("a prompt", "--prefill", count, limit) for count in options.prefill),
        ("a decoded sequence after its first token", "--decode", options.decode, limit - 1),
    )
    for what, option, count, longest in lengths:
        if not 1 <= count <= longest:
            raise RequestError(
                f"{what} does not fit the model",
                expected=f"{option} of 1 to {longest}",
                got=count,
            )
    counts = (*(("--batch", size) for size in options.batch), ("--repeat", options.repeat))
    for option, count in counts:
        if count < 1:
            raise RequestError(f"{option} is too small", expected="at least 1", got=count)
    if not options.prefill or not options.batch:
        raise RequestError("nothing to measure", expected="a prompt length and a batch size")


def measure_speed(
    loaded: LoadedModel,
    options: SpeedOptions,
    *,
    start_memory_bytes: int,
    on_measured: OnMeasured | None = None,
) -> SpeedResult:
    """`start_memory_bytes`: the peak of this process before the model was loaded."""
    config, ops = loaded.config, loaded.model.ops
    check_options(options, config)
    bench = _Bench(loaded.model, options, on_measured)
    decoded = {size: bench.decode(size) for size in dict.fromkeys(options.batch)}
    grid = [
        (prompt, size, bench.prefill(prompt, size))
        for prompt, size in product(options.prefill, options.batch)
    ]
    peak = peak_memory_bytes()  # before the buffer of the next line
    bandwidth = read_bandwidth(ops.threads)
    weights = loaded.model.decode_weight_bytes
    cache_bytes = kv_read_bytes(config, options)
    runs = []
    for prompt, size, prefill in grid:
        step_bytes = weights + size * cache_bytes
        floor = bandwidth / (step_bytes / size)
        runs.append(
            SpeedRun(
                prompt_tokens=prompt,
                decode_tokens=options.decode,
                batch=size,
                prefill=prefill,
                decode=decoded[size],
                bytes_per_token=step_bytes / size,
                floor_tok_s=floor,
                floor_share=decoded[size].median / floor,
            )
        )
    return SpeedResult(
        model=loaded.name,
        instruction_set=ops.name.removeprefix("cpu-"),
        threads=ops.threads,
        kv_format=options.kv_format.value,
        exact=loaded.exact,
        repeat=options.repeat,
        weights_bytes=loaded.weights_bytes,
        decode_weight_bytes=weights,
        read_bytes_per_s=bandwidth,
        load_s=loaded.load_s,
        start_memory_bytes=start_memory_bytes,
        peak_memory_bytes=peak,
        runs=tuple(runs),
    )


def kv_read_bytes(config: ModelConfig, options: SpeedOptions) -> int:
    """Keys and values that one sequence's decode step looks at, on average over the steps."""
    seen = 0
    for layer in range(config.num_layers):
        window = config.window_of(layer) or config.max_seq_len
        # Step i sees the prompt's one token, the i decoded ones before it, and itself.
        seen += sum(min(i + 2, window) for i in range(options.decode))
    per_position = config.num_kv_heads * options.kv_format.bytes_per_head(config.head_dim)
    return seen * per_position // options.decode


def fixed_tokens(count: int, vocab_size: int) -> tuple[int, ...]:
    """What every sequence consists of; llama.cpp is measured on the same."""
    return tuple((100 + i % 20000) % vocab_size for i in range(count))


def prefill_passes(
    prompt: Sequence[int], pages: Sequence[tuple[int, ...]], pass_rows: int = PASS_ROWS
) -> Iterator[list[Segment]]:
    """One prompt for each entry of `pages`, as the passes of at most `pass_rows` tokens."""
    current: list[Segment] = []
    room = pass_rows
    for page_ids in pages:
        start = 0
        while start < len(prompt):
            end = min(start + room, len(prompt))
            logit_rows = LogitRows.LAST if end == len(prompt) else LogitRows.NONE
            chunk, held = tuple(prompt[start:end]), page_ids[: pages_for(end)]
            current.append(Segment(chunk, start, held, logit_rows))
            room -= end - start
            start = end
            if room == 0:
                yield current
                current, room = [], pass_rows
    if current:
        yield current


class _Bench:
    """Runs each measurement once unmeasured and then `repeat` times."""

    def __init__(
        self, model: Transformer, options: SpeedOptions, on_measured: OnMeasured | None
    ) -> None:
        self._model = model
        self._options = options
        self._on_measured = on_measured
        sizes = len(dict.fromkeys(options.batch))
        measurements = len(options.prefill) * len(options.batch) + sizes
        self._total = measurements * (options.repeat + 1)
        self._done = 0

    def prefill(self, prompt_tokens: int, batch: int) -> Spread:
        """Prompt tokens a second, of all sequences together."""
        runner, pages = self._runner(prompt_tokens, batch)
        prompt = fixed_tokens(prompt_tokens, self._model.config.vocab_size)

        def once() -> float:
            started = time.perf_counter()
            for segments in prefill_passes(prompt, pages):
                runner.run(segments)
            return batch * prompt_tokens / (time.perf_counter() - started)

        return self._repeated(once, f"prefill of {prompt_tokens} tokens, batch {batch}")

    def decode(self, batch: int) -> Spread:
        """Decoded tokens a second, of all sequences together."""
        steps = self._options.decode
        runner, pages = self._runner(steps + 1, batch)
        tokens = fixed_tokens(steps, self._model.config.vocab_size)

        def step(token_id: int, past_len: int) -> None:
            runner.run(
                [
                    Segment(
                        token_ids=(token_id,),
                        past_len=past_len,
                        page_ids=page_ids[: pages_for(past_len + 1)],
                        logit_rows=LogitRows.LAST,
                    )
                    for page_ids in pages
                ]
            )

        def once() -> float:
            step(tokens[0], 0)
            started = time.perf_counter()
            for number, token_id in enumerate(tokens, start=1):
                step(token_id, number)
            return batch * steps / (time.perf_counter() - started)

        return self._repeated(once, f"decode of {steps} tokens, batch {batch}")

    def _runner(self, tokens: int, batch: int) -> tuple[Runner, list[tuple[int, ...]]]:
        """A cache with room for `batch` sequences of that many tokens, and each one's pages."""
        config, each = self._model.config, pages_for(tokens)
        store = KVStore(
            self._options.kv_format,
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            batch * each,
            device=self._model.ops.device,
        )
        pages = [tuple(range(owner * each, (owner + 1) * each)) for owner in range(batch)]
        return Runner(self._model, store), pages

    def _repeated(self, once: Callable[[], float], what: str) -> Spread:
        rates = []
        for _ in range(self._options.repeat + 1):
            if self._on_measured is not None:
                self._on_measured(self._done, self._total, what)
            rates.append(once())
            self._done += 1
        measured = rates[1:]  # the first warms caches, clocks and the allocator
        return Spread(median(measured), min(measured), max(measured))
