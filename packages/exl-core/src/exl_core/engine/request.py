"""What a user asks of the engine: frozen, checked where it is made, free of torch and of text.

What depends on the model (the context, the vocabulary, the size of the cache) is checked by
`Engine.submit`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from exl_core.errors import RequestError
from exl_core.sampling.params import SamplerParams

if TYPE_CHECKING:
    from exl_core.model.adapters import AdapterUse
    from exl_core.model.embedded import EmbeddedSpan

_serials = count()


def next_request_id() -> str:
    """An id that no other request of this process got by default."""
    return f"request-{next(_serials)}"


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue.

    max_tokens    most tokens to generate; None: until the context (or the cache) is full
    stop_ids      tokens that end the reply; they are no part of its text
    stop_strings  strings that end the reply, wherever the token borders fall; neither they nor
                  anything after them is part of the text
    min_tokens    until so many are generated, stop tokens are not sampled (stop strings still stop)
    adapters      low-rank additions that the model runs under
    embeddings    vectors that stand in the prompt in place of tokens
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int | None = None
    sampler: SamplerParams = field(default_factory=SamplerParams)
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0
    adapters: tuple[AdapterUse, ...] = ()
    embeddings: tuple[EmbeddedSpan, ...] = ()
    request_id: str = field(default_factory=next_request_id)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", _token_ids("prompt_ids", self.prompt_ids))
        if not self.prompt_ids:
            raise RequestError(
                "the prompt is empty",
                where=self.request_id,
                expected="at least one token",
                next_step="Give it some text, or let the tokenizer add its BOS token.",
            )
        object.__setattr__(self, "stop_ids", frozenset(_token_ids("stop_ids", self.stop_ids)))
        object.__setattr__(self, "stop_strings", _stop_strings(self.stop_strings))
        if self.max_tokens is not None:
            _check_count("max_tokens", self.max_tokens)
        _check_count("min_tokens", self.min_tokens)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                "min_tokens is more than max_tokens",
                where=self.request_id,
                expected=f"at most {self.max_tokens}",
                got=self.min_tokens,
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


def _stop_strings(strings: str | Iterable[str]) -> tuple[str, ...]:
    """A bare string is one stop string, not a list of characters."""
    listed = (strings,) if isinstance(strings, str) else tuple(strings)
    for string in listed:
        if not isinstance(string, str) or not string:
            raise RequestError(
                "stop_strings holds something that no text can match",
                expected="strings of at least one character",
                got=repr(string),
            )
    return listed


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise RequestError(
            f"{name} is out of range", expected="a whole number from 0", got=repr(value)
        )
