"""Many replies at once: jobs come and go, and every step serves all that there is room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from threading import Event as Flag
from typing import Unpack, overload

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
from exl_core.generate.settings import RequestFields, Stops, check_names, seeded
from exl_core.load import LoadedModel
from exl_core.model.embedded import EmbeddedSpan
from exl_core.sampling.params import SamplerParams
from exl_core.speculate.drafter import Drafter

Pair = tuple[str, str]
"""A prompt, and the one that guidance steers away from."""


class Stage(Enum):
    STARTED = "started"
    PREFILL = "prefill"
    STREAMING = "streaming"


@dataclass(eq=False)
class Job:
    """One request in a generator. `serial` counts from 0; `identifier` is the caller's own."""

    request: Request
    serial: int
    identifier: object = None
    text: str = ""
    """So far."""
    num_tokens: int = 0
    """Generated so far, of which was told."""
    finish: FinishEvent | None = None
    """Reason, counts and times, once it has ended."""
    error: BaseException | None = None
    """What made it fail."""
    is_dropped: bool = False
    """It was cancelled before its end."""

    @property
    def is_finished(self) -> bool:
        """No result of it comes any more."""
        return self.finish is not None or self.error is not None or self.is_dropped


@dataclass(frozen=True, slots=True)
class Result:
    """What one step brought to one job.

    text, token_ids   new ones; empty where nothing is certain yet
    tokens            the same tokens with what `Request.report` asked to be told of them
    done, total       PREFILL: tokens of the prompt in the cache, and all of them
    scores            PREFILL: the next tokens of the prompt, where `Report.prompt` asks for them
    suppressed        text of a banned string that was taken back
    finish            the end: reason, counts, times
    error             the end of a job that failed
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
    """Continuous batching. Not for use by several threads at once; `asynchronous.py` has a face
    for that."""

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
        """The live ones, by request id."""
        self.last_jobs: list[Job] = []
        """Of the last `generate`."""
        self._serials = count()

    @overload
    def enqueue(self, request: Request, identifier: object = None) -> Job: ...
    @overload
    def enqueue(self, request: Sequence[Request], identifier: object = None) -> list[Job]: ...
    def enqueue(
        self, request: Request | Sequence[Request], identifier: object = None
    ) -> Job | list[Job]:
        """Check and queue; of a list all or none."""
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
        """One step of all jobs, and what it brought. Call it while there are jobs left.

        Raises what broke a pass off; the next call gives every job that was in it its end.
        """
        results = [self._result(event) for event in self.engine.step()]
        return [result for result in results if result is not None]

    @property
    def num_remaining_jobs(self) -> int:
        """Live jobs, waiting or running."""
        return len(self.jobs)

    def cancel(self, job: Job) -> bool:
        """Drop it; no result of it comes any more. False: it had ended already."""
        request_id = job.request.request_id
        if self.jobs.get(request_id) is not job:
            return False
        del self.jobs[request_id]
        job.is_dropped = True
        self.engine.cancel(request_id)
        self.engine.discard_events(request_id)
        return True

    def clear_queue(self) -> None:
        """Drop all jobs."""
        for job in list(self.jobs.values()):
            self.cancel(job)

    def page_list(self) -> str:
        """A character for each page of the cache: how many hold it, `.` free."""
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
        stop: Stops = (),
        add_bos: bool | None = False,
        parse_special: bool = False,
        completion_only: bool = False,
        seed: int | None = None,
        abort: Flag | None = None,
        embeddings: Mapping[str, EmbeddedSpan] | None = None,
        **settings: Unpack[RequestFields],
    ) -> str | list[str] | None:
        """Complete one prompt, or all of a list side by side.

        Without `stop` nothing but `max_tokens` ends a reply, not even EOS (`eos_ids` has those).
        The text of a prompt comes first, unless `completion_only`. Prompt i gets the settings
        `each[i]` over the shared ones, and the seed `seed + i`. Once `abort` is set these jobs are
        dropped: None. `last_jobs` tell the rest. Jobs that were queued before go on meanwhile.
        """
        check_names(settings, self.generate)
        prompts = prompt if isinstance(prompt, list) else [prompt]
        requests = []
        for number, (one, own) in enumerate(zip(prompts, _own(each, len(prompts)), strict=True)):
            positive, negative = _pair(one, number)
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
        self.last_jobs = self.enqueue(requests)
        self._run(self.last_jobs, abort)
        texts = []
        for one, job in zip(prompts, self.last_jobs, strict=True):
            if job.error is not None:
                raise job.error
            if job.finish is None:
                return None
            shown = one[0] if isinstance(one, tuple) else one
            texts.append(job.text if completion_only else shown + job.text)
        return texts if isinstance(prompt, list) else texts[0]

    def _enqueue(self, request: Request, identifier: object) -> Job:
        if not isinstance(request, Request):
            raise RequestError(
                "not a request",
                got=type(request).__name__,
                next_step="Make one of a prompt with the generator's request().",
            )
        self.engine.submit(request)
        job = Job(request, next(self._serials), identifier)
        self.jobs[request.request_id] = job
        return job

    def _run(self, jobs: Sequence[Job], abort: Flag | None) -> None:
        """Until all are finished; on the way out none is left in the engine."""
        try:
            while not all(job.is_finished for job in jobs):
                if abort is not None and abort.is_set():
                    return
                self.iterate()
        finally:  # also where a step raised
            for job in jobs:
                self.cancel(job)

    def _result(self, event: Event) -> Result | None:
        job = self.jobs.get(event.request_id)
        if job is None:  # of a request that went to the engine past this generator
            return None
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


def _own(each: Sequence[RequestFields] | None, num_prompts: int) -> Sequence[RequestFields]:
    if each is None:
        return [{}] * num_prompts
    if len(each) != num_prompts:
        raise RequestError(
            "`each` has settings for another number of prompts",
            expected=num_prompts,
            got=len(each),
        )
    return each


def _pair(prompt: str | Pair, number: int) -> tuple[str, str | None]:
    """The prompt, and the one that guidance steers away from, if any."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, tuple) and [type(text) for text in prompt] == [str, str]:
        return prompt
    raise RequestError(
        f"prompt {number} is neither a text nor a pair of texts",
        got=repr(prompt)[:100],
        next_step="For token ids there are request() and enqueue().",
    )
