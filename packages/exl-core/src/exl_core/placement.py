"""What fits where: the devices of this machine, and the contexts that a model has room for there.

Plain numbers, before anything is loaded. A GPU is one device of its own; a model lies on one whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from exl_core.cache.format import PAGE_SIZE, KVFormat, kv_bytes_per_token, pages_for
from exl_core.cache.memory import free_memory_bytes
from exl_core.errors import RequestError

GPU_OVERHEAD = 600 << 20
"""Besides weights and cache, at most: dequantized slices, activations of a pass, graphs, logits."""

CPU_OVERHEAD = 256 << 20


class CacheShape(Protocol):
    """The numbers of a model that its cache depends on."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Room:
    """A device, and what this process may still take of it; None where nobody knows."""

    device: str
    name: str
    free_bytes: int | None

    @property
    def overhead_bytes(self) -> int:
        return CPU_OVERHEAD if self.device == "cpu" else GPU_OVERHEAD


@dataclass(frozen=True, slots=True)
class Fit:
    """A model in a room: what it needs at a context, and the longest context of each cache.

    `contexts` are tokens of one sequence, at most what the model was made for; 0 where not even a
    page would fit, and None throughout where nobody knows what is free.
    """

    room: Room
    ctx: int
    needed_bytes: int
    contexts: Mapping[KVFormat, int | None]

    @property
    def fits(self) -> bool | None:
        free = self.room.free_bytes
        return None if free is None else self.needed_bytes <= free

    @property
    def advice(self) -> str:
        """What would fit, where the model does not at that context; nothing where it does."""
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


def rooms() -> list[Room]:
    """The CPU, and every GPU that torch sees."""
    found = [Room("cpu", "this machine's memory", free_memory_bytes(torch.device("cpu")))]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", index)
        name = torch.cuda.get_device_name(device)
        found.append(Room(f"cuda:{index}", name, free_memory_bytes(device)))
    return found


def fit_all(
    weights_bytes: int, config: CacheShape, ctx: int, where: Sequence[Room] | None = None
) -> list[Fit]:
    """The model in each room (by default `rooms()`), with one sequence of `ctx` tokens in fp16."""
    return [
        _fit(weights_bytes, config, ctx, room) for room in (rooms() if where is None else where)
    ]


def _fit(weights_bytes: int, config: CacheShape, ctx: int, room: Room) -> Fit:
    fixed = weights_bytes + room.overhead_bytes
    contexts: dict[KVFormat, int | None] = {}
    for kind in KVFormat:
        if kind is KVFormat.FP32:
            continue
        try:
            each = _bytes_per_token(config, kind)
        except RequestError:  # heads of this size cannot be cached so
            continue
        if room.free_bytes is None:
            contexts[kind] = None
            continue
        pages = max(room.free_bytes - fixed, 0) // (each * PAGE_SIZE)
        contexts[kind] = min(pages * PAGE_SIZE, config.max_seq_len)
    cache = pages_for(ctx) * PAGE_SIZE * _bytes_per_token(config, KVFormat.FP16)
    return Fit(room, ctx, fixed + cache, contexts)


def _bytes_per_token(config: CacheShape, kind: KVFormat) -> int:
    return kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, kind)
