"""What the engine reports. Each request gets text as it becomes certain, then exactly one end.

The end is a `FinishEvent`, or a `FailEvent` where the request came to grief. The texts of a
request's events, joined, are the text of its end. No torch, no tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from exl_core.speculate.stats import DraftStats

if TYPE_CHECKING:
    from torch import Tensor


class FinishReason(Enum):
    STOP = "stop"
    """A stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens`, or the end of the context or of the cache."""
    TIME = "time"
    """`max_time_s`."""
    CONSTRAINT = "constraint"
    """The constraints leave nothing that could follow."""
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token, and what was asked to be told of it (`Report`); `top`, `top_log_probs` are likeliest
    first."""

    token_id: int
    probability: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    logits: Tensor | None = None
    log_prob: float | None = None
    top_log_probs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StartEvent:
    """Its pages are there, and its first pass begins. Once, also where it is computed again."""

    request_id: str
    cached_tokens: int
    cached_pages: int
    queued_s: float


@dataclass(frozen=True, slots=True)
class PrefillEvent:
    """So many tokens of the prompt (of both, with guidance) are in the cache; more are to come.

    `done` grows from event to event. What is computed again later, for lack of pages, is not told.
    """

    request_id: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class ScoreEvent:
    """How likely the model found the next tokens of the prompt, where `Report.prompt` asks for it.

    All of a request's, in order, are all tokens of the prompt but the first.
    """

    request_id: str
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class TextEvent:
    """New text, never empty, never half a character, never the beginning of a stop string.

    `token_ids` are the tokens sampled since the event before; a stop token is none of them, nor is
    a healed one. The last of them may be ahead of the text: what could still become a stop string
    is held back and comes with a later event.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    tokens: tuple[SampledToken, ...] = ()
    """The same tokens, with what was asked to be told of them; empty if nothing was."""


@dataclass(frozen=True, slots=True)
class RewindEvent:
    """A banned string came up: these tokens, never reported before, are taken back."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The end of a request, with what it came to.

    stopped_by     the stop token's id, or the stop string, that ended it; else None
    text           all of it, without the stop
    token_ids      every token that was sampled and not taken back, a stop token and the tokens of
                   a stop string too, the healed token not
    healed_id      what the last token of the prompt became; None where it was not healed
    held_text      what was generated and is no part of the text: the stop string and what follows
    tokens         what was asked to be told of the tokens that no `TextEvent` reported
    cached_tokens  tokens of the prompt that were found in the cache and not computed
    cached_pages   pages that they lie on, whole or in part
    drafting       what drafts came to; None without a drafter
    queued_s       from submission until its first pass
    prefill_s      from its first pass until its first token
    decode_s       from its first token until its last
    """

    request_id: str
    reason: FinishReason
    stopped_by: int | str | None
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    queued_s: float
    prefill_s: float
    decode_s: float
    held_text: str = ""
    tokens: tuple[SampledToken, ...] = ()
    cached_pages: int = 0
    drafting: DraftStats | None = None
    healed_id: int | None = None

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def prefill_tok_s(self) -> float:
        """Computed prompt tokens per second; 0 where nothing was computed."""
        return _rate(self.prompt_tokens - self.cached_tokens, self.prefill_s)

    @property
    def decode_tok_s(self) -> float:
        """Tokens per second after the first, which belongs to prefill; 0 where there are none."""
        return _rate(self.completion_tokens - 1, self.decode_s)


@dataclass(frozen=True, slots=True)
class FailEvent:
    """The request ended without a result. `generate` and `stream` raise its `error`."""

    request_id: str
    error: BaseException


Event = StartEvent | PrefillEvent | ScoreEvent | TextEvent | RewindEvent | FinishEvent | FailEvent


def _rate(count: int, seconds: float) -> float:
    return count / seconds if count > 0 and seconds > 0 else 0.0
