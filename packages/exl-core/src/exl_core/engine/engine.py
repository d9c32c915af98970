"""The loop: requests in, events out, one forward pass a step.

Owns the cache, and puts scheduler, runner, drafts and outputs together. It never waits: whoever
calls `step` sets the pace. Every request that was accepted gets exactly one end, a `FinishEvent` or
a `FailEvent`. After a pass that raised, the exception reaches the caller of `step`, every request
that ran gets a `FailEvent` with the next step, and the rest goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from exl_core.cache.format import PAGE_SIZE, KVFormat, pages_for
from exl_core.cache.page_pool import PagePool
from exl_core.cache.store import KVStore
from exl_core.constrain.filter_set import FilterSet
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.engine.admission import check_tokens, max_len
from exl_core.engine.drafting import Drafting
from exl_core.engine.events import Event, FailEvent, FinishEvent, PrefillEvent, StartEvent
from exl_core.engine.healing import healing_of
from exl_core.engine.output import Output
from exl_core.engine.plan import BatchPlan
from exl_core.engine.request import Request
from exl_core.engine.scheduler import Scheduler
from exl_core.engine.sequence import Sequence
from exl_core.errors import ExlError, RequestError
from exl_core.model.runner import Model, Runner
from exl_core.model.segment import LogitRows, Segment
from exl_core.sampling.sampler import Sampler, guide
from exl_core.speculate.drafter import Draft, Drafter
from exl_core.tokenizer.base import Tokenizer

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
        tokenizer: Tokenizer,
        options: EngineOptions | None = None,
        *,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`drafter`: whoever guesses what comes next; the replies are the same without one."""
        self.options = options or EngineOptions()
        self.model = model
        self.tokenizer = tokenizer
        config = model.config
        # A model's vocabulary is often padded: ids that the tokenizer does not have are not drawn.
        self.vocab_size = min(config.vocab_size, tokenizer.vocab_size)
        wanted = self.options.cache_tokens or min(config.max_seq_len, DEFAULT_CACHE_TOKENS)
        num_pages = pages_for(wanted)
        self.store = KVStore(
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
        self._runner = Runner(model, self.store)
        self._clock = clock
        self._drafting = None if drafter is None else Drafting(drafter, clock)
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

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens' bytes, for constraints and token healing."""
        return Vocabulary(self.tokenizer, self.vocab_size)

    def check(self, request: Request) -> None:
        """Refuse a request that this model and this cache can never serve."""
        self._checked(request)
        self._filters(request)

    def submit(self, request: Request) -> Sequence:
        """Check and queue the request."""
        request_id = request.request_id
        if request_id in self._outputs or any(e.request_id == request_id for e in self._events):
            raise RequestError("a request with this id has not ended yet", where=request_id)
        sequence, twin = self._checked(request)
        output = self._output(sequence, self._clock())
        if request.max_tokens == 0:
            self._events.append(output.finish_empty(self._clock()))
            return sequence
        self._outputs[request_id] = output
        self.scheduler.add(sequence, twin)
        return sequence

    def cancel(self, request_id: str) -> bool:
        """End the request; its `FinishEvent` comes with the next step. False: it had ended."""
        output = self._outputs.get(request_id)
        if output is None:
            return False
        self._events.append(self._with_drafts(output.cancel(self._clock())))
        self._drop(output)
        return True

    def token_ids_of(self, request_id: str) -> tuple[int, ...]:
        """Prompt and reply so far of a live request."""
        return tuple(self._outputs[request_id].sequence.token_ids)

    def ban_next(self, request_id: str, token_ids: frozenset[int]) -> None:
        """The next token of a live request will be none of these."""
        self._outputs[request_id].ban_next(token_ids)

    def discard_events(self, request_id: str) -> None:
        """Nobody listens to this request any more: drop what the next step would hand out of it."""
        self._events = [event for event in self._events if event.request_id != request_id]

    def step(self) -> list[Event]:
        """One forward pass, if there is anything to do, and what came of it."""
        try:
            self.scheduler.prepare()
            drafts = self._propose()
            plan = self.scheduler.plan({name: draft.token_ids for name, draft in drafts.items()})
            if plan.segments:
                self._run(plan, drafts)
                if not self._outputs:
                    self._move(self.scheduler.defragment())
        except BaseException as error:  # whatever it was, Ctrl-C too: it is raised again
            self._fail_running(error)
            raise
        events, self._events = self._events, []
        return events

    def defragment(self) -> int:
        """Put the cached pages of each prefix side by side; the number of pages that moved.

        Refused while requests run. `step` does it by itself now and then, when the last one ends.
        """
        if self._outputs:
            raise RequestError(
                "the cache is in use", expected="no live requests", got=len(self._outputs)
            )
        moves = self.scheduler.defragment(is_forced=True)
        self._move(moves)
        return len(moves)

    def forget_cache(self) -> None:
        """Nothing that was computed is reused from here on. Refused while requests run."""
        if self._outputs:
            raise RequestError(
                "the cache is in use", expected="no live requests", got=len(self._outputs)
            )
        self.pool.reset()

    def _move(self, moves: list[tuple[int, int]]) -> None:
        if moves:
            self.store.move_pages(moves)
            if self._drafting is not None:
                self._drafting.moved(moves)

    def _propose(self) -> dict[str, Draft]:
        if self._drafting is None:
            return {}
        wanting = [
            sequence
            for sequence in self.scheduler.drafting()
            if sequence.request.allow_drafts and not self._outputs[sequence.request_id].is_healing
        ]
        return self._drafting.propose(wanting, self.scheduler.reserve)

    def _run(self, plan: BatchPlan, drafts: dict[str, Draft]) -> None:
        now = self._clock()
        for sequence, segment in zip(plan.sequences, plan.segments, strict=True):
            output = self._outputs[sequence.request_id]
            if sequence is not output.sequence:  # a twin
                continue
            if output.mark_started(now):
                self._events.append(_started(output))
            if segment.logit_rows is not LogitRows.NONE:
                output.start_mask()
        logits = self._runner.run(plan.segments, plan.copies)
        if self._drafting is not None:
            self._drafting.passed(plan.num_rows, self._clock() - now)
        turned: list[tuple[Output, int]] = []
        row = 0
        for sequence, segment in zip(plan.sequences, plan.segments, strict=True):
            count = _num_logit_rows(segment)
            rows = logits[row : row + count]
            row += count
            output = self._outputs[sequence.request_id]
            if sequence is not output.sequence:
                continue
            if count == 0:
                self._events.append(_progress(sequence, segment))
                continue
            scale = sequence.request.sampler.cfg_scale
            if scale is not None:  # the twin's row comes next
                rows = guide(rows[0], logits[row], scale)[None]
            taken = self._take(output, rows, drafts.get(sequence.request_id))
            turned.append((output, taken))
        self.scheduler.advance(plan)
        for output, taken in turned:
            if self._drafting is not None and taken:
                draft = drafts.get(output.sequence.request_id)
                self._drafting.verified(
                    output.sequence.request_id,
                    drafted=0 if draft is None else len(draft.token_ids),
                    emitted=taken,
                    rows=plan.num_rows,
                    sequences=len(turned),
                )
            self._turn(output)

    def _take(self, output: Output, rows: Tensor, draft: Draft | None) -> int:
        """The tokens that a pass gave one request: one, and one for each proposal that holds.

        Returns how many.
        """
        sequence = output.sequence
        proposals = draft.token_ids if draft is not None else ()
        taken = 0
        try:
            for i, logits in enumerate(rows):
                proposal = proposals[i] if i < len(proposals) else None
                drawn_from = None
                if draft is not None and draft.probabilities is not None and proposal is not None:
                    drawn_from = draft.probabilities[i]
                now = self._clock()
                self._events += output.take(logits, now, proposal, drawn_from)
                taken += 1
                if sequence.twin is not None:
                    sequence.twin.token_ids.append(sequence.token_ids[-1])
                if output.end is not None or output.rewind_to is not None:
                    break
                if sequence.token_ids[-1] != proposal:
                    break
        except ExlError as error:
            # The others' logits may be fine, so they go on; what this one cached is not reused.
            self._events.append(FailEvent(sequence.request_id, error))
            output.error = error
        return taken

    def _turn(self, output: Output) -> None:
        """After the pass is booked: what has ended leaves, what went back is cut."""
        if output.error is not None:
            self._drop(output, is_trusted=False)
        elif output.end is not None:
            self._events.append(self._with_drafts(output.end))
            self._drop(output)
        elif output.rewind_to is not None:
            self.scheduler.rewind(output.sequence, output.rewind_to)
            output.rewind_to = None

    def _drop(self, output: Output, *, is_trusted: bool = True) -> None:
        request_id = output.sequence.request_id
        self.scheduler.remove(output.sequence, is_trusted=is_trusted)
        del self._outputs[request_id]
        if self._drafting is not None:
            self._drafting.forget(request_id)

    def _with_drafts(self, event: FinishEvent) -> FinishEvent:
        if self._drafting is None:
            return event
        return replace(event, drafting=self._drafting.stats(event.request_id))

    def _fail_running(self, error: BaseException) -> None:
        for sequence in self.scheduler.fail_running():
            if self._outputs.pop(sequence.request_id, None) is not None:
                self._events.append(FailEvent(sequence.request_id, error))
                if self._drafting is not None:
                    self._drafting.forget(sequence.request_id)

    def _checked(self, request: Request) -> tuple[Sequence, Sequence | None]:
        """The request's sequences, which this model and this cache can serve."""
        check_tokens(request, self.model.config.vocab_size)
        sequence, twin = self._sequences(request)
        self.scheduler.check_fits(
            request.request_id, sequence.max_len, None if twin is None else twin.max_len
        )
        return sequence, twin

    def _sequences(self, request: Request) -> tuple[Sequence, Sequence | None]:
        shape, capacity = self.model.config, self.scheduler.capacity
        prompt_ids, negative = request.prompt_ids, request.negative_prompt_ids
        if negative is None:
            end = max_len(request, len(prompt_ids), shape, capacity)
            healed = healing_of(prompt_ids, self.vocabulary) if request.token_healing else None
            token_ids = list(prompt_ids if healed is None else prompt_ids[:-1])
            return Sequence(request, end, token_ids), None
        half = capacity // 2
        room = min(
            max_len(request, len(prompt_ids), shape, half) - len(prompt_ids),
            max_len(request, len(negative), shape, half) - len(negative),
        )
        sequence = Sequence(request, len(prompt_ids) + room, list(prompt_ids))
        return sequence, Sequence(request, len(negative) + room, list(negative))

    def _output(self, sequence: Sequence, now: float) -> Output:
        request = sequence.request
        decoder = self.tokenizer.stream_decoder(skip_special=not request.show_special)
        # The reply continues the prompt: its first character may begin in it, and a space at the
        # start of the reply is not one at the start of a text.
        for token_id in request.prompt_ids:
            if token_id < self.tokenizer.vocab_size:
                decoder.feed(token_id)
        is_healed = len(sequence.token_ids) < len(request.prompt_ids)
        return Output(
            sequence,
            Sampler(request.sampler, self.model.ops),
            decoder,
            self.vocab_size,
            now,
            filters=self._filters(request),
            healing=healing_of(request.prompt_ids, self.vocabulary) if is_healed else None,
        )

    def _filters(self, request: Request) -> FilterSet | None:
        if not request.constraints:
            return None
        return FilterSet(
            [constraint.filter(self.vocabulary) for constraint in request.constraints],
            request.stop_ids,
            self.vocabulary,
            prefer_eos=request.prefer_eos,
            executor=self._executor,
        )

    @cached_property
    def _executor(self) -> ThreadPoolExecutor:
        """Works out which tokens the constraints allow, beside the forward pass."""
        return ThreadPoolExecutor(1, thread_name_prefix="exl-constraints")


def _started(output: Output) -> StartEvent:
    sequence = output.sequence
    return StartEvent(
        sequence.request_id,
        sequence.cached_tokens or 0,
        sequence.cached_pages or 0,
        output.queued_s,
    )


def _progress(sequence: Sequence, segment: Segment) -> PrefillEvent:
    """Counted before the pass is booked."""
    done = segment.past_len + len(segment.token_ids)
    total = len(sequence.token_ids)
    if sequence.twin is not None:
        done += sequence.twin.past_len
        total += len(sequence.twin.token_ids)
    return PrefillEvent(sequence.request_id, done, total)


def _num_logit_rows(segment: Segment) -> int:
    if segment.logit_rows is LogitRows.NONE:
        return 0
    return len(segment.token_ids) if segment.logit_rows is LogitRows.ALL else 1


def _check_at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise RequestError(
            f"{name} is too small", where="engine", expected=f"at least {low}", got=value
        )
