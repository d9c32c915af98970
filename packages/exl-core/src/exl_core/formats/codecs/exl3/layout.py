"""EXL3: meaning of the tensors of one quantized linear, bit by bit, and their exact values.

A matrix W [I, N] is stored as trellis codes of V = H diag(1 / suh) W diag(1 / svh) H. H has
normalized Hadamard matrices of 128 rows on its diagonal. It is symmetric and its own inverse.

    trellis      int16 [I/16, N/16, 16 * rate]   one ring of 256 * rate bits for each 16 x 16 tile
    suh, svh     fp16  [I], [N]                  scales of inputs and outputs, with signs
    su, sv       int16 [I/16], [N/16]            in old files instead: signs only, a set bit is -1.
                                                 Bit b of word w is feature 16 w + b
    mcg, mul1    int32 []                        the multiplier of the codebook. Neither: 3inst

Ring: bit b is bit 31 - b % 32 of the 32-bit word b // 32, whose low half is stored first. Position
p of 256 adds as many new bits as the rate. For half rates these are the integers below the rate (p
even) and above it (p odd). The state of p is the last 16 bits up to and with its own, first bit
most significant. The first positions continue from the end of the ring, so that any bits are a
valid tile.

Place: position p = 8 t + j is row 2 (t % 4) + j % 2 + 8 (j / 2 % 2), column t / 4 + 8 (j / 4). Rows
are input features.

Value: a 16-bit state s becomes x = s * multiplier (+ addend) modulo 2^32. For mul1 the value is
affine in the sum of the four bytes of x. For the others it is the sum of two float16 numbers, whose
signs, low exponent bits and mantissas are those of the halves of x. Either is rounded to float16.

I and N are multiples of 128; a writer extends the model's matrix by zeros. Knows neither files nor
models. The caller handles the bias.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from exl_core.errors import MissingTensorError, WeightFileError, WeightShapeError
from exl_core.formats.codecs.bits import require_shape, take
from exl_core.formats.codecs.runtime import are_equal, are_finite, check_scales
from exl_core.ops.weights import CODEBOOKS, HADAMARD, TILE, TRELLIS_RATES, Codebook

PARTS = ("trellis", "suh", "svh", "su", "sv", "mcg", "mul1")
POSITIONS = TILE * TILE
STATE_BITS = 16
WORD_BITS = 32
MULTIPLIERS = {"3inst": 89226354, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
ADDEND = 64248484  # of 3inst
CHUNK_VALUES = 1 << 18  # values decoded at a time: 2 MiB as 64-bit words, which stay in the cache


@dataclass(frozen=True, slots=True, eq=False)
class Exl3Linear:
    """Tensors of one layer, as validated by `check`. Signs of old files are scales of 1 and -1."""

    trellis: Tensor
    suh: Tensor
    svh: Tensor
    codebook: Codebook

    @property
    def in_features(self) -> int:
        return self.suh.shape[0]

    @property
    def out_features(self) -> int:
        return self.svh.shape[0]

    @property
    def tile_words(self) -> int:
        return self.trellis.shape[2]

    def to(self, device: torch.device) -> Exl3Linear:
        """The same layer with its tensors on `device`."""
        trellis, suh, svh = (x.to(device) for x in (self.trellis, self.suh, self.svh))
        return Exl3Linear(trellis, suh, svh, self.codebook)


def rate_of(tile_words: int) -> float | None:
    """Bits per weight of tiles with this number of 16-bit words; None if no rate has it."""
    rate = tile_words / TILE
    return rate if rate in TRELLIS_RATES else None


def check(parts: Mapping[str, Tensor], where: object) -> Exl3Linear:
    """Validates the tensors of a layer. Errors name the tensor at fault."""
    trellis = _aligned(take(parts, "trellis", 3, (torch.int16,), where))
    codebook = _codebook(parts, where)
    check_trellis_shape(tuple(trellis.shape), codebook, where)
    rows, columns = (count * TILE for count in trellis.shape[:2])
    suh = _scales(parts, "suh", rows, where)
    svh = _scales(parts, "svh", columns, where)
    return Exl3Linear(trellis, suh, svh, codebook)


def check_alike(layers: Sequence[Mapping[str, Tensor]], where: object) -> list[Exl3Linear] | None:
    """`check` of layers whose tensors have the same names, types and shapes, with joint checks of
    their values. None if one of them needs a check by itself. `where` names the first layer."""
    first, marks = check(layers[0], where), layers[0].keys() & {"mcg", "mul1"}
    if not layers[0].keys() >= {"suh", "svh"}:
        return None
    if not all(are_equal(layers, name) for name in marks) or not are_finite(layers, "suh", "svh"):
        return None
    return [
        Exl3Linear(_aligned(layer["trellis"]), layer["suh"], layer["svh"], first.codebook)
        for layer in layers
    ]


def _aligned(trellis: Tensor) -> Tensor:
    """Files may align tensors to 2 bytes, and 32-bit words are read."""
    return trellis.clone() if trellis.storage_offset() % 2 else trellis


def check_trellis_shape(shape: tuple[int, ...], codebook: Codebook, where: object) -> None:
    """Raises WeightShapeError unless a trellis of this shape has a rate and whole blocks of 128."""
    rate = rate_of(shape[2]) if len(shape) == 3 else None
    if rate is None:
        raise WeightShapeError(
            "tensor 'trellis' has no rate",
            where=where,
            expected="3 dimensions, the last one 16 times "
            + ", ".join(f"{rate:g}" for rate in TRELLIS_RATES),
            got=list(shape),
            next_step="The file looks truncated or was put together from several.",
        )
    if rate != int(rate) and codebook != "mul1":
        raise WeightShapeError(
            f"tensor 'trellis' has a rate that codebook {codebook!r} has not",
            where=where,
            expected="whole bits per weight, or codebook 'mul1'",
            got=f"{rate:g} bits",
        )
    if not all(shape[:2]) or any(count * TILE % HADAMARD for count in shape[:2]):
        raise WeightShapeError(
            "tensor 'trellis' has an impossible shape",
            where=where,
            expected=f"multiples of {HADAMARD // TILE} tiles in both directions",
            got=list(shape),
        )


def codebook_of(names: Mapping[str, object]) -> Codebook:
    """Codebook of a layer with these tensors."""
    return "mcg" if "mcg" in names else "mul1" if "mul1" in names else "3inst"


def _codebook(parts: Mapping[str, Tensor], where: object) -> Codebook:
    marked = [name for name in ("mcg", "mul1") if name in parts]
    if len(marked) > 1:
        raise WeightFileError(
            "the layer has two codebooks", where=where, expected="'mcg' or 'mul1'", got="both"
        )
    codebook = codebook_of(parts)
    for name in marked:
        marker, wanted = parts[name], MULTIPLIERS[name]
        is_number = marker.dtype is torch.int32 and marker.numel() == 1
        got = int(marker) & 0xFFFFFFFF if is_number else f"{marker.dtype} {list(marker.shape)}"
        if got != wanted:
            raise WeightFileError(
                f"tensor {name!r} marks an unknown codebook",
                where=where,
                expected=f"the multiplier {wanted:#x}",
                got=f"{got:#x}" if isinstance(got, int) else got,
                next_step="Use a file that a release of exllamav3 has written.",
            )
    return codebook


def _scales(parts: Mapping[str, Tensor], name: str, count: int, where: object) -> Tensor:
    """Scales of all features, float16. `name` is 'suh' or 'svh'."""
    old, reason = name[:2], f"'trellis' has {count} features here"
    if name in parts:
        scales = take(parts, name, 1, (torch.float16,), where)
        require_shape(scales, name, (count,), reason, where)
        check_scales(scales, name, where)
        return scales
    if old not in parts:
        raise MissingTensorError(
            f"tensor {name!r} is missing",
            where=where,
            expected=f"{name!r}, or {old!r} in old files",
            got=", ".join(sorted(parts)),
            next_step="The file looks truncated or was put together from several.",
        )
    packed = take(parts, old, 1, (torch.int16,), where)
    require_shape(packed, old, (count // TILE,), reason, where)
    bits = packed[:, None].int() >> torch.arange(TILE, dtype=torch.int32) & 1
    return (1 - 2 * bits).flatten().half()


@cache
def codebook_values(codebook: Codebook) -> Tensor:
    """Values of all 65536 states, float16."""
    x = torch.arange(1 << STATE_BITS) * MULTIPLIERS[codebook]
    if codebook == "mul1":
        total = sum(x >> shift & 255 for shift in (0, 8, 16, 24))
        assert isinstance(total, Tensor), "a sum of four tensors"
        # Exact in float64, so that the conversion is the only rounding.
        return ((1024 + total).double() * (1774 / 2**18) - 1329 / 128).half()
    x = (x + (ADDEND if codebook == "3inst" else 0)) & 0x8FFF8FFF ^ 0x3B603B60
    low, high = (
        (x >> shift & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.float16).float()
        for shift in (0, 16)
    )
    return (low + high).half()


def new_bits(rate: float) -> Tensor:
    """New bits of each position, int64 [256]."""
    low = int(rate)
    return low + (torch.arange(POSITIONS) % 2 if rate != low else torch.zeros(POSITIONS).long())


@cache
def tile_places() -> Tensor:
    """Place of each position in its tile, row by row, int64 [256]."""
    p = torch.arange(POSITIONS)
    t, j = p >> 3, p & 7
    rows = 2 * (t & 3) + (j & 1) + 8 * (j >> 1 & 1)
    return rows * TILE + (t >> 2) + 8 * (j >> 2)


def unpack_states(words: Tensor, rate: float) -> Tensor:
    """Words of tiles, int16 [.., 16 * rate] -> states, int64 [.., 256]."""
    ends = new_bits(rate).cumsum(0).to(words.device)  # of the window of each position, in bits
    wide = words.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    last = (ends - 1) // WORD_BITS
    pairs = wide.roll(1, -1) << WORD_BITS | wide  # each word after the one before it in the ring
    shift = (last + 1) * WORD_BITS - ends
    return pairs[..., last] >> shift & 0xFFFF


def pack_states(states: Tensor, rate: float) -> Tensor:
    """Inverse of `unpack_states` for closed rings: only the new bits of each state are read."""
    position, shift, place = _packing(rate, states.device)
    bits = states[..., position] >> shift & 1
    wide = (bits.view(*bits.shape[:-1], -1, WORD_BITS) << place).sum(-1)
    return (wide - (wide >> 31 << 32)).to(torch.int32).view(torch.int16)


@cache
def _packing(rate: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Position of each bit of a ring, its place in the state there, and the places in a word."""
    counts = new_bits(rate)
    position = torch.arange(POSITIONS).repeat_interleave(counts)
    shift = counts.cumsum(0)[position] - 1 - torch.arange(len(position))
    place = torch.arange(WORD_BITS - 1, -1, -1)
    return position.to(device), shift.to(device), place.to(device)


def decode_tiles(trellis: Tensor, codebook: Codebook) -> Tensor:
    """The rotated matrix V, float16 [rows, columns], exact."""
    rows, columns, tile_words = trellis.shape
    rate = rate_of(tile_words)
    assert rate is not None, "checked before"
    values = codebook_values(codebook).to(trellis.device)
    places = tile_places().argsort().to(trellis.device)  # position of each place
    out = torch.empty(rows, TILE, columns, TILE, dtype=torch.float16, device=trellis.device)
    step = max(1, CHUNK_VALUES // (columns * POSITIONS))
    for first in range(0, rows, step):
        states = unpack_states(trellis[first : first + step], rate)
        tiles = values[states[..., places]]
        out[first : first + step] = tiles.view(-1, columns, TILE, TILE).transpose(1, 2)
    return out.view(rows * TILE, columns * TILE)


@cache
def hadamard() -> Tensor:
    """The normalized Hadamard matrix of 128 rows, float64."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < HADAMARD:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / math.sqrt(HADAMARD)


@cache
def _hadamard_like(dtype: torch.dtype, device: torch.device) -> Tensor:
    return hadamard().to(device, dtype)


def rotate(x: Tensor) -> Tensor:
    """H applied to the last dimension, in blocks of 128. Keeps the dtype, float32 or float64."""
    blocks = x.reshape(*x.shape[:-1], -1, HADAMARD)
    rotated: Tensor = (blocks @ _hadamard_like(x.dtype, x.device)).view(x.shape)
    return rotated


def dequantize(linear: Exl3Linear, first: int, last: int) -> Tensor:
    """Columns first .. last - 1, whole blocks of 128, float32 [in_features, last - first].

    Computed in float64 on the device of the tensors, so that the conversion is the only rounding.
    """
    tiles = linear.trellis[:, first // TILE : last // TILE]
    rotated = decode_tiles(tiles, linear.codebook).double()
    rows = rotate(rotated.T) * linear.suh.double()  # [columns, in]
    return (rotate(rows.T) * linear.svh[first:last].double()).float()


assert tuple(MULTIPLIERS) == CODEBOOKS, "one multiplier for each codebook"
