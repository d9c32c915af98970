"""Latent attention of the CPU kernels: the absorbed form, and the expanded one for prompts.

The form is chosen for each sequence by its products. A pair of a query and a key takes p + r
products and as many for the value in the absorbed form, and n + p (or v, if that is more) each in
the expanded form. The expanded form computes keys and values of all cached positions once per call,
which the absorbed form does for its own rows only. In the batch-invariant mode every row takes the
absorbed form: the two round differently.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from exl_core.ops.attention import (
    AttentionBatch,
    AttentionOps,
    AttentionRows,
    CacheLayer,
    Scoring,
)
from exl_core.ops.backends.cpu.attention import CpuBatch
from exl_core.ops.backends.cpu.linear import CpuHeads
from exl_core.ops.backends.latent import AbsorbedLatentOps, attend_absorbed
from exl_core.ops.cache_rows import decode_rows
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.latent import HeadOps, HeadUp, LatentUp
from exl_core.ops.linear import PackedLinear

LEAST_ROWS = 64
"""Rows of a prompt from which the expanded form is considered. With fewer there is little to
save."""

LEAST_SAVING = 2
"""Least ratio of the products that the expanded form saves to those of its expansion. At 1.2 the
absorbed form was faster, at 3 the expanded one (docs/experiments/cpu.md)."""

EXPANDED_BYTES = 16 * 1024 * 1024
"""Memory for keys and values of a part of the heads, which are expanded and attended together."""


class Sizes(NamedTuple):
    """Elements of a head: n without and p with RoPE, r of a latent vector, v of a value."""

    plain: int
    rotated: int
    rank: int
    value: int

    @property
    def wide(self) -> int:
        """Elements of an expanded key and of a value, the shorter of which is padded."""
        return max(self.plain + self.rotated, self.value)

    def is_expanded(self, rows: int, past: int) -> bool:
        """Whether the expanded form is faster for the rows of a sequence."""
        pairs = rows * past + rows * (rows + 1) // 2
        saved = 2 * pairs * (self.rotated + self.rank - self.wide)
        cost = past * self.rank * (self.plain + self.value)
        return rows >= LEAST_ROWS and saved > LEAST_SAVING * cost


class Prompt(NamedTuple):
    """A sequence in the expanded form: its rows, its cached positions before them, its pages."""

    rows: slice
    past: int
    pages: Tensor


class Divided(NamedTuple):
    """Sequences in the expanded form; index and batch of the rows of all others, if there are."""

    prompts: tuple[Prompt, ...]
    others: tuple[Tensor, CpuBatch] | None


class Operands(NamedTuple):
    """Operands of a layer that all sequences share."""

    up: HeadUp
    sizes: Sizes
    cache: CacheLayer
    scoring: Scoring


class _Table(AttentionOps, HeadOps, Protocol):
    @property
    def is_batch_invariant(self) -> bool: ...
    def rms_norm(self, x: Tensor, norm: RmsNorm) -> Tensor: ...
    def rope_(self, x: Tensor, cos: Tensor, sin: Tensor) -> None: ...
    def activations(self, rows: int, columns: int) -> Tensor: ...


class CpuLatentOps(AbsorbedLatentOps):
    """LatentOps of the CPU kernels."""

    def new_latent_up(self: _Table, keys: Tensor, values: Tensor) -> HeadUp:
        up = HeadUp(self.new_head_linear(keys), self.new_head_linear(values))
        if self.is_batch_invariant:
            return up
        return replace(up, expanded_keys=self.new_head_linear(keys.transpose(1, 2)))

    def attend_latent(
        self: _Table,
        q: Tensor,
        latent: Tensor,
        key: Tensor,
        up: LatentUp,
        *,
        batch: AttentionBatch,
        cache: CacheLayer,
        scoring: Scoring,
        norm: RmsNorm | None = None,
        to: PackedLinear | None = None,  # noqa: ARG002 - all matrices take tensors
    ) -> Tensor:
        latent = latent if norm is None else self.rms_norm(latent, norm)
        heads, of = cast(HeadUp, up), cast(CpuBatch, batch)
        num_heads, rotated = heads.keys.num_heads, key.shape[1]
        value = cast(CpuHeads, heads.values).heads[0].out_features
        sizes = Sizes(q.shape[1] // num_heads - rotated, rotated, latent.shape[1], value)
        attend = partial(attend_absorbed, self, cache=cache, scoring=scoring)
        divided = Divided((), None) if heads.expanded_keys is None else _divided(self, of, sizes)
        if not divided.prompts:
            return attend(q, latent, key, heads, batch=of)
        out = torch.empty(q.shape[0], num_heads * value)
        if divided.others is not None:
            index, rest = divided.others
            some = q[index], latent[index], key[index]
            out[index] = attend(*some, heads, batch=rest)
        operands = Operands(heads, sizes, cache, scoring)
        for prompt in divided.prompts:
            own = prompt.rows
            row = torch.cat([key[own], latent[own]], 1).unsqueeze(1)  # [R, 1, p + r]
            split = q[own].view(len(row), num_heads, -1)
            turned = split[..., sizes.plain :].contiguous()
            for x in (row, turned):
                self.rope_(x, of.cos[own], of.sin[own])
            self.write_kv(row, row, cache, of.slots[own])
            queries = torch.zeros(len(row), num_heads, sizes.wide)
            queries[..., :rotated] = turned
            queries[..., rotated : rotated + sizes.plain] = split[..., : sizes.plain]
            _attend_prompt(self, queries, operands, prompt, out[own])
        return out


def _attend_prompt(
    table: _Table, queries: Tensor, operands: Operands, prompt: Prompt, out: Tensor
) -> None:
    """Rotated queries [R, H, wide] attend to the keys and values of a sequence's cached rows, which
    include its own. Writes out [R, H * v]."""
    up, sizes, cache, scoring = operands
    count, num_heads, wide = queries.shape
    rotated, value, end = sizes.rotated, sizes.value, prompt.past + count
    held = decode_rows(cache.keys[prompt.pages].flatten(0, 2)[:end], torch.float32)
    latents = held[:, None, rotated:]  # [T, 1, r]
    starts = torch.tensor([0, count], dtype=torch.int32)
    past = torch.tensor([prompt.past], dtype=torch.int32)
    rows = AttentionRows(torch.zeros(1, 1, dtype=torch.int32), starts, past)
    results = out.view(count, num_heads, value)
    step = min(num_heads, max(1, EXPANDED_BYTES // (8 * end * wide)))
    while num_heads % step:
        step -= 1
    both = torch.zeros(2, 1, step, end, wide)  # one page of keys, one of values
    both[0, 0, ..., :rotated] = held[:, :rotated]
    pages = CacheLayer(both[0], both[1])
    keys, values = both[:, 0].transpose(1, 2)  # [T, heads, wide]
    expansions = (
        (up.expanded_keys, keys[..., rotated : rotated + sizes.plain]),
        (up.values, values[..., :value]),
    )
    for first in range(0, num_heads, step):
        part = slice(first, first + step)
        for matrices, to in expansions:
            some = CpuHeads(cast(CpuHeads, matrices).heads[part])
            table.head_linear(latents.expand(end, step, -1), some, to)
        y = table.paged_attention(queries[:, part], pages, rows, scoring)
        results[:, part] = y.view(count, step, wide)[..., :value]


def _divided(table: _Table, of: CpuBatch, sizes: Sizes) -> Divided:
    """The batch's sequences by form. Kept in the batch: the layers of a pass share it."""
    found = of.divided.get(sizes)
    if found is None:
        found = of.divided[sizes] = _divide(table, of, sizes)
    return cast(Divided, found)


def _divide(table: _Table, of: CpuBatch, sizes: Sizes) -> Divided:
    starts, past = of.rows.row_starts.tolist(), of.rows.past_lens.tolist()
    prompts: list[Prompt] = []
    others, ends = [], [0]
    for seq, held in enumerate(past):
        rows = slice(starts[seq], starts[seq + 1])
        count = rows.stop - rows.start
        if sizes.is_expanded(count, held):
            pages = -(-(held + count) // of.page_size)
            prompts.append(Prompt(rows, held, of.rows.page_table[seq, :pages].long()))
        elif count:
            others.append(seq)
            ends.append(ends[-1] + count)
    if not prompts or not others:
        return Divided(tuple(prompts), None)
    index = torch.cat([torch.arange(starts[seq], starts[seq + 1]) for seq in others])
    kept = torch.tensor(others)
    row_starts = torch.tensor(ends, dtype=torch.int32)
    rest = table.attention_batch(
        AttentionRows(of.rows.page_table[kept], row_starts, of.rows.past_lens[kept]),
        of.slots[index],
        of.cos[index],
        of.sin[index],
        num_pages=of.num_pages,
        page_size=of.page_size,
    )
    return Divided(tuple(prompts), (index, cast(CpuBatch, rest)))
