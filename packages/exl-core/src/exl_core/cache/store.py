"""Memory of the cache: one key tensor and one value tensor per layer, divided into pages.

Knows shapes, which may differ between layers, and precision. Knows neither sequences nor the
contents of pages (`page_pool.py`). Memory reads as zero until it is written. A cache for a long
context costs only the part in use. On the CPU, memory becomes resident when it is written. On a GPU
the store takes memory in steps (`KVStore.grow`), at addresses that never change. A cache larger
than the available memory is refused before anything is allocated.

The dtype of a tensor determines how its rows are stored. float32, float16 and float8_e4m3fn hold
the head's values. int8 (8-bit codes) and uint8 (4-bit codes) hold bytes: first the codes, then the
scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from exl_core.arch.layers import KVShape
from exl_core.cache.format import PAGE_SIZE, KVFormat, RowFormat, kv_bytes_per_token
from exl_core.cache.memory import free_memory_bytes, zeros_when_touched
from exl_core.cache.page_pool import PageCopy
from exl_core.cache.state import StateCopy
from exl_core.cache.state_store import StateStore
from exl_core.errors import OutOfMemoryError, RequestError
from exl_core.ops.attention import CacheLayer
from exl_core.ops.backends.cuda.growing import GrowingBuffer, Memory, driver_memory

_DTYPES = {
    RowFormat.FP32: torch.float32,
    RowFormat.FP16: torch.float16,
    RowFormat.FP8: torch.float8_e4m3fn,
    RowFormat.CODES8: torch.int8,
    RowFormat.CODES4: torch.uint8,
}
_MIB = 1024 * 1024
_GROWTH = 1.25
"""Factor of a step in which a store grows. A step takes three calls of the driver for each tensor,
some milliseconds in all, so there must be few of them."""

_LEAST_GRANULES = 8
"""Smallest tensor that takes memory in steps, in granules of the driver (2 MiB). Two granules, at
the ends, are taken at once."""


class PageMirror(Protocol):
    """Receives each copy between pages, or between slots of state. Other processes repeat it in
    their part of the cache."""

    def copied(self, copies: Sequence[PageCopy]) -> None: ...
    def moved(self, moves: Sequence[tuple[int, int]]) -> None: ...
    def transferred(self, to: KVStore, pages: Sequence[tuple[int, int]]) -> None: ...
    def states_copied(self, copies: Sequence[tuple[int, int]]) -> None: ...
    def state_transferred(self, to: KVStore, source: int, target: int) -> None: ...


class KVStore:
    """Keys and values of `num_pages` pages in every layer."""

    def __init__(
        self,
        kv_format: KVFormat,
        kv_shapes: Sequence[KVShape | None],
        num_pages: int,
        *,
        available_bytes: int | None = None,
        device: torch.device | Sequence[torch.device] | None = None,
        grows: bool = False,
        states: StateStore | None = None,
        final_size: int = 0,
    ) -> None:
        """`kv_shapes`: heads and head sizes, by layer; None for a layer that caches nothing.
        `available_bytes`: memory that may be used on each device; by default, its free memory.
        `device`: one for all layers (the CPU by default), or one for each layer.
        `grows`: take memory on GPUs as pages are used.
        `states`: memory of the recurrent layers, if the model has some.
        `final_size`: size of `final_states`; 0: there are none."""
        cached = [shape for shape in kv_shapes if shape is not None]
        has_layers = bool(cached) or states is not None
        if num_pages < 1 or not has_layers or any(min(shape) < 1 for shape in cached):
            shapes = sorted({f"{one.num_kv_heads} heads of {one.head_dim}" for one in cached})
            raise RequestError(
                "a cache needs at least one page, layer, head and dimension",
                got=f"{num_pages} pages, {len(kv_shapes)} layers, {', '.join(shapes)}",
            )
        one = torch.device("cpu") if device is None else device
        self.devices = (one,) * len(kv_shapes) if isinstance(one, torch.device) else tuple(one)
        self.device = self.devices[-1]
        self.kv_format = kv_format
        self.kv_shapes = tuple(kv_shapes)
        self.num_pages = num_pages
        self.page_size = PAGE_SIZE
        self.mirror: PageMirror | None = None
        self.states = states
        self._final_bytes: int = final_size * final_dtype(kv_format).itemsize
        self.bytes_per_token = kv_bytes_per_token(kv_shapes, kv_format) + self._final_bytes
        self.size_bytes = self.bytes_per_token * num_pages * PAGE_SIZE
        _check_fits(self, available_bytes)
        self.grows = grows
        self._buffers: list[tuple[GrowingBuffer, int]] = []  # with the bytes of their pages
        self._layers = {
            layer: self._cache_layer(shape, where)
            for layer, (shape, where) in enumerate(zip(kv_shapes, self.devices, strict=True))
            if shape is not None
        }
        self.final_states: Tensor | None = self._new_final_states(final_size)
        """States after the final norm, [slots, hidden], which a layer for multi-token prediction
        reads. The last page belongs to no sequence."""
        pages = () if self.final_states is None else (self._as_pages(self.final_states),)
        # Views as bytes, which copies work on: [num_pages, num_kv_heads, page_size, bytes]
        self._bytes: tuple[Tensor, ...] = (
            *(
                x.view(torch.uint8)
                for layer in self._layers.values()
                for x in ((layer.keys,) if layer.is_shared else (layer.keys, layer.values))
            ),
            *pages,
        )
        self._grown = self._grown_pages()

    def grow(self, num_pages: int) -> None:
        """Has memory for the first `num_pages` pages. Passes and copies call it before they write.

        Beyond the pages that were used, a store holds at most a quarter more, and a step of the
        driver (2 MiB) at both ends of each tensor. Raises OutOfMemoryError, and changes nothing
        that was written, if another program has taken the memory.
        """
        if num_pages <= self._grown:
            return
        self._check_pages(num_pages - 1)
        wanted = min(self.num_pages, max(num_pages, int(self._grown * _GROWTH)))
        for buffer, page_bytes in self._buffers:
            buffer.grow(wanted * page_bytes)
        self._grown = self._grown_pages()

    @property
    def held_bytes(self) -> int:
        """Memory that the store has taken; for tensors on a CPU their whole size."""
        return self.tensor_bytes + self.mapped_bytes

    @property
    def mapped_bytes(self) -> int:
        """Memory that the store has taken in steps, which torch's allocator does not count."""
        return sum(buffer.held_bytes for buffer, _ in self._buffers)

    @property
    def tensor_bytes(self) -> int:
        """Memory of the tensors whose memory was taken at once."""
        return sum(x.nbytes for x in self._bytes) - sum(b.size for b, _ in self._buffers)

    def _grown_pages(self) -> int:
        grown = (buffer.grown // page_bytes for buffer, page_bytes in self._buffers)
        return min(self.num_pages, min(grown, default=self.num_pages))

    @property
    def spare_page(self) -> int:
        """Page that belongs to no sequence: padding rows of a batch write there. Layers on a GPU
        have it."""
        return self.num_pages

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """Layers with keys and values."""
        return tuple(self._layers)

    def layer(self, layer: int) -> CacheLayer:
        """Keys and values of a cached layer, [num_pages, num_kv_heads, page_size, row] each."""
        return self._layers[layer]

    @torch.inference_mode()  # the store may have been made in this mode
    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Makes the copies in every layer, one after the other."""
        if self.mirror is not None:
            self.mirror.copied(copies)
        for copy in copies:
            self._check_pages(copy.source, copy.target)
            self.grow(max(copy.source, copy.target) + 1)
            if not 0 <= copy.length <= self.page_size:
                raise ValueError(f"copy_pages: {copy.length} positions of {self.page_size}")
            for pages in self._bytes:
                pages[copy.target, :, : copy.length] = pages[copy.source, :, : copy.length]

    @torch.inference_mode()
    def move_pages(self, moves: Sequence[tuple[int, int]]) -> None:
        """Moves pages, given as (source, target), all of them simultaneously.

        Pages that are sources but not targets keep their contents. Needs temporary memory for the
        moved pages of one layer's keys or values.
        """
        if not moves:
            return
        sources, targets = zip(*moves, strict=True)
        self._check_pages(*sources, *targets)
        if len(set(targets)) < len(targets):
            raise ValueError(f"move_pages: two moves to one page ({moves})")
        self.grow(max(*sources, *targets) + 1)
        if self.mirror is not None:
            self.mirror.moved(moves)
        ids = {
            where: (torch.tensor(sources, device=where), torch.tensor(targets, device=where))
            for where in dict.fromkeys(self.devices)
        }
        for pages in self._bytes:
            from_ids, to_ids = ids[pages.device]
            pages.index_copy_(0, to_ids, pages.index_select(0, from_ids))

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """Makes the copies between slots of recurrent state, if the model has some."""
        if self.states is None or not copies:
            return
        if self.mirror is not None:
            self.mirror.states_copied(copies)
        self.states.copy(copies)

    def transfer_state(self, to: KVStore, source: int, target: int) -> None:
        """Copies a slot of recurrent state to another store of the same shapes, or to another slot
        of this one, if the model has some."""
        if self.states is None or to.states is None:
            return
        if self.mirror is not None:
            self.mirror.state_transferred(to, source, target)
        self.states.transfer(to.states, source, target)

    @torch.inference_mode()
    def transfer_pages(self, to: KVStore, pages: Sequence[tuple[int, int]]) -> None:
        """Copies whole pages, given as (source, target), to another store of the same format and
        shapes, or to other pages of this one."""
        if self.mirror is not None and pages:
            self.mirror.transferred(to, pages)
        for source, target in pages:
            self._check_pages(source)
            to._check_pages(target)
            self.grow(source + 1)
            to.grow(target + 1)
            for ours, theirs in zip(self._bytes, to._bytes, strict=True):
                theirs[target] = ours[source]

    def _cache_layer(self, shape: KVShape, where: torch.device) -> CacheLayer:
        keys = self._pages(self.kv_format.key_rows, shape, where)
        if shape.is_shared:
            return CacheLayer(keys, keys)
        return CacheLayer(keys, self._pages(self.kv_format.value_rows, shape, where))

    def _pages(self, rows: RowFormat, shape: KVShape, where: torch.device) -> Tensor:
        dtype = _DTYPES[rows]
        row_size = rows.row_bytes(shape.head_dim) // dtype.itemsize
        page = (shape.num_kv_heads, self.page_size, row_size)
        memory = self._growing_memory(where)
        page_bytes = math.prod(page) * dtype.itemsize
        size = (self.num_pages + 1) * page_bytes
        if memory is not None and size >= _LEAST_GRANULES * memory.granule:
            buffer = GrowingBuffer(memory, size, page_bytes)
            self._buffers.append((buffer, page_bytes))
            return buffer.bytes.view(dtype).view(self.num_pages + 1, *page)
        if where.type == "cpu":
            return zeros_when_touched((self.num_pages, *page), dtype)
        return torch.zeros((self.num_pages + 1, *page), dtype=dtype, device=where)

    def _new_final_states(self, size: int) -> Tensor | None:
        if not size:
            return None
        shape, dtype = ((self.num_pages + 1) * self.page_size, size), final_dtype(self.kv_format)
        if self.device.type == "cpu":
            return zeros_when_touched(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _as_pages(self, rows: Tensor) -> Tensor:
        """Rows by slot as bytes by page: [num_pages + 1, 1, page_size, bytes]."""
        return rows.view(torch.uint8).view(self.num_pages + 1, 1, self.page_size, -1)

    def _growing_memory(self, where: torch.device) -> Memory | None:
        """Memory of a GPU that grows; None where memory is taken at once, or by the machine."""
        return driver_memory(where) if self.grows and where.type == "cuda" else None

    def _check_pages(self, *page_ids: int) -> None:
        for page_id in page_ids:
            if not 0 <= page_id < self.num_pages:
                raise ValueError(f"no such page: {page_id} of {self.num_pages}")


def final_dtype(kv_format: KVFormat) -> torch.dtype:
    """Type of the states after the final norm. Only drafts depend on them."""
    return torch.float32 if kv_format is KVFormat.FP32 else torch.bfloat16


def _check_fits(store: KVStore, available_bytes: int | None) -> None:
    """Raises OutOfMemoryError if the layers of a device do not fit there."""
    shapes: dict[torch.device, list[KVShape | None]] = {}
    for shape, where in zip(store.kv_shapes, store.devices, strict=True):
        shapes.setdefault(where, []).append(shape)
    for where, held in shapes.items():
        available = free_memory_bytes(where) if available_bytes is None else available_bytes
        each = kv_bytes_per_token(held, store.kv_format)
        each += store._final_bytes if where == store.device else 0
        tokens = store.num_pages * PAGE_SIZE
        if available is None:
            continue
        states = 0 if store.states is None else store.states.untouched_bytes(where)
        available = max(0, available - states)
        if each * tokens <= available:
            continue
        affordable = available // each // PAGE_SIZE * PAGE_SIZE
        part = "" if len(shapes) == 1 else f", in the {len(held)} layers on {where}"
        raise OutOfMemoryError(
            f"a {store.kv_format.value} cache of {tokens} tokens takes "
            f"{each * tokens / _MIB:.0f} MiB ({each} bytes a token{part})",
            where="cache",
            expected=f"at most {available / _MIB:.0f} MiB, which is what is free"
            + (" beside the recurrent states" if states else ""),
            next_step=f"A cache of {affordable} tokens would fit."
            if affordable
            else "Free some memory, or take a smaller model.",
        )
