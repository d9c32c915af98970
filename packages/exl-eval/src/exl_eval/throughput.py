"""Latency and throughput of one engine under a stream of requests.

Each request is submitted at its arrival time, even if the engine has fallen behind. Queueing time
therefore counts in the figures of the requests that wait. Times are wall clock, taken when a token
is sampled:

  first token   from arrival to the first token; includes queueing and the prompt
  inter-token   from each token to the next one of its reply, over all replies
  end to end    from arrival to the last token

The workload fixes the number of tokens of every reply, so every run does the same work.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import numpy as np

from exl_core.cache.format import KVFormat
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import FinishEvent, SampledToken, StartEvent
from exl_core.engine.request import Request
from exl_core.errors import RequestError
from exl_core.generate import driver
from exl_core.generate.driver import generate
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import LoadedModel
from exl_eval.requests_file import TimedRequest
from exl_eval.result import SCHEMA_VERSION
from exl_eval.speed import device_name

OnTokens = Callable[[int, int, str], None]
"""Called after each pass: tokens generated, tokens in all, what runs and what waits."""


@dataclass(frozen=True, slots=True)
class ThroughputOptions:
    """Settings of the engine (see `EngineOptions`), and the seed of prompts and samplers."""

    max_batch: int = 16
    cache_tokens: int | None = None
    kv_format: KVFormat = KVFormat.FP16
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Tail:
    """Distribution of latencies in seconds: mean, percentiles and maximum."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Times of one request, in seconds after the start of the run. `cached_tokens` of its prompt
    came from the cache and were not computed."""

    line: int
    arrival_s: float
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    first_token_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class ThroughputResult:
    """Figures of a whole run, which lasts `seconds` from its start to the last token.
    `offered_per_s` is the arrival rate of the workload, `requests_per_s` the completion rate."""

    model: str
    device: str
    threads: int
    kv_format: str
    exact: bool
    max_batch: int
    cache_tokens: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    seconds: float
    passes: int
    most_running: int
    offered_per_s: float | None
    requests_per_s: float
    generated_tok_s: float
    total_tok_s: float
    first_token: Tail
    inter_token: Tail | None
    end_to_end: Tail
    by_request: tuple[RequestTimes, ...]

    def as_dict(self) -> dict[str, object]:
        return {"schema_version": SCHEMA_VERSION, "measurement": "throughput", **asdict(self)}


@dataclass(slots=True)
class _Running:
    """A request of the workload and its progress."""

    asked: TimedRequest
    request: Request
    cached_tokens: int = 0
    token_times: list[float] = field(default_factory=list)


def measure_throughput(
    loaded: LoadedModel,
    workload: Sequence[TimedRequest],
    options: ThroughputOptions,
    on_tokens: OnTokens | None = None,
) -> ThroughputResult:
    """Runs the workload. Before the first pass, raises `RequestError` with the line of a request
    that this model can never serve."""
    engine = Engine(
        loaded.model,
        loaded.tokenizer,
        EngineOptions(
            cache_tokens=options.cache_tokens,
            max_batch=options.max_batch,
            kv_format=options.kv_format,
        ),
    )
    generate(engine, Request((1,), max_tokens=2))  # warms up
    engine.forget_cache()
    player = Player(engine, workload, options.seed, on_tokens)
    seconds = player.play()
    ops = loaded.model.ops
    listed = player.times()
    prompt_tokens = sum(one.prompt_tokens for one in listed)
    generated = sum(one.tokens for one in listed)
    last_arrival = max(one.arrival_s for one in listed)
    return ThroughputResult(
        model=loaded.label,
        device=device_name(ops),
        threads=ops.threads,
        kv_format=options.kv_format.value,
        exact=loaded.exact,
        max_batch=options.max_batch,
        cache_tokens=engine.pool.num_pages * engine.store.page_size,
        requests=len(listed),
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(one.cached_tokens for one in listed),
        generated_tokens=generated,
        seconds=seconds,
        passes=player.passes,
        most_running=player.most_running,
        offered_per_s=len(listed) / last_arrival if last_arrival > 0 else None,
        requests_per_s=len(listed) / seconds,
        generated_tok_s=generated / seconds,
        total_tok_s=(prompt_tokens + generated) / seconds,
        first_token=tail([one.first_token_s - one.arrival_s for one in listed]),
        inter_token=tail(player.gaps()) if player.gaps() else None,
        end_to_end=tail([one.end_s - one.arrival_s for one in listed]),
        by_request=tuple(listed),
    )


def tail(seconds: Sequence[float]) -> Tail:
    """Statistics of `seconds`. Percentiles are interpolated."""
    values = np.asarray(seconds, dtype=np.float64)
    p50, p90, p95, p99 = (float(value) for value in np.percentile(values, (50, 90, 95, 99)))
    return Tail(float(values.mean()), p50, p90, p95, p99, float(values.max()))


class Player:
    """Submits each request at its arrival time and steps the engine until all have ended."""

    def __init__(
        self,
        engine: Engine,
        workload: Sequence[TimedRequest],
        seed: int,
        on_tokens: OnTokens | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.passes = 0
        self.most_running = 0
        self._engine = engine
        self._clock, self._sleep = clock, sleep
        self._on_tokens = on_tokens
        self._started = 0.0
        self._generated = 0
        self._all = [self._prepared(asked, seed) for asked in workload]
        self._total = sum(asked.max_tokens for asked in workload)

    def play(self) -> float:
        """Runs all requests. Returns the seconds until the last reply has ended."""
        waiting = sorted(self._all, key=lambda one: one.asked.arrival_s)
        running: dict[str, _Running] = {}
        self._started = self._clock()
        with driver.running(self._engine) as run:
            while waiting or running:
                now = self._clock() - self._started
                while waiting and waiting[0].asked.arrival_s <= now:
                    one = waiting.pop(0)
                    running[one.request.request_id] = one
                    run.submit(one.request)
                if not running:
                    self._sleep(waiting[0].asked.arrival_s - now)
                    continue
                self._step(run, running)
                if self._on_tokens is not None:
                    what = f"{len(running)} running, {len(waiting)} to come"
                    self._on_tokens(self._generated, self._total, what)
        return self._clock() - self._started

    def times(self) -> list[RequestTimes]:
        """Times of all requests, in the order of the file."""
        return [
            RequestTimes(
                line=one.asked.line,
                arrival_s=one.asked.arrival_s,
                prompt_tokens=len(one.request.prompt_ids),
                cached_tokens=one.cached_tokens,
                tokens=len(one.token_times),
                first_token_s=one.token_times[0],
                end_s=one.token_times[-1],
            )
            for one in sorted(self._all, key=lambda one: one.asked.line)
        ]

    def gaps(self) -> list[float]:
        """Seconds between consecutive tokens of a reply, for all replies together."""
        return [
            later - earlier for one in self._all for earlier, later in pairwise(one.token_times)
        ]

    def _step(self, run: driver.Run, running: dict[str, _Running]) -> None:
        self.passes += 1
        for event in run.step():
            if isinstance(event, StartEvent):
                running[event.request_id].cached_tokens = event.cached_tokens
            if isinstance(event, FinishEvent):
                del running[event.request_id]
        self.most_running = max(self.most_running, len(self._engine.scheduler.running))

    def _prepared(self, asked: TimedRequest, seed: int) -> _Running:
        engine, name = self._engine, f"line {asked.line}"
        limit = engine.model.config.max_seq_len
        if isinstance(asked.prompt, int):
            _check_fits(name, asked.prompt, asked.max_tokens, limit)
            generator = random.Random(f"{seed}, {asked.line}")
            ids = [generator.randrange(engine.vocab_size) for _ in range(asked.prompt)]
        else:
            ids = engine.tokenizer.encode(asked.prompt)
            _check_fits(name, len(ids), asked.max_tokens, limit)
        times: list[float] = []

        def note(_token: SampledToken) -> None:
            times.append(self._clock() - self._started)
            self._generated += 1

        sampler = SamplerParams(temperature=asked.temperature, seed=seed + asked.line)
        request = Request(
            tuple(ids),
            max_tokens=asked.max_tokens,
            sampler=sampler,
            request_id=name,
            hooks=(note,),
        )
        engine.check(request)
        return _Running(asked, request, token_times=times)


def _check_fits(name: str, prompt_tokens: int, max_tokens: int, limit: int) -> None:
    if prompt_tokens + max_tokens > limit:
        raise RequestError(
            "prompt and reply do not fit the model's context",
            where=name,
            expected=f"at most {limit} tokens together",
            got=f"{prompt_tokens} and {max_tokens}",
        )
