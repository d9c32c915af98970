"""ExLlamaV2DynamicGenerator: continuous batching with jobs and result dictionaries."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count
from typing import Any, overload

from exl_core.engine.engine import Engine
from exl_core.engine.events import (
    Event,
    FailEvent,
    FinishEvent,
    FinishReason,
    PrefillEvent,
    RewindEvent,
    StartEvent,
    TextEvent,
)
from exl_core.engine.request import Request
from exl_core.generate.driver import generate
from exl_core.speculate.drafter import Drafter
from exl_core.speculate.ngram import NgramDrafter
from exl_exllamav2.cache import ExLlamaV2Cache_8bit, ExLlamaV2CacheBase
from exl_exllamav2.engines import Weights, make_engine, model_drafter, weights_of
from exl_exllamav2.errors import OldAssertionError, asserted, old_types
from exl_exllamav2.job import ExLlamaV2DynamicJob, Result
from exl_exllamav2.model import ExLlamaV2
from exl_exllamav2.settings import Settings
from exl_exllamav2.tokenizer import ExLlamaV2Tokenizer

PAGE_SIZE = 256


class ExLlamaV2DynamicGenerator:
    """Runs jobs in one batch. Unknown arguments are accepted and ignored."""

    def __init__(
        self,
        model: ExLlamaV2,
        cache: ExLlamaV2CacheBase,
        tokenizer: ExLlamaV2Tokenizer,
        max_batch_size: int | None = None,
        max_seq_len: int | None = None,
        max_chunk_size: int | None = None,
        max_q_size: int = 8,
        draft_model: ExLlamaV2 | None = None,
        draft_cache: ExLlamaV2CacheBase | None = None,
        num_draft_tokens: int = 4,
        use_ngram_draft: bool = False,
        max_ngram: int = 4,
        max_sampling_threads: int = 16,
        min_sampling_threads: int = 3,
        paged: bool = True,
        filter_background_eval: bool = True,
        **kwargs: Any,
    ) -> None:
        _check_caches(cache, draft_model, draft_cache, is_paged=paged)
        if draft_model is not None and use_ngram_draft:
            raise OldAssertionError("use a draft model or n-gram drafts, not both")
        self.model = model
        self.cache = cache
        self.tokenizer = tokenizer
        self.draft_model = draft_model
        self.draft_cache = draft_cache
        self.paged = paged
        self.max_seq_len = max_seq_len or model.config.max_seq_len
        self.max_chunk_size = max_chunk_size or model.config.max_input_len
        batch = max_batch_size or max(1, model.config.max_input_len // max(1, max_q_size))
        self.max_batch_size = batch
        self.use_ngram_draft = use_ngram_draft
        is_drafting = draft_model is not None or use_ngram_draft
        self.num_draft_tokens = num_draft_tokens if is_drafting else 0
        self.max_ngram = max_ngram
        self.page_size = PAGE_SIZE
        self.max_pages = max(1, cache.max_seq_len // PAGE_SIZE)
        self.max_total_tokens = PAGE_SIZE * self.max_pages
        self.current_loras: list[Any] | None = None
        self.job_serial = 0
        self._jobs: dict[str, ExLlamaV2DynamicJob] = {}
        self._waiting_results: list[Result] = []
        self._serials = count()
        with old_types():
            self.engine, self._weights = self._make_engine()

    def _make_engine(self) -> tuple[Engine, Weights]:
        """An engine, and the weights that it runs on."""
        drafter: Drafter | None = None
        if self.draft_model is not None:
            drafter = model_drafter(
                self.model,
                self.cache,
                self.draft_model,
                self.draft_cache,
                self.tokenizer,
                max_tokens=self.num_draft_tokens,
                min_probability=0.0,
            )
        elif self.use_ngram_draft:
            drafter = NgramDrafter(
                max_tokens=max(1, self.num_draft_tokens), max_match=max(2, self.max_ngram)
            )
        engine = make_engine(
            self.model,
            self.cache,
            self.tokenizer,
            max_batch=self.max_batch_size,
            prefill_chunk=self.max_chunk_size,
            drafter=drafter,
        )
        return engine, weights_of(self.model, self.draft_model)

    # Owner of the cache

    @property
    def held_len(self) -> int:
        return sum(len(row) for row in self.held_ids())

    def held_ids(self) -> list[list[int]]:
        """No row: jobs share the cache, which holds no single sequence."""
        return []

    def leave(self) -> None:
        """Another owner takes the cache: live jobs cannot go on."""
        self.clear_queue()

    def _take_cache(self) -> None:
        # Jobs on freed weights keep their engine, which ends them with an error.
        if not self._jobs and self._weights != weights_of(self.model, self.draft_model):
            with old_types():
                self.engine, self._weights = self._make_engine()
        self.cache.pending_ids = None
        if self.cache.take(self):
            self.engine.forget_cache()

    # Jobs

    @property
    def pending_jobs(self) -> list[ExLlamaV2DynamicJob]:
        return [job for job in self._jobs.values() if not job.is_started]

    @property
    def active_jobs(self) -> list[ExLlamaV2DynamicJob]:
        return [job for job in self._jobs.values() if job.is_started]

    def is_queued(self, job: ExLlamaV2DynamicJob) -> bool:
        """Whether the job waits or runs here."""
        return self._jobs.get(job.request_id) is job

    def num_remaining_jobs(self) -> int:
        """Jobs that wait or run, and jobs with results that were not returned."""
        return len(self._jobs) or len({id(one["job"]) for one in self._waiting_results})

    @overload
    def enqueue(self, job: ExLlamaV2DynamicJob) -> int: ...
    @overload
    def enqueue(self, job: list[ExLlamaV2DynamicJob]) -> list[int]: ...
    def enqueue(self, job: ExLlamaV2DynamicJob | list[ExLlamaV2DynamicJob]) -> int | list[int]:
        """Check and queue jobs; returns their serial numbers."""
        if isinstance(job, list):
            return [self.enqueue(one) for one in job]
        last = job.generator
        job.check_is_new(is_queued=last is not None and last.is_queued(job))
        self._take_cache()
        busy = [one for live in self._jobs.values() for one in live.filters]
        with asserted():
            request = job.request(self.tokenizer, self.current_loras, busy)
            sequence = self.engine.submit(request, self.engine.compile(request))
        job.serial_number = next(self._serials)
        self.job_serial = job.serial_number + 1
        job.time_enqueue = time.time()
        job.generator = self
        job.started(sequence)
        job.num_sampled = len(sequence.token_ids)
        self._jobs[request.request_id] = job
        return job.serial_number

    def cancel(self, job: ExLlamaV2DynamicJob) -> None:
        """Drop a job without a final result, and its results that were not returned."""
        self._waiting_results = [one for one in self._waiting_results if one["job"] is not job]
        if not self.is_queued(job):
            return
        del self._jobs[job.request_id]
        self.engine.cancel(job.request_id)
        self.engine.discard_events(job.request_id)

    def clear_queue(self) -> None:
        for job in list(self._jobs.values()):
            self.cancel(job)
        self._waiting_results = []

    def iterate(self) -> list[Result]:
        """Run one step for all jobs; returns their results. A failed job's error is raised."""
        if not self._jobs:
            found, self._waiting_results = self._waiting_results, []
            return found
        self._take_cache()
        for job in self._jobs.values():
            self._refresh(job)
        with old_types():
            events = self.engine.step()
        results, self._waiting_results = self._waiting_results, []
        failure: BaseException | None = None
        by_job: dict[str, list[Event]] = {}
        for event in events:
            by_job.setdefault(event.request_id, []).append(event)
        now, padded_vocab = time.time(), self._padded_vocab
        for request_id, job in list(self._jobs.items()):
            assert job.reader is not None, "jobs are enqueued with a reader"
            job.reader.store_cut(self.engine, request_id)
            error = self._collect(job, by_job.get(request_id, ()), results, now, padded_vocab)
            failure = failure or error
        if failure is not None:
            self._waiting_results = results
            with old_types():
                raise failure
        return results

    def _refresh(self, job: ExLlamaV2DynamicJob) -> None:
        """Apply settings that the program has changed since the last token."""
        assert job.reader is not None, "jobs are enqueued with a reader"
        params = job.reader.changed()
        if params is not None:
            with old_types():
                self.engine.set_sampler(job.request_id, params)

    def _collect(
        self,
        job: ExLlamaV2DynamicJob,
        events: Sequence[Event],
        results: list[Result],
        now: float,
        padded_vocab: int,
    ) -> BaseException | None:
        """Add the results of one job: at least one for each token that was sampled. `now`: the time
        of the step's end."""
        sequence = job.sequences[0].running
        assert sequence is not None, "queued jobs have a sequence"
        own: list[Result] = []
        finish: FinishEvent | None = None
        for event in events:
            match event:
                case TextEvent():  # first, because most events are of this kind
                    own.append(job.streamed(event, padded_vocab))
                case StartEvent():
                    job.is_started = True
                    job.prefill_total = _prefill_total(sequence.request)
                    job.prefill_done = event.cached_tokens
                    job.time_first_prefill = now
                    own.append(job.result("started"))
                case PrefillEvent():
                    job.prefill_done = min(event.done, job.prefill_total)
                    own.append(_progress(job))
                case RewindEvent():
                    own.append(_suppressed(job, event))
                case FinishEvent():
                    finish = event
                case FailEvent():
                    del self._jobs[job.request_id]
                    job.is_finished = True
                    return event.error
        length = len(sequence.token_ids)
        num_new, job.num_sampled = length - job.num_sampled, length
        if num_new > 0:
            job.time_first_token = job.time_first_token or now
            job.time_last_token = now
        job.new_tokens = max(0, length - len(sequence.request.prompt_ids))
        if job.new_tokens > 0 and job.prefill_done < job.prefill_total:
            # The engine reports no progress with the chunk that ends the prompt.
            job.prefill_done = job.prefill_total
            stages = [one["stage"] for one in own]
            first = stages.index("streaming") if "streaming" in stages else len(own)
            own.insert(first, _progress(job))
        shown = sum(one["stage"] == "streaming" for one in own)
        if shown < num_new:
            own += [job.result("streaming") for _ in range(num_new - shown)]
        if finish is not None:
            del self._jobs[job.request_id]
            if finish.reason is not FinishReason.CANCELLED:
                last = own.pop() if own and own[-1]["stage"] == "streaming" else None
                own.append(job.finished(finish, last, self.tokenizer))
        results += own
        return None

    @property
    def _padded_vocab(self) -> int:
        return self.model.config.padded_vocab_size

    def generate(
        self,
        prompt: Any,
        max_new_tokens: int,
        min_new_tokens: int = 0,
        seed: int | None = None,
        gen_settings: Settings | list[Settings] | None = None,
        token_healing: bool = False,
        encode_special_tokens: bool = False,
        decode_special_tokens: bool = False,
        stop_conditions: Any = None,
        add_bos: bool = False,
        abort_event: Any = None,
        completion_only: bool = False,
        filters: list[Any] | None = None,
        filter_prefer_eos: bool = False,
        return_last_results: bool = False,
        embeddings: list[Any] | None = None,
        banned_strings: list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Complete one prompt, or a list of prompts; a pair (a, b) is guided by `cfg_scale`.

        Returns text (with the prompt, unless `completion_only`) or a list of texts; with
        `return_last_results` a pair with the final results; None once `abort_event` is set.
        """
        is_list = isinstance(prompt, list)
        prompts = prompt if is_list else [prompt]
        # An empty list means none, for a list of prompts too.
        each_filters = _per_prompt(filters or None, len(prompts), is_list=is_list)
        each_embeddings = _per_prompt(embeddings or None, len(prompts), is_list=is_list)
        is_each = isinstance(gen_settings, list)
        settings = _per_prompt(gen_settings, len(prompts), is_list=is_each)
        common = {
            "max_new_tokens": max_new_tokens,
            "min_new_tokens": min_new_tokens,
            "stop_conditions": stop_conditions,
            "decode_special_tokens": decode_special_tokens,
            "filter_prefer_eos": filter_prefer_eos,
            "token_healing": token_healing,
            "banned_strings": banned_strings,
        }
        jobs = [
            ExLlamaV2DynamicJob(
                self._encoded(one, add_bos, encode_special_tokens, each_embeddings[i]),
                seed=None if seed is None else seed + i,
                gen_settings=settings[i],
                filters=each_filters[i],
                embeddings=each_embeddings[i],
                **common,
            )
            for i, one in enumerate(prompts)
        ]
        last_results = self._run(jobs, abort_event)
        if last_results is None:
            return None
        shown = [""] * len(prompts) if completion_only else map(_shown, prompts)
        texts = [s + r["full_completion"] for s, r in zip(shown, last_results, strict=True)]
        found = (texts, last_results) if is_list else (texts[0], last_results[0])
        return found if return_last_results else found[0]

    def _encoded(
        self, prompt: Any, add_bos: bool, encode_special_tokens: bool, embeddings: Any
    ) -> list[Any]:
        """Ids of a prompt, or of both prompts of a pair."""
        return [
            self.tokenizer.encode(
                text,
                add_bos=add_bos,
                encode_special_tokens=encode_special_tokens,
                embeddings=embeddings,
            )
            for text in (prompt if isinstance(prompt, tuple) else (prompt,))
        ]

    def _run(self, jobs: list[ExLlamaV2DynamicJob], abort_event: Any) -> list[Result] | None:
        """Run until all jobs have ended; None if they were aborted."""
        last: dict[ExLlamaV2DynamicJob, Result] = {}
        try:
            self.enqueue(jobs)
            while len(last) < len(jobs):
                if abort_event is not None and abort_event.is_set():
                    self.clear_queue()
                    return None
                for result in self.iterate():
                    if result["eos"]:
                        last[result["job"]] = result
        finally:
            for job in jobs:
                self.cancel(job)
        return [last[job] for job in jobs]

    # Other methods

    def warmup(self) -> None:
        """Generate a short reply, so that one-time costs do not fall on the first job."""
        self._take_cache()
        with old_types():
            self.engine.vocabulary.prepare()
            ids = self.tokenizer.exl.encode("warm-up") or [0]
            generate(self.engine, Request(tuple(ids), max_tokens=4))
            self.engine.forget_cache()

    def set_loras(self, loras: Any) -> None:
        """Adapters of all following jobs: one, a list, or None. The queue must be empty."""
        if self.num_remaining_jobs():
            raise OldAssertionError("set_loras needs an empty queue", got=self.num_remaining_jobs())
        listed = loras if isinstance(loras, list | tuple) else [] if loras is None else [loras]
        self.current_loras = list(listed) or None

    def reset_page_table(self) -> None:
        """Forget all cached prefixes."""
        self.clear_queue()
        self.engine.forget_cache()

    def defrag_cache(self) -> None:
        """Move the pages of each cached prefix next to each other, if no job is live."""
        if not self._jobs:
            self.engine.defragment()

    def validate_cache(self) -> None:
        """Does nothing: the page pool checks itself in tests."""

    def print_page_list(self, short: bool = True) -> None:
        print(self.engine.pool.describe())


def _check_caches(
    cache: ExLlamaV2CacheBase,
    draft_model: ExLlamaV2 | None,
    draft_cache: ExLlamaV2CacheBase | None,
    *,
    is_paged: bool,
) -> None:
    if isinstance(cache, ExLlamaV2Cache_8bit):
        raise OldAssertionError(
            "the dynamic generator takes no FP8 cache", next_step="Use ExLlamaV2Cache_Q8."
        )
    if is_paged and (cache.batch_size != 1 or cache.max_seq_len % PAGE_SIZE):
        raise OldAssertionError(
            "the cache does not suit the dynamic generator",
            expected="batch_size 1 and a max_seq_len that is a multiple of 256",
            got=f"{cache.batch_size} x {cache.max_seq_len}",
        )
    if (draft_model is None) != (draft_cache is None):
        raise OldAssertionError("a draft model needs a draft cache, and the other way round")
    if draft_cache is not None and draft_cache.max_seq_len != cache.max_seq_len:
        raise OldAssertionError(
            "the draft cache has another length",
            expected=cache.max_seq_len,
            got=draft_cache.max_seq_len,
        )


def _per_prompt(values: Any, num_prompts: int, *, is_list: bool) -> list[Any]:
    """Value of each prompt: the entries of a list, or one value for all."""
    if values is None:
        return [None] * num_prompts
    if not is_list:
        return [values] * num_prompts
    if len(values) != num_prompts:
        raise OldAssertionError(
            "a list of another length than that of the prompts",
            expected=num_prompts,
            got=len(values),
        )
    return list(values)


def _shown(prompt: Any) -> str:
    """Text of a prompt, or of the first prompt of a pair."""
    return str(prompt[0] if isinstance(prompt, tuple) else prompt)


def _prefill_total(request: Request) -> int:
    """Tokens of the prompts without the last one of each, which the first sampled token follows."""
    prompts = (request.prompt_ids, request.negative_prompt_ids)
    return sum(len(ids) - 1 for ids in prompts if ids)


def _progress(job: ExLlamaV2DynamicJob) -> Result:
    return job.result("prefill", curr_progress=job.prefill_done, max_progress=job.prefill_total)


def _suppressed(job: ExLlamaV2DynamicJob, event: RewindEvent) -> Result:
    import torch

    ids = torch.tensor([list(event.token_ids)], dtype=torch.long)
    return job.result("streaming", suppressed_text=event.text, suppressed_tokens=ids)
