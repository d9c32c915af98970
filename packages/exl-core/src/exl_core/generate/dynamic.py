"""Dynamic generator: continuous batching of jobs, which may arrive and end at any time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from threading import Event as Flag
from typing import Unpack, overload

from exl_core.constrain.filter import Filter
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import (
    Event,
    FinishEvent,
    PrefillEvent,
    RewindEvent,
    SampledToken,
    ScoreEvent,
    StartEvent,
    TextEvent,
)
from exl_core.engine.request import Request
from exl_core.errors import RequestError
from exl_core.generate.generator import Generator
from exl_core.model.embedded import EmbeddedSpan
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import LoadedModel
from exl_core.session.request_fields import RequestFields, Stops, check_names, seeded
from exl_core.speculate.drafter import Drafter

Pair = tuple[str, str]
"""A prompt and its negative prompt, for guidance."""


class Stage(Enum):
    STARTED = "started"
    PREFILL = "prefill"
    STREAMING = "streaming"


@dataclass(eq=False)
class Job:
    """One request in a generator. `serial` counts from 0; `identifier` is set by the caller."""

    request: Request
    serial: int
    identifier: object = None
    text: str = ""
    """Text reported so far."""
    num_tokens: int = 0
    """Tokens reported so far."""
    finish: FinishEvent | None = None
    """Reason, counts and times, after a successful end."""
    error: BaseException | None = None
    """Error, after a failure."""
    is_dropped: bool = False
    """The job was cancelled before its end."""

    @property
    def is_finished(self) -> bool:
        """No further result of this job follows."""
        return self.finish is not None or self.error is not None or self.is_dropped


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one step for one job.

    text, token_ids   new text and tokens; empty while nothing is final yet
    tokens            the same tokens with the details that `Request.report` selects
    done, total       PREFILL: prompt tokens in the cache, and all prompt tokens
    scores            PREFILL: the next prompt tokens with log probabilities, if `Report.prompt`
    suppressed        text of a banned string that was taken back
    finish            reason, counts and times, at a successful end
    error             error, at the end of a job that failed
    """

    job: Job
    stage: Stage
    text: str = ""
    token_ids: tuple[int, ...] = ()
    tokens: tuple[SampledToken, ...] = ()
    done: int = 0
    total: int = 0
    scores: tuple[SampledToken, ...] = ()
    suppressed: str = ""
    finish: FinishEvent | None = None
    error: BaseException | None = None

    @property
    def is_end(self) -> bool:
        return self.finish is not None or self.error is not None


class DynamicGenerator(Generator):
    """Continuous batching, for one thread at a time. For asyncio, see `asynchronous.py`."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: EngineOptions | None = None,
        *,
        drafter: Drafter | None = None,
        engine: Engine | None = None,
    ) -> None:
        super().__init__(loaded, options, drafter=drafter, engine=engine)
        self.jobs: dict[str, Job] = {}
        """Live jobs, by request id."""
        self.last_jobs: list[Job] = []
        """Jobs of the last `generate`."""
        self._serials = count()

    @overload
    def enqueue(self, request: Request, identifier: object = None) -> Job: ...
    @overload
    def enqueue(self, request: Sequence[Request], identifier: object = None) -> list[Job]: ...
    def enqueue(
        self, request: Request | Sequence[Request], identifier: object = None
    ) -> Job | list[Job]:
        """Check and queue one request, or all requests of a list or none.

        The constraints are compiled here, which may take seconds.
        """
        if isinstance(request, Request):
            return self._enqueue(request, identifier)
        jobs: list[Job] = []
        try:
            for one in request:
                jobs.append(self._enqueue(one, identifier))
        except BaseException:
            for job in jobs:
                self.cancel(job)
            raise
        return jobs

    def iterate(self) -> list[Result]:
        """Run one step for all jobs and return the results. Call it while jobs remain.

        If a pass fails, its error is raised; the next call returns the end of each job in it.
        """
        return [self._result(event) for event in self.engine.step(self.jobs)]

    @property
    def num_remaining_jobs(self) -> int:
        """Live jobs, waiting or running."""
        return len(self.jobs)

    def cancel(self, job: Job) -> bool:
        """Cancel a job; no further result of it follows. False if it had ended."""
        request_id = job.request.request_id
        if self.jobs.get(request_id) is not job:
            return False
        del self.jobs[request_id]
        job.is_dropped = True
        self.engine.cancel(request_id)
        self.engine.discard_events(request_id)
        return True

    def clear_queue(self) -> None:
        """Cancel all jobs."""
        for job in list(self.jobs.values()):
            self.cancel(job)

    def page_list(self) -> str:
        """One character per page of the cache: its reference count, or `.` if it is free."""
        return self.engine.pool.describe()

    @overload
    def generate(
        self,
        prompt: str | Pair,
        *,
        stop: Stops = ...,
        add_bos: bool | None = ...,
        parse_special: bool = ...,
        completion_only: bool = ...,
        seed: int | None = ...,
        abort: Flag | None = ...,
        embeddings: Mapping[str, EmbeddedSpan] | None = ...,
        **settings: Unpack[RequestFields],
    ) -> str | None: ...
    @overload
    def generate(
        self,
        prompt: list[str] | list[Pair],
        *,
        each: Sequence[RequestFields] | None = ...,
        stop: Stops = ...,
        add_bos: bool | None = ...,
        parse_special: bool = ...,
        completion_only: bool = ...,
        seed: int | None = ...,
        abort: Flag | None = ...,
        embeddings: Mapping[str, EmbeddedSpan] | None = ...,
        **settings: Unpack[RequestFields],
    ) -> list[str] | None: ...
    def generate(
        self,
        prompt: str | Pair | list[str] | list[Pair],
        *,
        each: Sequence[RequestFields] | None = None,
        stop: Stops = None,
        add_bos: bool | None = False,
        parse_special: bool = False,
        completion_only: bool = False,
        seed: int | None = None,
        abort: Flag | None = None,
        embeddings: Mapping[str, EmbeddedSpan] | None = None,
        **settings: Unpack[RequestFields],
    ) -> str | list[str] | None:
        """Complete one prompt, or a list of prompts as one batch.

        `stop`: token ids and texts that end a reply. None: the model's EOS tokens; (): only
        `max_tokens` ends it. The prompt's text precedes the reply unless `completion_only`. Prompt
        i gets the settings `each[i]`, which override the shared ones, and the seed `seed + i`. Once
        `abort` is set, these jobs are cancelled and the call returns None. `last_jobs` holds the
        details. Jobs that were queued before run meanwhile.
        """
        check_names(settings, self.generate)
        prompts = prompt if isinstance(prompt, list) else [prompt]
        requests = []
        overrides = _overrides(each, len(prompts))
        for number, (one, own) in enumerate(zip(prompts, overrides, strict=True)):
            positive, negative = _split_pair(one, number)
            check_names(own)
            fields: RequestFields = {**settings, **own}
            fields["sampler"] = seeded(fields.get("sampler", SamplerParams()), seed, number)
            requests.append(
                self.request(
                    positive,
                    negative=negative,
                    stop=stop,
                    add_bos=add_bos,
                    parse_special=parse_special,
                    embeddings=embeddings,
                    **fields,
                )
            )
        jobs = self.last_jobs = self.enqueue(requests)
        self._run(jobs, abort)
        texts = []
        for one, job in zip(prompts, jobs, strict=True):
            if job.error is not None:
                raise job.error
            if job.finish is None:
                return None
            shown = one[0] if isinstance(one, tuple) else one
            texts.append(job.text if completion_only else shown + job.text)
        return texts if isinstance(prompt, list) else texts[0]

    def enqueue_compiled(
        self, request: Request, filters: tuple[Filter, ...], identifier: object = None
    ) -> Job:
        """Check and queue. `filters`: what `Engine.compile` returned for the request."""
        self.engine.submit(request, filters)
        job = Job(request, next(self._serials), identifier)
        self.jobs[request.request_id] = job
        return job

    def _enqueue(self, request: Request, identifier: object) -> Job:
        check_request(request)
        return self.enqueue_compiled(request, self.engine.compile(request), identifier)

    def _run(self, jobs: Sequence[Job], abort: Flag | None) -> None:
        """Step until all jobs are finished or `abort` is set; no job stays in the engine."""
        try:
            while not all(job.is_finished for job in jobs):
                if abort is not None and abort.is_set():
                    return
                self.iterate()
        finally:  # also if a step raised
            for job in jobs:
                self.cancel(job)

    def _result(self, event: Event) -> Result:
        job = self.jobs[event.request_id]
        match event:
            case StartEvent():
                return Result(job, Stage.STARTED)
            case PrefillEvent():
                return Result(job, Stage.PREFILL, done=event.done, total=event.total)
            case ScoreEvent():
                return Result(job, Stage.PREFILL, scores=event.tokens)
            case TextEvent() | RewindEvent():
                return self._streamed(job, event)
        del self.jobs[event.request_id]
        if isinstance(event, FinishEvent):
            job.finish = event
            job.num_tokens = event.completion_tokens
        else:
            job.error = event.error
        return Result(job, Stage.STREAMING, finish=job.finish, error=job.error)

    @staticmethod
    def _streamed(job: Job, event: TextEvent | RewindEvent) -> Result:
        if isinstance(event, RewindEvent):
            return Result(job, Stage.STREAMING, suppressed=event.text)
        job.text += event.text
        job.num_tokens += len(event.token_ids)
        text, ids, tokens = event.text, event.token_ids, event.tokens
        return Result(job, Stage.STREAMING, text=text, token_ids=ids, tokens=tokens)


def check_request(request: object) -> None:
    if not isinstance(request, Request):
        raise RequestError(
            "not a request",
            got=type(request).__name__,
            next_step="Make one of a prompt with the generator's request().",
        )


def _overrides(each: Sequence[RequestFields] | None, num_prompts: int) -> Sequence[RequestFields]:
    if each is None:
        return [{}] * num_prompts
    if len(each) != num_prompts:
        raise RequestError(
            "`each` has settings for another number of prompts",
            expected=num_prompts,
            got=len(each),
        )
    return each


def _split_pair(prompt: str | Pair, number: int) -> tuple[str, str | None]:
    """The prompt and its negative prompt, if it is a pair."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, tuple) and [type(text) for text in prompt] == [str, str]:
        return prompt
    raise RequestError(
        f"prompt {number} is neither a text nor a pair of texts",
        got=repr(prompt)[:100],
        next_step="For token ids there are request() and enqueue().",
    )
