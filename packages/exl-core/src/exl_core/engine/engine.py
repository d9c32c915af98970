"""The generation loop: takes requests, returns events, runs one forward pass per step.

The engine owns the cache and connects scheduler, runner, drafts and replies. It has no thread of
its own: work happens only inside `step`, which the caller repeats.

Every accepted request gets exactly one final event, a `FinishEvent` or a `FailEvent`. A failure in
the work of one request (sampling, filters, hooks, text) ends that request alone (`failure.py`). If
the forward pass raises, the exception reaches the caller of `step`, every running request gets a
`FailEvent` with the next step, and waiting requests continue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property

from exl_core.cache.format import PAGE_SIZE, KVFormat
from exl_core.cache.need import CacheNeed
from exl_core.cache.page_pool import PagePool
from exl_core.cache.state import StatePool
from exl_core.cache.store import KVStore
from exl_core.constrain.filter import Filter
from exl_core.constrain.filter_set import FilterSet
from exl_core.constrain.limits import CompileLimits
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.engine.admission import check_banned, check_ids, reply_limit
from exl_core.engine.async_step import AsyncStep
from exl_core.engine.drafting import Drafting
from exl_core.engine.events import Event, FailEvent, FinishEvent
from exl_core.engine.healing import Healing, healing_of
from exl_core.engine.log_probs import rows_of_logits
from exl_core.engine.logits import PassLogits
from exl_core.engine.plan import BatchPlan
from exl_core.engine.reply import ReplyState
from exl_core.engine.request import Request
from exl_core.engine.request_logits import sample_batch, split_by_request
from exl_core.engine.scheduler import Scheduler
from exl_core.engine.sequence import RequestSequence
from exl_core.errors import OutOfMemoryError, RequestError
from exl_core.model.protocol import Model
from exl_core.model.runner import Runner, store_for
from exl_core.model.segment import LogitRows
from exl_core.option_types import check_options
from exl_core.sampling.params import SamplerParams
from exl_core.sampling.sampler import Sampler
from exl_core.settings import available_cpus
from exl_core.speculate.drafter import Draft, Drafter, StateDrafter
from exl_core.tokenizer.base import Tokenizer

DEFAULT_CACHE_TOKENS = 32768
"""Default cache size, in tokens, for models with a longer context. Unused pages cost nothing."""

PREFILL_CHUNK = {"cpu": 512, "cuda": 2048}
"""Most prompt tokens in one pass, by device type.

A larger chunk amortizes the fixed cost of a pass; a smaller one delays the other sequences less.
"""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of one engine.

    cache_tokens   cache size in tokens, for all running requests together, rounded up to whole
                   pages; None: the model's context, at most 32768
    max_batch      most sequences in one pass
    prefill_chunk  most prompt tokens in one pass; None: 512 on the CPU, 2048 on a GPU
    kv_format      precision of the cache
    lazy_cache     on a GPU, take memory for the cache as pages are used, up to `cache_tokens`: at
                   most a quarter more than the pages in use, and 4 MiB for each key or value
                   tensor. The rest of the bound stays reserved. Growing makes prompts slower
    snapshots      most snapshots of recurrent state, from which prefixes continue; None: as many as
                   take the memory of the cache, at least `max_batch`. Unused if the model has no
                   recurrent layers
    adapt_drafts   shorten or pause drafts that do not pay; False keeps them at full length, which
                   measurements need
    compile_limits time, memory and length allowed for compiling one constraint
    """

    cache_tokens: int | None = None
    max_batch: int = 16
    prefill_chunk: int | None = None
    kv_format: KVFormat = KVFormat.FP16
    lazy_cache: bool = False
    snapshots: int | None = None
    adapt_drafts: bool = True
    compile_limits: CompileLimits = field(default_factory=CompileLimits)

    def __post_init__(self) -> None:
        check_options(
            self, "engine", cache_tokens=PAGE_SIZE, max_batch=1, prefill_chunk=1, snapshots=0
        )


class Engine:
    """Generation loop of one model: `submit` requests, then `step` until they have ended."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        options: EngineOptions | None = None,
        *,
        drafter: Drafter | None = None,
        store: KVStore | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`drafter` proposes tokens for speculative decoding. It does not change the replies.

        `store` is memory for the cache that the caller owns; its size and precision then replace
        `cache_tokens` and `kv_format`. Several engines and contexts may use one store, one at a
        time: call `forget_cache` before an engine continues after another user of the store.
        """
        self.options = options or EngineOptions()
        self.model = model
        self.tokenizer = tokenizer
        config = model.config
        # Vocabularies of models are often padded. Ids unknown to the tokenizer are never sampled.
        self.vocab_size = min(config.vocab_size, tokenizer.vocab_size)
        if store is None:
            num_tokens = self.options.cache_tokens or min(config.max_seq_len, DEFAULT_CACHE_TOKENS)
            store = _new_store(model, self.options, num_tokens, drafter)
        self.store = store
        if isinstance(drafter, StateDrafter):
            drafter.attach(store)
        self.pool = PagePool(store.num_pages)
        if store.states is not None:
            _check_at_least("slots of state", store.states.num_slots, self.options.max_batch)
        self.scheduler = Scheduler(
            self.pool,
            max_batch=self.options.max_batch,
            prefill_chunk=self.options.prefill_chunk or PREFILL_CHUNK[model.ops.device.type],
            score_chunk=rows_of_logits(config.vocab_size),
            states=None
            if store.states is None
            else StatePool(store.states.num_slots, self.options.max_batch),
        )
        self._runner = Runner(model, self.store)
        self._async_step = AsyncStep(self._runner, self.scheduler)
        self._clock = clock
        self._drafting: Drafting | None = None
        if drafter is not None:
            adapt = self.options.adapt_drafts
            self._drafting = Drafting(drafter, self.vocab_size, clock, is_adaptive=adapt)
        self._replies: dict[str, ReplyState] = {}
        self._events: list[Event] = []  # to be returned by the next step
        self._late_cancels: list[str] | None = None
        """Requests that hooks have cancelled in the running step; None between steps."""
        self._stepping = 0  # thread of the latest step

    @property
    def is_idle(self) -> bool:
        """No request runs or waits, and every event has been returned."""
        return not self._replies and not self._events

    @property
    def live_requests(self) -> frozenset[str]:
        """Ids of the requests that have not ended."""
        return frozenset(self._replies)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Bytes of every token, for constraints and token healing."""
        return Vocabulary(self.tokenizer, self.vocab_size, self.options.compile_limits)

    def check(self, request: Request) -> None:
        """Raise RequestError if this model and cache can never serve the request."""
        self._checked(request)

    def compile(self, request: Request) -> tuple[Filter, ...]:
        """Compile the request's constraints into filters, which serve one `submit`.

        Raises what `check` raises, and ConstraintError if a constraint cannot be met. May take
        seconds. Safe on any thread while another one calls `step`.
        """
        if request.constraints:
            self.check(request)
        return tuple(constraint.filter(self.vocabulary) for constraint in request.constraints)

    def submit(self, request: Request, filters: tuple[Filter, ...] = ()) -> RequestSequence:
        """Check the request and queue it. `filters` are the result of `compile`."""
        request_id = request.request_id
        if request_id in self._replies or any(e.request_id == request_id for e in self._events):
            raise RequestError("a request with this id has not ended yet", where=request_id)
        if len(filters) != len(request.constraints):
            raise RequestError(
                "the request's constraints are not compiled",
                where=request_id,
                expected=f"{len(request.constraints)} filters",
                got=len(filters),
                next_step="Pass submit what Engine.compile returns for the request.",
            )
        sequence, negative, healing = self._checked(request)
        reply = self._reply_state(sequence, filters, healing, self._clock())
        if request.max_tokens == 0 and not sequence.is_scored:
            self._events.append(self._with_drafts(reply.finish_empty(self._clock())))
            return sequence
        self._replies[request_id] = reply
        self.scheduler.add(sequence, negative)
        return sequence

    def cancel(self, request_id: str) -> bool:
        """End the request; the next step returns its `FinishEvent`. False if it had ended.

        A hook may call this. The request then ends in the running step, after its next token or, if
        it is the hook's own request, after the token that the hook returns.
        """
        reply = self._replies.get(request_id)
        if reply is None:
            return False
        if self._late_cancels is not None:
            # The rest of the step uses the reply and the pages of the request.
            reply.is_cancelled = True
            self._late_cancels.append(request_id)
            return True
        with reply.guard:
            self._events.append(self._with_drafts(reply.cancel(self._clock())))
        if reply.error is not None:
            self._drop_failed([reply])
        else:
            self._drop(reply)
        return True

    def token_ids_of(self, request_id: str) -> tuple[int, ...]:
        """Tokens of a live request: its prompt and its reply so far."""
        return tuple(self._live(request_id).sequence.token_ids)

    def ban_next(self, request_id: str, token_ids: frozenset[int]) -> None:
        """Exclude these ids from the next token of a live request."""
        check_banned(request_id, token_ids, self.vocab_size)
        self._live(request_id).ban_next(token_ids)

    def mirostat_cut(self, request_id: str) -> float | None:
        """Current cut of a live request in bits; None without mirostat."""
        return self._live(request_id).mirostat_cut

    def set_sampler(self, request_id: str, params: SamplerParams) -> None:
        """Change the sampler settings of a live request, from its next token on.

        The random stream continues; the new `seed` is ignored. RequestError if the request is not
        live, if the settings hold unknown ids, or if only one of both settings has a guidance
        scale.
        """
        reply = self._live(request_id)
        request = replace(reply.sequence.request, sampler=params)
        check_ids(request, self.model.config, self.tokenizer.vocab_size)
        reply.change(request)

    def set_stops(
        self, request_id: str, stop_ids: Iterable[int], stop_strings: Iterable[str]
    ) -> None:
        """Change the stop conditions of a live request, from its next token on.

        Text that is held back as the beginning of an earlier stop string is matched anew.
        """
        reply = self._live(request_id)
        request = replace(
            reply.sequence.request,
            stop_ids=frozenset(stop_ids),
            stop_strings=tuple(stop_strings),
        )
        check_ids(request, self.model.config, self.tokenizer.vocab_size)
        reply.change(request)

    def discard_events(self, request_id: str) -> None:
        """Drop the request's pending events, for a caller that no longer reads them."""
        self._events = [event for event in self._events if event.request_id != request_id]

    def step(self, request_ids: Container[str] | None = None) -> list[Event]:
        """Run one forward pass if a request needs one; return the events that no step returned.

        `request_ids`: only the events of these requests; the others stay for later steps. None:
        all. RequestError if a hook calls this, or another thread meanwhile.
        """
        if self._late_cancels is not None:
            is_hook = self._stepping == threading.get_ident()
            raise RequestError(
                "a hook called step" if is_hook else "another thread runs a step of this engine",
                expected="one step at a time",
                next_step=None if is_hook else "Use an AsyncGenerator, or an engine per thread.",
            )
        self._stepping = threading.get_ident()
        try:
            self._end_late_waiting()
            self.scheduler.prepare()
            drafts: dict[str, Draft] = {}
            plan = self._async_step.plan()
            if plan is None:
                drafts = self._propose()
                token_ids = {name: draft.token_ids for name, draft in drafts.items()}
                plan = self.scheduler.plan(token_ids)
            if plan.segments:
                self._late_cancels = []
                self._run(plan, drafts)
                self._cancel_late()
                if not self._replies:
                    self._move_pages(self.scheduler.defragment())
        except BaseException as error:  # KeyboardInterrupt included; raised again below
            self._fail_running(error)
            self._cancel_late()  # those that wait, the others have failed
            raise
        events, self._events = self._events, []
        if request_ids is None:
            return events
        own = [event for event in events if event.request_id in request_ids]
        if len(own) < len(events):
            self._events = [event for event in events if event.request_id not in request_ids]
        return own

    def defragment(self) -> int:
        """Move the cached pages of each prefix next to each other; return how many pages moved.

        RequestError while requests are live. `step` does this by itself at times, after the last
        live request has ended.
        """
        self._check_unused()
        moves = self.scheduler.defragment(is_forced=True)
        self._move_pages(moves)
        return len(moves)

    def forget_cache(self) -> None:
        """Drop all cached prefixes. RequestError while requests are live."""
        self._check_unused()
        self.scheduler.memory.reset()

    def _check_unused(self) -> None:
        if self._replies:
            raise RequestError(
                "the cache is in use", expected="no live requests", got=len(self._replies)
            )

    def _live(self, request_id: str) -> ReplyState:
        reply = self._replies.get(request_id)
        if reply is None:
            raise RequestError("no live request has this id", where=request_id)
        return reply

    def _move_pages(self, moves: list[tuple[int, int]]) -> None:
        if moves:
            self.store.move_pages(moves)
            if self._drafting is not None:
                self._drafting.moved(moves)

    def _propose(self) -> dict[str, Draft]:
        if self._drafting is None:
            return {}
        if self._drafting.reads_states and self.scheduler.pending_copies:
            return {}  # the next pass makes the copies; until then, pages lack the states
        sequences = [s for s in self.scheduler.drafting() if s.request.allow_drafts]
        return self._drafting.propose(sequences, self.scheduler.reserve)

    def _run(self, plan: BatchPlan, drafts: dict[str, Draft]) -> None:
        now = self._clock()
        replies = [self._replies[sequence.request_id] for sequence in plan.sequences]
        for reply, segment in zip(replies, plan.segments, strict=True):
            with reply.guard:
                self._events += reply.start(now)
                if segment.logit_rows is not LogitRows.NONE:
                    reply.start_mask()
        try:
            logits = self._async_step.take(plan)
            if logits is None:
                found = self._runner.run(plan.segments, plan.copies, state_copies=plan.state_copies)
                logits = PassLogits(found)
        except OutOfMemoryError:
            if self.scheduler.make_smaller(plan):
                self._drop_failed(replies)
                return  # no state has changed, so the next step plans again
            raise
        if self._drafting is not None:
            self._drafting.passed(plan.num_rows, self._clock() - now)
        parts = split_by_request(plan, replies, logits, drafts, self._events)
        async_step = self._async_step if self._drafting is None else None
        sample_batch(
            parts, plan, logits, self.model.ops, vocab_size=self.vocab_size, async_step=async_step
        )
        taken = [(part.reply, part.take(self._events, self._clock)) for part in parts]
        self._drop_failed(replies)  # before `advance` registers their pages for reuse
        self.scheduler.advance(plan)
        for reply in dict.fromkeys(replies):
            with reply.guard:
                if reply.error is None:
                    self._events += reply.progress()
        for reply, counts in taken:
            with reply.guard:
                if reply.error is None and self._drafting is not None and counts.emitted:
                    self._drafting.verified(
                        reply.sequence.request_id,
                        **counts._asdict(),
                        rows=plan.num_rows,
                        sequences=len(taken),
                    )
            if reply.error is None:
                self._finish_or_rewind(reply)
        self._drop_failed(replies)

    def _end_late_waiting(self) -> None:
        """End preempted requests whose time is over while they wait for pages."""
        for sequence in list(self.scheduler.waiting):
            reply = self._replies[sequence.request_id]
            with reply.guard:
                self._events += reply.end_if_late(self._clock())
            if reply.error is None:
                self._finish_or_rewind(reply)
            else:
                self._drop_failed([reply])

    def _cancel_late(self) -> None:
        late, self._late_cancels = self._late_cancels, None
        for request_id in late or ():
            self.cancel(request_id)  # has no effect on a request that has ended meanwhile

    def _finish_or_rewind(self, reply: ReplyState) -> None:
        """Cut the tokens of a reply that goes back; remove one that has ended."""
        if reply.rewind_to is not None:
            self.scheduler.rewind(reply.sequence, reply.rewind_to)
            reply.rewind_to = None
        if reply.end is not None:
            self._events.append(self._with_drafts(reply.end))
            self._drop(reply)

    def _drop_failed(self, replies: Iterable[ReplyState]) -> None:
        """Remove the requests whose own work failed, each with a `FailEvent`."""
        for reply in replies:
            request_id = reply.sequence.request_id
            if reply.error is not None and self._replies.get(request_id) is reply:
                self._events.append(FailEvent(request_id, reply.error))
                self._drop(reply, is_trusted=False)

    def _drop(self, reply: ReplyState, *, is_trusted: bool = True) -> None:
        request_id = reply.sequence.request_id
        self.scheduler.remove(reply.sequence, is_trusted=is_trusted)
        del self._replies[request_id]
        if not self._replies:
            self._async_step.drop()
        if self._drafting is not None:
            self._drafting.forget(request_id)

    def _with_drafts(self, event: FinishEvent) -> FinishEvent:
        if self._drafting is None:
            return event
        return replace(event, drafting=self._drafting.stats(event.request_id))

    def _fail_running(self, error: BaseException) -> None:
        self._async_step.drop()
        self.scheduler.fail_running()
        waiting = {sequence.request_id for sequence in self.scheduler.waiting}
        failed = [request_id for request_id in self._replies if request_id not in waiting]
        for request_id in failed:
            reply = self._replies.pop(request_id)
            own = reply.error
            self._events.append(FailEvent(request_id, error if own is None else own))
        if self._drafting is not None:
            for request_id in failed:
                self._drafting.forget(request_id)

    def _checked(
        self, request: Request
    ) -> tuple[RequestSequence, RequestSequence | None, Healing | None]:
        """Check the request; return its sequence, its negative sequence and its healing."""
        shape = self.model.config
        check_ids(request, shape, self.tokenizer.vocab_size)
        if request.adapters:
            self.model.check_adapters(request.adapters)
        limit = reply_limit(request, shape, self.pool.num_pages)
        prompt_ids, negative_ids = request.prompt_ids, request.negative_prompt_ids
        healing = healing_of(prompt_ids, self.vocabulary) if request.token_healing else None
        token_ids = prompt_ids if healing is None else prompt_ids[:-1]
        new_sequence = self.scheduler.new_sequence
        sequence = new_sequence(request, token_ids, len(prompt_ids) + limit)
        negative = None
        if negative_ids is not None:
            negative = new_sequence(request, negative_ids, len(negative_ids) + limit)
        self.scheduler.check_fits(
            request.request_id, sequence.max_len, None if negative is None else negative.max_len
        )
        return sequence, negative, healing

    def _reply_state(
        self,
        sequence: RequestSequence,
        filters: tuple[Filter, ...],
        healing: Healing | None,
        now: float,
    ) -> ReplyState:
        request = sequence.request
        decoder = self.tokenizer.stream_decoder(skip_special=not request.show_special)
        # The decoder reads the prompt first: the reply's first character may begin in the prompt,
        # and a space at the start of the reply is not dropped like one at the start of a text.
        for token_id in request.prompt_ids:
            if token_id < self.tokenizer.vocab_size:
                decoder.feed(token_id)
        return ReplyState(
            sequence,
            Sampler(request.sampler, self.model.ops),
            decoder,
            self.vocab_size,
            now,
            filters=self._filters(request, filters),
            healing=healing,
        )

    def _filters(self, request: Request, filters: tuple[Filter, ...]) -> FilterSet | None:
        if not filters:
            return None
        return FilterSet(
            filters,
            request.stop_ids,
            self.vocabulary,
            prefer_eos=request.prefer_eos,
            executor=self._executor,
        )

    @cached_property
    def _executor(self) -> ThreadPoolExecutor | None:
        """Thread that computes the masks of constraints during the forward pass.

        None if the kernels' threads occupy every core: one more thread would make a kernel thread,
        and with it the whole pass, wait for a core. That costs far more than the masks.
        """
        if available_cpus() <= self.model.ops.threads:
            return None
        return ThreadPoolExecutor(1, thread_name_prefix="exl-constraints")


def _new_store(
    model: Model, options: EngineOptions, num_tokens: int, drafter: Drafter | None
) -> KVStore:
    """A store for `num_tokens` tokens, and for the states of the sequences if there are some."""
    need = CacheNeed(
        num_tokens,
        options.kv_format,
        options.max_batch,
        has_drafts=drafter is not None,
        snapshots=options.snapshots,
    )
    return store_for(
        model,
        options.kv_format,
        need.num_pages,
        grows=options.lazy_cache,
        num_states=need.slots(model.config),
        keeps_final=isinstance(drafter, StateDrafter),
    )


def _check_at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise RequestError(
            f"{name} is too small", where="engine", expected=f"at least {low}", got=value
        )
