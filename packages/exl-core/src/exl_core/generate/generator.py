"""What the three generators share: a model with its engine, and requests made from text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import TypedDict, Unpack

from exl_core.constrain.filter import Constraint
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.request import Hook, Report, Request
from exl_core.errors import RequestError
from exl_core.generate.stream import generate
from exl_core.load import LoadedModel, stop_ids
from exl_core.model.adapters import AdapterUse
from exl_core.model.embedded import EmbeddedSpan
from exl_core.sampling.params import SamplerParams
from exl_core.speculate.drafter import Drafter
from exl_core.tokenizer.batch import encode_with_aliases

Stop = int | str
Prompt = str | Sequence[int]


class RequestFields(TypedDict, total=False):
    """What else a request may say; `Request` explains each."""

    max_tokens: int | None
    sampler: SamplerParams
    min_tokens: int
    banned_strings: tuple[str, ...]
    constraints: tuple[Constraint, ...]
    prefer_eos: bool
    token_healing: bool
    adapters: tuple[AdapterUse, ...]
    hooks: tuple[Hook, ...]
    report: Report
    show_special: bool
    allow_drafts: bool
    request_id: str


class Generator:
    """A model, its tokenizer, and an engine with a cache of its own."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: EngineOptions | None = None,
        *,
        drafter: Drafter | None = None,
    ) -> None:
        self.loaded = loaded
        self.tokenizer = loaded.tokenizer
        self.engine = Engine(loaded.model, loaded.tokenizer, options, drafter=drafter)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every token that ends a reply of this model."""
        return stop_ids(self.tokenizer, self.loaded.config)

    def encode(
        self,
        prompt: Prompt,
        *,
        add_bos: bool | None = False,
        parse_special: bool = False,
        embeddings: Mapping[str, EmbeddedSpan] | None = None,
    ) -> list[int]:
        """Token ids of a text; ids stay as they are.

        add_bos        None: as the model's tokenizer does by itself
        parse_special  the text of a special token becomes that token
        embeddings     spans of vectors by the text that stands for them in the prompt
        """
        if not isinstance(prompt, str):
            return list(prompt)
        aliases = {alias: span.token_ids for alias, span in (embeddings or {}).items()}
        return encode_with_aliases(
            self.tokenizer, prompt, aliases, allow_special=parse_special, add_bos=add_bos
        )

    def request(
        self,
        prompt: Prompt,
        *,
        negative: Prompt | None = None,
        stop: Stop | Iterable[Stop] = (),
        add_bos: bool | None = False,
        parse_special: bool = False,
        embeddings: Mapping[str, EmbeddedSpan] | None = None,
        **settings: Unpack[RequestFields],
    ) -> Request:
        """A request for this model. `negative` is the prompt that guidance steers away from."""
        check_names(settings)

        def encoded(text: Prompt) -> tuple[int, ...]:
            return tuple(
                self.encode(
                    text, add_bos=add_bos, parse_special=parse_special, embeddings=embeddings
                )
            )

        ids, strings = split_stops(stop)
        return Request(
            prompt_ids=encoded(prompt),
            negative_prompt_ids=None if negative is None else encoded(negative),
            stop_ids=ids,
            stop_strings=strings,
            embeddings=tuple((embeddings or {}).values()),
            **settings,
        )

    def warmup(self) -> None:
        """A short reply, forgotten at once: what is slow only the first time is behind you."""
        ids = self.tokenizer.encode("warm-up") or [0]
        generate(self.engine, Request(tuple(ids), max_tokens=4))
        self.engine.forget_cache()


def split_stops(stop: Stop | Iterable[Stop]) -> tuple[frozenset[int], tuple[str, ...]]:
    """Token ids and strings apart; a bare one is a list of one."""
    listed = (stop,) if isinstance(stop, int | str) else tuple(stop)
    ids = frozenset(item for item in listed if isinstance(item, int))
    strings = tuple(item for item in listed if isinstance(item, str))
    for item in listed:
        if not isinstance(item, int | str) or isinstance(item, bool):
            raise RequestError("a stop condition is neither a token id nor a text", got=repr(item))
    return ids, strings


def check_names(settings: Mapping[str, object]) -> None:
    """A setting that does not exist is the caller's slip, and is told with the nearest name."""
    known = [field.name for field in fields(Request)]
    for name in settings:
        if name not in known:
            near = get_close_matches(name, [*known, "stop", "negative", "add_bos"], n=1)
            raise RequestError(
                f"no such setting: {name}",
                expected=", ".join(sorted(known)),
                got=name,
                next_step=f"Did you mean {near[0]!r}?" if near else None,
            )
