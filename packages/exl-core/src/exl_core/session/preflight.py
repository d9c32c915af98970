"""Checks of a model that its headers allow, before its weights are read.

A program that has one model loaded can check the next one first, and free the former only then.
`load_model` makes the same checks itself. A plan for several devices is not made here: it depends
on the memory of all of them at the time of the load.
"""

from __future__ import annotations

import torch

from exl_core.arch.modules import module_table
from exl_core.arch.spec import ModelConfig
from exl_core.cache.memory import free_memory_bytes
from exl_core.errors import OutOfMemoryError
from exl_core.formats.checkpoint import Checkpoint
from exl_core.session.load import LoadOptions, checkpoint_of, config_on, mtp_of, placement_of
from exl_core.session.open import ModelFiles
from exl_core.session.placement import DeviceMemory
from exl_core.session.planning import need_of


def check_load(files: ModelFiles, options: LoadOptions, *, freed_bytes: int = 0) -> None:
    """Raises the errors of `load_model` that headers, tokenizer and template show.

    OutOfMemoryError if weights and cache do not fit on the only device that they may use, with
    `freed_bytes` that the caller will free there.
    """
    split, device, reserve = placement_of(options)
    config = config_on(device, files, options)
    checkpoint = checkpoint_of(files, config, options)
    if options.mtp:
        mtp_of(files, config, options, checkpoint)
    # The properties raise for a broken tokenizer or template.
    _ = files.tokenizer, files.template
    is_single = options.tensor_parallel == 1 and options.job is None
    may_move = device.startswith("cuda") and options.split != "none"
    if is_single and not may_move and not split.stages:
        where = torch.device("cpu" if device == "reference" else device)
        free = free_memory_bytes(where)
        memory = DeviceMemory(device, "", None if free is None else free + freed_bytes)
        _check_fit(files, options, config, checkpoint, reserve.kept_from(memory))


def _check_fit(
    files: ModelFiles,
    options: LoadOptions,
    config: ModelConfig,
    checkpoint: Checkpoint,
    memory: DeviceMemory,
) -> None:
    is_on_gpu = memory.device.startswith("cuda")
    weights, at_once = checkpoint.packed_bytes, checkpoint.bytes_at_once
    table = module_table(config)
    if options.embeddings_on == "cpu" and is_on_gpu and not table.is_tied:
        embed_bytes = checkpoint.packed_bytes_of(table.embed)
        weights, at_once = weights - embed_bytes, at_once - embed_bytes
    if options.held_bytes is not None:
        weights = min(weights, max(at_once, options.held_bytes))
    cache = need_of(options, config).total_bytes(config, has_spare=is_on_gpu)
    if memory.free_bytes is None or weights + cache <= memory.free_bytes:
        return
    raise OutOfMemoryError(
        "the model and its cache do not fit into memory",
        where=files.path,
        expected=f"{weights / 2**20:.0f} MiB and a cache of {cache / 2**20:.0f} MiB",
        got=f"{memory.free_bytes / 2**20:.0f} MiB free",
        next_step="A smaller model, a shorter --ctx-size or a smaller --cache-type would need "
        "less.",
    )
