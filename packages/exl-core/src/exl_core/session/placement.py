"""Which devices of this machine a model fits on, and with how long a context.

Works from plain numbers, before anything is loaded. Each GPU is a device of its own, and a model is
placed on one device as a whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from exl_core.cache.format import PAGE_SIZE, KVFormat, pages_for
from exl_core.cache.memory import free_memory_bytes
from exl_core.cache.need import CacheNeed, CacheShape
from exl_core.errors import OutOfMemoryError, RequestError

GPU_OVERHEAD = 600 << 20
"""Upper bound in bytes of all else on a GPU: dequantized slices, activations, graphs, logits."""

CPU_OVERHEAD = 256 << 20


class ContextShape(CacheShape, Protocol):
    """The numbers of a model that its longest context on a device depends on."""

    @property
    def max_seq_len(self) -> int: ...


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device and the bytes that this process may still allocate there; None if unknown."""

    device: str
    name: str
    free_bytes: int | None

    def without(self, size_bytes: int) -> DeviceMemory:
        """The device with less free memory."""
        if self.free_bytes is None:
            return self
        return replace(self, free_bytes=max(0, self.free_bytes - size_bytes))

    @property
    def overhead_bytes(self) -> int:
        return CPU_OVERHEAD if self.device == "cpu" else GPU_OVERHEAD


@dataclass(frozen=True, slots=True)
class Fit:
    """A model on a device: bytes needed for a context of `ctx`, longest context per cache format.

    `needed_bytes` include `state_bytes`, those of the recurrent layers' states. `contexts` are
    tokens that all sequences share, at most the model's own maximum. A value is 0 if not even one
    page fits. All values are None if the device's free memory is unknown.
    """

    memory: DeviceMemory
    ctx: int
    needed_bytes: int
    state_bytes: int
    contexts: Mapping[KVFormat, int | None]

    @property
    def fits(self) -> bool | None:
        free = self.memory.free_bytes
        return None if free is None else self.needed_bytes <= free

    @property
    def advice(self) -> str:
        """Options under which a model that does not fit would fit; empty if it fits."""
        if self.fits is not False:
            return ""
        cheaper = [kind.value for kind, most in self.contexts.items() if (most or 0) >= self.ctx]
        shorter = self.contexts[KVFormat.FP16]
        ways = []
        if cheaper:
            ways.append(f"--cache-type {' or '.join(cheaper)}")
        if shorter:
            ways.append(f"--ctx-size {shorter}")
        return " or ".join(ways) or "nothing"


def device_memory() -> list[DeviceMemory]:
    """The CPU, and every GPU that torch sees."""
    found = [DeviceMemory("cpu", "this machine's memory", free_memory_bytes(torch.device("cpu")))]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", index)
        name = torch.cuda.get_device_name(device)
        found.append(DeviceMemory(f"cuda:{index}", name, free_memory_bytes(device)))
    return found


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that one model needs on a device: its weights and its cache, in bytes."""

    name: str
    weights_bytes: int
    cache_bytes: int


def check_together(needs: Sequence[Need], free_bytes: int | None, where: object) -> None:
    """Raises OutOfMemoryError if the models do not fit together, before any of them is read.

    `free_bytes` None: unknown, nothing is checked.
    """
    needed = sum(need.weights_bytes + need.cache_bytes for need in needs)
    if free_bytes is None or needed <= free_bytes:
        return
    parts = (
        f"{need.name} {need.weights_bytes / 2**20:.0f} MiB and a cache of "
        f"{need.cache_bytes / 2**20:.0f} MiB"
        for need in needs
    )
    raise OutOfMemoryError(
        "the model and its draft model do not fit into memory together",
        where=where,
        expected=f"{needed / 2**20:.0f} MiB: {', '.join(parts)}",
        got=f"{free_bytes / 2**20:.0f} MiB free",
        next_step="A shorter --ctx-size, a smaller --cache-type, --ngram instead of --draft-model, "
        "or a smaller model would need less.",
    )


def fit_all(
    weights_bytes: int,
    config: ContextShape,
    need: CacheNeed,
    where: Sequence[DeviceMemory] | None = None,
) -> list[Fit]:
    """The model with a cache of `need` on each device of `where` (default: `device_memory()`)."""
    devices = device_memory() if where is None else where
    return [_fit(weights_bytes, config, need, memory) for memory in devices]


def _fit(weights_bytes: int, config: ContextShape, need: CacheNeed, memory: DeviceMemory) -> Fit:
    fixed, has_spare = weights_bytes + memory.overhead_bytes, memory.device != "cpu"
    contexts: dict[KVFormat, int | None] = {}
    for kind in KVFormat:
        if kind is KVFormat.FP32:
            continue
        try:
            need.with_format(kind).kv_bytes(config.kv_shapes)
        except RequestError:  # the format does not support this head size
            continue
        contexts[kind] = None
        if memory.free_bytes is not None:
            room = memory.free_bytes - fixed
            pages = _most_pages(config, need.with_format(kind), room, has_spare=has_spare)
            contexts[kind] = min(pages * PAGE_SIZE, config.max_seq_len)
    states = sum(need.state_bytes(config, has_spare=has_spare))
    needed = fixed + need.total_bytes(config, has_spare=has_spare)
    return Fit(memory, need.tokens, needed, states, contexts)


def _most_pages(config: ContextShape, need: CacheNeed, room: int, *, has_spare: bool) -> int:
    """Pages of the longest context whose cache has at most `room` bytes. The number of snapshots
    grows with the pages."""

    def exceeds(pages: int) -> bool:
        longer = replace(need, tokens=pages * PAGE_SIZE)
        return longer.total_bytes(config, has_spare=has_spare) > room

    return bisect_left(range(1, pages_for(config.max_seq_len) + 1), x=True, key=exceeds)
