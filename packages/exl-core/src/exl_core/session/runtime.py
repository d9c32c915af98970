"""A model at work: loaded weights, engine, adapters and drafter, and the builder of requests.

The command line, the server and evaluation open a model here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Unpack

import torch

from exl_core.arch.layers import KVShape
from exl_core.arch.modules import module_table
from exl_core.arch.spec import ModelConfig
from exl_core.cache.format import PAGE_SIZE, KVFormat, kv_bytes_per_token, pages_for
from exl_core.cache.memory import free_memory_bytes
from exl_core.cache.need import CacheNeed
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.request import Request
from exl_core.errors import ContextLengthError, OutOfMemoryError, RequestError, wrong_type
from exl_core.lora.adapter import load_adapter
from exl_core.lora.config import read_adapter_config
from exl_core.model.adapters import AdapterUse, check_scale
from exl_core.option_types import check_option, check_options
from exl_core.session.load import (
    LoadedModel,
    LoadOptions,
    checkpoint_of,
    load_model,
    resolve_device,
    with_options,
)
from exl_core.session.open import ModelFiles, open_model, stop_ids
from exl_core.session.placement import DeviceMemory, Need, check_together
from exl_core.session.planning import DEFAULT_CTX_LIMIT
from exl_core.session.preflight import check_load
from exl_core.session.request_fields import (
    RequestFields,
    Stops,
    build_request,
    check_argument,
    split_stops,
)
from exl_core.session.reserve import Reserve
from exl_core.speculate.compatible import check_same_vocabulary, draft_rope_alpha
from exl_core.speculate.controller import (
    DEFAULT_DRAFT_TOKENS,
    DEFAULT_MTP_TOKENS,
    DEFAULT_NGRAM_TOKENS,
)
from exl_core.speculate.draft_model import ModelDrafter
from exl_core.speculate.drafter import Drafter
from exl_core.speculate.mtp import MtpDrafter
from exl_core.speculate.ngram import NgramDrafter

Loader = Callable[[ModelFiles | str | Path | None, LoadOptions], LoadedModel]


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Speculative decoding: by the draft model `model`, by the model's own layer for multi-token
    prediction if `mtp`, or else by n-grams of the text."""

    model: str | Path | None = None
    max_tokens: int | None = None
    """Most tokens per draft; None: 4 for a draft model, 3 for multi-token prediction, 8 for
    n-grams."""
    mtp: bool = False

    def __post_init__(self) -> None:
        check_options(self, "draft", max_tokens=1)
        if self.mtp and self.model is not None:
            raise RequestError(
                "two kinds of drafts are selected",
                expected="a draft model or multi-token prediction",
                got="both",
            )


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
    adapters: tuple[tuple[str | Path, float], ...] = ()
    draft: DraftOptions | None = None
    has_guidance: bool = False
    """Requests have negative prompts: the cache and a batch have room for twice the sequences."""

    def __post_init__(self) -> None:
        given: object = self.adapters
        if isinstance(given, list):
            object.__setattr__(self, "adapters", tuple(given))
        check_options(self, ctx_size=1, cache_tokens=1, max_batch=1)
        for one in self.adapters:
            if not isinstance(one, tuple | list) or len(one) != 2:
                raise wrong_type("adapters", "pairs of a folder and a scale", one)
            check_option("folder of an adapter", one[0], str | Path)
            check_scale(one[1])


@dataclass(slots=True)
class Runtime:
    """A loaded model with an engine. `ctx_size` limits prompt and reply together.

    `warnings` are sentences about the options for the user.
    """

    loaded: LoadedModel
    engine: Engine
    ctx_size: int
    adapters: tuple[AdapterUse, ...] = ()
    warnings: tuple[str, ...] = ()

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

    def encode_end(self, text: str, *, parse_special: bool, reply: int) -> tuple[list[int], int]:
        """Token ids of the end of a prompt that leaves room for `reply` tokens, and the number of
        tokens dropped before it. BOS is kept where the tokenizer adds it."""
        capacity = self.ctx_size - reply
        if capacity < 1:
            raise RequestError(
                "the reply leaves no room for a prompt",
                expected=f"at most {self.ctx_size - 1} tokens of reply in a context of "
                f"{self.ctx_size}",
                got=reply,
            )
        tokenizer = self.loaded.tokenizer
        ids = tokenizer.encode(text, allow_special=parse_special, add_bos=None)
        kept = 1 if ids[:1] == [tokenizer.bos_id] and capacity > 1 else 0
        dropped = max(0, len(ids) - capacity)
        return [*ids[:kept], *ids[kept + dropped :]], dropped

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
    example = "For example RuntimeOptions(load=LoadOptions(device='cpu'))."
    check_argument("options", options, RuntimeOptions | None, example)
    options = options or RuntimeOptions()
    files = model if isinstance(model, ModelFiles) else open_model(model)
    plan = _planned(files, options)
    loaded = load(files, plan.load)
    adapters = tuple(
        AdapterUse(load_adapter(folder, loaded.model), scale) for folder, scale in options.adapters
    )
    drafter = None
    if options.draft is not None:
        draft = None
        if plan.draft_files is not None:
            draft = load_draft(plan.draft_files, plan.ctx_size, options.load, load)
        drafter = _drafter(options, loaded, draft, plan.need.tokens)
    with _naming_cheaper_caches(loaded, plan.need):
        engine = Engine(
            loaded.model,
            loaded.tokenizer,
            EngineOptions(
                cache_tokens=plan.need.tokens,
                max_batch=plan.need.max_batch,
                kv_format=options.kv_format,
            ),
            drafter=drafter,
        )
    warning = context_warning(plan.ctx_size, files.config, options.load)
    warnings = () if warning is None else (warning,)
    return Runtime(loaded, engine, plan.ctx_size, adapters, warnings)


def check_runtime(files: ModelFiles, options: RuntimeOptions, *, freed_bytes: int = 0) -> None:
    """Raises the errors of `open_runtime` that headers show. Reads no weights.

    It checks the tensors' names and shapes, the tokenizer, the template, the options, and whether
    weights and cache fit on a single device. `freed_bytes` of the device are in use now, and the
    caller frees them before the load.
    """
    plan = _planned(files, options)
    check_load(files, plan.load, freed_bytes=freed_bytes)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Values that the options of a runtime and the headers of its model determine.

    load         options of the model's load
    draft_files  opened files of the draft model; None without one
    ctx_size     tokens of one sequence
    need         size of the cache
    """

    load: LoadOptions
    draft_files: ModelFiles | None
    ctx_size: int
    need: CacheNeed


def _planned(files: ModelFiles, options: RuntimeOptions) -> _Plan:
    draft_name = None if options.draft is None else options.draft.model
    draft_files = None if draft_name is None else open_draft(draft_name, files)
    for folder, _ in options.adapters:
        read_adapter_config(Path(folder))
    ctx = settle_ctx_size(options.ctx_size, files.config.max_seq_len)
    cache_tokens, max_batch = max(ctx, PAGE_SIZE, options.cache_tokens or 0), options.max_batch
    if options.has_guidance:
        cache_tokens, max_batch = 2 * pages_for(cache_tokens) * PAGE_SIZE, 2 * max_batch
    reserved_bytes, has_drafts = 0, options.draft is not None
    need = CacheNeed(cache_tokens, options.kv_format, max_batch, has_drafts=has_drafts)
    if draft_files is not None:
        reserved_bytes = _check_both(files, draft_files, options, ctx, need)
    how = replace(
        options.load,
        cache_tokens=cache_tokens,
        kv_format=options.kv_format,
        max_batch=max_batch,
        has_drafts=has_drafts,
        reserved_bytes=reserved_bytes,
        mtp=options.draft is not None and options.draft.mtp,
    )
    return _Plan(fitted_to(ctx, files.config, how), draft_files, ctx, need)


def _check_both(
    files: ModelFiles, draft: ModelFiles, options: RuntimeOptions, ctx: int, need: CacheNeed
) -> int:
    """Raises OutOfMemoryError if a model, its draft model and both caches do not fit together, and
    no layers may move to other devices. Returns the bytes of the draft model and its cache.
    `need`: the cache of the model.

    Reads headers only.
    """
    device = resolve_device(options.load.device, is_exact=options.load.exact)
    where = torch.device("cpu" if device == "reference" else device)
    needs = []
    for one, how in (
        (files, fitted_to(ctx, files.config, options.load)),
        (draft, draft_options(draft, ctx, options.load)),
    ):
        config = with_options(one.config, how)
        cache = need.total_bytes(config, has_spare=where.type == "cuda")
        checkpoint, table = checkpoint_of(one, config, how), module_table(config)
        weights = checkpoint.packed_bytes
        if how.embeddings_on == "cpu" and where.type == "cuda" and not table.is_tied:
            weights -= checkpoint.packed_bytes_of(table.embed)
        needs.append(Need(one.name, weights, cache))
    if where.type == "cpu" or options.load.split == "none":
        free = DeviceMemory(device, "", free_memory_bytes(where))
        kept = Reserve.of(options.load.reserve, device).kept_from(free)
        check_together(needs, kept.free_bytes, files.path)
    return needs[1].weights_bytes + needs[1].cache_bytes


def fitted_to(ctx: int, config: ModelConfig, options: LoadOptions) -> LoadOptions:
    """Options for a context of `ctx` tokens.

    The context may be longer than the model's. It chooses the RoPE table of some models.
    """
    has_choice = any(rope.long_divisors for rope in config.ropes)
    is_open = has_choice or ctx > config.max_seq_len
    if is_open and options.max_seq_len is None:
        return replace(options, max_seq_len=ctx)
    return options


def context_warning(ctx: int, config: ModelConfig, options: LoadOptions) -> str | None:
    """Sentence about a context that is longer than the model's; None if it is not.

    RoPE options say that the user knows. With a factor, the stretched context must suffice.
    """
    factor = options.yarn_factor or options.rope_factor or 1.0
    reach = config.max_seq_len * factor
    if ctx <= reach or options.rope_alpha is not None:
        return None
    own = config.max_seq_len
    if factor == 1.0:
        return (
            f"a context of {ctx} tokens is longer than the model's {own}; replies may become "
            "incoherent beyond it. --rope-yarn or --rope-alpha stretches the model's positions."
        )
    option = "--rope-scale" if options.yarn_factor is None else "--rope-yarn"
    return (
        f"a context of {ctx} tokens is longer than {int(reach)}, the model's {own} times "
        f"the factor {factor:g} of {option}; replies may become incoherent beyond it."
    )


def open_draft(spec: str | Path, target: ModelFiles) -> ModelFiles:
    """Opens a draft model. RequestError if its vocabulary differs from the target's."""
    files = open_model(spec)
    check_same_vocabulary(target.tokenizer, files.tokenizer)
    return files


def load_draft(
    files: ModelFiles, ctx: int, options: LoadOptions, load: Loader = load_model
) -> LoadedModel:
    """Loads a draft model. If its own context is shorter than `ctx`, its RoPE is stretched."""
    return load(files, draft_options(files, ctx, options))


def draft_options(files: ModelFiles, ctx: int, options: LoadOptions) -> LoadOptions:
    """Options for a draft model of a model that is loaded with `options`."""
    chosen = LoadOptions(
        device=options.device, threads=options.threads, batch_invariant=options.batch_invariant
    )
    if files.config.max_seq_len < ctx:
        alpha = draft_rope_alpha(ctx, files.config.max_seq_len)
        chosen = replace(chosen, max_seq_len=ctx, rope_alpha=alpha)
    return chosen


def settle_ctx_size(wanted: int | None, model_max: int) -> int:
    """The context size: `wanted`, or the default for a model whose own context is `model_max`."""
    return min(model_max, DEFAULT_CTX_LIMIT) if wanted is None else wanted


def _drafter(
    options: RuntimeOptions, loaded: LoadedModel, draft: LoadedModel | None, cache_tokens: int
) -> Drafter:
    most = None if options.draft is None else options.draft.max_tokens
    if loaded.mtp is not None:
        return MtpDrafter(
            loaded.mtp,
            vocab_size=min(loaded.config.vocab_size, loaded.tokenizer.vocab_size),
            max_tokens=most or DEFAULT_MTP_TOKENS,
        )
    if draft is None:
        return NgramDrafter(max_tokens=most or DEFAULT_NGRAM_TOKENS)
    with _naming_cheaper_caches(draft, CacheNeed(cache_tokens, options.kv_format)):
        return ModelDrafter(
            draft.model,
            num_pages=pages_for(cache_tokens),
            kv_format=options.kv_format,
            max_tokens=most or DEFAULT_DRAFT_TOKENS,
            vocab_size=min(loaded.config.vocab_size, loaded.tokenizer.vocab_size),
        )


@contextmanager
def _naming_cheaper_caches(loaded: LoadedModel, need: CacheNeed) -> Iterator[None]:
    """If the cache does not fit into memory, names the cache formats that would fit."""
    try:
        yield
    except OutOfMemoryError as error:
        free = free_memory_bytes(loaded.model.ops.device)
        if error.where != "cache" or free is None:
            raise
        config, has_spare = loaded.config, loaded.model.ops.device.type == "cuda"

        def size(wanted: KVFormat) -> int:
            return need.with_format(wanted).total_bytes(config, has_spare=has_spare)

        fitting = [
            cheaper.value
            for cheaper in KVFormat
            if _can_hold(config.kv_shapes, cheaper)
            and size(cheaper) <= min(free, size(need.kv_format) - 1)
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
