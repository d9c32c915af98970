"""Task accuracy with EleutherAI's lm-evaluation-harness, run in this process on an exl model.

The harness provides the tasks, the prompts, the metrics and their errors. `HarnessModel` is the
model that it queries. No other module needs the package lm-eval, which is optional: import this
module only inside the function that uses it.
"""

from __future__ import annotations

import difflib
import logging
import math
import sys
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any, Protocol, Self

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from exl_core.arch.spec import ModelConfig
from exl_core.cache.format import KVFormat
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import FinishEvent
from exl_core.engine.request import Request
from exl_core.errors import RequestError, TemplateError
from exl_core.generate.driver import running
from exl_core.prompt.template import ChatTemplate
from exl_core.prompt.tracked import TrackedText
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import LoadedModel
from exl_core.session.open import stop_ids
from exl_core.tokenizer.base import Tokenizer
from exl_core.tokenizer.special_text import Trust
from exl_eval.continuations import Pair, Scored, score_continuations
from exl_eval.result import SCHEMA_VERSION

DEFAULT_REPLY_TOKENS = 256
OnDone = Callable[[int], None]
"""Called with the number of items that are done since the last call."""
_SAMPLER_SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """Settings of a run. `fewshot` None keeps each task's own number. `limit` is the number of
    documents per task; None means all. `include` is a folder with additional task files. `chat`
    formats prompts with the model's chat template."""

    tasks: tuple[str, ...]
    fewshot: int | None = None
    limit: int | None = None
    include: Path | None = None
    chat: bool = False
    max_batch: int = 16
    kv_format: KVFormat = KVFormat.FP16
    seed: int = 1234


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Result of one task. `metrics` have the harness's names, such as `acc,none` for accuracy
    without a filter; a metric that is not a finite number is None."""

    name: str
    metrics: dict[str, float | None]
    fewshot: int
    documents: int
    version: str


@dataclass(frozen=True, slots=True)
class TasksResult:
    model: str
    kv_format: str
    exact: bool
    chat: bool
    limit: int | None
    seed: int
    lm_eval_version: str
    tasks: tuple[TaskResult, ...]

    def as_dict(self) -> dict[str, object]:
        return {"schema_version": SCHEMA_VERSION, "measurement": "tasks", **asdict(self)}


class TaskModel(Protocol):
    """A model's facts that the harness needs besides its answers; `LoadedModel` has them."""

    @property
    def name(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def template(self) -> ChatTemplate | None: ...
    @property
    def exact(self) -> bool: ...


class TaskWork(Protocol):
    """A model's answers, from this process or from others."""

    def scores(self, pairs: Sequence[Pair], on_done: OnDone) -> list[Scored]:
        """Scores in the order of the pairs."""
        ...

    def replies(self, requests: Sequence[Request]) -> Iterator[tuple[int, str]]:
        """Index and reply of each request, in the order in which they end."""
        ...


class LocalWork:
    """The answers of a model in this process, by one engine and `score_continuations`."""

    def __init__(self, loaded: LoadedModel, options: TaskOptions) -> None:
        self._model = loaded.model
        self._kv_format = options.kv_format
        engine = EngineOptions(max_batch=options.max_batch, kv_format=options.kv_format)
        self._engine = Engine(loaded.model, loaded.tokenizer, engine)

    def scores(self, pairs: Sequence[Pair], on_done: OnDone) -> list[Scored]:
        return score_continuations(self._model, pairs, kv_format=self._kv_format, on_scored=on_done)

    def replies(self, requests: Sequence[Request]) -> Iterator[tuple[int, str]]:
        numbers = {one.request_id: number for number, one in enumerate(requests)}
        with running(self._engine, requests) as run:
            for event in run.events():
                if isinstance(event, FinishEvent):
                    yield numbers[event.request_id], event.text


class HarnessModel(TemplateLM):
    """The harness's model interface, implemented by `TaskWork`.

    Special tokens are recognized in a task's own texts, as elsewhere with the harness. In prompts
    that the chat template rendered, only the template may write them. BOS is added if the model's
    tokenizer adds it and the text does not begin with it. A context that is too long keeps its end.
    """

    def __init__(
        self,
        loaded: TaskModel,
        work: TaskWork,
        *,
        seed: int = 1234,
        is_watched: bool = False,
    ) -> None:
        super().__init__()
        self._loaded = loaded
        self._work = work
        self._seed = seed
        self._is_watched = is_watched
        self._ends = stop_ids(loaded.tokenizer, loaded.config)
        self._rendered = _RenderedPrompts()

    @classmethod
    def of(cls, loaded: LoadedModel) -> Self:
        """A model in this process, with the default settings."""
        return cls(loaded, LocalWork(loaded, TaskOptions(())))

    @property
    def max_length(self) -> int:
        return self._loaded.config.max_seq_len

    @property
    def eot_token_id(self) -> int:
        if not self._ends:
            raise RequestError("the model has no token that ends a text", where=self._loaded.path)
        return min(self._ends)

    @property
    def prefix_token_id(self) -> int:
        """Token put before a text that has no context."""
        bos = self._loaded.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self._loaded.name

    def chat_template(self, chat_template: bool | str = False) -> str | None:  # noqa: ARG002
        template = self._loaded.template
        return None if template is None else template.source

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        template = self._loaded.template
        if template is None:
            raise TemplateError("the model has no chat template", where=self._loaded.path)
        if add_generation_prompt:
            return self._rendered.add(template.render(chat_history))
        # The last message is the beginning of the reply: the model continues it directly.
        *before, begun = chat_history
        return self._rendered.add(template.render(before)) + begun["content"]

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        **kwargs: Any,  # noqa: ARG002 - settings for other models
    ) -> list[int]:
        tokenizer, template = self._loaded.tokenizer, self._loaded.template
        trusted = self._rendered.trusted_in(string)
        trust = None if trusted is None or template is None else Trust(trusted, template.source)
        ids = tokenizer.encode(string, allow_special=True, add_bos=False, trust=trust)
        wants_bos = tokenizer.adds_bos if add_special_tokens is None else add_special_tokens
        bos = tokenizer.bos_id
        if not wants_bos or bos is None or ids[:1] == [bos]:
            return ids
        return [bos, *ids]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        pairs: list[tuple[tuple[str, str], list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            cut = [make_disjoint_window(window) for window in windows]
            pairs += [(("", ""), context, continuation) for context, continuation in cut]
            counts.append(len(cut))
        scores = iter(self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm))
        sums = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,  # noqa: ARG002
    ) -> list[tuple[float, bool]]:
        asked = [(context, tail) for _, context, tail in requests]
        pairs = [self._pair(context, tail) for context, tail in asked if tail]
        with self._bar(len(pairs), "scoring", disable_tqdm) as bar:
            scored = iter(self._work.scores(pairs, lambda count: _advance(bar, count)))
        answers = []
        for text, _, tail in requests:
            one = next(scored) if tail else None  # an empty continuation has probability 1
            answer = (0.0, True) if one is None else (one.log_prob, one.is_greedy)
            if text != ("", ""):
                self.cache_hook.add_partial("loglikelihood", text, answer)
            answers.append(answer)
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        asked = []
        for number, one in enumerate(requests):
            context, settings = one.args
            asked.append(self._request(context, settings, number))
        replies = [""] * len(requests)
        with self._bar(len(requests), "generating", disable_tqdm) as bar:
            for number, text in self._work.replies(asked):
                replies[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
                bar.update(1)
        return replies

    def _pair(self, context: Sequence[int], continuation: Sequence[int]) -> Pair:
        longest = self.max_length + 1 - len(continuation)
        if longest < 1:
            raise RequestError(
                "a continuation is longer than the model's context",
                expected=f"at most {self.max_length} tokens",
                got=len(continuation),
            )
        return Pair(tuple(context[-longest:]), tuple(continuation))

    def _request(self, context: str, settings: Mapping[str, Any], number: int) -> Request:
        known = dict(normalize_gen_kwargs(dict(settings), DEFAULT_REPLY_TOKENS))
        until = [text for text in known.pop("until") if text]
        max_tokens = known.pop("max_gen_toks")
        if not known.pop("do_sample"):
            known["temperature"] = 0.0
        strange = [name for name in known if name not in _SAMPLER_SETTINGS]
        if strange:
            raise RequestError(
                f"a task sets an unknown option of generation: {strange[0]}",
                expected=", ".join(("until", "max_gen_toks", "do_sample", *_SAMPLER_SETTINGS)),
            )
        longest = self.max_length - max_tokens
        if longest < 1:
            raise RequestError(
                "a task requests replies as long as the model's context",
                expected=f"max_gen_toks below {self.max_length}",
                got=max_tokens,
            )
        ids = self.tok_encode(context) or [self.prefix_token_id]
        return Request(
            tuple(ids[-longest:]),
            max_tokens=max_tokens,
            sampler=SamplerParams(**known, seed=self._seed + number),
            stop_ids=self._ends,
            stop_strings=tuple(until),
        )

    def _bar(self, total: int, what: str, disable_tqdm: bool) -> Any:
        return tqdm(total=total, desc=what, disable=disable_tqdm or not self._is_watched)


def _advance(bar: Any, count: int) -> None:
    bar.update(count)


class _RenderedPrompts:
    """Prompts that the chat template rendered, with the characters that it wrote itself.

    The harness treats prompts as plain strings: it appends continuations and strips blanks from
    their ends. A string that begins with a rendered prompt is therefore one.
    """

    def __init__(self) -> None:
        self._trusted: dict[str, bytes] = {}
        self._sorted: list[str] = []

    def add(self, text: TrackedText) -> str:
        """Remember a prompt; returns it as a plain string."""
        for known in (text, text.rstrip()):
            if known.plain() not in self._trusted:
                self._trusted[known.plain()] = known.trusted
                insort(self._sorted, known.plain())
        return text.plain()

    def trusted_in(self, string: str) -> bytes | None:
        """One byte per character: 1 where the template wrote it. None for any other string."""
        end = bisect_right(self._sorted, string)
        while end and self._sorted[end - 1][:1] == string[:1]:
            known = self._sorted[end - 1]
            if string.startswith(known):
                return self._trusted[known] + bytes(len(string) - len(known))
            # Every prefix of the string is a prefix of what it shares with the last candidate.
            pairs = zip(string, known, strict=False)
            length = next((i for i, (a, b) in enumerate(pairs) if a != b), len(string))
            end = bisect_right(self._sorted, string[:length], 0, end - 1)
        return None


def run_tasks(
    loaded: LoadedModel, options: TaskOptions, *, is_watched: bool = False
) -> TasksResult:
    """Runs the tasks. `is_watched` shows progress on stderr. The harness prints nothing to
    stdout."""
    return run_with(loaded, LocalWork(loaded, options), options, is_watched=is_watched)


def run_with(
    loaded: TaskModel, work: TaskWork, options: TaskOptions, *, is_watched: bool = False
) -> TasksResult:
    """The same with the answers of `work`, whose model `loaded` describes."""
    model = HarnessModel(loaded, work, seed=options.seed, is_watched=is_watched)
    manager = _manager(options)
    with _quiet(is_watched=is_watched):
        found = _evaluate(model, options, manager)
    return TasksResult(
        model=loaded.label,
        kv_format=options.kv_format.value,
        exact=loaded.exact,
        chat=options.chat,
        limit=options.limit,
        seed=options.seed,
        lm_eval_version=version("lm-eval"),
        tasks=tuple(_task_result(name, found) for name in found["results"]),
    )


@contextmanager
def _quiet(*, is_watched: bool) -> Iterator[None]:
    """Discards the output of the harness and its libraries. With `is_watched`, stderr stays
    visible, but the log of the hub's retries does not: they end in one error or in success."""
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "lm_eval", "datasets")]
    levels = [logger.level for logger in loggers]
    silence = StringIO()
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with redirect_stdout(silence), redirect_stderr(sys.stderr if is_watched else silence):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _evaluate(model: HarnessModel, options: TaskOptions, manager: TaskManager) -> dict[str, Any]:
    try:
        found: dict[str, Any] | None = simple_evaluate(
            model,
            tasks=list(options.tasks),
            num_fewshot=options.fewshot,
            limit=options.limit,
            apply_chat_template=options.chat,
            task_manager=manager,
            log_samples=False,
            random_seed=options.seed,
            numpy_random_seed=options.seed,
            torch_random_seed=options.seed,
            fewshot_random_seed=options.seed,
        )
    except OSError as error:  # raised by datasets and the hub when they cannot be reached
        raise RequestError(
            "the data of a task cannot be read",
            where=", ".join(options.tasks),
            got=f"{type(error).__name__}: {str(error)[:300]}",
            next_step="Most tasks download their data from the hub once; your own task files "
            "(--include) may name local files.",
        ) from error
    assert found is not None
    return found


def _task_result(name: str, found: Mapping[str, Any]) -> TaskResult:
    metrics = {
        key: float(value) if isinstance(value, int | float) and math.isfinite(value) else None
        for key, value in found["results"][name].items()
        if "," in key
    }
    samples = found["n-samples"].get(name, {})
    return TaskResult(
        name=name,
        metrics=metrics,
        fewshot=int(found["n-shot"].get(name) or 0),
        documents=int(samples.get("effective", 0)),
        version=str(found["versions"].get(name)),
    )


def _manager(options: TaskOptions) -> TaskManager:
    """Task manager that knows all tasks of `options`. Indexing the harness's thousands of tasks
    takes seconds, so they are skipped if the files of `include` define all requested tasks."""
    if options.include is not None:
        own = TaskManager(include_path=str(options.include), include_defaults=False)
        if set(options.tasks) <= set(own.all_tasks):
            return own
    manager = TaskManager(include_path=None if options.include is None else str(options.include))
    for name in options.tasks:
        if name not in manager.all_tasks:
            nearest = difflib.get_close_matches(name, manager.all_tasks, n=3)
            advice = f"Similar: {', '.join(nearest)}." if nearest else "--include DIR adds tasks."
            raise RequestError(f"no task {name!r}", expected="a task of lm-eval", next_step=advice)
    return manager
