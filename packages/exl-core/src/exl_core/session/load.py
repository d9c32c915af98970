"""Loads a model: from a path and options to a model that is ready to run."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TypedDict, Unpack

import torch

from exl_core.arch.checks import check_config
from exl_core.arch.spec import ModelConfig, RopeMethod
from exl_core.cache.memory import free_memory_bytes
from exl_core.errors import OutOfMemoryError, RequestError
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.containers.source import Progress
from exl_core.model.build import build_weights, stream_weights
from exl_core.model.sample_text import SAMPLE_TEXT
from exl_core.model.transformer import Transformer
from exl_core.model.weights import ModelWeights
from exl_core.ops.backends.cuda.device import parse_device
from exl_core.ops.open import device_failures, get_table
from exl_core.ops.table import OpTable
from exl_core.prompt.template import ChatTemplate
from exl_core.session.open import ModelFiles, open_model
from exl_core.session.request_fields import check_argument
from exl_core.session.resolve import resolve_model
from exl_core.settings import read_settings
from exl_core.tokenizer.base import Tokenizer


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of a run. None leaves the choice to the model, the settings or the machine."""

    device: str = "auto"
    """`auto` (a GPU where there is one and kernels for it, else the CPU), `cpu`, `cuda`, `cuda:1`,
    or `reference` (plain torch on the CPU, slow, to check the others)."""
    isa: str | None = None
    threads: int | None = None
    max_seq_len: int | None = None
    """Context size. It chooses between the RoPE tables of models that have one for short and one
    for long contexts (`longrope`)."""
    rope_factor: float | None = None
    rope_alpha: float | None = None
    yarn_factor: float | None = None
    """Stretch the model's own context by this factor with YaRN. Replaces `rope_factor`."""
    exact: bool = False
    """Compute in float32, with weights dequantized to float16 as their format defines."""
    batch_invariant: bool = False
    """Logits do not depend on which other sequences a pass computes, on the chunks of a prompt, or
    on drafts: the same bits. CPU only, and except for LoRA deltas. Costs time only on instruction
    sets that are not so anyway (`ops/table.py`)."""
    held_bytes: int | None = None
    """Limit on the memory for weights, in bytes. Blocks beyond it are read anew in every pass, one
    at a time. None keeps all weights in memory."""


class LoadFields(TypedDict, total=False):
    """Fields of `LoadOptions` by keyword, for `load_model`."""

    device: str
    isa: str | None
    threads: int | None
    max_seq_len: int | None
    rope_factor: float | None
    rope_alpha: float | None
    yarn_factor: float | None
    exact: bool
    batch_invariant: bool
    held_bytes: int | None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, with its tokenizer and chat template (None for base models)."""

    name: str
    path: Path
    config: ModelConfig
    model: Transformer
    tokenizer: Tokenizer
    template: ChatTemplate | None
    weights_bytes: int
    load_s: float
    exact: bool = False


def load_model(
    model: str | Path | ModelFiles | None = None,
    options: LoadOptions | None = None,
    progress: Progress | None = None,
    **changes: Unpack[LoadFields],
) -> LoadedModel:
    """Loads a model: opened files (`open_model`), a path, or a name (`resolve_model`).

    `changes` are fields of `LoadOptions`, as in `device="cuda:1"`. `progress` gets bytes read and
    total bytes. Raises `ModelError` for any fault of the model, before large allocations if the
    headers show it, and `OutOfMemoryError` if the weights cannot fit.
    """
    started = time.perf_counter()
    options = _checked_options(options, changes)
    settings = read_settings()
    threads = options.threads or settings.threads
    device = resolve_device(options.device, is_exact=options.exact)
    isa = options.isa or (settings.isa if device == "cpu" else None)
    path = None if isinstance(model, ModelFiles) else resolve_model(model)
    make_table = partial(
        get_table, device, isa=isa, threads=threads, batch_invariant=options.batch_invariant
    )
    opening = _start_device(make_table) if device.startswith("cuda") else None
    files = model if isinstance(model, ModelFiles) else open_model(path)
    config = _with_options(files.config, options)
    checkpoint = Checkpoint(files.source, config, files.quantization, is_exact=options.exact)
    tokenizer = files.tokenizer
    at_once, needed, held = checkpoint.bytes_at_once, checkpoint.packed_bytes, options.held_bytes
    if opening is None:
        ops = make_table()
    else:
        checkpoint.open_ahead(until=opening.done)
        ops = opening.result()
    is_streamed = held is not None and held < needed
    if held is not None:
        needed = min(needed, max(at_once, held))
    check_memory(needed, free_memory_bytes(ops.device), files.path)
    with device_failures(ops.device, "loading the weights"):
        if is_streamed:
            weights: ModelWeights = stream_weights(
                config, checkpoint, ops, threads=threads, held_bytes=needed - at_once
            )
        else:
            weights = build_weights(config, checkpoint, ops, threads=threads, progress=progress)
        if ops.device.type == "cuda":
            # Kernels may read weights before earlier work on the stream has ended.
            torch.cuda.synchronize(ops.device)
    sample_ids = tuple(tokenizer.encode(SAMPLE_TEXT, add_bos=False))
    transformer = Transformer(config, weights, ops, sample_ids)
    return LoadedModel(
        name=files.name,
        path=files.path,
        config=config,
        model=transformer,
        tokenizer=tokenizer,
        template=files.template,
        weights_bytes=transformer.weights_bytes,
        load_s=time.perf_counter() - started,
        exact=options.exact,
    )


def _checked_options(options: LoadOptions | None, changes: LoadFields) -> LoadOptions:
    known = [field.name for field in fields(LoadOptions)]
    for name in changes:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise RequestError(
                f"no such option: {name}",
                where="load_model",
                expected=", ".join(known),
                got=name,
                next_step=f"Did you mean {near[0]!r}?" if near else None,
            )
    example = "For example load_model('smollm2', device='cpu')."
    check_argument("options", options, LoadOptions | None, example)
    return replace(options or LoadOptions(), **changes)


def resolve_device(name: str, *, is_exact: bool = False) -> str:
    """The device that `name` means on this machine: `cpu`, `cuda`, `cuda:N` or `reference`.

    RequestError for an unknown name, and for a GPU together with `is_exact`.
    """
    if name == "reference":
        return name
    if not is_exact:
        return parse_device(name)
    if name not in ("auto", "cpu"):
        raise RequestError(
            "--exact computes in float32, on the CPU", expected="--device cpu", got=name
        )
    return "cpu"


def _start_device(make: Callable[[], OpTable]) -> Future[OpTable]:
    """Starts the GPU on a thread. This takes a third of a second, mostly outside the interpreter,
    and overlaps with reading headers, the tokenizer and other work that needs no GPU."""
    opener = ThreadPoolExecutor(1, thread_name_prefix="exl-device")
    table = opener.submit(make)
    opener.shutdown(wait=False)
    return table


def check_memory(needed: int, available: int | None, where: object) -> None:
    """Raises `OutOfMemoryError` if `needed` bytes exceed the `available` ones (None: unknown)."""
    if available is not None and needed > available:
        raise OutOfMemoryError(
            "the weights do not fit into memory",
            where=where,
            expected=f"{needed / 2**20:.0f} MiB",
            got=f"{available / 2**20:.0f} MiB free",
            next_step="Free some memory, or take a smaller model.",
        )


def _with_options(config: ModelConfig, options: LoadOptions) -> ModelConfig:
    rope = config.ropes[0]
    for name, value in (
        ("RoPE factor", options.rope_factor),
        ("RoPE alpha", options.rope_alpha),
        ("YaRN factor", options.yarn_factor),
    ):
        if value is not None and not 0.0 < value < float("inf"):
            raise RequestError(f"{name} must be a finite number above 0", got=value)
    if options.rope_factor is not None:
        rope = replace(rope, method=RopeMethod.LINEAR, factor=options.rope_factor)
    if options.yarn_factor is not None:
        native = rope.original_max_seq_len or config.max_seq_len
        rope = replace(
            rope,
            method=RopeMethod.YARN,
            factor=options.yarn_factor,
            original_max_seq_len=native,
        )
    if options.rope_alpha is not None:
        rope = replace(rope, alpha=options.rope_alpha)
    length = config.max_seq_len if options.max_seq_len is None else options.max_seq_len
    if length < 1:
        raise RequestError("the context size must be at least 1 token", got=length)
    ropes = tuple(one.fitted(length) for one in (rope, *config.ropes[1:]))
    config = replace(config, ropes=ropes, max_seq_len=length)
    check_config(config, "load options")
    return config
