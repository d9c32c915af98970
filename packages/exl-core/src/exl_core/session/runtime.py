"""A model at work: loaded weights, engine, adapters and drafter, and the builder of requests.

The command line, the server and evaluation open a model here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Unpack

from exl_core.arch.layers import KVShape
from exl_core.cache.format import PAGE_SIZE, KVFormat, kv_bytes_per_token, pages_for
from exl_core.cache.memory import free_memory_bytes
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.request import Request
from exl_core.errors import ContextLengthError, OutOfMemoryError, RequestError
from exl_core.lora.adapter import load_adapter
from exl_core.lora.config import read_adapter_config
from exl_core.model.adapters import AdapterUse
from exl_core.session.load import LoadedModel, LoadOptions, load_model
from exl_core.session.open import ModelFiles, open_model, stop_ids
from exl_core.session.request_fields import RequestFields, Stops, build_request, split_stops
from exl_core.speculate.compatible import check_same_vocabulary, draft_rope_alpha
from exl_core.speculate.controller import DEFAULT_DRAFT_TOKENS, DEFAULT_NGRAM_TOKENS
from exl_core.speculate.draft_model import ModelDrafter
from exl_core.speculate.drafter import Drafter
from exl_core.speculate.ngram import NgramDrafter

DEFAULT_CTX_LIMIT = 8192
"""Longest default context. The whole context of a 128k model would take gigabytes of cache."""

Loader = Callable[[ModelFiles | str | Path | None, LoadOptions], LoadedModel]


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Speculative decoding: by the draft model `model`, or by n-grams of the text if it is None."""

    model: str | None = None
    max_tokens: int | None = None
    """Most tokens per draft; None: 4 for a draft model, 8 for n-grams."""


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """Options of a model at work. `adapters` are folders of LoRA adapters with their scales."""

    load: LoadOptions = field(default_factory=LoadOptions)
    ctx_size: int | None = None
    """Tokens of one sequence; None: the model's maximum, but not more than 8192."""
    cache_tokens: int | None = None
    """Tokens that all requests share; None: one context."""
    max_batch: int = 1
    kv_format: KVFormat = KVFormat.FP16
    adapters: tuple[tuple[Path, float], ...] = ()
    draft: DraftOptions | None = None
    has_guidance: bool = False
    """Requests have negative prompts: the cache and a batch have room for twice the sequences."""


@dataclass(slots=True)
class Runtime:
    """A loaded model with an engine. `ctx_size` limits prompt and reply together."""

    loaded: LoadedModel
    engine: Engine
    ctx_size: int
    adapters: tuple[AdapterUse, ...] = ()

    @property
    def name(self) -> str:
        return self.loaded.name

    @property
    def load_s(self) -> float:
        return self.loaded.load_s

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that leaves room for one token of reply."""
        return self.ctx_size - 1

    def encode_prompt(self, text: str, *, parse_special: bool) -> list[int]:
        """Token ids of a prompt, with BOS where the tokenizer adds it by default."""
        return self.loaded.tokenizer.encode(
            text, allow_special=parse_special, add_bos=None, max_tokens=self.max_prompt_tokens
        )

    def request(
        self,
        prompt_ids: Sequence[int],
        *,
        stop: Stops = (),
        stops_at_eos: bool = True,
        negative_ids: Sequence[int] | None = None,
        **settings: Unpack[RequestFields],
    ) -> Request:
        """A request that fits the context. `max_tokens` None: until the context is full.

        The adapters of this runtime apply unless `settings` name others. The reply ends at the
        model's stop tokens, unless `stops_at_eos` is false, and at `stop`. Raises
        ContextLengthError for a prompt that leaves no room for a reply.
        """
        longest = max(len(prompt_ids), len(negative_ids or ()))
        capacity = self.ctx_size - longest
        if capacity < 1:
            raise ContextLengthError(longest, self.max_prompt_tokens)
        wanted = settings.get("max_tokens")
        settings["max_tokens"] = capacity if wanted is None else min(wanted, capacity)
        least = settings.get("min_tokens", 0)
        if least > capacity and (wanted is None or wanted >= least):
            settings["min_tokens"] = capacity  # the end of the context ends the reply in any case
        settings.setdefault("adapters", self.adapters)
        ids, strings = split_stops(stop)
        if stops_at_eos:
            ids |= stop_ids(self.loaded.tokenizer, self.loaded.config)
        stops: Stops = (*ids, *strings)
        return build_request(prompt_ids, stop=stops, negative_ids=negative_ids, **settings)


def open_runtime(
    model: ModelFiles | str | Path | None = None,
    options: RuntimeOptions | None = None,
    load: Loader = load_model,
) -> Runtime:
    """Opens and loads a model with its adapters and its drafter, and makes an engine.

    Everything that headers show is checked before weights are read: that takes a while. `load` may
    add a progress bar to `load_model`.
    """
    options = options or RuntimeOptions()
    files = model if isinstance(model, ModelFiles) else open_model(model)
    draft_name = None if options.draft is None else options.draft.model
    draft_files = None if draft_name is None else open_draft(draft_name, files)
    for folder, _ in options.adapters:
        read_adapter_config(folder)
    ctx = settle_ctx_size(options.ctx_size, files.config.max_seq_len)
    loaded = load(files, _fitted_to(ctx, files, options.load))
    adapters = tuple(
        AdapterUse(load_adapter(folder, loaded.model), scale) for folder, scale in options.adapters
    )
    cache_tokens, max_batch = max(ctx, PAGE_SIZE, options.cache_tokens or 0), options.max_batch
    if options.has_guidance:
        cache_tokens, max_batch = 2 * pages_for(cache_tokens) * PAGE_SIZE, 2 * max_batch
    drafter = None
    if options.draft is not None:
        draft = None if draft_files is None else load_draft(draft_files, ctx, options.load, load)
        drafter = _drafter(options, loaded, draft, cache_tokens)
    with _naming_cheaper_caches(loaded, options.kv_format, cache_tokens):
        engine = Engine(
            loaded.model,
            loaded.tokenizer,
            EngineOptions(
                cache_tokens=cache_tokens,
                max_batch=max_batch,
                kv_format=options.kv_format,
            ),
            drafter=drafter,
        )
    return Runtime(loaded, engine, ctx, adapters)


def _fitted_to(ctx: int, files: ModelFiles, options: LoadOptions) -> LoadOptions:
    """Options for a context of `ctx` tokens, which chooses the RoPE table of some models."""
    has_choice = any(rope.long_divisors for rope in files.config.ropes)
    is_open = has_choice and options.max_seq_len is None
    return replace(options, max_seq_len=ctx) if is_open else options


def open_draft(spec: str, target: ModelFiles) -> ModelFiles:
    """Opens a draft model. RequestError if its vocabulary differs from the target's."""
    files = open_model(spec)
    check_same_vocabulary(target.tokenizer, files.tokenizer)
    return files


def load_draft(
    files: ModelFiles, ctx: int, options: LoadOptions, load: Loader = load_model
) -> LoadedModel:
    """Loads a draft model. If its own context is shorter than `ctx`, its RoPE is stretched."""
    chosen = LoadOptions(
        device=options.device, threads=options.threads, batch_invariant=options.batch_invariant
    )
    if files.config.max_seq_len < ctx:
        alpha = draft_rope_alpha(ctx, files.config.max_seq_len)
        chosen = replace(chosen, max_seq_len=ctx, rope_alpha=alpha)
    return load(files, chosen)


def settle_ctx_size(wanted: int | None, model_max: int) -> int:
    """The context size: `wanted`, or the default for a model whose maximum is `model_max`."""
    if wanted is None:
        return min(model_max, DEFAULT_CTX_LIMIT)
    if wanted > model_max:
        raise RequestError(
            "the context is longer than the model was made for",
            expected=f"--ctx-size of at most {model_max}",
            got=wanted,
        )
    return wanted


def _drafter(
    options: RuntimeOptions, loaded: LoadedModel, draft: LoadedModel | None, cache_tokens: int
) -> Drafter:
    most = None if options.draft is None else options.draft.max_tokens
    if draft is None:
        return NgramDrafter(max_tokens=most or DEFAULT_NGRAM_TOKENS)
    with _naming_cheaper_caches(draft, options.kv_format, cache_tokens):
        return ModelDrafter(
            draft.model,
            num_pages=pages_for(cache_tokens),
            kv_format=options.kv_format,
            max_tokens=most or DEFAULT_DRAFT_TOKENS,
            vocab_size=min(loaded.config.vocab_size, loaded.tokenizer.vocab_size),
        )


@contextmanager
def _naming_cheaper_caches(
    loaded: LoadedModel, kv_format: KVFormat, cache_tokens: int
) -> Iterator[None]:
    """If the cache does not fit into memory, names the cache formats that would fit."""
    try:
        yield
    except OutOfMemoryError as error:
        free = free_memory_bytes(loaded.model.ops.device)
        if error.where != "cache" or free is None:
            raise
        shapes = loaded.config.kv_shapes

        def size(wanted: KVFormat) -> int:
            each = kv_bytes_per_token(shapes, wanted)
            return each * pages_for(cache_tokens) * PAGE_SIZE

        fitting = [
            cheaper.value
            for cheaper in KVFormat
            if _can_hold(shapes, cheaper) and size(cheaper) <= min(free, size(kv_format) - 1)
        ]
        advice = [f"--cache-type {' or '.join(fitting)} would fit."] if fitting else []
        if error.next_step is not None:
            advice.append(error.next_step.replace("would fit", "would fit too (--ctx-size)"))
        raise OutOfMemoryError(
            error.what,
            where=error.where,
            expected=error.expected,
            got=error.got,
            next_step=" ".join(advice) or None,
        ) from error


def _can_hold(shapes: Sequence[KVShape | None], kv_format: KVFormat) -> bool:
    try:
        kv_bytes_per_token(shapes, kv_format)
    except RequestError:
        return False
    return True
