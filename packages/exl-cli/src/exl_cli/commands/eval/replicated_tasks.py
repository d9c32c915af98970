"""Tasks of lm-evaluation-harness, whose scores and replies come from several processes, each with
the whole model. The harness itself, tokenizer and chat template stay in this one.

Imports lm-eval, which is optional.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from exl_cli.commands.eval.replicated import FACTS, ModelJob
from exl_cli.eval_options import Where
from exl_cli.replicas import Answers, Replica, answer_with, opened
from exl_core.arch.spec import ModelConfig
from exl_core.engine.request import Request
from exl_core.prompt.template import ChatTemplate
from exl_core.session.load import LoadedModel
from exl_core.session.open import open_model
from exl_core.tokenizer.base import Tokenizer
from exl_eval.continuations import Pair, Scored
from exl_eval.harness import LocalWork, OnDone, TaskOptions, TasksResult, run_with

UNIT = 64
"""Continuations that a replica takes at a time. Those of one document follow each other, and share
the passes of their context."""
MOST_UNITS = 1024
"""The harness makes the requests after the model is there, so their number is not known before."""


class TaskFacts(NamedTuple):
    """Facts about a loaded model that its files do not have."""

    label: str
    exact: bool
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """`TaskModel` of a model in other processes."""

    name: str
    label: str
    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    exact: bool


@dataclass(frozen=True, slots=True)
class TaskJob(ModelJob):
    """`ReplicaJob` of tasks: its items are numbered continuations and requests."""

    options: TaskOptions

    def worker(self, *, is_quiet: bool) -> TaskWorker:
        loaded = replace(self.loading, is_quiet=is_quiet).load(self.spec)
        return TaskWorker(loaded, LocalWork(loaded, self.options))


class TaskWorker:
    """A model that scores continuations and writes replies."""

    def __init__(self, loaded: LoadedModel, work: LocalWork) -> None:
        self._loaded = loaded
        self._work = work

    def answer(self, items: Sequence[int] | Sequence[tuple[int, Pair | Request]]) -> Answers:
        if list(items) == [FACTS]:
            config = self._loaded.config
            yield FACTS, TaskFacts(self._loaded.label, self._loaded.exact, config.max_seq_len)
            return
        numbers, asked = [], []
        for item in items:
            assert isinstance(item, tuple), "anything but `FACTS` is numbered"
            numbers.append(item[0])
            asked.append(item[1])
        pairs = [one for one in asked if isinstance(one, Pair)]
        if pairs:
            yield from zip(numbers, self._work.scores(pairs, lambda _: None), strict=True)
            return
        requests = [one for one in asked if isinstance(one, Request)]
        for index, text in self._work.replies(requests):
            yield numbers[index], text


class ReplicatedWork:
    """`TaskWork` of several replicas."""

    def __init__(self, replicas: Sequence[Replica], max_batch: int) -> None:
        self._replicas = replicas
        self._max_batch = max_batch

    def scores(self, pairs: Sequence[Pair], on_done: OnDone) -> list[Scored]:
        found: dict[int, Scored] = {}
        for number, scored in answer_with(self._replicas, list(enumerate(pairs)), UNIT):
            found[number] = scored
            on_done(1)
        return [found[number] for number in range(len(pairs))]

    def replies(self, requests: Sequence[Request]) -> Iterator[tuple[int, str]]:
        yield from answer_with(self._replicas, list(enumerate(requests)), self._max_batch)


def run_by_replicas(job: TaskJob, where: Where, *, is_watched: bool) -> TasksResult:
    """Runs the tasks with the replicas of the job."""
    with opened(job, *where, units=MOST_UNITS, is_quiet=job.loading.is_quiet) as replicas:
        ((_, facts),) = replicas[0].answer([FACTS])
        assert isinstance(facts, TaskFacts)
        files = open_model(job.spec)
        model = DescribedModel(
            files.name,
            facts.label,
            files.path,
            replace(files.config, max_seq_len=facts.max_seq_len),
            files.tokenizer,
            files.template,
            facts.exact,
        )
        work = ReplicatedWork(replicas, job.options.max_batch)
        return run_with(model, work, job.options, is_watched=is_watched)
