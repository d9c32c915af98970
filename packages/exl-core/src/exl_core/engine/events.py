"""Events that the engine reports: text as it becomes final, then exactly one final event.

The final event is a `FinishEvent`, or a `FailEvent` if the request failed. The joined texts of a
request's `TextEvent`s are the text of its `FinishEvent`. No torch, no tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from exl_core.speculate.stats import DraftStats

if TYPE_CHECKING:
    from torch import Tensor


class FinishReason(Enum):
    """Cause of the end of a reply."""

    STOP = "stop"
    """A stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens`, or the end of the context or of the cache."""
    TIME = "time"
    """`max_time_s`."""
    CONSTRAINT = "constraint"
    """The constraints allow no further token."""
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token and the details that the request's `Report` selects.

    `top` and `top_log_probs` list the likeliest tokens first.
    """

    token_id: int
    probability: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    logits: Tensor | None = None
    log_prob: float | None = None
    top_log_probs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StartEvent:
    """The request has its pages and its first pass begins. Sent once, even after preemption."""

    request_id: str
    cached_tokens: int
    cached_pages: int
    queued_s: float


@dataclass(frozen=True, slots=True)
class PrefillEvent:
    """Progress of prefill: `done` of `total` prompt tokens are cached.

    Under guidance both prompts count. `done` grows with each event; recomputation after preemption
    is not reported.
    """

    request_id: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class ScoreEvent:
    """Log probabilities of the next prompt tokens, if `Report.prompt` is set.

    The events of a request together cover every prompt token but the first, in order.
    """

    request_id: str
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class TextEvent:
    """New text: never empty, never part of a character, never the beginning of a stop string.

    `token_ids` are the tokens sampled since the previous event, without a stop token and without a
    healed token. The last ones may be ahead of the text: text that may still become a stop string
    is held back and comes with a later event.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    tokens: tuple[SampledToken, ...] = ()
    """The same tokens with the details that `Report` selects; empty if it selects none."""


@dataclass(frozen=True, slots=True)
class RewindEvent:
    """A banned string was generated: these tokens, none of them reported yet, are taken back."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """Successful end of a request.

    stopped_by     id of the stop token, or the stop string, that ended the reply; else None
    text           the whole text, without the stop string
    token_ids      every sampled token that was not taken back, including a stop token and the
                   tokens of a stop string, without the healed token
    healed_id      token that replaced the last prompt token; None without healing
    held_text      generated text that is not part of `text`: the stop string and all after it
    tokens         details of the tokens that no `TextEvent` reported
    cached_tokens  prompt tokens found in the cache and not computed
    cached_pages   full pages among them, which are shared
    drafting       counts of drafted and accepted tokens; None without a drafter
    queued_s       seconds from submission to the first pass
    prefill_s      seconds from the first pass to the first token
    decode_s       seconds from the first token to the last
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
        """Computed prompt tokens per second; 0 if none were computed."""
        return _rate(self.prompt_tokens - self.cached_tokens, self.prefill_s)

    @property
    def decode_tok_s(self) -> float:
        """Tokens per second after the first, which counts as prefill; 0 if there are none."""
        return _rate(self.completion_tokens - 1, self.decode_s)


@dataclass(frozen=True, slots=True)
class FailEvent:
    """The request failed. `generate` and `stream` raise its `error`."""

    request_id: str
    error: BaseException


Event = StartEvent | PrefillEvent | ScoreEvent | TextEvent | RewindEvent | FinishEvent | FailEvent


def _rate(count: int, seconds: float) -> float:
    return count / seconds if count > 0 and seconds > 0 else 0.0
