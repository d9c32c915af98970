"""Base class of the generators: a model with its engine, and requests made from text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Unpack

from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.request import Request
from exl_core.errors import RequestError
from exl_core.generate.driver import generate
from exl_core.model.embedded import EmbeddedSpan
from exl_core.session.load import LoadedModel
from exl_core.session.open import stop_ids
from exl_core.session.request_fields import (
    RequestFields,
    Stops,
    build_request,
    check_argument,
    check_names,
)
from exl_core.speculate.drafter import Drafter
from exl_core.tokenizer.batch import encode_with_aliases

Prompt = str | Sequence[int]


class Generator:
    """A model, its tokenizer, and an engine with its own cache."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: EngineOptions | None = None,
        *,
        drafter: Drafter | None = None,
        engine: Engine | None = None,
    ) -> None:
        """`engine`: an existing engine of this model; `options` and `drafter` are then ignored.
        Several generators may use one engine, in one thread."""
        check_argument("loaded", loaded, LoadedModel, "Load it first: load_model('smollm2').")
        example = "For example EngineOptions(cache_tokens=4096)."
        check_argument("options", options, EngineOptions | None, example)
        check_argument("engine", engine, Engine | None, "For example another generator's engine.")
        if engine is not None and engine.model is not loaded.model:
            raise RequestError(
                "the engine is that of another model", next_step="Pass an engine of this model."
            )
        self.loaded = loaded
        self.tokenizer = loaded.tokenizer
        self.engine = engine or Engine(loaded.model, loaded.tokenizer, options, drafter=drafter)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every token that ends a reply of this model."""
        return stop_ids(self.tokenizer, self.loaded.config)

    @property
    def _max_len(self) -> int:
        """Most tokens of a prompt and its reply: the context, or what a shorter cache holds.

        The last token of a reply needs no place in the cache.
        """
        return min(self.loaded.config.max_seq_len, self.engine.scheduler.capacity + 1)

    def encode(
        self,
        prompt: Prompt,
        *,
        add_bos: bool | None = False,
        parse_special: bool = False,
        embeddings: Mapping[str, EmbeddedSpan] | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of a text; a prompt of ids is returned as it is.

        add_bos        whether BOS comes first; None: the tokenizer's default
        parse_special  encode the text of a special token as that token
        embeddings     spans of vectors, by the text that they replace in the prompt
        max_tokens     limit of the result; a longer text raises ContextLengthError early
        """
        if isinstance(prompt, str):
            aliases = {alias: span.token_ids for alias, span in (embeddings or {}).items()}
            return encode_with_aliases(
                self.tokenizer,
                prompt,
                aliases,
                allow_special=parse_special,
                add_bos=add_bos,
                max_tokens=max_tokens,
            )
        if not isinstance(prompt, Iterable) or isinstance(prompt, bytes):
            raise RequestError(
                "the prompt is neither a text nor token ids", got=type(prompt).__name__
            )
        return list(prompt)

    def request(
        self,
        prompt: Prompt,
        *,
        negative: Prompt | None = None,
        stop: Stops = None,
        add_bos: bool | None = False,
        parse_special: bool = False,
        embeddings: Mapping[str, EmbeddedSpan] | None = None,
        **settings: Unpack[RequestFields],
    ) -> Request:
        """A request for this model. `negative` is the prompt that guidance steers away from.

        `stop`: token ids and texts that end the reply. None: the model's EOS tokens; (): nothing
        but the limits.
        """
        check_names(settings, self.request)

        def encoded(text: Prompt) -> list[int]:
            return self.encode(
                text,
                add_bos=add_bos,
                parse_special=parse_special,
                embeddings=embeddings,
                max_tokens=self.loaded.config.max_seq_len,
            )

        return build_request(
            encoded(prompt),
            negative_ids=None if negative is None else encoded(negative),
            stop=self.eos_ids if stop is None else stop,
            embeddings=(embeddings or {}).values(),
            **settings,
        )

    def warmup(self) -> None:
        """Generate a short reply and build the tables that constraints need, so that one-time costs
        do not fall on the first request.

        The cache is emptied afterwards. RequestError while requests are live.
        """
        self.engine.vocabulary.prepare()
        ids = self.tokenizer.encode("warm-up") or [0]
        generate(self.engine, Request(tuple(ids), max_tokens=4))
        self.engine.forget_cache()
