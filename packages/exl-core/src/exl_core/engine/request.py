"""What a user asks of the engine: frozen, checked where it is made, free of torch and of text.

What depends on the model (the context, the vocabulary, the size of the cache) is checked by
`Engine.submit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from exl_core.errors import RequestError
from exl_core.sampling.params import SamplerParams

if TYPE_CHECKING:
    from exl_core.constrain.filter import Constraint
    from exl_core.engine.events import SampledToken
    from exl_core.model.adapters import AdapterUse
    from exl_core.model.embedded import EmbeddedSpan

Hook = Callable[["SampledToken"], int | None]
"""Called with every sampled token before it is taken; an id that it returns is taken instead.

An exception ends the request, and no other.
"""

_serials = count()


def next_request_id() -> str:
    """An id that no other request of this process got by default."""
    return f"request-{next(_serials)}"


@dataclass(frozen=True, slots=True)
class Report:
    """What is told of each token beside its id, at the price of computing it.

    probabilities  of the token itself, after all steps of sampling
    top_tokens     so many of the likeliest, with their probabilities
    logits         as the model gave them for the prompt, float32 [vocab_size]
    log_probs      natural logarithms of what the model itself gives, before any step of sampling:
                   of the token, and of so many of the likeliest
    prompt         these logarithms of the prompt's tokens too, but for the first, which nothing
                   predicts (`ScoreEvent`). All of the prompt is computed then, cached or not
    """

    probabilities: bool = False
    top_tokens: int = 0
    logits: bool = False
    log_probs: int | None = None
    prompt: bool = False

    def __post_init__(self) -> None:
        _check_count("top_tokens", self.top_tokens)
        if self.log_probs is not None:
            _check_count("log_probs", self.log_probs)
        elif self.prompt:
            raise RequestError(
                "a report on the prompt has nothing to tell", expected="log_probs", got="None"
            )

    @property
    def is_empty(self) -> bool:
        return not (
            self.probabilities or self.top_tokens or self.logits or self.log_probs is not None
        )


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue.

    max_tokens           most tokens to generate; None: until the context (or the cache) is full
    stop_ids             tokens that end the reply; they are no part of its text
    stop_strings         strings that end the reply, wherever the token borders fall; neither they
                         nor anything after them is part of the text
    max_time_s           seconds from its first pass after which no token follows; it has at least
                         one. None: as long as it takes
    min_tokens           until so many are generated, stop tokens are not sampled (stop strings
                         still stop)
    banned_strings       strings that the text will not contain, in upper or lower case: where one
                         comes up, the reply goes back to the token that began it and takes another
    constraints          what the text must look like; all of them hold at once
    prefer_eos           stop as soon as the constraints allow it
    token_healing        the last token of the prompt may grow: it is sampled again among the tokens
                         that begin with its text. A prompt of one token stays as it is
    negative_prompt_ids  what guidance steers away from; goes with `sampler.cfg_scale`
    adapters             low-rank adapters, applied to this request alone
    embeddings           spans of vectors whose ids stand in `prompt_ids`
    hooks                called in order with every sampled token, but for a healed one
    report               what is told of each token beside its id
    show_special         special tokens show their text
    allow_drafts         where the engine has a drafter
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int | None = None
    max_time_s: float | None = None
    sampler: SamplerParams = field(default_factory=SamplerParams)
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0
    request_id: str = field(default_factory=next_request_id)
    banned_strings: tuple[str, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    prefer_eos: bool = False
    token_healing: bool = False
    negative_prompt_ids: tuple[int, ...] | None = None
    adapters: tuple[AdapterUse, ...] = ()
    embeddings: tuple[EmbeddedSpan, ...] = ()
    hooks: tuple[Hook, ...] = ()
    report: Report = field(default_factory=Report)
    show_special: bool = False
    allow_drafts: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", _token_ids("prompt_ids", self.prompt_ids))
        object.__setattr__(self, "stop_ids", frozenset(_token_ids("stop_ids", self.stop_ids)))
        for name in ("stop_strings", "banned_strings"):
            object.__setattr__(self, name, _strings(name, getattr(self, name)))
        for name in ("constraints", "adapters", "embeddings", "hooks"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for hook in self.hooks:
            if not callable(hook):
                raise RequestError("a hook cannot be called", got=repr(hook))
        if self.max_tokens is not None:
            _check_count("max_tokens", self.max_tokens)
        if self.max_time_s is not None and not self.max_time_s > 0:
            raise RequestError(
                "max_time_s is out of range", expected="more than 0", got=repr(self.max_time_s)
            )
        _check_count("min_tokens", self.min_tokens)
        if self.negative_prompt_ids is not None:
            ids = _token_ids("negative_prompt_ids", self.negative_prompt_ids)
            object.__setattr__(self, "negative_prompt_ids", ids)
        self._check_together()

    def _check_together(self) -> None:
        if not self.prompt_ids or self.negative_prompt_ids == ():
            raise RequestError(
                "the prompt is empty",
                where=self.request_id,
                expected="at least one token",
                next_step="Give it some text, or let the tokenizer add its BOS token.",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                "min_tokens is more than max_tokens",
                where=self.request_id,
                expected=f"at most {self.max_tokens}",
                got=self.min_tokens,
            )
        if (self.negative_prompt_ids is None) != (self.sampler.cfg_scale is None):
            raise RequestError(
                "guidance needs both a negative prompt and a scale",
                where=self.request_id,
                expected="negative_prompt_ids and sampler.cfg_scale, or neither",
                got="the scale alone" if self.negative_prompt_ids is None else "the prompt alone",
            )
        if self.negative_prompt_ids is not None and self.token_healing:
            raise RequestError(
                "token healing does not go with guidance: two prompts end in two tokens",
                where=self.request_id,
                next_step="Turn one of the two off.",
            )
        if self.report.prompt and (
            self.negative_prompt_ids is not None or self.token_healing or self.embeddings
        ):
            raise RequestError(
                "the tokens of this prompt cannot be scored",
                where=self.request_id,
                expected="one prompt of tokens, as it stands",
                got="guidance, token healing or embeddings",
            )
        if self.prefer_eos and not self.stop_ids:
            raise RequestError(
                "prefer_eos has no stop token to prefer",
                where=self.request_id,
                expected="stop_ids",
                got="none",
            )


def _token_ids(name: str, token_ids: Iterable[int]) -> tuple[int, ...]:
    ids = tuple(token_ids)
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise RequestError(
                f"{name} holds something that is no token id",
                expected="whole numbers from 0",
                got=repr(token_id),
            )
    return ids


def _strings(name: str, strings: str | Iterable[str]) -> tuple[str, ...]:
    """A bare string is one string, not a list of characters."""
    listed = (strings,) if isinstance(strings, str) else tuple(strings)
    for string in listed:
        if not isinstance(string, str) or not string:
            raise RequestError(
                f"{name} holds something that no text can match",
                expected="strings of at least one character",
                got=repr(string),
            )
    return listed


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise RequestError(
            f"{name} is out of range", expected="a whole number from 0", got=repr(value)
        )
