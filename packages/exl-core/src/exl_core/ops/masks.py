"""Bitmasks: sets of allowed tokens, one bit per token id, as `SamplingOps.sample` expects them.

A mask is int32 [ceil(vocab_size / 32)]. Bit `i % 32` of word `i // 32` is 1 if token i may be
sampled.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

WORD_BITS = 32


def pack(token_ids: Iterable[int], vocab_size: int) -> Tensor:
    """The mask that allows these tokens; ids outside the vocabulary are ignored."""
    wanted = np.fromiter(token_ids, dtype=np.int64)
    flags = np.zeros(-(-vocab_size // WORD_BITS) * WORD_BITS, dtype=np.bool_)
    flags[wanted[(wanted >= 0) & (wanted < vocab_size)]] = True
    return torch.from_numpy(np.packbits(flags, bitorder="little").view("<i4").astype(np.int32))


def unpack(words: Tensor, vocab_size: int) -> Tensor:
    """The tokens that a mask allows: bool [vocab_size]."""
    shifts = torch.arange(WORD_BITS, dtype=torch.int32)
    return ((words[:, None] >> shifts) & 1).flatten()[:vocab_size].bool()
