"""Settings that `/set` shows and changes, by name: options of sampling, of replies, of the chat."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from exl_cli import options
from exl_cli.reply_options import ReplyOptions
from exl_cli.sampling_options import SamplingOptions
from exl_core.errors import RequestError
from exl_core.sampling.params import SamplerParams
from exl_core.tokenizer.base import Tokenizer

ON = ("on", "yes", "true", "show")
OFF = ("off", "no", "false", "fold", "hide", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Chat options other than sampling. `max_response_tokens` -1: until the context is full."""

    max_response_tokens: int = 1000
    reasoning: bool = False
    """True shows reasoning in full; False shows one line with its token count."""
    stats: bool = False
    amnesia: bool = False


SAMPLING = get_type_hints(SamplingOptions)
REPLYING = get_type_hints(ReplyOptions)
CHAT = get_type_hints(ChatOptions)
NAMES = tuple(
    field.name.replace("_", "-")
    for group in (ChatOptions, ReplyOptions, SamplingOptions)
    for field in fields(group)
)


class ChatSettings:
    """Options of sampling, of replies and of the chat, read and set by name."""

    def __init__(
        self,
        sampling: SamplingOptions,
        chat: ChatOptions,
        replying: ReplyOptions | None = None,
    ) -> None:
        self.sampling = sampling
        self.chat = chat
        self.replying = replying or ReplyOptions()
        self._replies = 0

    @property
    def max_tokens(self) -> int | None:
        return options.token_limit(self.chat.max_response_tokens)

    def params(self, tokenizer: Tokenizer | None = None) -> SamplerParams:
        """Sampler parameters of the next reply.

        With a fixed seed, reply n uses seed + n, so that `/retry` yields a different reply.
        """
        params = self.sampling.params(tokenizer)
        if self.sampling.seed is not None:
            params = replace(params, seed=(self.sampling.seed + self._replies) % 2**63)
        self._replies += 1
        return params

    def shown(self, name: str = "") -> dict[str, str]:
        """Values of one setting, or of all, in the form that `set` accepts.

        Raises RequestError for an unknown name.
        """
        values = {
            field.name.replace("_", "-"): _shown(getattr(group, field.name))
            for group in (self.chat, self.replying, self.sampling)
            for field in fields(group)
        }
        if not name:
            return values
        key = name.replace("_", "-").lstrip("-")
        if key not in values:
            raise _unknown(name)
        return {key: values[key]}

    def set(self, name: str, text: str, tokenizer: Tokenizer | None = None) -> None:
        """Change one setting; `ban` and `bias` get one more item, and `off` clears them.

        Raises RequestError for an unknown name or a bad value, with `tokenizer` also for a bias of
        what is not one token.
        """
        key = name.replace("-", "_").lstrip("_")
        if key in SAMPLING:
            sampling = replace(self.sampling, **{key: _parsed(name, text, SAMPLING[key])})
            sampling.params()
            self.sampling = sampling
            return
        if key in REPLYING:
            self.replying = self._replying_with(key, _parsed(name, text, REPLYING[key]), tokenizer)
            return
        if key in CHAT:
            chat = replace(self.chat, **{key: _parsed(name, text, CHAT[key])})
            self.replying.check(options.token_limit(chat.max_response_tokens))
            self.chat = chat
            return
        raise _unknown(name)

    def _replying_with(self, key: str, value: Any, tokenizer: Tokenizer | None) -> ReplyOptions:
        is_guidance = key in ("negative_prompt", "guidance_scale")
        if is_guidance and value is not None and not self.replying.has_guidance:
            raise RequestError(
                "the chat began without guidance, so the cache has no place for a second prompt",
                next_step="Start exl chat with --negative-prompt and --guidance-scale.",
            )
        if key in ("ban", "bias") and value is not None:
            value = [*(getattr(self.replying, key) or ()), *value]
        replying = replace(self.replying, **{key: value})
        replying.check(self.max_tokens)
        if tokenizer is not None:
            replying.sampler(SamplerParams(), tokenizer)
        return replying


def _unknown(name: str) -> RequestError:
    near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.0)[0]
    return RequestError(f"there is no setting {name!r}", next_step=f"The nearest is {near}.")


def _parsed(name: str, text: str, hint: object) -> Any:
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if list[str] in kinds:
        return None if text == "off" else [text]
    if NoneType in kinds and text in OFF:
        return None
    if bool in kinds:
        if text in (*ON, *OFF):
            return text in ON
        raise RequestError(f"{name} is a switch", expected="on or off", got=text)
    for kind, noun in ((int, "a whole number"), (float, "a number")):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                raise RequestError(f"{name} takes {noun}", got=text) from None
    return text


def _shown(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(map(repr, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
