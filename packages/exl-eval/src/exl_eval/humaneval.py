"""HumanEval: functions that the model completes from their docstring, checked by running tests.

The problems come from a file in HumanEval's schema, one JSON object per line. The model continues
the prompt until a line begins something new; the sandbox then runs prompt, completion and tests.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import FailEvent, FinishEvent
from exl_core.errors import RequestError
from exl_core.files import CONFIG_LIMIT_BYTES, read_text_file
from exl_core.generate.driver import running
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import LoadedModel
from exl_core.session.open import stop_ids
from exl_core.session.request_fields import Stops, build_request
from exl_eval.result import SCHEMA_VERSION
from exl_eval.sandbox import Limits, Outcome, Verdict, run_program

STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\nassert ", "\n@", "\n```")
"""A completion ends before a line that begins something other than the function."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One line of the file. `test` defines `check(candidate)`."""

    task_id: str
    prompt: str
    entry_point: str
    test: str

    def program(self, completion: str) -> str:
        return f"{self.prompt}{completion}\n\n{self.test}\n\ncheck({self.entry_point})\n"


@dataclass(frozen=True, slots=True)
class HumanEvalOptions:
    """`samples` completions of each problem; `temperature` 0 takes the likeliest tokens."""

    samples: int = 1
    temperature: float = 0.0
    max_tokens: int = 512
    max_batch: int = 16
    seed: int = 1234
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Checked:
    """One completion and what became of it."""

    task_id: str
    completion: str
    verdict: str
    error: str


@dataclass(frozen=True, slots=True)
class HumanEvalResult:
    """`pass_at_1`: mean over the problems of the share of completions that pass."""

    model: str
    problems: int
    samples: int
    temperature: float
    pass_at_1: float
    stderr: float
    is_isolated: bool
    is_confined: bool
    completions: tuple[Checked, ...]

    @property
    def verdicts(self) -> dict[str, int]:
        counts = Counter(one.verdict for one in self.completions)
        return {verdict.value: counts[verdict.value] for verdict in Verdict}

    def as_dict(self) -> dict[str, object]:
        return {"schema_version": SCHEMA_VERSION, "measurement": "humaneval", **asdict(self)}


def read_problems(path: Path, limit: int | None = None) -> list[Problem]:
    """Problems of a file. RequestError names the first line that is not one."""
    problems: list[Problem] = []
    for number, line in enumerate(read_text_file(path, CONFIG_LIMIT_BYTES).splitlines(), 1):
        if not line.strip():
            continue
        if limit is not None and len(problems) == limit:
            break
        problems.append(_problem(line, f"{path}, line {number}"))
    if not problems:
        raise RequestError("holds no problems", where=path)
    return problems


def _problem(line: str, where: str) -> Problem:
    names = ("task_id", "prompt", "entry_point", "test")
    try:
        read = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError("is not valid JSON", where=where, got=str(error)[:200]) from error
    if not isinstance(read, dict) or not all(isinstance(read.get(name), str) for name in names):
        raise RequestError(
            "is no problem of HumanEval",
            where=where,
            expected=f"an object with the texts {', '.join(names)}",
            got=line[:80],
        )
    if not read["entry_point"].isidentifier():
        raise RequestError(
            "entry_point is no name", where=where, got=repr(read["entry_point"])[:80]
        )
    return Problem(*(read[name] for name in names))


def run_humaneval(
    loaded: LoadedModel,
    problems: list[Problem],
    options: HumanEvalOptions | None = None,
    on_checked: Callable[[int], None] = lambda _: None,
) -> HumanEvalResult:
    """Complete and check all problems. The caller has the user's consent to run the code.

    `on_checked` gets the number of completions checked so far.
    """
    options = options or HumanEvalOptions()
    found = completions(loaded, problems, options)
    return check_completions(loaded.label, found, options, on_checked)


def check_completions(
    label: str,
    found: Iterable[tuple[Problem, str]],
    options: HumanEvalOptions,
    on_checked: Callable[[int], None] = lambda _: None,
) -> HumanEvalResult:
    """Checks completions, `options.samples` of each problem after the other. `label`: the model's.

    The caller has the user's consent to run the code.
    """
    checked: list[Checked] = []
    outcomes: list[Outcome] = []
    for problem, completion in found:
        outcome = run_program(problem.program(completion), options.limits)
        outcomes.append(outcome)
        checked.append(
            Checked(problem.task_id, completion, outcome.verdict.value, outcome.error[:200])
        )
        on_checked(len(checked))
    count = options.samples
    passed = [outcome.verdict is Verdict.PASSED for outcome in outcomes]
    rates = [sum(passed[i : i + count]) / count for i in range(0, len(passed), count)]
    mean = sum(rates) / len(rates)
    spread = sum((rate - mean) ** 2 for rate in rates) / max(1, len(rates) - 1)
    return HumanEvalResult(
        model=label,
        problems=len(rates),
        samples=count,
        temperature=options.temperature,
        pass_at_1=mean,
        stderr=math.sqrt(spread / len(rates)),
        is_isolated=all(outcome.is_isolated for outcome in outcomes),
        is_confined=all(outcome.is_confined for outcome in outcomes),
        completions=tuple(checked),
    )


def completions(
    loaded: LoadedModel, problems: list[Problem], options: HumanEvalOptions
) -> Iterator[tuple[Problem, str]]:
    """Each problem with its completions, problem by problem."""
    engine = Engine(loaded.model, loaded.tokenizer, EngineOptions(max_batch=options.max_batch))
    params = SamplerParams(temperature=options.temperature)
    stop: Stops = (*stop_ids(loaded.tokenizer, loaded.config), *STOPS)
    requests = [
        build_request(
            loaded.tokenizer.encode(problem.prompt, add_bos=None),
            stop=stop,
            max_tokens=options.max_tokens,
            sampler=replace(params, seed=options.seed + number),
        )
        for problem in problems
        for number in range(options.samples)
    ]
    texts: dict[str, str] = {}
    with running(engine, requests) as run:
        for event in run.events():
            if isinstance(event, FailEvent):
                raise event.error
            if isinstance(event, FinishEvent):
                texts[event.request_id] = event.text
    for number, request in enumerate(requests):
        yield problems[number // options.samples], texts[request.request_id]
