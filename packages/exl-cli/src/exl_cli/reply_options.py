"""Options of one reply beyond sampling: length, healing, banned texts, token bias, guidance.

Declares the options and converts them to settings of a request. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from exl_cli.prompts import check_encodable, check_texts
from exl_core.errors import RequestError
from exl_core.sampling.params import SamplerParams, TokenBias

if TYPE_CHECKING:
    from exl_core.tokenizer.base import Tokenizer

_PANEL = "Reply"

MinTokens = Annotated[
    int,
    typer.Option(
        "--min-tokens",
        metavar="N",
        min=0,
        help="The model may not end the reply before N tokens; --stop still does.",
        rich_help_panel=_PANEL,
    ),
]
TokenHealing = Annotated[
    bool,
    typer.Option(
        "--token-healing",
        help="Sample the last token of the prompt again among the tokens that begin with its text, "
        "for prompts that end inside a word.",
        rich_help_panel=_PANEL,
    ),
]
Ban = Annotated[
    list[str] | None,
    typer.Option(
        "--ban",
        metavar="TEXT",
        help="Never generate this text, in upper or lower case: the reply goes back to where it "
        "began and takes another token. May be given several times.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
Bias = Annotated[
    list[str] | None,
    typer.Option(
        "--bias",
        "--logit-bias",
        metavar="TOKEN=VALUE",
        help="Add VALUE to the logit of a token, given as its text or its id (digits). -inf bans "
        "it. May be given several times.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
NegativePrompt = Annotated[
    str | None,
    typer.Option(
        "--negative-prompt",
        metavar="TEXT",
        help="Prompt that guidance steers away from. In a conversation: the system prompt of a "
        "second one with the same messages. Needs --guidance-scale.",
        rich_help_panel=_PANEL,
    ),
]
GuidanceScale = Annotated[
    float | None,
    typer.Option(
        "--guidance-scale",
        metavar="X",
        min=0.0,
        max=100.0,
        help="Classifier-free guidance: weight of the prompt against --negative-prompt. Above 1 "
        "steers away from it; 1 ignores it.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]


class ReplyFields(TypedDict):
    """Settings of a request that come from options of this group."""

    min_tokens: int
    banned_strings: tuple[str, ...]
    token_healing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    """Options of each reply of a command."""

    min_tokens: MinTokens = 0
    token_healing: TokenHealing = False
    ban: Ban = None
    bias: Bias = None
    negative_prompt: NegativePrompt = None
    guidance_scale: GuidanceScale = None

    @property
    def has_guidance(self) -> bool:
        return self.negative_prompt is not None

    def check(self, limit: int | None) -> None:
        """Raises RequestError for values that no model can meet, before anything is loaded.

        `limit`: most tokens of a reply.
        """
        if limit is not None and self.min_tokens > limit:
            raise RequestError(
                "--min-tokens is more than the limit of the reply",
                expected=f"at most {limit} (-n)",
                got=self.min_tokens,
            )
        check_texts(self.ban or (), "--ban")
        _parsed(self.bias or ())
        if (self.negative_prompt is None) != (self.guidance_scale is None):
            given, missing = "--negative-prompt", "--guidance-scale"
            if self.negative_prompt is None:
                given, missing = missing, given
            raise RequestError(
                f"{given} without {missing}", next_step=f"Add {missing}, or drop it."
            )
        if self.negative_prompt is not None:
            check_encodable(self.negative_prompt, "the negative prompt")
            SamplerParams(cfg_scale=self.guidance_scale)  # checks the range
            if self.token_healing:
                raise RequestError(
                    "token healing does not go with guidance",
                    expected="--token-healing or --negative-prompt",
                    got="both",
                )

    def sampler(self, params: SamplerParams, tokenizer: Tokenizer) -> SamplerParams:
        """`params` with token bias and guidance."""
        bias: dict[int, float] = {}
        for token, value in _parsed(self.bias or ()):
            token_id = _token_id(token, tokenizer)
            if token_id in bias:
                raise RequestError("--bias names one token twice", got=f"{token!r}, id {token_id}")
            bias[token_id] = value
        return replace(params, token_bias=TokenBias(bias), cfg_scale=self.guidance_scale)

    def fields(self, num_generated: int = 0) -> ReplyFields:
        """Settings of the request for a reply, of which `num_generated` tokens exist already."""
        return {
            "min_tokens": max(0, self.min_tokens - num_generated),
            "banned_strings": tuple(self.ban or ()),
            "token_healing": self.token_healing and num_generated == 0,
        }


def _parsed(given: Sequence[str]) -> list[tuple[str, float]]:
    """Token and value of each `TOKEN=VALUE`. The last '=' separates them."""
    found = []
    for text in given:
        check_encodable(text, "--bias")
        token, _, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not token or math.isnan(value):
            raise RequestError(
                "--bias is not a token and a number", expected="TOKEN=VALUE", got=repr(text)
            )
        TokenBias({0: value})  # checks the range
        found.append((token, value))
    return found


def _token_id(token: str, tokenizer: Tokenizer) -> int:
    if token.isascii() and token.isdecimal():
        token_id = int(token)
        if token_id >= tokenizer.vocab_size:
            raise RequestError(
                "--bias names a token that the model does not have",
                expected=f"ids below {tokenizer.vocab_size}",
                got=token,
            )
        return token_id
    ids = tokenizer.encode(token, allow_special=True, add_bos=False)
    if len(ids) != 1:
        raise RequestError(
            f"--bias: the text {token!r} is not one token of this model",
            expected="one token",
            got=f"{len(ids)} tokens, ids {', '.join(map(str, ids[:8]))}",
            next_step="Give its tokens by id. A word in a sentence begins with a space.",
        )
    return ids[0]
