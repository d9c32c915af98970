"""ExLlamaV2BaseGenerator: one call from a prompt, or several prompts, to the completed texts."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from exl_core.constrain.filter import Constraint
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.request import Report, Request
from exl_core.generate.base import BaseGenerator
from exl_core.generate.driver import generate
from exl_core.model.embedded import EmbeddedSpan
from exl_exllamav2.cache import ExLlamaV2CacheBase
from exl_exllamav2.engines import (
    Weights,
    hooks_of,
    make_engine,
    random_seed,
    report_for,
    weights_of,
)
from exl_exllamav2.errors import old_types, whole_number
from exl_exllamav2.filters import constraints_of, healed_text
from exl_exllamav2.forward import ForwardOwner
from exl_exllamav2.lora import adapters_of
from exl_exllamav2.model import ExLlamaV2
from exl_exllamav2.notices import warn_once
from exl_exllamav2.settings import Settings, sampler_params
from exl_exllamav2.tokenizer import ExLlamaV2Tokenizer

WARMUP_TOKENS = 256  # of the cache of a warm-up


class EngineOwner:
    """User of a cache that generates with an engine of its own, on `weights`."""

    def __init__(self, engine: Engine, weights: Weights) -> None:
        self.engine = engine
        self.weights = weights

    @property
    def held_len(self) -> int:
        return 0

    def held_ids(self) -> list[list[int]]:
        return []

    def leave(self) -> None:
        """Cancel the requests that still run."""
        for request_id in self.engine.live_requests:
            self.engine.cancel(request_id)
            self.engine.discard_events(request_id)


class ExLlamaV2BaseGenerator:
    """Synchronous generator for one prompt or a batch.

    A batch larger than that of the cache prints a warning: its rows share the cache's memory.
    """

    def __init__(
        self, model: ExLlamaV2, cache: ExLlamaV2CacheBase, tokenizer: ExLlamaV2Tokenizer
    ) -> None:
        self.model = model
        self.cache = cache
        self.tokenizer = tokenizer
        self.sequence_ids: Tensor | None = None
        self.abort_event: Any = None
        self._simple: tuple[EngineOwner, BaseGenerator] | None = None

    def warmup(self) -> None:
        """Run a short reply in memory of its own; the cache is not touched."""
        with old_types():
            options = EngineOptions(max_batch=1, cache_tokens=WARMUP_TOKENS)
            engine = Engine(self.model.weights, self.tokenizer.exl, options)
            generate(engine, Request((0, 1), max_tokens=2))

    def full(self) -> bool:
        """Whether the sequence fills the context."""
        held = self.sequence_ids
        return held is not None and held.shape[-1] >= self.model.config.max_seq_len

    def generate_simple(
        self,
        prompt: str | list[str],
        gen_settings: Settings,
        num_tokens: int,
        seed: int | None = None,
        token_healing: bool = False,
        encode_special_tokens: bool = False,
        decode_special_tokens: bool = False,
        loras: Any = None,
        stop_token: int | None = -1,
        add_bos: bool = False,
        abort_event: Any = None,
        input_embeddings: Tensor | None = None,
        completion_only: bool = False,
        filters: list[Any] | None = None,
        filter_prefer_eos: bool = False,
    ) -> Any:
        """Text, or a list of texts for a list of prompts; see exl's `BaseGenerator`."""
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        num_tokens = whole_number("num_tokens", num_tokens)
        if len(prompts) > self.cache.batch_size:
            warn_once(
                "generate_simple",
                f"{len(prompts)} prompts share the memory of a cache of batch_size "
                f"{self.cache.batch_size}, which exllamav2 refused",
            )
        if seed is not None:
            random.seed(seed)
        self.abort_event = abort_event
        generator = self._generator()
        stop = self.tokenizer.eos_token_id if stop_token == -1 else stop_token
        if input_embeddings is None:
            num_tokens = self._fitting(prompts, num_tokens, add_bos, encode_special_tokens)
        hooks = hooks_of(gen_settings, self.model.config.padded_vocab_size)
        healed = prompts if token_healing else []
        constraints = self._constraints(filters, healed, add_bos, encode_special_tokens)
        with old_types():
            texts = generator.generate_simple(
                prompts,
                num_tokens=num_tokens,
                seed=random_seed(),
                stop_token=stop,
                add_bos=add_bos and self.tokenizer.bos_token_id is not None,
                parse_special=self.tokenizer.reads_special(encode_special_tokens),
                completion_only=completion_only,
                abort=abort_event,
                input_embeddings=input_embeddings,
                sampler=sampler_params(gen_settings, self.tokenizer, None),
                token_healing=token_healing,
                show_special=decode_special_tokens,
                adapters=adapters_of(loras),
                constraints=constraints,
                prefer_eos=filter_prefer_eos and bool(constraints) and stop is not None,
                hooks=hooks,
                report=report_for(hooks, Report()),
            )
        self.sequence_ids = self._padded(generator.sequence_ids)
        return texts[0] if isinstance(prompt, str) else texts

    def _fitting(
        self, prompts: list[str], num_tokens: int, add_bos: bool, encode_special_tokens: bool
    ) -> int:
        """The tokens for which a cache shorter than the context has room behind the longest prompt,
        at most `num_tokens`. exllamav2 failed at the end of such a cache, unless the reply ended
        before."""
        if self.cache.max_seq_len >= self.model.config.max_seq_len:
            return num_tokens  # the beginning of a prompt that is too long is cut
        ids = self._encoded(prompts, add_bos, encode_special_tokens)
        room: int = self.cache.max_seq_len - ids.shape[-1]
        if not 1 <= room < num_tokens:
            return num_tokens
        warn_once(
            "generate_simple num_tokens",
            f"the cache of {self.cache.max_seq_len} tokens has room for {room} new ones, fewer "
            f"than num_tokens={num_tokens}",
        )
        return room

    def _constraints(
        self, filters: Any, healed: list[str], add_bos: bool, encode_special_tokens: bool
    ) -> tuple[Constraint, ...]:
        """Constraints of the filters. They see the healed token of one prompt, not of several."""
        if not filters or len(healed) != 1:
            return constraints_of(filters)
        ids = self._encoded(healed, add_bos, encode_special_tokens)[0].tolist()
        return constraints_of(filters, healed=healed_text(ids, self.tokenizer))

    def _encoded(self, prompts: list[str], add_bos: bool, encode_special_tokens: bool) -> Tensor:
        """Ids [prompts, longest], padded on the left."""
        ids: Tensor = self.tokenizer.encode(
            prompts, add_bos=add_bos, encode_special_tokens=encode_special_tokens
        )
        return ids

    def _generator(self) -> BaseGenerator:
        """The generator that runs a call, as the user of the cache."""
        weights, held = weights_of(self.model), self._simple
        if held is None or held[0].weights != weights:
            with old_types():
                batch = max(1, self.cache.batch_size)
                engine = make_engine(self.model, self.cache, self.tokenizer, max_batch=batch)
                simple = BaseGenerator(self.model.loaded_model, engine=engine)
                held = self._simple = EngineOwner(engine, weights), simple
        owner, generator = held
        self.cache.pending_ids = None
        if self.cache.take(owner):
            owner.engine.forget_cache()
        return generator

    def _padded(self, rows: tuple[tuple[int, ...], ...]) -> Tensor:
        longest = max(map(len, rows), default=0)
        pad = self.tokenizer.pad_token_id
        return torch.tensor([(*row, *[pad] * (longest - len(row))) for row in rows])

    def _gen_begin_base(
        self,
        input_ids: Tensor,
        mask: Tensor | None = None,
        loras: Any = None,
        position_offsets: Tensor | None = None,
        input_embeddings: Tensor | None = None,
    ) -> None:
        """Empty the cache and compute all tokens but the last."""
        spans = () if input_embeddings is None else (EmbeddedSpan(input_embeddings[0]),)
        if isinstance(self.cache.owner, ForwardOwner):
            self.cache.current_seq_len = 0
        self.cache.pending_ids = [[] for _ in range(self.cache.batch_size)]
        self.sequence_ids = input_ids.clone()
        if input_ids.shape[-1] > 1:
            self.model.forward(
                input_ids[:, :-1],
                self.cache,
                input_mask=mask,
                preprocess_only=True,
                loras=loras,
                position_offsets=position_offsets,
                indexed_embeddings=spans,
            )
