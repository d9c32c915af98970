"""The loop: requests in, events out, one forward pass a step.

Owns the cache, and puts scheduler, runner and outputs together. It has no threads and never waits:
whoever calls `step` sets the pace. Every request that was accepted gets exactly one end, a
`FinishEvent` or a `FailEvent`. After a pass that raised, the exception reaches the caller of
`step`, every request that ran gets a `FailEvent` with the next step, and the rest goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from exl_core.cache.format import PAGE_SIZE, KVFormat, pages_for
from exl_core.cache.page_pool import PagePool
from exl_core.cache.store import KVStore
from exl_core.engine.events import Event, FailEvent, FinishEvent
from exl_core.engine.output import Detokenizes, Output
from exl_core.engine.plan import BatchPlan
from exl_core.engine.request import Request
from exl_core.engine.scheduler import Scheduler
from exl_core.engine.sequence import Sequence
from exl_core.errors import RequestError
from exl_core.model.runner import Model, Runner
from exl_core.model.segment import LogitRows
from exl_core.sampling.sampler import LogitsError

DEFAULT_CACHE_TOKENS = 32768
"""Of a model with a longer context, unless more is asked for; pages cost nothing until used."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Choices of one engine.

    cache_tokens   tokens that all running requests share, rounded up to whole pages; None: the
                   model's context, but at most 32768
    max_batch      most requests in one pass
    prefill_chunk  most prompt tokens in one pass
    kv_format      precision of the cache
    """

    cache_tokens: int | None = None
    max_batch: int = 16
    prefill_chunk: int = 512
    kv_format: KVFormat = KVFormat.FP16

    def __post_init__(self) -> None:
        if self.cache_tokens is not None:
            _check_at_least("cache_tokens", self.cache_tokens, PAGE_SIZE)
        _check_at_least("max_batch", self.max_batch, 1)
        _check_at_least("prefill_chunk", self.prefill_chunk, 1)


class Engine:
    def __init__(
        self,
        model: Model,
        tokenizer: Detokenizes,
        options: EngineOptions | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.options = options or EngineOptions()
        self.model = model
        self.tokenizer = tokenizer
        config = model.config
        wanted = self.options.cache_tokens or min(config.max_seq_len, DEFAULT_CACHE_TOKENS)
        num_pages = pages_for(wanted)
        store = KVStore(
            self.options.kv_format,
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            num_pages,
        )
        self.pool = PagePool(num_pages)
        self.scheduler = Scheduler(
            self.pool,
            max_batch=self.options.max_batch,
            prefill_chunk=self.options.prefill_chunk,
        )
        self._runner = Runner(model, store)
        self._clock = clock
        self._outputs: dict[str, Output] = {}
        self._events: list[Event] = []  # that the next step hands out

    @property
    def is_idle(self) -> bool:
        """Nothing runs, nothing waits, and every event was handed out."""
        return not self._outputs and not self._events

    @property
    def live_requests(self) -> frozenset[str]:
        """Ids of the requests that have not ended."""
        return frozenset(self._outputs)

    def check(self, request: Request) -> None:
        """Refuse a request that this model and this cache can never serve."""
        self._check_tokens(request)
        self.scheduler.check_fits(request.request_id, self._max_len(request))

    def submit(self, request: Request) -> Sequence:
        """Check and queue the request."""
        request_id = request.request_id
        if request_id in self._outputs or any(e.request_id == request_id for e in self._events):
            raise RequestError("a request with this id has not ended yet", where=request_id)
        self.check(request)
        sequence = Sequence(request, self._max_len(request), list(request.prompt_ids))
        now = self._clock()
        output = Output(sequence, self.tokenizer, self.model.config.vocab_size, now)
        if request.max_tokens == 0:
            self._events.append(output.finish_empty(now))
            return sequence
        self._outputs[request_id] = output
        self.scheduler.add(sequence)
        return sequence

    def cancel(self, request_id: str) -> bool:
        """End the request; its `FinishEvent` comes with the next step. False: it had ended."""
        output = self._outputs.pop(request_id, None)
        if output is None:
            return False
        self.scheduler.remove(output.sequence)
        self._events.append(output.cancel(self._clock()))
        return True

    def discard_events(self, request_id: str) -> None:
        """Nobody listens to this request any more: drop what the next step would hand out of it."""
        self._events = [event for event in self._events if event.request_id != request_id]

    def step(self) -> list[Event]:
        """One forward pass, if there is anything to do, and what came of it."""
        try:
            plan = self.scheduler.plan()
            if plan.segments:
                self._run(plan)
        except BaseException as error:  # whatever it was, Ctrl-C too: it is raised again
            self._fail_running(error)
            raise
        events, self._events = self._events, []
        return events

    def _run(self, plan: BatchPlan) -> None:
        now = self._clock()
        for sequence in plan.sequences:
            self._outputs[sequence.request_id].mark_started(now)
        for source, target, length in plan.copies:
            for layer in range(self._runner.store.num_layers):
                for memory in (self._runner.store.key(layer), self._runner.store.value(layer)):
                    memory[target, :, :length] = memory[source, :, :length]
        logits = self._runner.run(plan.segments)
        sampling = [
            sequence
            for sequence, segment in zip(plan.sequences, plan.segments, strict=True)
            if segment.logit_rows is not LogitRows.NONE
        ]
        sampled: list[tuple[Output, int]] = []
        for sequence, row in zip(sampling, logits, strict=True):
            output = self._outputs[sequence.request_id]
            try:
                sampled.append((output, output.sample(row)))
            except LogitsError as error:
                # The others' logits may be fine, so they go on; what this one cached is not reused.
                self._events.append(FailEvent(sequence.request_id, error))
                self.scheduler.remove(sequence, is_trusted=False)
                del self._outputs[sequence.request_id]
        self.scheduler.advance(plan)
        for output, token_id in sampled:
            self._consume(output, token_id)

    def _consume(self, output: Output, token_id: int) -> None:
        request_id = output.sequence.request_id
        events = output.consume(token_id, self._clock())
        self._events += events
        if events and isinstance(events[-1], FinishEvent):
            self.scheduler.remove(output.sequence)
            del self._outputs[request_id]

    def _fail_running(self, error: BaseException) -> None:
        for sequence in self.scheduler.fail_running():
            if self._outputs.pop(sequence.request_id, None) is not None:
                self._events.append(FailEvent(sequence.request_id, error))

    def _check_tokens(self, request: Request) -> None:
        vocab_size = self.model.config.vocab_size
        largest = max(request.prompt_ids)
        if largest >= vocab_size:
            raise RequestError(
                f"prompt token {request.prompt_ids.index(largest)} is not in the vocabulary",
                where=request.request_id,
                expected=f"ids below {vocab_size}",
                got=largest,
                next_step="Does this tokenizer belong to this model?",
            )

    def _max_len(self, request: Request) -> int:
        """Where the sequence ends at the latest, prompt included."""
        prompt_len, context = len(request.prompt_ids), self.model.config.max_seq_len
        if prompt_len + 1 > context:
            raise RequestError(
                f"the prompt has {prompt_len} tokens, the context {context}",
                where=request.request_id,
                expected=f"at most {context - 1}, to leave room for a reply",
                got=prompt_len,
                next_step="Shorten the prompt.",
            )
        if request.max_tokens is not None:
            return min(context, prompt_len + request.max_tokens)
        # Until all is full; a prompt that leaves no room at all is then found not to fit.
        return max(prompt_len + 1, min(context, self.scheduler.capacity + 1))


def _check_at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise RequestError(
            f"{name} is too small", where="engine", expected=f"at least {low}", got=value
        )
