"""Plan of a load: the devices of a model's layers, from its options and the machine's memory.

Joins the options with the arithmetic of `split.py`. Reads headers only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, Protocol

from exl_core.arch.spec import ModelConfig
from exl_core.cache.format import KVFormat
from exl_core.cache.memory import free_memory_bytes
from exl_core.cache.need import CacheNeed
from exl_core.errors import RequestError
from exl_core.formats.checkpoint import Checkpoint
from exl_core.ops.table import OpTable
from exl_core.parallel.plan import RankCount
from exl_core.session.mtp import MtpFiles
from exl_core.session.placement import DeviceMemory, device_memory
from exl_core.session.reserve import Reserve
from exl_core.session.split import (
    LayerSizes,
    Split,
    StagePlan,
    layer_sizes,
    parse_experts_on,
    plan_split,
)

DEFAULT_CTX_LIMIT = 8192
"""Longest default context. The whole context of a 128k model would take gigabytes of cache."""


class PlanOptions(Protocol):
    """Options of a run that its plan depends on; `LoadOptions` has them."""

    @property
    def cache_tokens(self) -> int | None: ...
    @property
    def kv_format(self) -> KVFormat: ...
    @property
    def max_batch(self) -> int: ...
    @property
    def has_drafts(self) -> bool: ...
    @property
    def tensor_parallel(self) -> RankCount: ...
    @property
    def embeddings_on(self) -> Literal["device", "cpu"]: ...
    @property
    def reserved_bytes(self) -> int: ...
    @property
    def experts_on(self) -> str: ...
    @property
    def cpu_layers(self) -> int | None: ...
    @property
    def held_bytes(self) -> int | None: ...
    @property
    def device(self) -> str: ...


def need_of(options: PlanOptions, config: ModelConfig) -> CacheNeed:
    """The cache that the options leave memory for."""
    return CacheNeed(
        options.cache_tokens or min(config.max_seq_len, DEFAULT_CTX_LIMIT),
        options.kv_format,
        options.max_batch,
        has_drafts=options.has_drafts,
    )


def sizes_of(
    options: PlanOptions, config: ModelConfig, checkpoint: Checkpoint, mtp: MtpFiles | None
) -> LayerSizes:
    """Sizes of the model and of the cache that `options` ask for. The layer for multi-token
    prediction, its cache, and the states that it reads are on the device of the head."""
    need = need_of(options, config)
    sizes = layer_sizes(checkpoint.bytes_by_part, config, need, checkpoint.expert_bytes)
    if mtp is None:
        return sizes
    read = need.final_bytes(config.hidden_size) + need.kv_bytes(mtp.config.kv_shapes)
    cache = (*sizes.cache[:-1], sizes.cache[-1] + read)
    return replace(sizes, cache=cache, head=sizes.head + mtp.packed_bytes)


def plan_of(
    options: PlanOptions,
    split: Split,
    config: ModelConfig,
    make_sizes: Callable[[], LayerSizes],
    ops: OpTable,
    *,
    device: str,
    reserve: Reserve,
) -> tuple[StagePlan, ...]:
    """Stages of the model; () for all of it on `device`, which `ops` is the table of, and for ranks
    that have a part of every layer each. `make_sizes` computes the sizes of its layers.

    OutOfMemoryError if the model does not fit, or does not leave the reserve free.
    """
    if options.tensor_parallel != 1:
        return ()

    def sizes() -> LayerSizes:
        found = make_sizes()
        is_on_host = options.embeddings_on == "cpu" and ops.device.type == "cuda"
        return replace(found, embedding=0) if is_on_host and not found.is_tied else found

    own = DeviceMemory(str(ops.device), "", free_memory_bytes(ops.device))
    own = own.without(options.reserved_bytes)
    kept = reserve.kept_from(own)
    plan = _divided(options, split, config, sizes, own=kept, reserve=reserve, device=device)
    if reserve.is_given:
        _check_kept(options, plan, sizes(), own, reserve)
    return plan


def _divided(
    options: PlanOptions,
    split: Split,
    config: ModelConfig,
    make_sizes: Callable[[], LayerSizes],
    *,
    own: DeviceMemory,
    reserve: Reserve,
    device: str,
) -> tuple[StagePlan, ...]:
    """The stages; () for the whole model on `own`, whose free memory is less the reserve."""
    experts = parse_experts_on(options.experts_on)
    is_default = split.is_auto and options.cpu_layers is None and not experts
    if options.held_bytes is not None:
        if not is_default:
            raise RequestError(
                "a model whose layers are read in every pass is on one device",
                got="--held-memory with --split, --cpu-layers or --experts-on",
            )
        return ()
    if not (split.is_auto or split.gigabytes or split.stages or options.cpu_layers or experts):
        return ()
    is_on_gpu = own.device.startswith("cuda")
    if not is_on_gpu and not split.stages:
        if is_default:
            return ()
        if experts and split.is_auto and options.cpu_layers is None:
            # All experts of a CPU are there. The reference takes those of the CPU's kernels.
            split = Split(is_auto=False, stages=((device, config.num_layers),))
    if not is_on_gpu and not split.stages:
        raise RequestError("no GPU to split the model over", got=f"--device {options.device}")
    sizes = make_sizes()
    needed = sizes.total_bytes + own.overhead_bytes
    if is_default and own.free_bytes is not None and needed <= own.free_bytes:
        return ()  # without a question to the other GPUs, which would start them
    cpu, *gpus = device_memory()
    devices = [own if one.device == own.device else reserve.kept_from(one) for one in gpus]
    if options.device.startswith("cuda:"):
        devices = [own]
    plan = plan_split(sizes, split, devices, cpu, options.cpu_layers, experts_on_cpu=experts)
    is_near = plan[0].device == own.device and not plan[0].host_layers
    is_whole = len(plan) == 1 and is_near
    return () if is_whole else plan


def _check_kept(
    options: PlanOptions,
    plan: tuple[StagePlan, ...],
    sizes: LayerSizes,
    own: DeviceMemory,
    reserve: Reserve,
) -> None:
    """Raises OutOfMemoryError if a plan does not leave the reserve of a device free. `own`: the
    device of a model without stages."""
    needed: dict[str, int] = {}
    for stage in plan:
        stage_bytes = stage.weights_bytes + stage.cache_bytes + stage.state_bytes
        needed[stage.device] = needed.get(stage.device, 0) + stage_bytes
    if not plan:
        cache = sum(sizes.cache) + sum(sizes.states)
        weights = sizes.total_bytes - cache
        if options.held_bytes is not None:
            weights = min(weights, options.held_bytes)
        needed[own.device] = weights + cache
    free = {own.device: own}
    if any(name not in free and reserve.bytes_on(name) for name in needed):
        free = {one.device: one for one in device_memory()} | free
    for name, size in needed.items():
        if name in free:
            reserve.check(free[name], size)
