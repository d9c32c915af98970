"""Quantized matrices on a device, packed here in torch from the words of exl/cuda.h alone.

Slow and plain, and independent of the packing kernel: what the kernels read is stated a second
time. So is the layout of prepared inputs.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from exl_core.ops.backends.reference.quantized import PlainQuantized, fill_quantized, new_quantized
from exl_core.ops.quantized import GroupRun, Offset, QuantColumns, QuantLayout
from exl_kernels import cuda

BLOCK_ROWS = 32
UNIT_BLOCKS = 4
STRIP = 32
CHUNK_ROWS = 64
WIDTHS = (2, 3, 4, 5, 6, 8)
# Where the code of each pair begins: word and bit. What comes in pieces is in PIECES.
PLACES = {
    2: "0.0 0.8 1.0 1.8 0.2 0.10 1.2 1.10 0.4 0.12 1.4 1.12 0.6 0.14 1.6 1.14",
    3: "0.0 0.3 1.0 2.0 1.3 1.9 2.3 2.9 0.6 0.9 0.12 1.6 1.12 2.6 2.12",
    4: "0.0 1.0 2.0 3.0 0.4 1.4 2.4 3.4 0.8 1.8 2.8 3.8 0.12 1.12 2.12 3.12",
    5: "0.0 1.0 2.0 3.0 4.0 0.10 1.10 2.10 0.5 1.5 2.5 3.5 4.5 3.10 4.10",
    6: "0.0 1.0 2.0 3.0 4.0 5.0 0.10 1.10 2.10 3.10 4.10 5.10",
    8: "0.0 1.0 2.0 3.0 0.8 1.8 2.8 3.8 4.0 5.0 6.0 7.0 4.8 5.8 6.8 7.8",
}
# Pair, first bit of the code, bits, word and bit.
PIECES = {
    3: [(15, i, 1, i, 15) for i in range(3)],
    5: [(15, i, 1, i, 15) for i in range(5)],
    6: [(12 + i, 0, 2, 4 + i // 2, 6 + i % 2 * 2) for i in range(4)]
    + [(12 + i, 2, 4, i, 6) for i in range(4)],
}
TYPES = {torch.float32: 0, torch.float16: 1}

Runs = Sequence[tuple[int, int, int]]  # bits, groups, rows of each


@dataclass(frozen=True)
class Unit:
    offset: int
    first_block: int
    bits: int
    blocks: int
    group: int


@dataclass(frozen=True)
class Plan:
    """Where a matrix's units lie in a strip, and which stored row each padded row is (-1: none)."""

    units: list[Unit]
    stored_rows: Tensor
    strip_bytes: int


def plan(layout: QuantLayout) -> Plan:
    scale_bytes = 2 if layout.scale_dtype == torch.float16 else 4
    offset_bytes = {"middle": 0, "zeros": 1, "minimums": scale_bytes}[layout.offset]
    header = STRIP * (scale_bytes + offset_bytes)
    units: list[Unit] = []
    rows: list[int] = []
    row = group = 0
    offset = cuda.STRIP_HEAD
    for run in layout.runs:
        for _ in range(run.groups):
            blocks = -(-run.rows // BLOCK_ROWS)
            for first in range(0, blocks, UNIT_BLOCKS):
                count = min(UNIT_BLOCKS, blocks - first)
                at = len(rows) // BLOCK_ROWS + first
                units.append(Unit(offset, at, run.bits, count, group))
                offset += header + count * 128 * run.bits
            rows += [*range(row, row + run.rows)] + [-1] * (blocks * BLOCK_ROWS - run.rows)
            row += run.rows
            group += 1
    return Plan(units, torch.tensor(rows), offset)


def pieces(bits: int) -> list[tuple[int, int, int, int, int]]:
    """Pair, first bit of the code, bits, word and bit of all pieces of a lane's codes."""
    whole = (place.split(".") for place in PLACES[bits].split())
    found = [(pair, 0, bits, int(word), int(bit)) for pair, (word, bit) in enumerate(whole)]
    return found + PIECES.get(bits, [])


def _places() -> tuple[Tensor, Tensor]:
    """Row of the block and column of the strip of [lane, pair, half]."""
    lane = torch.arange(32)[:, None, None]
    pair = torch.arange(16)[None, :, None]
    half = torch.arange(2)[None, None, :]
    g, t = lane // 4, lane % 4
    q, j = pair // 4, pair % 4
    return 8 * t + 2 * j + half, 8 * q + g + 0 * half


def _block(codes: Tensor, bits: int) -> Tensor:
    """codes [strips, lane, pair, half], each below 2^bits -> bytes [strips, 128 * bits]."""
    pairs = codes.long()
    words = torch.zeros(len(codes), 32, bits, dtype=torch.long, device=codes.device)
    for pair, first, count, word, bit in pieces(bits):
        for half in range(2):
            field = pairs[:, :, pair, half] >> first & (1 << count) - 1
            words[:, :, word] |= field << (16 * half + bit)
    most = 2 if bits < 4 else 4
    in_order = torch.cat([words[:, :, :most].flatten(1), words[:, :, most:].flatten(1)], 1)
    as_bytes = in_order[..., None] >> torch.arange(0, 32, 8, device=codes.device) & 0xFF
    return as_bytes.flatten(1).to(torch.uint8)


def _in_tile_order(values: Tensor) -> Tensor:
    """values [strips, 32] of columns -> as a header has them, column c at 4 (c % 8) + c / 8."""
    return values.reshape(-1, 4, 8).transpose(1, 2).reshape(-1, STRIP)


def strip_heads(scales: Tensor, minimums: Tensor | None) -> Tensor:
    """scales, minimums [groups, strips, 32] -> what strips begin with, uint8 [strips, 32]."""
    largest = scales.float().abs().amax(dim=(0, 2))
    if minimums is not None:
        largest = torch.maximum(largest, minimums.float().abs().amax(dim=(0, 2)) / 2**20)
    exponents = largest.clamp(2.0**-100, 2.0**100).log2().floor()
    heads = scales.new_zeros(len(largest), cuda.STRIP_HEAD // 4, dtype=torch.float32)
    heads[:, 0] = torch.exp2(-10 - exponents)
    return heads.view(torch.uint8)


def pack(plain: PlainQuantized) -> tuple[Plan, Tensor]:
    """The plan, and tiles uint8 [strips, strip_bytes]."""
    where = plan(plain.layout)
    device = plain.codes.device
    n = plain.out_features
    strips = -(-n // STRIP)

    def padded(values: Tensor) -> Tensor:  # [rows, n] -> [rows, strips, 32]
        wide = values.new_zeros(values.shape[0], strips * STRIP)
        wide[:, :n] = values
        return wide.reshape(-1, strips, STRIP)

    stored = where.stored_rows.to(device)
    codes = padded(plain.codes)[stored.clamp(min=0)]
    codes[stored < 0] = 0
    scales = padded(plain.scales)
    offsets = None if plain.offsets is None else padded(plain.offsets)
    row, column = (place.to(device) for place in _places())
    parts = [strip_heads(scales, offsets if plain.layout.offset == "minimums" else None)]
    for unit in where.units:
        heads = [scales[unit.group]] + ([] if offsets is None else [offsets[unit.group]])
        parts += [_in_tile_order(head).contiguous().view(torch.uint8) for head in heads]
        for block in range(unit.first_block, unit.first_block + unit.blocks):
            rows = codes[block * BLOCK_ROWS : (block + 1) * BLOCK_ROWS].transpose(0, 1)
            of_lanes = rows[:, row, column]  # [strips, lane, pair, half]
            parts.append(_block(of_lanes, unit.bits))
    tiles = torch.cat(parts, 1)
    assert tiles.shape == (strips, where.strip_bytes)
    return where, tiles


def run_table(layout: QuantLayout, where: Plan) -> Tensor:
    rows = []
    unit = 0
    for run in layout.runs:
        first = where.units[unit]
        group_units = -(-run.rows // (BLOCK_ROWS * UNIT_BLOCKS))
        last = where.units[unit + group_units - 1].blocks
        rows.append(
            struct.pack(
                "<IIHHBBH", unit, first.offset, first.first_block, group_units, run.bits, last, 0
            )
        )
        unit += run.groups * group_units
    return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)


def unit_table(units: Sequence[Unit]) -> Tensor:
    rows = (
        struct.pack("<IHBBI", u.offset, u.first_block, u.bits, u.blocks, u.group) for u in units
    )
    return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)


@dataclass
class DeviceMatrix:
    """A packed matrix on the device; keeps what its struct points to."""

    tiles: Tensor
    units: Tensor
    runs: tuple[Tensor, Tensor]  # here and on the device
    order: Tensor
    bias: Tensor | None
    struct: cuda.QuantMatrix = field(repr=False)

    @property
    def num_blocks(self) -> int:
        return self.order.numel() // BLOCK_ROWS


def on_device(
    layout: QuantLayout, where: Plan, tiles: Tensor, bias: Tensor | None = None
) -> DeviceMatrix:
    features = layout.features
    if features is None:
        features = torch.arange(layout.in_features, dtype=torch.int32)
    order = features.cpu()[where.stored_rows.clamp(min=0)]
    order[where.stored_rows < 0] = -1
    device = tiles.device
    units = unit_table(where.units).to(device)
    runs = run_table(layout, where)
    device_runs = runs.to(device)
    order = order.to(device, torch.int32)
    described = cuda.QuantMatrix(
        tiles.data_ptr(),
        units.data_ptr(),
        runs.data_ptr(),
        device_runs.data_ptr(),
        order.data_ptr(),
        None if bias is None else bias.data_ptr(),
        where.strip_bytes,
        layout.out_features,
        layout.in_features,
        len(where.units),
        order.numel() // BLOCK_ROWS,
        len(layout.runs),
        TYPES[layout.scale_dtype],
        cuda.OFFSETS[layout.offset],
    )
    return DeviceMatrix(tiles, units, (runs, device_runs), order, bias, described)


def random_plain(
    seed: int,
    runs: Runs,
    n: int,
    *,
    offset: Offset = "middle",
    scale_dtype: torch.dtype = torch.float16,
    is_shuffled: bool = True,
    has_bias: bool = False,
    device: str = "cuda",
) -> PlainQuantized:
    """Random codes, scales of weights near 1 / sqrt(k), and what the layout has beside them."""
    rng = torch.Generator().manual_seed(seed)
    layout_runs = tuple(GroupRun(*run) for run in runs)
    k = sum(run.groups * run.rows for run in layout_runs)
    features = torch.randperm(k, generator=rng).int() if is_shuffled else None
    layout = QuantLayout(n, k, layout_runs, features, scale_dtype, offset, has_bias)
    plain = new_quantized(layout)
    steps = [2.0**run.bits for run in layout_runs for _ in range(run.groups)]
    step = torch.tensor(steps)[:, None]
    spread = 0.5 + torch.rand(layout.num_groups, n, generator=rng)
    scales = (spread * 4 / step / k**0.5).to(scale_dtype)
    offsets = None
    if offset == "zeros":
        offsets = (torch.rand(layout.num_groups, n, generator=rng) * step).to(torch.uint8)
    elif offset == "minimums":
        offsets = (-torch.rand(layout.num_groups, n, generator=rng) * 4 / k**0.5).to(scale_dtype)
    codes = torch.randint(0, 256, (k, n), generator=rng, dtype=torch.uint8)
    codes = codes & (2 ** plain.row_bits[:, None] - 1).to(torch.uint8)
    bias = torch.randn(n, generator=rng) if has_bias else None
    columns = QuantColumns("bytes", codes, scales=scales, offsets=offsets, bias=bias)
    fill_quantized(plain, 0, columns)
    return replace(
        plain,
        row_bits=plain.row_bits.to(device),
        row_groups=plain.row_groups.to(device),
        codes=plain.codes.to(device),
        scales=plain.scales.to(device),
        offsets=None if plain.offsets is None else plain.offsets.to(device),
        bias=None if plain.bias is None else plain.bias.to(device),
    )


def packed(plain: PlainQuantized) -> DeviceMatrix:
    """Where the plain matrix is."""
    where, tiles = pack(plain)
    return on_device(plain.layout, where, tiles, plain.bias)


def prepare(x: Tensor, order: Tensor) -> Tensor:
    """x [m, k] -> inputs as the kernels for few rows read them: float16, flat, in chunks."""
    gathered = x.half()[:, order.long().clamp(min=0)]  # [m, 32 * blocks]
    gathered[:, order < 0] = 0
    return torch.cat([prepared_chunk(chunk) for chunk in gathered.split(CHUNK_ROWS)])


def prepared_chunk(rows: Tensor) -> Tensor:
    """rows [m, 32 * blocks] in a matrix's order, m up to 64 -> flat, as cuda.h has a chunk."""
    m, padded_k = rows.shape
    if m == 1:
        return rows.flatten()
    padded_m = next(count for count in (8, 16, 32, 64) if count >= m)
    blocks = padded_k // BLOCK_ROWS
    full = rows.new_zeros(padded_m, padded_k)
    full[:m] = rows
    if padded_m > 8 and torch.cuda.get_device_capability() == (9, 0):
        # block, 8 t + 4 s + 2 h + e -> block, 2 s + h, row, 2 t + e
        split = full.reshape(padded_m, blocks, 4, 4, 2)
        return split.permute(1, 3, 0, 2, 4).flatten()
    return full.reshape(padded_m, blocks, BLOCK_ROWS).transpose(0, 1).flatten()
