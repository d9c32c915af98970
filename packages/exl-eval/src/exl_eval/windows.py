"""A text as the windows that a model is given, and which tokens of each are scored.

Knows ids and rules; neither models nor where the text comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from exl_core.errors import RequestError
from exl_core.tokenizer.base import Tokenizer


class BosRule(Enum):
    """NONE: no BOS anywhere. ONCE: before the whole text, as part of the first window. EACH: the
    model sees BOS and the first ctx - 1 tokens of every window, and those are what is scored."""

    NONE = "none"
    ONCE = "once"
    EACH = "each"


BOS_CHOICES = ("default", *(rule.value for rule in BosRule))


@dataclass(frozen=True, slots=True)
class Window:
    """What the model is given; tokens `first` and later are scored."""

    token_ids: tuple[int, ...]
    first: int = 1


def settle_bos(choice: str, tokenizer: Tokenizer) -> BosRule:
    """The rule that `choice`, one of BOS_CHOICES, stands for; `default` is ONCE for a tokenizer
    that adds BOS by itself and NONE for one that does not."""
    if choice not in BOS_CHOICES:
        raise RequestError("no such BOS rule", expected=" or ".join(BOS_CHOICES), got=choice)
    if choice == "default":
        return BosRule.ONCE if tokenizer.adds_bos else BosRule.NONE
    rule = BosRule(choice)
    if rule is not BosRule.NONE and tokenizer.bos_id is None:
        raise RequestError(
            "the tokenizer has no BOS token", expected="--bos none or default", got=choice
        )
    return rule


def cut_windows(
    text_ids: Sequence[int], ctx: int, rule: BosRule, bos_id: int | None
) -> list[Window]:
    """Disjoint windows of `ctx` tokens; what is left at the end is dropped."""
    head = () if bos_id is None else (bos_id,)
    ids = (*head, *text_ids) if rule is BosRule.ONCE else tuple(text_ids)
    windows = [ids[start : start + ctx] for start in range(0, len(ids) - ctx + 1, ctx)]
    if rule is BosRule.EACH:
        windows = [(*head, *window[:-1]) for window in windows]
    return [Window(window) for window in windows]


def check_ctx(ctx: int, model_max: int) -> None:
    if not 2 <= ctx <= model_max:
        raise RequestError(
            "the window does not fit the model",
            expected=f"--ctx of 2 to {model_max}",
            got=ctx,
        )


def first_windows(
    windows: list[Window], wanted: int | None, *, ctx: int, text_tokens: int
) -> list[Window]:
    """The first `wanted` of them, all for None; more than there are, and none, are errors."""
    if not windows:
        raise RequestError(
            "the text is shorter than one window",
            expected=f"at least {ctx} tokens",
            got=text_tokens,
            next_step="Take a longer text or a smaller --ctx.",
        )
    if wanted is not None and wanted > len(windows):
        raise RequestError(
            "the text holds fewer windows than were asked for",
            expected=f"--windows of at most {len(windows)}",
            got=wanted,
        )
    return windows[:wanted]
