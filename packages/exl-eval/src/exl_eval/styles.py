"""Five named styles of measuring perplexity, and the layout of a text in each.

Their results differ by tens of per cent on one model and one text. All choices made here therefore
belong to the figure: window, stride, BOS rule, scored positions, and whether special tokens spelled
out in the text are recognized. Knows tokenizers and ids; no models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from exl_core.errors import RequestError
from exl_core.option_types import check_options
from exl_core.tokenizer.base import Tokenizer
from exl_eval.result import TextFacts
from exl_eval.texts import Text
from exl_eval.vocabulary import hash_tokenizer
from exl_eval.windows import (
    Tokens,
    Window,
    disjoint,
    disjoint_after,
    rolling,
    second_halves,
    strided,
)


class BosRule(Enum):
    """Places where BOS is inserted.

    NONE     nowhere
    ONCE     before the whole text, as part of the first window
    EACH     before every window, which then has one text token less; in `per-document`, before
             every document
    REPLACE  before the whole text, and in place of every window's first token
    """

    NONE = "none"
    ONCE = "once"
    EACH = "each"
    REPLACE = "replace"


BOS_CHOICES = ("default", *(rule.value for rule in BosRule))


@dataclass(frozen=True, slots=True)
class Style:
    """One style of measurement.

    ctx               tokens per window; None: the model's context length
    bos, no_bos       default BOS rule if the tokenizer adds BOS, and if it does not
    bos_rules         rules that the user may choose
    most_windows      limit on the number of windows; None: no limit
    has_special_text  whether the text "<unk>" becomes one special token
    """

    name: str
    ctx: int | None
    bos: BosRule
    no_bos: BosRule
    bos_rules: tuple[BosRule, ...]
    stride: int | None = None
    most_windows: int | None = None
    has_special_text: bool = True


_ANYWHERE = (BosRule.NONE, BosRule.ONCE, BosRule.EACH)
PAPER = Style("paper", 2048, BosRule.ONCE, BosRule.NONE, _ANYWHERE)
STYLES = {
    style.name: style
    for style in (
        PAPER,
        Style("exl3", 2048, BosRule.NONE, BosRule.NONE, _ANYWHERE, most_windows=100),
        Style("hf-stride", None, BosRule.ONCE, BosRule.NONE, _ANYWHERE[:2], stride=512),
        Style(
            "llama.cpp",
            512,
            BosRule.REPLACE,
            BosRule.NONE,
            (BosRule.NONE, BosRule.REPLACE),
            has_special_text=False,
        ),
        Style("per-document", None, BosRule.EACH, BosRule.EACH, (BosRule.NONE, BosRule.EACH)),
    )
}


@dataclass(frozen=True, slots=True)
class WindowOptions:
    """Choices of the user; None takes the style's default. `ctx`, `stride` and `windows` are whole
    numbers from 1. `windows` None uses all windows that the style takes from the text. `bos` is one
    of BOS_CHOICES. `special_text`: whether the text "<unk>" becomes one special token."""

    style: str = PAPER.name
    ctx: int | None = None
    stride: int | None = None
    windows: int | None = None
    bos: str = "default"
    special_text: bool | None = None

    def __post_init__(self) -> None:
        check_options(self, ctx=1, stride=1, windows=1)


@dataclass(frozen=True, slots=True)
class Layout:
    """A text cut into windows, and the choices behind it."""

    windows: tuple[Window, ...]
    facts: TextFacts


def find_style(name: str) -> Style:
    if name not in STYLES:
        raise RequestError("no such style", expected=" or ".join(STYLES), got=name)
    return STYLES[name]


def lay_out(text: Text, tokenizer: Tokenizer, options: WindowOptions, model_max: int) -> Layout:
    """Cuts the text into windows of the style, for a model with a context of `model_max` tokens."""
    style = find_style(options.style)
    rule = settle_bos(options.bos, tokenizer, style)
    ctx = _settle_ctx(options.ctx, style, model_max)
    special_text = options.special_text
    if special_text is None:
        special_text = style.has_special_text
    parts = _encode(text, tokenizer, style, special_text=special_text)
    facts = TextFacts(
        style=style.name,
        ctx=ctx,
        stride=_settle_stride(options.stride, style, ctx),
        bos=rule.value,
        bos_id=_bos_id(rule, tokenizer, style),
        special_text=special_text,
        windows=0,
        text=text.name,
        text_sha256=text.sha256,
        text_bytes=len(text.joined.encode("utf-8")),
        text_tokens=sum(len(part) for part in parts),
        documents=len(text.documents),
        tokenizer_sha256=hash_tokenizer(tokenizer),
    )
    windows = tuple(window for part in parts for window in _cut(part, facts))
    _check_windows(len(windows), options.windows, ctx, facts.text_tokens)
    windows = windows[: options.windows or style.most_windows]
    return Layout(windows, replace(facts, windows=len(windows)))


def settle_bos(choice: str, tokenizer: Tokenizer, style: Style = PAPER) -> BosRule:
    """BOS rule for `choice`, one of BOS_CHOICES."""
    if choice == "default":
        return style.bos if tokenizer.adds_bos else style.no_bos
    allowed = [rule.value for rule in style.bos_rules]
    if choice not in allowed:
        raise RequestError(
            f"no such BOS rule for the style {style.name}",
            expected=" or ".join(("default", *allowed)),
            got=choice,
        )
    rule = BosRule(choice)
    if rule is not BosRule.NONE and tokenizer.bos_id is None and style.name != "per-document":
        raise RequestError(
            "the tokenizer has no BOS token", expected="--bos none or default", got=choice
        )
    return rule


def _bos_id(rule: BosRule, tokenizer: Tokenizer, style: Style) -> int | None:
    """Token that the rule inserts. A document begins with BOS, or with EOS if the tokenizer has no
    BOS, because EOS separates texts. lm-eval does the same."""
    if rule is BosRule.NONE:
        return None
    if tokenizer.bos_id is None and style.name == "per-document" and tokenizer.eos_ids:
        return tokenizer.eos_ids[0]
    if tokenizer.bos_id is None:
        raise RequestError("the tokenizer has neither BOS nor EOS", expected="--bos none")
    return tokenizer.bos_id


def _encode(text: Text, tokenizer: Tokenizer, style: Style, *, special_text: bool) -> list[Tokens]:
    """Tokens of each part of the text that is cut into windows separately."""
    if style.name == "per-document":
        parts: Iterable[str] = text.documents
    elif style.name == "llama.cpp":
        parts = (text.joined.removesuffix("\n"),)  # as llama.cpp does when it reads a file
    else:
        parts = (text.joined,)
    return [Tokens(tokenizer, tokenizer.encode(part, allow_special=special_text)) for part in parts]


def _cut(tokens: Tokens, facts: TextFacts) -> Iterator[Window]:
    """Cuts one part of the text into windows."""
    ctx, bos_id = facts.ctx, facts.bos_id
    if facts.bos == BosRule.EACH.value and bos_id is not None and facts.style != "per-document":
        return disjoint_after(tokens, ctx, bos_id)
    tokens = tokens.after(bos_id)
    if facts.style == "llama.cpp":
        return second_halves(tokens, ctx, bos_id)
    if facts.style == "per-document":
        return rolling(tokens, ctx)
    if facts.stride is not None:
        return strided(tokens, ctx, facts.stride)
    return disjoint(tokens, ctx)


def _settle_ctx(wanted: int | None, style: Style, model_max: int) -> int:
    ctx = wanted or style.ctx or model_max
    smallest = 4 if style.name == "llama.cpp" else 2  # its scored half must have a position
    if not smallest <= ctx <= model_max:
        raise RequestError(
            "the window does not fit the model",
            expected=f"--ctx of {smallest} to {model_max}",
            got=ctx,
        )
    return ctx


def _settle_stride(wanted: int | None, style: Style, ctx: int) -> int | None:
    if style.stride is None:
        if wanted is not None:
            raise RequestError(
                f"the style {style.name} has no stride", expected="--style hf-stride", got=wanted
            )
        return None
    stride = wanted or style.stride
    if not 1 <= stride < ctx:
        raise RequestError(
            "the windows would not overlap", expected=f"--stride of 1 to {ctx - 1}", got=stride
        )
    return stride


def _check_windows(available: int, wanted: int | None, ctx: int, text_tokens: int) -> None:
    if text_tokens == 0:
        raise RequestError("the text is empty", expected=f"at least {ctx} tokens", got=0)
    if available == 0:
        raise RequestError(
            "the text is shorter than one window",
            expected=f"at least {ctx} tokens",
            got=text_tokens,
            next_step="Take a longer text or a smaller --ctx.",
        )
    if wanted is not None and wanted > available:
        raise RequestError(
            "the text has fewer windows than requested",
            expected=f"--windows of at most {available}",
            got=wanted,
        )
