"""Messages between ranks: what is sent arrives, and anything else is refused by name."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exl_core.cache.format import KVFormat
from exl_core.errors import RankError
from exl_core.model.adapters import Adapter
from exl_core.model.batch import Batch, EmbeddedRows
from exl_core.model.runner import make_batch
from exl_core.model.segment import LogitRows, Segment
from exl_core.parallel.wire import (
    Operation,
    adapter_message,
    adapter_source,
    batch_of,
    format_of,
    numbers_message,
    numbers_of,
    pass_message,
    replay_message,
    segments_of,
    store_message,
    unpacked,
)
from support.scheduling import use

FIELDS = (
    *("token_ids", "positions", "row_starts", "past_lens", "page_table", "slots", "logit_rows"),
)


def batch() -> Batch:
    return make_batch(
        [
            Segment((5, 6, 7), 250, (4, 2), LogitRows.ALL),
            Segment((9,), 0, (1,), LogitRows.NONE),
            Segment((8,), 3, (0,), LogitRows.LAST),
        ]
    )


def test_segments_of_a_graph_arrive() -> None:
    sent = [
        Segment((5, 6, 7), 250, (4, 2), LogitRows.ALL),
        Segment((9,), 0, (1,), LogitRows.NONE),
        Segment((8,), 3, (0, 5, 6), LogitRows.LAST),
        Segment((4,), 1, (3,), LogitRows.LAST, state_slot=0),
        Segment((4,), 1, (7,), LogitRows.LAST, state_slot=9),
    ]
    message = unpacked(replay_message(3, sent).packed(4), 4)
    assert (message.header.operation, message.header.store) == (Operation.REPLAY, 3)
    assert segments_of(message) == sent


def test_segments_of_other_lengths_are_refused() -> None:
    message = replay_message(0, [Segment((5, 6), 0, (1, 2, 3), LogitRows.ALL)])
    numbers = list(struct.unpack("<10q", message.payload))
    for at, value in ((1, 3), (2, 2), (0, -1), (3, 9)):
        wrong = numbers.copy()
        wrong[at] = value
        with pytest.raises(RankError):
            segments_of(message._replace(payload=struct.pack("<10q", *wrong)))


def no_number(adapter: Adapter) -> int:
    raise AssertionError("no row uses an adapter")


def no_adapter(number: int) -> Adapter:
    raise AssertionError("no row uses an adapter")


def assert_equal(found: Batch, sent: Batch) -> None:
    for name in FIELDS:
        one, other = getattr(found, name), getattr(sent, name)
        assert one.dtype is other.dtype
        assert torch.equal(one, other), name


def test_a_pass_arrives_as_it_was_sent() -> None:
    sent = batch()
    message = unpacked(pass_message(3, sent, no_number).packed(12), 12)
    assert message.header.store == 3
    found = batch_of(message, no_adapter)
    assert_equal(found, sent)
    assert found.embedded is None


def test_the_adapters_of_each_row_arrive_in_order() -> None:
    one, two = use(7), use(8, 0.3)
    uses = ((one, two), (), (two,))
    segments = [Segment((5, 6), 0, (index,), LogitRows.LAST, own) for index, own in enumerate(uses)]
    numbers: dict[int, Adapter] = {4: one.adapter, 9: two.adapter}
    sent = make_batch(segments)
    number_of = {id(adapter): number for number, adapter in numbers.items()}
    message = pass_message(0, sent, lambda adapter: number_of[id(adapter)])
    found = batch_of(unpacked(message.packed(0), 0), numbers.__getitem__)
    assert_equal(found, sent)
    assert found.adapters == ((0, 2, (one, two)), (4, 6, (two,)))


@pytest.mark.parametrize("name", [b"ein Ordner\xc3\xa4", b"no UTF-8: \xe4\xff", b"two\nlines"])
def test_an_adapter_is_named_by_its_folder_and_contents(tmp_path: Path, name: bytes) -> None:
    folder = tmp_path / os.fsdecode(name)
    message = unpacked(adapter_message(5, "abc", folder).packed(2), 2)
    assert message.header.adapter == 5
    assert adapter_source(message) == ("abc", folder)


def test_the_states_of_sequences_arrive() -> None:
    segments = [Segment((5, 6), 0, (index,), LogitRows.LAST, state_slot=index) for index in (4, 2)]
    sent = make_batch(segments)
    found = batch_of(unpacked(pass_message(0, sent, no_number).packed(0), 0), no_adapter)
    assert_equal(found, sent)
    assert found.states is not None
    assert found.states.tolist() == [4, 2]


def test_embedded_vectors_arrive_to_the_bit() -> None:
    vectors = torch.randn(2, 24)
    sent = batch()
    with_vectors = Batch(
        **{name: getattr(sent, name) for name in FIELDS},
        embedded=EmbeddedRows(torch.tensor([1, 3]), vectors),
    )
    found = batch_of(unpacked(pass_message(0, with_vectors, no_number).packed(0), 0), no_adapter)
    assert_equal(found, sent)
    assert found.embedded is not None
    assert torch.equal(found.embedded.rows, torch.tensor([1, 3]))
    assert torch.equal(found.embedded.vectors, vectors)


@pytest.mark.parametrize("kv_format", list(KVFormat))
def test_formats_of_caches_arrive(kv_format: KVFormat) -> None:
    message = unpacked(store_message(2, kv_format, 17, 5).packed(1), 1)
    assert format_of(message) is kv_format
    header = message.header
    assert (header.store, header.pages, header.states) == (2, 17, 5)


@pytest.mark.parametrize(
    ("operation", "numbers"),
    [
        (Operation.EMBED, [4, 5, 2**40]),
        (Operation.COPY, [[1, 2, 256], [3, 4, 7]]),
        (Operation.MOVE, [[1, 2], [2, 1]]),
        (Operation.GIVE, [[0, 9]]),
        (Operation.COPY_STATES, [[0, 9], [9, 1]]),
        (Operation.GIVE_STATES, [[3, 0]]),
    ],
)
def test_numbers_arrive(operation: Operation, numbers: list[int]) -> None:
    message = unpacked(numbers_message(operation, torch.tensor(numbers), 1, 2).packed(5), 5)
    assert numbers_of(message).tolist() == numbers
    assert (message.header.store, message.header.target_store) == (1, 2)


def test_a_missing_message_is_noticed() -> None:
    with pytest.raises(RankError, match=r"a message is missing \(expected 6, got 7\)"):
        unpacked(pass_message(0, batch(), no_number).packed(7), 6)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        (0, 1, "not a message"),
        (1, 3, "wrong size"),
        (2, 99, "not a message"),
        (7, 1000, "wrong size"),
        (8, -1, "wrong size"),
        (5, 77, "no cache format"),
    ],
)
def test_damaged_headers_are_refused(field: int, value: int, expected: str) -> None:
    data = bytearray(pass_message(0, batch(), no_number).packed(0))
    struct.pack_into("<i", data, 4 * field, value)
    with pytest.raises(RankError, match=expected):
        unpacked(bytes(data), 0)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RankError):
        unpacked(data, 0)


@given(st.integers(0, 400))
def test_cut_messages_are_refused(length: int) -> None:
    whole = pass_message(0, batch(), no_number).packed(0)
    with pytest.raises(RankError):
        unpacked(whole[: min(length, len(whole) - 1)], 0)
