"""Vocabulary: bytes of tokens and bitmasks, compared with their definitions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exl_core.constrain.vocabulary import SortedTokens, Vocabulary
from support.constraints import made_tokenizer
from support.profiles import examples
from support.scripted import BOS_ID, EOS_ID, ByteTokenizer


def test_special_tokens_gaps_and_padding_have_no_bytes() -> None:
    tokenizer = made_tokenizer()
    vocabulary = Vocabulary(tokenizer, 333)
    assert len(vocabulary.token_bytes) == tokenizer.vocab_size
    assert vocabulary.token_bytes[ord("a")] == b"a"
    for silent in (256, 257, tokenizer.eos_ids[0]):
        assert vocabulary.token_bytes[silent] == b""
    everything = vocabulary.ids_of(vocabulary.everything())
    assert everything == [i for i in range(tokenizer.vocab_size) if tokenizer.has_token(i)]
    assert 256 not in everything
    assert max(everything) < tokenizer.vocab_size < 333


def test_tokens_beyond_the_vocabulary_of_the_model_are_in_no_mask() -> None:
    vocabulary = Vocabulary(ByteTokenizer(), 100)
    assert vocabulary.num_words == 4
    assert vocabulary.ids_of(vocabulary.mask_of([99, 100, -1, 3])) == [3, 99]
    assert vocabulary.eos_ids == ()


@pytest.mark.parametrize("size", [258, 288, 289, 320])
def test_bits_match_the_layout_that_the_sampler_reads(size: int) -> None:
    vocabulary = Vocabulary(ByteTokenizer(), size)
    mask = vocabulary.mask_of([0, 31, 32, 63, BOS_ID, EOS_ID])
    assert mask.dtype == torch.int32
    assert mask.shape == (-(-size // 32),)
    words = [word & 0xFFFFFFFF for word in mask.tolist()]
    assert words[:2] == [1 | 1 << 31, 1 | 1 << 31]
    assert words[8] == 0b11


@given(st.lists(st.binary(max_size=3)), st.binary(max_size=3))
@settings(max_examples=examples(200))
def test_sorted_tokens_agree_with_a_scan(tokens: list[bytes], prefix: bytes) -> None:
    found = SortedTokens(tokens)
    starting = [i for i, t in enumerate(tokens) if t and t.startswith(prefix)]
    assert sorted(found.starting_with(prefix)) == starting
    assert found.has_prefix(prefix) == bool(starting)
    assert found.exactly(prefix) == [i for i, t in enumerate(tokens) if t and t == prefix]


@pytest.mark.parametrize("prefix", [b"", b"a", b"ab", b"\xff", b"\xff\xff", b"\xc3", b"abcd"])
def test_starting_with_finds_every_token_with_the_prefix(
    vocabulary: Vocabulary, prefix: bytes
) -> None:
    expected = [i for i, t in enumerate(vocabulary.token_bytes) if t and t.startswith(prefix)]
    assert vocabulary.ids_of(vocabulary.starting_with(prefix)) == expected


def test_tables_are_built_once_for_all_threads() -> None:
    vocabulary = Vocabulary(made_tokenizer(), 333)
    with ThreadPoolExecutor(8) as pool:
        guides = list(pool.map(lambda _: vocabulary.guide, range(32)))
        tables = list(pool.map(lambda _: vocabulary.sorted_tokens, range(32)))
    assert all(guide is guides[0] for guide in guides)
    assert all(table is tables[0] for table in tables)
    assert guides[0].vocab_size == 334
