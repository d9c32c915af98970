"""llama.cpp's `/completion` and `/infill`, as another form of completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from exl_cli.server.completions import Choice, Completion
from exl_cli.server.errors import ApiError
from exl_cli.server.schema import CompletionBody, parsed
from exl_cli.server.service import timings_of
from exl_cli.server.streaming import EVENTS_WITHOUT_END, Event
from exl_core.engine.events import FinishEvent, FinishReason
from exl_core.generate.asynchronous import AsyncJob
from exl_core.generate.dynamic import Result

Json = dict[str, Any]
_INERT = ("response_fields", "id_task")


def completion_body(body: Mapping[str, Any]) -> CompletionBody:
    """The completion that `/completion` stands for. Its reply is not limited by default."""
    left = _settings(body)
    return parsed(CompletionBody, {**left, **_limit(left)})


def infill_body(body: Mapping[str, Any]) -> CompletionBody:
    """The completion that `/infill` stands for: text between `input_prefix` and `input_suffix`.
    `prompt` continues the prefix; the texts of `input_extra` come before it."""
    left = _settings(body)
    extra = left.pop("input_extra", None) or []
    texts = [one.get("text") for one in extra if isinstance(one, dict)]
    parts = [*texts, left.pop("input_prefix", None), left.pop("prompt", None)]
    suffix = left.pop("input_suffix", None)
    if not all(part is None or isinstance(part, str) for part in [*parts, suffix]):
        raise ApiError(400, "input_prefix: a text is expected", param="input_prefix")
    prompt = "".join(part for part in parts if isinstance(part, str))
    # Without text after the gap, a line end still says that there is a gap.
    return parsed(
        CompletionBody, {**left, **_limit(left), "prompt": prompt, "suffix": suffix or "\n"}
    )


def _settings(body: Mapping[str, Any]) -> Json:
    """The body without fields that select parts of the answer. In llama.cpp a range of 0 turns DRY
    off; elsewhere it is the whole context."""
    left = {name: value for name, value in body.items() if name not in _INERT}
    if left.get("dry_penalty_last_n") in (0, "0"):
        left["dry_multiplier"] = 0
    return left


def _limit(left: Mapping[str, Any]) -> Json:
    given = [
        name for name in ("n_predict", "max_tokens", "num_predict") if left.get(name) is not None
    ]
    return {} if given else {"max_tokens": -1}


class LlamaCompletion(Completion):
    """A completion in llama.cpp's form: one reply, or a list of them for several prompts."""

    async def whole(self, stack: AsyncExitStack) -> Any:
        choices = await self.collect(stack)
        ends = self.ends(choices)
        found = [
            {**self.piece(choice, choice.take_text()), **self.last(end)}
            for choice, end in zip(choices, ends, strict=True)
        ]
        return found[0] if len(found) == 1 else found

    async def stream(self, stack: AsyncExitStack) -> PieceEvents:
        return PieceEvents(self, await self.start(stack))

    def piece(self, choice: Choice, text: str) -> Json:
        return {"index": choice.index, "content": text, "stop": False, **choice.probabilities()}

    def last(self, end: FinishEvent) -> Json:
        is_word = isinstance(end.stopped_by, str)
        is_cut = end.reason in (FinishReason.LENGTH, FinishReason.TIME)
        return {
            "stop": True,
            "model": self.model,
            "stop_type": "limit" if is_cut else "word" if is_word else "eos",
            "stopping_word": end.stopped_by if is_word else "",
            "tokens_predicted": end.completion_tokens,
            "tokens_evaluated": end.prompt_tokens,
            "tokens_cached": end.cached_tokens,
            "truncated": False,
            "timings": timings_of([end]),
        }


class PieceEvents:
    """Events of the replies; each ends with its counts. There is no `[DONE]`."""

    framing = EVENTS_WITHOUT_END

    def __init__(self, work: LlamaCompletion, choices: list[Choice]) -> None:
        self._work = work
        self._choices = choices

    @property
    def jobs(self) -> list[AsyncJob]:
        return [choice.job for choice in self._choices]

    def begin(self) -> Iterable[Event]:
        return ()

    def on_result(self, number: int, result: Result) -> Iterable[Event]:
        choice = self._choices[number]
        choice.take(result)
        if not choice.has_output:
            return
        piece = self._work.piece(choice, choice.take_text())
        yield piece if choice.end is None else {**piece, **self._work.last(choice.end)}

    def end(self) -> Iterable[Event]:
        self._work.ends(self._choices)
        return ()
