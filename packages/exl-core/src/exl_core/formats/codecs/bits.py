"""Codes packed into 32-bit words, and checked access to the tensors of one layer.

EXL2 and GPTQ pack alike. The codes of one column, lowest bits first, form one stream of bits, which
is cut into 32-bit words below each other. If the width does not divide 32, a code may continue in
the next word. The meaning of the codes belongs to the codecs.
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
    """Position of one code within a block."""

    word: int
    shift: int
    bits_here: int  # the other bits are the lowest of the next word


class _Block(NamedTuple):
    """Repeating pattern of a column: the smallest number of words that holds only whole codes."""

    words: int
    fields: tuple[_Field, ...]


@cache
def _block(bits: int) -> _Block:
    count = WORD_BITS // gcd(WORD_BITS, bits)
    starts = (divmod(bits * i, WORD_BITS) for i in range(count))
    fields = (_Field(word, shift, min(bits, WORD_BITS - shift)) for word, shift in starts)
    return _Block(bits * count // WORD_BITS, tuple(fields))


def words_per_block(bits: int) -> int:
    """Words per block; the length of a packed column is a multiple of it."""
    return _block(bits).words


def codes_per_block(bits: int) -> int:
    """Codes per block; the length of an unpacked column is a multiple of it."""
    return len(_block(bits).fields)


def unpack(words: Tensor, bits: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Codes [rows, n] from packed words, int32 [rows * bits / 32, n]."""
    block = _block(bits)
    blocks, columns = words.shape[0] // block.words, words.shape[1]
    assert blocks * block.words == words.shape[0], "incomplete block"
    source = words.reshape(blocks, block.words, columns)
    shape = blocks, len(block.fields), columns
    codes = torch.empty(shape, dtype=dtype, device=words.device)
    for i, (word, shift, bits_here) in enumerate(block.fields):
        # The right shift extends the sign; the mask removes it.
        code = (source[:, word] >> shift).bitwise_and_((1 << bits_here) - 1)
        if bits_here < bits:
            rest = source[:, word + 1] & ((1 << (bits - bits_here)) - 1)
            code |= rest.bitwise_left_shift_(bits_here)
        codes[:, i] = code
    return codes.view(-1, columns)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Inverse of `unpack`: packs codes [rows, n] in 0 .. 2^bits - 1 into int32 words."""
    block = _block(bits)
    blocks, columns = codes.shape[0] // len(block.fields), codes.shape[1]
    assert blocks * len(block.fields) == codes.shape[0], "incomplete block"
    source = codes.to(torch.int32).reshape(blocks, len(block.fields), columns)
    words = torch.zeros(blocks, block.words, columns, dtype=torch.int32)
    for i, (word, shift, bits_here) in enumerate(block.fields):
        words[:, word] |= source[:, i] << shift  # bits beyond the word are shifted out
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
    """Tensor `name` of a layer, checked: present, not empty, of one of `dtypes` and of this
    rank."""
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
    """Raises WeightShapeError for a shape that contradicts the layer's other tensors."""
    if tuple(tensor.shape) != expected:
        raise WeightShapeError(
            f"tensor {name!r} does not go with the others: {reason}",
            where=where,
            expected=expected,
            got=tuple(tensor.shape),
            next_step="The file looks truncated or was put together from several.",
        )
