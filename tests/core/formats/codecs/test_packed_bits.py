"""Packing of codes into words: fixed vectors of the format, and a slow independent packer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exl_core.formats.codecs import bits as bitstream
from support.profiles import examples
from support.quantized import as_int32, pack_columns

WIDTHS = (2, 3, 4, 5, 6, 8)

# Packed words of the codes (7 i + 3) mod 2^bits, i = 0 .. 31, in one column.
VECTORS = {
    2: "1B1B1B1B 1B1B1B1B",
    3: "53977053 70539770 97705397",
    4: "4D6F81A3 C5E7092B 4D6F81A3 C5E7092B",
    5: "4DFC4543 78245BA3 0753617D 4B276CF4 E55C7066",
    6: "9F611283 90BBD2D9 B2579740 8F201EB3 9CAB91D5 71538703",
    8: "18110A03 342D261F 5049423B 6C655E57 88817A73 A49D968F C0B9B2AB DCD5CEC7",
}


@pytest.mark.parametrize("bits", WIDTHS)
def test_words_match_the_format(bits: int) -> None:
    codes = ((7 * torch.arange(32) + 3) % 2**bits).to(torch.uint8)[:, None]
    words = as_int32(np.array([int(word, 16) for word in VECTORS[bits].split()]))[:, None]

    assert torch.equal(bitstream.pack(codes, bits), words)
    assert torch.equal(bitstream.unpack(words, bits), codes)


@pytest.mark.parametrize(
    ("bits", "straddling"),
    [
        (2, []),
        (3, [10, 21]),
        (4, []),
        (5, [6, 12, 19, 25]),
        (6, [5, 10]),
        (8, []),
    ],
)
def test_each_code_occupies_one_word_or_straddles_two(bits: int, straddling: list[int]) -> None:
    period = bitstream.codes_per_block(bits)
    codes = torch.eye(period, dtype=torch.int32) * (2**bits - 1)  # column i: only code i
    words = bitstream.pack(codes, bits)
    used = (words != 0).sum(0)
    assert used.tolist() == [2 if i in straddling else 1 for i in range(period)]
    assert torch.equal(bitstream.unpack(words, bits, torch.int32), codes)


@settings(max_examples=examples(60))
@given(
    bits=st.sampled_from(WIDTHS),
    blocks=st.integers(1, 5),
    columns=st.sampled_from([1, 3, 8, 17]),
    seed=st.integers(0, 2**32 - 1),
)
def test_packing_matches_one_long_integer(bits: int, blocks: int, columns: int, seed: int) -> None:
    rows = blocks * bitstream.codes_per_block(bits)
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, columns))
    words = as_int32(pack_columns(codes, bits))

    assert torch.equal(bitstream.pack(torch.from_numpy(codes), bits), words)
    for dtype in (torch.uint8, torch.float32):
        unpacked = bitstream.unpack(words, bits, dtype)
        assert torch.equal(unpacked, torch.from_numpy(codes).to(dtype))


def test_noncontiguous_views_are_unpacked_correctly() -> None:
    words = as_int32(np.random.default_rng(1).integers(0, 2**32, (12, 40)))
    view = words.T[8:24]
    assert not view.is_contiguous()
    assert torch.equal(bitstream.unpack(view, 4), bitstream.unpack(view.contiguous(), 4))
