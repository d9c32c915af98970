"""Requests to the engine: frozen, checked at construction, without torch and without text.

`Engine.submit` checks what depends on the model: context, vocabulary, size of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from exl_core.errors import RequestError, wrong_type
from exl_core.option_types import check_option
from exl_core.sampling.params import SamplerParams

if TYPE_CHECKING:
    from exl_core.constrain.filter import Constraint
    from exl_core.engine.events import SampledToken
    from exl_core.model.adapters import AdapterUse
    from exl_core.model.embedded import EmbeddedSpan


@dataclass(frozen=True, slots=True)
class HookedToken:
    """Token that a hook returns. Without `feeds_filters`, the constraints do not see it: the next
    token is what may follow the text before it."""

    token_id: int
    feeds_filters: bool = True


Hook = Callable[["SampledToken"], int | HookedToken | None]
"""Called with every sampled token before it is appended; an id that it returns replaces it.

An exception ends this request and no other.
"""

Kinds = tuple[tuple[str, type], ...]
"""Names of fields, and their types."""

_serials = count()


def next_request_id() -> str:
    """A default id, unique in this process."""
    return f"request-{next(_serials)}"


@dataclass(frozen=True, slots=True)
class Report:
    """Details to report with each token. Each costs time to compute.

    probabilities  probability of the token after all sampling steps
    top_tokens     number of likeliest tokens to list, with their probabilities
    logits         the model's logits, float32 [vocab_size]; under guidance those of the prompt
    log_probs      log probability of the token from the model, before any sampling step, and of
                   this many likeliest tokens; None: off
    prompt         report these log probabilities for the prompt's tokens too (`ScoreEvent`), except
                   for the first, which has no prediction. The whole prompt is then computed, even
                   if it is cached. With `max_tokens=0` the request ends after that
    """

    probabilities: bool = False
    top_tokens: int = 0
    logits: bool = False
    log_probs: int | None = None
    prompt: bool = False

    def __post_init__(self) -> None:
        _check_kinds(self, _REPORT_KINDS)
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

    max_tokens           most tokens to generate; None: until the context or the cache is full
    stop_ids             tokens that end the reply and are not part of its text
    stop_strings         strings that end the reply, independent of token borders; the string and
                         all text after it are not part of the reply
    max_time_s           seconds from the first pass after which no further token is generated; the
                         reply has at least one, unless a banned string took it back. None: no limit
    min_tokens           tokens before which no stop token is sampled (stop strings still stop)
    banned_strings       strings that the text must not contain, in any case: when one is completed,
                         the reply is rewound to the token that began it and takes another token
    constraints          rules that the text must match, all at once
    prefer_eos           stop as soon as the constraints allow it
    token_healing        sample the last prompt token again among the tokens that begin with its
                         text. A prompt of one token is not changed
    negative_prompt_ids  prompt that guidance steers away from; needs `sampler.cfg_scale`
    adapters             LoRA adapters, for this request alone
    embeddings           spans of vectors whose ids occur in `prompt_ids`
    hooks                called in order with every sampled token except a healed one (`Hook`)
    report               details to report with each token
    show_special         include the text of special tokens
    allow_drafts         use the engine's drafter, if it has one
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
        _check_kinds(self, _KINDS)
        object.__setattr__(self, "prompt_ids", _token_ids("prompt_ids", self.prompt_ids))
        object.__setattr__(self, "stop_ids", frozenset(_token_ids("stop_ids", self.stop_ids)))
        for name in ("stop_strings", "banned_strings"):
            object.__setattr__(self, name, _strings(name, getattr(self, name)))
        for name, (attribute, expected) in _PARTS.items():
            parts = _listed(name, getattr(self, name), expected)
            for part in parts:
                if not hasattr(part, attribute):
                    raise wrong_type(name, expected, part)
            object.__setattr__(self, name, parts)
        if self.max_tokens is not None:
            _check_count("max_tokens", self.max_tokens)
        if self.max_time_s is not None:
            check_option("max_time_s", self.max_time_s, float)
            if not self.max_time_s > 0:
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


_REPORT_KINDS: Kinds = (("probabilities", bool), ("logits", bool), ("prompt", bool))
_KINDS: Kinds = (
    ("sampler", SamplerParams),
    ("report", Report),
    ("request_id", str),
    ("prefer_eos", bool),
    ("token_healing", bool),
    ("show_special", bool),
    ("allow_drafts", bool),
)
_PARTS = {
    "constraints": ("filter", "a tuple of constraints such as JsonSchema(...)"),
    "adapters": ("scale", "a tuple of AdapterUse(adapter, scale)"),
    "embeddings": ("first_id", "a tuple of EmbeddedSpan(vectors)"),
    "hooks": ("__call__", "a tuple of callables that take a SampledToken"),
}
"""Fields that are tuples: an attribute of their parts, which shows a part of another type, and what
the fields hold. Names of the parts' classes would need torch."""


def _check_kinds(owner: Request | Report, kinds: Kinds) -> None:
    for name, kind in kinds:
        value = getattr(owner, name)
        if not isinstance(value, kind):
            check_option(name, value, kind)


def _listed(name: str, value: object, expected: str) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        return value
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise wrong_type(name, expected, value)
    return tuple(value)


def _token_ids(name: str, token_ids: Iterable[int]) -> tuple[int, ...]:
    ids = _listed(name, token_ids, "a sequence of token ids")
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise RequestError(
                f"{name} holds something that is no token id",
                expected="whole numbers from 0",
                got=repr(token_id),
            )
    return ids


def _strings(name: str, strings: str | Iterable[str]) -> tuple[str, ...]:
    """A single string counts as a list of one string."""
    listed = (strings,) if isinstance(strings, str) else _listed(name, strings, "texts")
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
