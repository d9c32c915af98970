"""Opens a model for use: from a model argument to model, tokenizer, template and engine.

Imports torch, so a command imports this module only when it runs. Declares no options. Prints only
a progress bar, on a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from exl_cli.engine_options import DEFAULT_DRAFT_TOKENS, DEFAULT_NGRAM_TOKENS, EngineChoices
from exl_cli.render import bytes_progress
from exl_core.arch.layers import KVShape
from exl_core.arch.spec import ModelConfig
from exl_core.cache.format import PAGE_SIZE, KVFormat, kv_bytes_per_token, pages_for
from exl_core.cache.memory import free_memory_bytes
from exl_core.constrain.filter import Constraint
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.request import Request
from exl_core.errors import ContextLengthError, OutOfMemoryError, RequestError
from exl_core.load import (
    LoadedModel,
    LoadOptions,
    gguf_fields,
    load_model,
    model_name,
    open_checkpoint,
    stop_ids,
)
from exl_core.lora.adapter import load_adapter
from exl_core.lora.config import read_adapter_config
from exl_core.model.adapters import AdapterUse
from exl_core.ops.backends.cuda.device import parse_device
from exl_core.resolve import resolve_model
from exl_core.sampling.params import SamplerParams
from exl_core.speculate.compatible import check_same_vocabulary, draft_rope_alpha
from exl_core.speculate.draft_model import ModelDrafter
from exl_core.speculate.drafter import Drafter
from exl_core.speculate.ngram import NgramDrafter
from exl_core.tokenizer.base import Tokenizer
from exl_core.tokenizer.check import check_vocab
from exl_core.tokenizer.detect import load_tokenizer

DEFAULT_CTX_LIMIT = 8192
"""Default context, at most. Without it, a 128k model would allocate gigabytes of cache that the
user did not request."""


@dataclass(slots=True)
class Runtime:
    """A loaded model with an engine."""

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

    def encode_prompt(self, text: str, *, parse_special: bool) -> list[int]:
        """Token ids of a prompt, with BOS if the tokenizer adds one by default."""
        with self.refusing_long_prompts():
            return self.loaded.tokenizer.encode(
                text, allow_special=parse_special, add_bos=None, max_tokens=self.ctx_size - 1
            )

    @contextmanager
    def refusing_long_prompts(self) -> Iterator[None]:
        """Reports a prompt whose tokenization stopped because it exceeds the context."""
        try:
            yield
        except ContextLengthError as error:
            raise self._too_long(f"at least {error.num_tokens}") from error

    def request(
        self,
        token_ids: Sequence[int],
        max_tokens: int | None,
        sampler: SamplerParams,
        stop: Sequence[str],
        constraints: tuple[Constraint, ...] = (),
    ) -> Request:
        """A request. `max_tokens` None: until the context is full. The limit never exceeds the
        room that the context has left."""
        room = self.ctx_size - len(token_ids)
        if room < 1:
            raise self._too_long(f"{len(token_ids)}")
        return Request(
            prompt_ids=tuple(token_ids),
            max_tokens=room if max_tokens is None else min(max_tokens, room),
            sampler=sampler,
            stop_ids=stop_ids(self.loaded.tokenizer, self.loaded.config),
            stop_strings=tuple(stop),
            constraints=constraints,
            adapters=self.adapters,
        )

    def _too_long(self, num_tokens: str) -> RequestError:
        return RequestError(
            f"the prompt has {num_tokens} tokens and leaves no room for a reply",
            expected=f"at most {self.ctx_size - 1} tokens, for a context of {self.ctx_size}",
            got=num_tokens,
            next_step=self._advice(),
        )

    def _advice(self) -> str:
        longest = self.loaded.config.max_seq_len
        if self.ctx_size == longest:
            return "Shorten it; this is the model's longest context."
        return f"Shorten it, or raise --ctx-size (at most {longest})."


def load_quietly(
    spec: str | None,
    *,
    device: str = "auto",
    threads: int | None,
    is_quiet: bool,
    exact: bool,
    options: LoadOptions | None = None,
) -> LoadedModel:
    """Load a model, with a progress bar on a terminal. The named parameters override `options`.

    Torch gets one thread. The kernels have their own threads and leave little work to torch, so a
    second thread pool would only compete with them for cores.
    """
    torch.set_num_threads(1)
    chosen = replace(
        options or LoadOptions(),
        backend=backend_of(device, exact=exact),
        threads=threads,
        exact=exact,
    )
    with bytes_progress("loading", is_quiet=is_quiet) as progress:
        return load_model(spec, chosen, progress)


@dataclass(frozen=True, slots=True)
class Headers:
    """Facts about a model that need no loading. `size_bytes`: all tensors in its files."""

    path: Path
    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    size_bytes: int


def read_headers(spec: str | None) -> Headers:
    path = resolve_model(spec)
    source, config, _ = open_checkpoint(path)
    tokenizer = load_tokenizer(path, gguf_fields(source))
    check_vocab(tokenizer, config.vocab_size, path)
    size_bytes = sum(tensor.size_bytes for tensor in source.tensors.values())
    return Headers(path, model_name(path), config, tokenizer, size_bytes)


def backend_of(device: str, *, exact: bool) -> str:
    """Resolve `--device` to `cpu`, `cuda` or `cuda:N`."""
    if not exact:
        return parse_device(device)
    if device not in ("auto", "cpu"):
        raise RequestError(
            "--exact computes in float32, on the CPU", expected="--device cpu", got=device
        )
    return "cpu"


def open_runtime(
    path: Path,
    choices: EngineChoices,
    ctx_size: int | None,
    device: str,
    threads: int | None,
    *,
    is_quiet: bool,
    exact: bool,
    max_batch: int = 1,
    cache_tokens: int | None = None,
) -> Runtime:
    """Load the model with its adapters and drafter, and create the engine.

    Loading takes a while, so errors that need no loading are raised before it. `cache_tokens`:
    size of the cache that all requests share; None: one context.
    """
    draft_path = None if choices.draft_model is None else resolve_model(choices.draft_model)
    for folder, _ in choices.loras:
        read_adapter_config(folder)
    if ctx_size is not None:
        settle_ctx_size(ctx_size, open_checkpoint(path)[1].max_seq_len)
    loaded = load_quietly(str(path), device=device, threads=threads, is_quiet=is_quiet, exact=exact)
    ctx = settle_ctx_size(ctx_size, loaded.config.max_seq_len)
    adapters = tuple(
        AdapterUse(load_adapter(folder, loaded.model), scale) for folder, scale in choices.loras
    )
    cache_tokens = max(ctx, PAGE_SIZE, cache_tokens or 0)
    options = EngineOptions(
        cache_tokens=cache_tokens, max_batch=max_batch, kv_format=choices.kv_format
    )
    drafter: Drafter | None = None
    if choices.ngram:
        drafter = NgramDrafter(max_tokens=choices.draft_tokens or DEFAULT_NGRAM_TOKENS)
    elif draft_path is not None:
        draft = load_draft(
            draft_path, loaded, ctx, device=device, threads=threads, is_quiet=is_quiet
        )
        with _naming_cheaper_caches(draft, choices.kv_format, cache_tokens):
            drafter = ModelDrafter(
                draft.model,
                num_pages=pages_for(cache_tokens),
                kv_format=choices.kv_format,
                max_tokens=choices.draft_tokens or DEFAULT_DRAFT_TOKENS,
                vocab_size=min(loaded.config.vocab_size, loaded.tokenizer.vocab_size),
            )
    with _naming_cheaper_caches(loaded, choices.kv_format, cache_tokens):
        engine = Engine(loaded.model, loaded.tokenizer, options, drafter=drafter)
    return Runtime(loaded, engine, ctx, adapters)


def load_draft(
    path: Path,
    loaded: LoadedModel,
    ctx: int,
    *,
    device: str,
    threads: int | None,
    is_quiet: bool,
) -> LoadedModel:
    """Load the draft model. RoPE scaling stretches its context to that of the target model."""
    headers = read_headers(str(path))
    check_same_vocabulary(loaded.tokenizer, headers.tokenizer)
    options = LoadOptions()
    if headers.config.max_seq_len < ctx:
        alpha = draft_rope_alpha(ctx, headers.config.max_seq_len)
        options = LoadOptions(max_seq_len=ctx, rope_alpha=alpha)
    return load_quietly(
        str(path), device=device, threads=threads, is_quiet=is_quiet, exact=False, options=options
    )


@contextmanager
def _naming_cheaper_caches(
    loaded: LoadedModel, kv_format: KVFormat, cache_tokens: int
) -> Iterator[None]:
    """Adds to an out-of-memory error of the cache the smaller cache formats that would fit."""
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


def _can_hold(shapes: Sequence[KVShape], kv_format: KVFormat) -> bool:
    try:
        kv_bytes_per_token(shapes, kv_format)
    except RequestError:
        return False
    return True


def settle_ctx_size(wanted: int | None, model_max: int) -> int:
    if wanted is None:
        return min(model_max, DEFAULT_CTX_LIMIT)
    if wanted > model_max:
        raise RequestError(
            "the context is longer than the model supports",
            expected=f"--ctx-size of at most {model_max}",
            got=wanted,
        )
    return wanted
