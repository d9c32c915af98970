"""Evaluations by several processes, each with the whole model: windows of a perplexity or of a
divergence, and completions of HumanEval's problems.

On the CPU `exl eval` is batch-invariant, so the figures do not depend on the number of replicas.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from exl_cli.eval_options import Loading, Where
from exl_cli.replicas import Answers, Replica, Worker, answer_with, opened
from exl_core.cache.format import KVFormat
from exl_core.session.load import LoadedModel
from exl_eval.divergence import RunningReference, WindowComparer
from exl_eval.humaneval import HumanEvalOptions, Problem, completions
from exl_eval.perplexity import PerplexityOptions, WindowScorer, model_facts
from exl_eval.result import ModelFacts
from exl_eval.styles import Layout
from exl_eval.texts import Text
from exl_eval.window_file import WindowFile, each_window

FACTS = -1
"""Item that asks for the facts about the models instead of a result."""
NLL = "nll"


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
        scorer = WindowScorer(loaded, self.text, self.choices)
        return WindowWorker(scorer.facts, lambda number: {NLL: scorer.score(number)})


@dataclass(frozen=True, slots=True)
class ComparisonJob(ModelJob):
    """`ReplicaJob` of a divergence: its items are numbers of windows. Each replica has both the
    model and its reference."""

    reference: str
    layout: Layout
    kv_format: KVFormat

    def worker(self, *, is_quiet: bool) -> WindowWorker:
        loading = replace(self.loading, is_quiet=is_quiet)
        reference, candidate = loading.load(self.reference), loading.load(self.spec)
        running = RunningReference(reference, self.layout, candidate.config.vocab_size)
        comparer = WindowComparer(running, candidate, self.layout, self.kv_format)
        return WindowWorker(comparer.facts, comparer.compare)


class WindowWorker:
    """Values of windows, as arrays, which other processes can receive."""

    def __init__(self, facts: object, find: Callable[[int], Mapping[str, Tensor]]) -> None:
        self._facts = facts
        self._find = find

    def answer(self, items: Sequence[int]) -> Answers:
        for number in items:
            if number == FACTS:
                yield number, self._facts
            else:
                yield number, {name: x.numpy() for name, x in self._find(number).items()}


class ReplicatedWindows:
    """Values of a text's windows, computed by replicas ahead of the caller."""

    def __init__(self, replicas: Sequence[Replica], num_windows: int) -> None:
        self._replicas = replicas
        self._num_windows = num_windows
        ((_, self.facts),) = replicas[0].answer([FACTS])
        self._found: dict[int, Any] = {}
        self._answers: Answers | None = None

    def score(self, number: int) -> Tensor:
        """Terms of a window, as `WindowScorer.score`."""
        return self.find(number)[NLL]

    def find(self, number: int) -> dict[str, Tensor]:
        """Values of a window. The caller takes windows in their order. The first call starts all
        replicas on that window and those after it."""
        if self._answers is None:
            rest = range(number, self._num_windows)
            self._answers = answer_with(self._replicas, rest, unit=1)
        while number not in self._found:
            index, values = next(self._answers)
            self._found[index] = values
        return {name: torch.tensor(x) for name, x in self._found.pop(number).items()}


@dataclass(frozen=True, slots=True)
class CompletionJob(ModelJob):
    """`ReplicaJob` of HumanEval: its items are numbers of problems."""

    problems: tuple[Problem, ...]
    choices: HumanEvalOptions

    @property
    def unit(self) -> int:
        """Problems that fill a batch."""
        return max(1, self.choices.max_batch // self.choices.samples)

    def worker(self, *, is_quiet: bool) -> CompletionWorker:
        return CompletionWorker(self, replace(self.loading, is_quiet=is_quiet).load(self.spec))


class CompletionWorker:
    """A model that completes problems, several at the same time."""

    def __init__(self, job: CompletionJob, loaded: LoadedModel) -> None:
        self._job = job
        self._loaded = loaded

    def answer(self, items: Sequence[int]) -> Answers:
        if list(items) == [FACTS]:
            yield FACTS, model_facts(self._loaded, KVFormat.FP16)
            return
        choices = self._job.choices
        problems = [self._job.problems[number] for number in items]
        texts = [text for _, text in completions(self._loaded, problems, choices)]
        for place, number in enumerate(items):
            yield number, texts[place * choices.samples : (place + 1) * choices.samples]


class Completions:
    """The completions of each problem, by replicas or by one worker in this process."""

    def __init__(self, job: CompletionJob, replicas: Sequence[Worker]) -> None:
        self._job = job
        self._replicas = replicas
        ((_, self.model),) = replicas[0].answer([FACTS])
        assert isinstance(self.model, ModelFacts)
        self._found: dict[int, Sequence[str]] = {}
        self._answers: Answers | None = None

    def find(self, number: int) -> dict[str, Tensor]:
        """UTF-8 bytes of a problem's completions, by sample. The caller takes problems in their
        order. The first call starts on that problem and those after it."""
        if self._answers is None:
            rest = range(number, len(self._job.problems))
            self._answers = answer_with(self._replicas, rest, self._job.unit)
        while number not in self._found:
            index, texts = next(self._answers)
            self._found[index] = texts
        return {str(i): _bytes(text) for i, text in enumerate(self._found.pop(number))}

    def in_order(self, file: WindowFile | None) -> Iterator[tuple[Problem, str]]:
        """Each problem with its completions; those of an earlier run from the file."""
        problems = self._job.problems
        kept = each_window(len(problems), self.find, file)
        for problem, (found, _) in zip(problems, kept, strict=True):
            for sample in range(self._job.choices.samples):
                yield problem, bytes(found[str(sample)].tolist()).decode()

    def header(self) -> dict[str, object]:
        """Everything that the completions depend on, for their file."""
        choices = self._job.choices
        problems = "\n".join(f"{one.task_id} {one.prompt}" for one in self._job.problems)
        return {
            "measurement": "humaneval",
            "problems_sha256": hashlib.sha256(problems.encode()).hexdigest(),
            "samples": choices.samples,
            "temperature": choices.temperature,
            "max_tokens": choices.max_tokens,
            "seed": choices.seed,
            **asdict(self.model),
        }


def _bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


@contextmanager
def replicated(
    job: WindowJob | ComparisonJob, where: Where, num_windows: int
) -> Iterator[ReplicatedWindows]:
    """Values of the job's windows from its replicas."""
    with opened(job, *where, units=num_windows, is_quiet=job.loading.is_quiet) as replicas:
        yield ReplicatedWindows(replicas, num_windows)
