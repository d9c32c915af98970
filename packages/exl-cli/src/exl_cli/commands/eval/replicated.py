"""Evaluations by several processes, each with the whole model: windows of a perplexity, and
completions of HumanEval's problems.

On the CPU `exl eval` is batch-invariant, so the figures do not depend on the number of replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from exl_cli.eval_options import Loading
from exl_cli.replicas import Answers, Replica, answer_with, opened
from exl_core.session.load import LoadedModel
from exl_eval.humaneval import HumanEvalOptions, Problem, completions
from exl_eval.perplexity import PerplexityOptions, ScoringFacts, WindowScorer
from exl_eval.texts import Text

FACTS = -1
"""Item that asks for the `ScoringFacts` or the model's label instead of a result."""


@dataclass(frozen=True, slots=True)
class ModelJob:
    """The part of a `ReplicaJob` that loads a model."""

    loading: Loading
    spec: str | None

    @property
    def device(self) -> str:
        return self.loading.device

    @property
    def threads(self) -> int | None:
        return self.loading.threads

    def placed(self, device: str, threads: int | None) -> Self:
        return replace(self, loading=replace(self.loading, device=device, threads=threads))


@dataclass(frozen=True, slots=True)
class WindowJob(ModelJob):
    """`ReplicaJob` of a text: its items are numbers of windows."""

    text: Text
    choices: PerplexityOptions

    def worker(self, *, is_quiet: bool) -> WindowWorker:
        loaded = replace(self.loading, is_quiet=is_quiet).load(self.spec)
        return WindowWorker(WindowScorer(loaded, self.text, self.choices))


class WindowWorker:
    """Terms of windows, as arrays, which other processes can receive."""

    def __init__(self, scorer: WindowScorer) -> None:
        self._scorer = scorer

    def answer(self, items: Sequence[int]) -> Answers:
        for number in items:
            is_facts = number == FACTS
            yield number, self._scorer.facts if is_facts else self._scorer.score(number).numpy()


class ReplicatedScores:
    """Terms of a text's windows, computed by replicas ahead of the caller."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        ((_, self.facts),) = replicas[0].answer([FACTS])
        assert isinstance(self.facts, ScoringFacts)
        self._found: dict[int, Any] = {}
        self._answers: Answers | None = None

    def score(self, number: int) -> Tensor:
        """Terms of a window, as `WindowScorer.score`. The caller takes windows in their order. The
        first call starts all replicas on that window and those after it."""
        if self._answers is None:
            rest = range(number, len(self.facts.layout.windows))
            self._answers = answer_with(self._replicas, rest, unit=1)
        while number not in self._found:
            index, nll = next(self._answers)
            self._found[index] = nll
        return torch.tensor(self._found.pop(number))


@dataclass(frozen=True, slots=True)
class CompletionJob(ModelJob):
    """`ReplicaJob` of HumanEval: its items are numbers of problems."""

    problems: tuple[Problem, ...]
    choices: HumanEvalOptions

    def worker(self, *, is_quiet: bool) -> CompletionWorker:
        return CompletionWorker(self, replace(self.loading, is_quiet=is_quiet).load(self.spec))


class CompletionWorker:
    """A model that completes problems, several at the same time."""

    def __init__(self, job: CompletionJob, loaded: LoadedModel) -> None:
        self._job = job
        self._loaded = loaded

    def answer(self, items: Sequence[int]) -> Answers:
        if list(items) == [FACTS]:
            yield FACTS, self._loaded.label
            return
        choices = self._job.choices
        problems = [self._job.problems[number] for number in items]
        texts = [text for _, text in completions(self._loaded, problems, choices)]
        for place, number in enumerate(items):
            yield number, texts[place * choices.samples : (place + 1) * choices.samples]


def completed(
    job: CompletionJob, replicas: Sequence[Replica]
) -> tuple[str, Iterator[tuple[Problem, str]]]:
    """The model's label, and each problem with its completions, in the order of the problems."""
    ((_, label),) = replicas[0].answer([FACTS])
    unit = max(1, job.choices.max_batch // job.choices.samples)

    def in_order() -> Iterator[tuple[Problem, str]]:
        waiting: dict[int, Sequence[str]] = {}
        answers = answer_with(replicas, range(len(job.problems)), unit)
        for number, problem in enumerate(job.problems):
            while number not in waiting:
                index, texts = next(answers)
                waiting[index] = texts
            for text in waiting.pop(number):
                yield problem, text

    return label, in_order()


@contextmanager
def replicated(job: WindowJob, count: int | None, ray: str | None) -> Iterator[ReplicatedScores]:
    """Replicas of the job: `count` processes, or actors of the Ray cluster at `ray`."""
    with opened(job, count, ray, is_quiet=job.loading.is_quiet) as replicas:
        yield ReplicatedScores(replicas)
