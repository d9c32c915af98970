"""Many replies at once: jobs come and go, and every step serves all that there is room for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count
from threading import Event as Flag
from typing import Unpack, overload

from exl_core.engine.engine import EngineOptions
from exl_core.engine.events import (
    Event,
    FinishEvent,
    PrefillEvent,
    RewindEvent,
    SampledToken,
    StartEvent,
    TextEvent,
)
from exl_core.engine.request import Request
from exl_core.generate.generator import Generator, RequestFields, Stop
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
    finish: FinishEvent | None = None
    """Reason, counts and times, once it has ended."""
    error: BaseException | None = None
    """What made it fail."""

    @property
    def is_finished(self) -> bool:
        return self.finish is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class Result:
    """What one step brought to one job.

    text, token_ids   new ones; empty where nothing is certain yet
    tokens            the same tokens with what `Request.report` asked to be told of them
    done, total       PREFILL: tokens of the prompt in the cache, and all of them
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
    ) -> None:
        super().__init__(loaded, options, drafter=drafter)
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
            self.engine.submit(request)
            job = Job(request, next(self._serials), identifier)
            self.jobs[request.request_id] = job
            return job
        for one in request:
            self.engine.check(one)
        return [self.enqueue(one, identifier) for one in request]

    def iterate(self) -> list[Result]:
        """One step of all jobs, and what it brought. Call it while there are jobs left."""
        results = [self._result(event) for event in self.engine.step()]
        return [result for result in results if result is not None]

    @property
    def num_remaining_jobs(self) -> int:
        """Live jobs, waiting or running."""
        return len(self.jobs)

    def cancel(self, job: Job) -> bool:
        """Drop it; no result of it comes any more. False: it had ended already."""
        if self.jobs.pop(job.request.request_id, None) is None:
            return False
        self.engine.cancel(job.request.request_id)
        self.engine.discard_events(job.request.request_id)
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
        stop: Stop | Iterable[Stop] = ...,
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
        samplers: Sequence[SamplerParams] | None = ...,
        stop: Stop | Iterable[Stop] = ...,
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
        samplers: Sequence[SamplerParams] | None = None,
        stop: Stop | Iterable[Stop] = (),
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
        The text of a prompt comes first, unless `completion_only`. Prompt i gets the seed
        `seed + i`, or `samplers[i]`. Once `abort` is set all jobs are dropped: None. The jobs
        of `last_jobs` tell the rest.
        """
        prompts = prompt if isinstance(prompt, list) else [prompt]
        shared = settings.get("sampler", SamplerParams())
        requests = []
        for i, one in enumerate(prompts):
            positive, negative = one if isinstance(one, tuple) else (one, None)
            sampler = shared if samplers is None else samplers[i]
            settings["sampler"] = sampler if seed is None else replace(sampler, seed=seed + i)
            requests.append(
                self.request(
                    positive,
                    negative=negative,
                    stop=stop,
                    add_bos=add_bos,
                    parse_special=parse_special,
                    embeddings=embeddings,
                    **settings,
                )
            )
        self.last_jobs = self.enqueue(requests)
        if not self._run(self.last_jobs, abort):
            return None
        texts = []
        for one, job in zip(prompts, self.last_jobs, strict=True):
            if job.error is not None:
                raise job.error
            shown = one[0] if isinstance(one, tuple) else one
            texts.append(job.text if completion_only else shown + job.text)
        return texts if isinstance(prompt, list) else texts[0]

    def _run(self, jobs: Sequence[Job], abort: Flag | None) -> bool:
        try:
            while not all(job.is_finished for job in jobs):
                if abort is not None and abort.is_set():
                    return False
                self.iterate()
        finally:  # also where a step raised
            for job in jobs:
                self.cancel(job)
        return True

    def _result(self, event: Event) -> Result | None:
        job = self.jobs.get(event.request_id)
        if job is None:  # of a request that went to the engine past this generator
            return None
        streaming = Result(job, Stage.STREAMING)
        match event:
            case StartEvent():
                return Result(job, Stage.STARTED)
            case PrefillEvent():
                return Result(job, Stage.PREFILL, done=event.done, total=event.total)
            case TextEvent():
                job.text += event.text
                return replace(
                    streaming, text=event.text, token_ids=event.token_ids, tokens=event.tokens
                )
            case RewindEvent():
                return replace(streaming, suppressed=event.text)
        del self.jobs[event.request_id]
        if isinstance(event, FinishEvent):
            job.finish = event
        else:
            job.error = event.error
        return replace(streaming, finish=job.finish, error=job.error)
