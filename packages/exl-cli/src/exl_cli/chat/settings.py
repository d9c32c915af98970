"""Settings that `/set` shows and changes, by name: options of sampling, of replies, of the chat."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
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
    wrap: bool = True
    """Break long lines of a reply between words, on a terminal."""


SAMPLING = get_type_hints(SamplingOptions)
REPLYING = get_type_hints(ReplyOptions)
CHAT = get_type_hints(ChatOptions)
NAMES = tuple(
    field.name.replace("_", "-")
    for group in (ChatOptions, ReplyOptions, SamplingOptions)
    for field in fields(group)
)


def _spellings() -> dict[str, str]:
    """Field of each spelling of a setting: the names of its option, and those of ollama."""
    found = {name: name.replace("-", "_") for name in NAMES}
    for group in (SamplingOptions, ReplyOptions):
        for field, hint in get_type_hints(group, include_extras=True).items():
            for option in hint.__metadata__[0].param_decls:
                found[option.lstrip("-")] = field
    others = {"n": "max_response_tokens", "max-tokens": "max_response_tokens"}
    others |= {"num-predict": "max_response_tokens", "repeat-last-n": "repeat_range"}
    return found | others | {"typical-p": "typical", "tfs-z": "tfs", "wordwrap": "wrap"}


FIELDS = _spellings()
SAVED_AS = {"max_response_tokens": "max-tokens"}
"""Names in presets that differ from those in a chat: every command has these options."""
AT_START = {"num-ctx": "-c", "ctx-size": "-c", "stop": "--stop", "device": "--device"}
"""Settings of a chat that cannot change while it runs, with their options."""


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
        key = field_of(name).replace("_", "-")
        return {key: values[key]}

    def changed(self) -> dict[str, Any]:
        """Settings whose values are not the defaults, by the names of their options."""
        pairs = (
            (self.chat, ChatOptions()),
            (self.replying, ReplyOptions()),
            (self.sampling, SamplingOptions()),
        )
        return {
            SAVED_AS.get(field.name, field.name.replace("_", "-")): getattr(group, field.name)
            for group, default in pairs
            for field in fields(group)
            if getattr(group, field.name) not in (getattr(default, field.name), None)
        }

    def apply(self, values: Mapping[str, Any], tokenizer: Tokenizer | None = None) -> list[str]:
        """Sets values by the names of options, as in a profile. Returns names that are no setting
        of a chat."""
        left = []
        for name, value in values.items():
            if name not in FIELDS:
                left.append(name)
                continue
            if isinstance(value, list):
                self.set(name, "off")
            for one in value if isinstance(value, list) else [value]:
                self.set(name, str(one) if type(one) is float else _shown(one), tokenizer)
        return left

    def set(self, name: str, text: str, tokenizer: Tokenizer | None = None) -> None:
        """Change one setting; `ban` and `bias` get one more item, and `off` clears them.

        Raises RequestError for an unknown name or a bad value, with `tokenizer` also for a bias of
        what is not one token.
        """
        key = field_of(name)
        if key in SAMPLING:
            sampling = replace(self.sampling, **{key: _parsed(name, text, SAMPLING[key])})
            sampling.params()
            self.sampling = sampling
            return
        if key in REPLYING:
            self.replying = self._replying_with(key, _parsed(name, text, REPLYING[key]), tokenizer)
            return
        chat = replace(self.chat, **{key: _parsed(name, text, CHAT[key])})
        self.replying.check(options.token_limit(chat.max_response_tokens))
        self.chat = chat

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


def field_of(name: str) -> str:
    """Field of a setting, by any of its spellings. Raises RequestError for an unknown name."""
    key = name.replace("_", "-").lstrip("-")
    if key in FIELDS:
        return FIELDS[key]
    if key in AT_START:
        raise RequestError(
            f"{name} is fixed when a chat starts",
            next_step=f"Start exl chat with {AT_START[key]}.",
        )
    near = difflib.get_close_matches(key, FIELDS, n=1, cutoff=0.5)
    advice = f"The nearest is {near[0]}." if near else "/set alone lists them."
    raise RequestError(f"there is no setting {name!r}", next_step=advice)


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
