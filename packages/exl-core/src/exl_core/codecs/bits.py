"""Small integers packed into 32-bit words, and taking a layer's tensors out of a mapping.

EXL2 and GPTQ pack alike: the codes of one column, one after the other and lowest bits first, are
one stream of bits, cut into 32-bit words that lie below each other. Where the width does not
divide 32, a code may continue in the next word. What the codes mean is their codecs' business.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from exl_core.errors import MissingTensorError, WeightFileError, WeightShapeError

WORD_BITS = 32


class _Field(NamedTuple):
    """Where one code of a block lies."""

    word: int
    shift: int
    bits_here: int  # the rest is at the bottom of the next word


class _Block(NamedTuple):
    """The pattern that repeats down a column: as few whole words as hold whole codes."""

    words: int
    fields: tuple[_Field, ...]


@cache
def _block(bits: int) -> _Block:
    count = WORD_BITS // gcd(WORD_BITS, bits)
    places = (divmod(bits * i, WORD_BITS) for i in range(count))
    fields = (_Field(word, shift, min(bits, WORD_BITS - shift)) for word, shift in places)
    return _Block(bits * count // WORD_BITS, tuple(fields))


def words_per_block(bits: int) -> int:
    """A column of packed codes is a multiple of this many words."""
    return _block(bits).words


def codes_per_block(bits: int) -> int:
    """A column of packed codes is a multiple of this many codes."""
    return len(_block(bits).fields)


def unpack(words: Tensor, bits: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Codes [rows, n] of packed words, int32 [rows * bits / 32, n]."""
    block = _block(bits)
    blocks, columns = words.shape[0] // block.words, words.shape[1]
    assert blocks * block.words == words.shape[0], "a block was cut"
    source = words.reshape(blocks, block.words, columns)
    shape = blocks, len(block.fields), columns
    codes = torch.empty(shape, dtype=dtype, device=words.device)
    for i, (word, shift, bits_here) in enumerate(block.fields):
        # The shift drags the sign along; the mask drops it again.
        code = (source[:, word] >> shift).bitwise_and_((1 << bits_here) - 1)
        if bits_here < bits:
            rest = source[:, word + 1] & ((1 << (bits - bits_here)) - 1)
            code |= rest.bitwise_left_shift_(bits_here)
        codes[:, i] = code
    return codes.view(-1, columns)


def pack(codes: Tensor, bits: int) -> Tensor:
    """The inverse of `unpack`: int32 words of codes in 0 .. 2^bits - 1, [rows, n]."""
    block = _block(bits)
    blocks, columns = codes.shape[0] // len(block.fields), codes.shape[1]
    assert blocks * len(block.fields) == codes.shape[0], "a block was cut"
    source = codes.to(torch.int32).reshape(blocks, len(block.fields), columns)
    words = torch.zeros(blocks, block.words, columns, dtype=torch.int32)
    for i, (word, shift, bits_here) in enumerate(block.fields):
        words[:, word] |= source[:, i] << shift  # what does not fit falls off the top
        if bits_here < bits:
            words[:, word + 1] |= source[:, i] >> bits_here
    return words.view(-1, columns)


def take(
    parts: Mapping[str, Tensor],
    name: str,
    rank: int,
    dtypes: tuple[torch.dtype, ...],
    where: object,
) -> Tensor:
    """Tensor `name` of a layer: present, not empty, of one of `dtypes` and of this rank."""
    tensor = parts.get(name)
    if tensor is None:
        raise MissingTensorError(
            f"tensor {name!r} is missing",
            where=where,
            got=", ".join(sorted(parts)) or "no tensors",
            next_step="The file looks truncated or was put together from several.",
        )
    if tensor.dtype not in dtypes:
        raise WeightFileError(
            f"tensor {name!r} has another type of element than its format",
            where=where,
            expected=" or ".join(str(dtype) for dtype in dtypes),
            got=tensor.dtype,
        )
    if tensor.dim() != rank or tensor.numel() == 0:
        raise WeightShapeError(
            f"tensor {name!r} has an impossible shape",
            where=where,
            expected=f"{rank} dimensions, none of them 0",
            got=tuple(tensor.shape),
        )
    return tensor.contiguous()


def require_shape(
    tensor: Tensor, name: str, expected: tuple[int, ...], reason: str, where: object
) -> None:
    """Refuse a shape that contradicts the layer's other tensors."""
    if tuple(tensor.shape) != expected:
        raise WeightShapeError(
            f"tensor {name!r} does not go with the others: {reason}",
            where=where,
            expected=expected,
            got=tuple(tensor.shape),
            next_step="The file looks truncated or was put together from several.",
        )
