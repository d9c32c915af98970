"""Padded batches, the cache of encoded texts, and aliases."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from exl_core.errors import RequestError
from exl_core.tokenizer.base import ControlIds, Tokenizer
from exl_core.tokenizer.batch import (
    CachedEncoder,
    encode_batch,
    encode_with_aliases,
    num_tokens,
    padding_id,
)
from support.scripted import BOS_ID, EOS_ID, ByteTokenizer


class Counting(ByteTokenizer):
    """Counts calls of `_encode`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def _encode(self, text: str, *, allow_special: bool) -> list[int]:
        self.calls += 1
        return super()._encode(text, allow_special=allow_special)


class Roles(ByteTokenizer):
    """Byte tokenizer with given control ids and special tokens."""

    def __init__(self, control: ControlIds, special: Mapping[str, int]) -> None:
        Tokenizer.__init__(self, control, special, "Roles")


def test_shorter_texts_are_padded_on_the_left() -> None:
    batch = encode_batch(ByteTokenizer(), ["abc", "", "x"], add_bos=None)
    a, b, c, x = b"abcx"
    assert batch.token_ids == ((a, b, c), (EOS_ID,) * 3, (EOS_ID, EOS_ID, x))
    assert batch.offsets == (0, -3, -2)
    assert batch.is_padding == ((False,) * 3, (True,) * 3, (True, True, False))
    assert encode_batch(ByteTokenizer(), []).token_ids == ()


def test_batch_rows_equal_single_texts_without_padding() -> None:
    tokenizer = ByteTokenizer()
    texts = ["a<eos>", "<eos>", "naïve"]
    for allow_special in (False, True):
        batch = encode_batch(tokenizer, texts, allow_special=allow_special, add_bos=True)
        for text, row, padding in zip(texts, batch.token_ids, batch.is_padding, strict=True):
            ids = tokenizer.encode(text, allow_special=allow_special, add_bos=True)
            assert [i for i, is_pad in zip(row, padding, strict=True) if not is_pad] == ids


@pytest.mark.parametrize(
    ("control", "special", "expected"),
    [
        (ControlIds(pad_id=5, eos_ids=(EOS_ID,)), {}, 5),
        (ControlIds(eos_ids=(EOS_ID,)), {"<pad>": 9}, 9),
        (ControlIds(eos_ids=(EOS_ID,)), {"<pad>": 0}, EOS_ID),
        (ControlIds(eos_ids=(BOS_ID, EOS_ID), bos_id=BOS_ID), {}, EOS_ID),
        (ControlIds(eos_ids=(BOS_ID,), bos_id=BOS_ID), {}, -1),
        (ControlIds(), {}, -1),
    ],
)
def test_padding_id_precedence(control: ControlIds, special: dict[str, int], expected: int) -> None:
    assert padding_id(Roles(control, special)) == expected


def test_cached_encoder_keeps_the_most_recent_texts() -> None:
    tokenizer = Counting()
    encoder = CachedEncoder(tokenizer)
    assert encoder.encode("abc", add_bos=True) == (BOS_ID, *b"abc")
    assert encoder.encode("abc", add_bos=True) == (BOS_ID, *b"abc")
    assert tokenizer.calls == 1
    assert encoder.encode("abc") == tuple(b"abc")
    assert encoder.encode("<eos>") == tuple(b"<eos>")
    assert encoder.encode("<eos>", allow_special=True) == (EOS_ID,)
    before = tokenizer.calls
    for number in range(99):
        encoder.encode(str(number))
    assert tokenizer.calls == before + 99
    encoder.encode("<eos>", allow_special=True)
    assert tokenizer.calls == before + 99
    encoder.encode("abc", add_bos=True)
    assert tokenizer.calls == before + 100


def test_num_tokens_counts_special_text_as_plain_text() -> None:
    assert num_tokens(ByteTokenizer(), "<eos>") == 5
    assert num_tokens(ByteTokenizer(), "") == 0


ALIASES = {"[img]": range(1000, 1003), "[img]2": [2000], "<eos>": [3000], "none": []}


def test_aliases_are_matched_before_special_tokens() -> None:
    def encode(text: str, **options: bool) -> list[int]:
        return encode_with_aliases(ByteTokenizer(), text, ALIASES, **options)

    assert encode("a[img]b[img]") == [ord("a"), 1000, 1001, 1002, ord("b"), 1000, 1001, 1002]
    assert encode("[img]2[img]3") == [2000, 1000, 1001, 1002, ord("3")]
    assert encode("<eos>", allow_special=True) == [3000]
    assert encode("<bos>[img]", allow_special=True) == [BOS_ID, 1000, 1001, 1002]
    assert encode("[img]", add_bos=True) == [BOS_ID, 1000, 1001, 1002]
    assert encode("nonenone") == []
    assert encode("[im") == [*b"[im"]
    assert encode("") == []


def test_no_token_crosses_an_alias(smollm2_tokenizer: Tokenizer) -> None:
    ids = encode_with_aliases(smollm2_tokenizer, "Hello<here> world", {"<here>": [10**9]})
    assert ids == [*smollm2_tokenizer.encode("Hello"), 10**9, *smollm2_tokenizer.encode(" world")]
    assert encode_with_aliases(smollm2_tokenizer, "Hello", {}) == smollm2_tokenizer.encode("Hello")


def test_an_empty_alias_is_refused() -> None:
    with pytest.raises(RequestError, match="empty text"):
        encode_with_aliases(ByteTokenizer(), "text", {"": [1]})
