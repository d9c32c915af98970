"""EXL2: meaning of the tensors of one quantized linear, bit by bit, and their exact values.

A matrix [in_features, out_features] is stored with its rows permuted: `q_invperm[k]` is the stored
row of feature k. Runs of stored rows form groups, those with the widest codes first. Each group has
a bit width, a largest scale and a 4-bit scale code per column:

    q_weight     int32 [R, N]     codes, packed down each column (`bits.py`), group after group
    q_scale      int32 [G, N/8]   scale codes, 8 columns per word
    q_scale_max  fp16  [G]        scale of code 15
    q_groups     int16 [2G]       pairs (bits, first row in q_weight)
    q_invperm    int32 [K]

Knows neither files nor models. The caller handles the bias, and `q_perm`, which some files have in
addition and which is redundant. The kernels' layout of the weights is not defined here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from exl_core.errors import WeightFileError, WeightShapeError, WeightValueError
from exl_core.formats.codecs import bits as bitstream
from exl_core.formats.codecs.runtime import Move, are_equal, are_finite, stay

PARTS = ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm")
WIDTHS = (2, 3, 4, 5, 6, 8)
ROW_STEP = 32  # groups begin at multiples of it; 32 rows of b-bit codes take b words
COLUMN_STEP = 32  # writers pad out_features to a multiple of it
SCALE_BITS = 4
MAX_IN_FEATURES = 65536  # the reference reader stores the permutation in 16 bits
LARGEST_FP16 = 65504.0
CHUNK_VALUES = 1 << 19  # values unpacked at a time: 2 MiB as float32, which a CPU cache can hold


class Exl2Group(NamedTuple):
    """Consecutive stored rows with codes of one width, and one scale per column."""

    bits: int
    first_packed_row: int
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class Exl2Linear:
    """Tensors of one layer, as validated by `check`."""

    q_weight: Tensor
    q_scale: Tensor
    q_scale_max: Tensor
    q_groups: Tensor
    q_invperm: Tensor

    @property
    def in_features(self) -> int:
        return self.q_invperm.shape[0]

    @property
    def out_features(self) -> int:
        """Stored number of columns, including the writer's padding."""
        return self.q_weight.shape[1]

    @property
    def size_bytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in PARTS)

    @property
    def bits_per_weight(self) -> float:
        return self.size_bytes * 8 / (self.in_features * self.out_features)

    @property
    def groups(self) -> tuple[Exl2Group, ...]:
        return _groups(self.q_groups, self.q_weight.shape[0])


def _groups(q_groups: Tensor, packed_rows: int) -> tuple[Exl2Group, ...]:
    return _groups_of(tuple(q_groups.tolist()), packed_rows)


@lru_cache(maxsize=1024)  # a model has hundreds of matrices, but few distinct tables
def _groups_of(table: tuple[int, ...], packed_rows: int) -> tuple[Exl2Group, ...]:
    widths, starts = table[::2], table[1::2]
    ends = (*starts[1:], packed_rows)
    return tuple(
        Exl2Group(bits, start, (end - start) * 32 // bits)
        for bits, start, end in zip(widths, starts, ends, strict=True)
    )


def read_groups(q_groups: Tensor, packed_rows: int, where: object) -> tuple[Exl2Group, ...]:
    """Groups from the group table, with the checks that need no other tensor.

    `packed_rows` is the number of rows of `q_weight`.
    """
    is_list = q_groups.dtype is torch.int16 and q_groups.dim() == 1
    if not is_list or not q_groups.numel() or q_groups.numel() % 2:
        raise WeightShapeError(
            "tensor 'q_groups' is no list of pairs",
            where=where,
            expected="int16, one dimension, an even number",
            got=f"{q_groups.dtype} {list(q_groups.shape)}",
        )
    _check_group_table(q_groups, packed_rows, where)
    return _groups(q_groups, packed_rows)


def check(parts: Mapping[str, Tensor], where: object) -> Exl2Linear:
    """Validates the tensors of a layer. Errors name the tensor at fault."""
    linear = Exl2Linear(
        q_weight=bitstream.take(parts, "q_weight", 2, (torch.int32,), where),
        q_scale=bitstream.take(parts, "q_scale", 2, (torch.int32,), where),
        q_scale_max=bitstream.take(parts, "q_scale_max", 1, (torch.float16,), where),
        q_groups=bitstream.take(parts, "q_groups", 1, (torch.int16,), where),
        q_invperm=bitstream.take(parts, "q_invperm", 1, (torch.int32,), where),
    )
    columns = linear.out_features
    if columns % COLUMN_STEP:
        raise WeightShapeError(
            "tensor 'q_weight' has an impossible number of columns",
            where=where,
            expected=f"a multiple of {COLUMN_STEP}",
            got=columns,
        )
    count = linear.q_scale.shape[0]
    shape, reason = (count, columns // 8), f"'q_weight' has {columns} columns"
    bitstream.require_shape(linear.q_scale, "q_scale", shape, reason, where)
    reason = f"'q_scale' has {count} groups"
    bitstream.require_shape(linear.q_scale_max, "q_scale_max", (count,), reason, where)
    bitstream.require_shape(linear.q_groups, "q_groups", (2 * count,), reason, where)
    _check_group_table(linear.q_groups, linear.q_weight.shape[0], where)
    _check_group_sizes(linear, where)
    _check_permutation(linear.q_invperm, where)
    _check_scales(linear, where)
    return linear


def check_alike(layers: Sequence[Mapping[str, Tensor]], where: object) -> list[Exl2Linear] | None:
    """`check` of layers whose tensors have the same names, types and shapes, with joint checks of
    their values. None if one of them needs a check by itself. `where` names the first layer."""
    first = check(layers[0], where)
    largest = torch.stack([layer["q_scale_max"] for layer in layers])
    if not are_equal(layers, "q_groups") or not are_finite(layers, "q_scale_max"):
        return None
    if bool((largest < 0).any()) or _may_overflow(first, 1.0, largest.amax(0).tolist()):
        return None
    orders = torch.stack([layer["q_invperm"] for layer in layers])
    if int(orders.min()) < 0 or int(orders.max()) >= orders.shape[1]:
        return None
    if not torch.zeros(orders.shape, dtype=torch.bool).scatter_(1, orders.long(), True).all():
        return None
    return [Exl2Linear(*(layer[name] for name in PARTS)) for layer in layers]


def _check_group_table(q_groups: Tensor, packed_rows: int, where: object) -> None:
    """Checks each width and offset by itself, and their order."""
    table = tuple(q_groups.tolist())
    if not _is_possible(table, packed_rows):
        _check_table(table, packed_rows, where)


@lru_cache(maxsize=1024)
def _is_possible(table: tuple[int, ...], packed_rows: int) -> bool:
    """Whether `_check_table` accepts a group table, which most matrices share with others."""
    try:
        _check_table(table, packed_rows, None)
    except WeightFileError:
        return False
    return True


def _check_table(entries: tuple[int, ...], packed_rows: int, where: object) -> None:
    """Raises for an impossible entry of a group table."""

    def error(index: int, expected: str, got: object) -> WeightFileError:
        what = f"tensor 'q_groups', group {index}: impossible entry"
        return WeightFileError(what, where=where, expected=expected, got=got)

    table = list(zip(entries[::2], entries[1::2], strict=True))
    for index, (bits, start) in enumerate(table):
        if bits not in WIDTHS:
            raise error(index, f"a width of {', '.join(map(str, WIDTHS))}", f"{bits} bits")
        if index == 0 and start != 0:
            raise error(index, "its first row in 'q_weight' to be 0", start)
    ends = [*table[1:], (WIDTHS[0], packed_rows)]
    for index, ((bits, start), (next_bits, end)) in enumerate(zip(table, ends, strict=True)):
        if next_bits > bits:
            raise error(index + 1, f"at most {bits} bits, as the group before", f"{next_bits} bits")
        if end <= start:
            raise error(index, f"a first row below {end}, where it ends", start)
        if (end - start) % bits:  # 32 rows of weights take `bits` rows of words
            raise error(index, f"a multiple of {bits} rows in 'q_weight'", end - start)


def _check_group_sizes(linear: Exl2Linear, where: object) -> None:
    """Checks group sizes, which follow from the offsets: a wrong offset gives an irregular size.

    Writers use one size for all groups of a width, a power of two. Only the matrix's last group may
    be shorter. These rules detect any single wrong offset.
    """
    groups = linear.groups
    size: dict[int, int] = {}
    for index, group in enumerate(groups):
        usual = size.setdefault(group.bits, group.rows)
        is_last = index == len(groups) - 1
        if group.rows > usual or (group.rows < usual and not is_last):
            expected = f"{usual} rows, as other groups of {group.bits} bits"
        elif group.rows & (group.rows - 1) and not is_last:
            expected = "a power of two of rows"
        else:
            continue
        raise WeightFileError(
            f"tensor 'q_groups', group {index}: impossible size",
            where=where,
            expected=expected,
            got=f"{group.rows} rows",
        )
    rows = sum(group.rows for group in groups)
    if rows > MAX_IN_FEATURES:
        raise WeightShapeError(
            "tensor 'q_groups' lists too many rows",
            where=where,
            expected=f"at most {MAX_IN_FEATURES}",
            got=rows,
        )
    reason = f"the groups have {rows} rows in all"
    bitstream.require_shape(linear.q_invperm, "q_invperm", (rows,), reason, where)


def _check_permutation(invperm: Tensor, where: object) -> None:
    rows = invperm.shape[0]
    for feature in (int(invperm.argmin()), int(invperm.argmax())):
        if not 0 <= int(invperm[feature]) < rows:
            raise WeightFileError(
                f"tensor 'q_invperm' gives feature {feature} a row that does not exist",
                where=where,
                expected=f"0 to {rows - 1}",
                got=int(invperm[feature]),
            )
    uses = torch.bincount(invperm, minlength=rows)
    if int(uses.max()) > 1:
        row = int(uses.argmax())
        raise WeightFileError(
            "tensor 'q_invperm' is not a permutation",
            where=where,
            expected="every row once",
            got=f"row {row} for features {(invperm == row).nonzero().flatten().tolist()[:4]}",
        )


def _check_scales(linear: Exl2Linear, where: object) -> None:
    usable = linear.q_scale_max.isfinite() & (linear.q_scale_max >= 0)
    if not usable.all():
        group = int(usable.int().argmin())
        raise WeightValueError(
            f"tensor 'q_scale_max' has no usable value for group {group}",
            where=where,
            expected="a finite number, not below 0",
            got=float(linear.q_scale_max[group]),
        )
    if _may_overflow(linear, 1.0, linear.q_scale_max.tolist()):
        dequantize(linear, where=where)


def _may_overflow(linear: Exl2Linear, prescale: float, scales: Sequence[float]) -> bool:
    """Whether a weight could exceed float16 if its codes were the extreme ones. `scales` are the
    largest ones of each group."""
    largest = max(
        scale * 2 ** (group.bits - 1) for scale, group in zip(scales, linear.groups, strict=True)
    )
    return (
        not largest * abs(prescale) * 1.01 < LARGEST_FP16
    )  # 1.01: margin for two roundings of the scales


def unpack_scales(linear: Exl2Linear, *, prescale: float = 1.0, move: Move = stay) -> Tensor:
    """Exact scales, float16 [groups, out_features], on the device to which `move` copies the codes.

    There are two roundings to float16, the first often to a subnormal; their order is part of the
    format. A group has only 16 distinct scales, so they are looked up in a table: each byte of
    codes selects a pair of scales, stored as one word. On a GPU that takes two kernels, and each
    additional kernel would take time to load.
    """
    factor = torch.tensor(prescale / 256, dtype=torch.float32)
    step = (linear.q_scale_max.float() * factor).half()  # [G]
    squares = torch.arange(1, 17).float().square()  # exact
    scales = (step.float()[:, None] * squares).half()  # [G, 16]
    # The low half of a byte is the code of the first of its two columns, so it varies fastest.
    first, second = scales[:, None, :].expand(-1, 16, 16), scales[:, :, None].expand(-1, 16, 16)
    pairs = torch.stack([first, second], -1).flatten(1)  # [G, 256 * 2]
    codes = move(linear.q_scale).view(torch.uint8)  # [G, N / 2]
    return move(pairs.view(torch.int32)).gather(1, codes.long()).view(torch.float16)


def unpack_joint_scales(
    linears: Sequence[Exl2Linear], prescale: float, move: Move
) -> tuple[Tensor, ...]:
    """`unpack_scales` of layers with the same number of columns, as if their groups were those of
    one layer."""
    first = linears[0]
    joint = Exl2Linear(
        first.q_weight,
        torch.cat([linear.q_scale for linear in linears]),
        torch.cat([linear.q_scale_max for linear in linears]),
        first.q_groups,
        first.q_invperm,
    )
    scales = unpack_scales(joint, prescale=prescale, move=move)
    return torch.split(scales, [linear.q_scale.shape[0] for linear in linears])


class _Run(NamedTuple):
    """Consecutive groups of one width: one contiguous range of the bit stream."""

    bits: int
    first_packed_row: int
    first_row: int
    rows: int


def _runs(groups: tuple[Exl2Group, ...]) -> Iterator[_Run]:
    row = 0
    for bits, members in groupby(groups, key=lambda group: group.bits):
        run = list(members)
        rows = sum(group.rows for group in run)
        yield _Run(bits, run[0].first_packed_row, row, rows)
        row += rows


def _chunks(linear: Exl2Linear) -> Iterator[tuple[slice, int, Tensor]]:
    """Iterates over (stored rows, bit width, packed words) in chunks of about CHUNK_VALUES
    values."""
    step = max(CHUNK_VALUES // linear.out_features // ROW_STEP, 1) * ROW_STEP
    for run in _runs(linear.groups):
        for start in range(0, run.rows, step):
            rows = min(step, run.rows - start)
            word = run.first_packed_row + start * run.bits // 32
            words = linear.q_weight[word : word + rows * run.bits // 32]
            yield slice(run.first_row + start, run.first_row + start + rows), run.bits, words


def unpack_codes(linear: Exl2Linear) -> Tensor:
    """Codes in the order of the stored rows, uint8 [in_features, out_features]."""
    codes = torch.empty(linear.in_features, linear.out_features, dtype=torch.uint8)
    for rows, bits, words in _chunks(linear):
        codes[rows] = bitstream.unpack(words, bits)
    return codes


def dequantize(linear: Exl2Linear, *, prescale: float = 1.0, where: object = None) -> Tensor:
    """Exact weights, float16 [in_features, out_features], with the permutation undone.

    `prescale` is a constant factor that a few architectures apply to a layer. The format applies it
    to the scales before they are rounded.
    """
    if not math.isfinite(prescale):
        raise ValueError(f"prescale is {prescale}")
    scales = unpack_scales(linear, prescale=prescale)
    block_counts = torch.tensor([group.rows // ROW_STEP for group in linear.groups])
    group_of_block = torch.arange(len(block_counts)).repeat_interleave(block_counts)
    permutation = linear.q_invperm.argsort()  # feature of each stored row
    weight = torch.empty(linear.in_features, linear.out_features, dtype=torch.float16)
    for rows, bits, words in _chunks(linear):
        # An integer times a float16 is exact in float32, so the only rounding is the last step.
        values = bitstream.unpack(words, bits, torch.float32).sub_(2 ** (bits - 1))
        groups = group_of_block[rows.start // ROW_STEP : rows.stop // ROW_STEP]
        blocks = values.view(len(groups), ROW_STEP, -1)
        blocks.mul_(scales[groups].float()[:, None])
        weight[permutation[rows]] = values.half()
    if _may_overflow(linear, prescale, linear.q_scale_max.tolist()) and not weight.isfinite().all():
        raise WeightValueError(
            "tensor 'q_scale_max' makes weights too large for float16",
            where=where,
            expected=f"weights up to {LARGEST_FP16:.0f}",
            got=f"a scale of {float(linear.q_scale_max.max()):g}",
        )
    return weight
