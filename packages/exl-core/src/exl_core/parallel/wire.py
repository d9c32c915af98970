"""Messages from rank 0 to the other ranks: fixed layouts of plain numbers, never pickles.

A message is a header of 16 int32 and a payload. The header names the operation and all lengths, so
that a receiver checks the size of the payload before it reads it. Sequence numbers are consecutive:
a gap means that a rank missed a pass, after which its cache would be wrong.

    PASS   one forward pass: the tensors of a `Batch`, and its adapters: int64 [uses, 3] of first
           row, last row and adapter, float64 [uses] of scales
    REPLAY a pass as a captured CUDA graph: int64 [sequences, 5] of cached tokens, tokens, pages,
           kind of logit rows and 1 + slot of state (0: none), int64 [rows] of tokens, int64 [pages]
           of pages
    EMBED  the embedding of token ids: int64 [rows]
    STORE  a cache of `pages` pages in a format, with `states` slots of recurrent state
    DROP   the cache is not used any more
    ADAPT  a LoRA adapter: its digest, a line feed and the path of its folder, in bytes of the
           file system
    FORGET the adapter is not used any more
    COPY   positions from page to page: int64 [rows, 3] of source, target, length
    MOVE   pages to other places: int64 [rows, 2] of source, target
    GIVE   pages to the cache `target_store`: int64 [rows, 2] of source, target
    COPY_STATES, GIVE_STATES  the same for slots of recurrent state
    JOIN   all ranks are loaded and meet now: token ids of the text on which key smoothing is
           measured, int64 [rows]
    END    the rank leaves
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.errors import RankError
from exl_core.model.adapters import Adapter, AdapterUse
from exl_core.model.batch import AdapterRows, Batch, EmbeddedRows
from exl_core.model.segment import LogitRows, Segment

VERSION = 3
MESSAGE_LIMIT_BYTES = 1 << 30
_HEADER = struct.Struct("<16i")
_FORMATS = tuple(KVFormat)
_LOGIT_ROWS = tuple(LogitRows)


class Operation(IntEnum):
    PASS = 1
    EMBED = 2
    STORE = 3
    DROP = 4
    COPY = 5
    MOVE = 6
    JOIN = 7
    END = 8
    GIVE = 9
    ADAPT = 10
    FORGET = 11
    COPY_STATES = 12
    GIVE_STATES = 13
    REPLAY = 14


@dataclass(frozen=True, slots=True)
class Header:
    """Numbers of a message; 0 where the operation has no use for one."""

    operation: int
    sequence: int = 0
    store: int = 0
    kv_format: int = 0
    pages: int = 0
    """Pages of a cache, or of all segments, or columns of the page table of a pass."""
    rows: int = 0
    sequences: int = 0
    logit_rows: int = 0
    embedded_rows: int = 0
    hidden_size: int = 0
    target_store: int = 0
    adapter: int = 0
    adapter_uses: int = 0
    states: int = 0
    """Slots of recurrent state of a cache, or 1 for a pass that names one for each sequence."""


class Message(NamedTuple):
    header: Header
    payload: bytes

    def packed(self, sequence: int) -> bytes:
        """The bytes to send as message number `sequence`."""
        values = [getattr(self.header, field.name) for field in fields(Header)]
        values[1] = sequence
        numbers = [VERSION, len(self.payload), *values]
        return _HEADER.pack(*numbers, *[0] * (16 - len(numbers))) + self.payload


def unpacked(data: bytes, sequence: int) -> Message:
    """The message in these bytes, which must be number `sequence`. RankError for anything else."""
    if len(data) < _HEADER.size:
        raise RankError("a message is too short", expected=_HEADER.size, got=len(data))
    version, size, *values = _HEADER.unpack_from(data)
    header = Header(*values[: len(fields(Header))])
    if version != VERSION or header.operation not in list(Operation):
        raise RankError("not a message", got=f"version {version}, operation {header.operation}")
    if header.sequence != sequence:
        raise RankError("a message is missing", expected=sequence, got=header.sequence)
    expected = _payload_bytes(header)
    if not size == expected == len(data) - _HEADER.size or min(values) < 0:
        got = f"{size} bytes declared, {len(data) - _HEADER.size} there"
        raise RankError("a message has the wrong size", expected=expected, got=got)
    if header.kv_format >= len(_FORMATS):
        raise RankError("a message names no cache format", got=header.kv_format)
    return Message(header, data[_HEADER.size :])


def _payload_bytes(header: Header) -> int:
    match header.operation:
        case Operation.PASS:
            wide = 3 * header.rows + header.logit_rows + header.embedded_rows
            narrow = 2 * header.sequences + 1 + header.sequences * header.pages
            wide += 4 * header.adapter_uses + header.sequences * header.states
            return 8 * wide + 4 * (narrow + header.embedded_rows * header.hidden_size)
        case Operation.REPLAY | Operation.EMBED | Operation.JOIN:
            return 8 * (5 * header.sequences + header.rows + header.pages)
        case Operation.ADAPT:
            return header.rows
        case Operation.COPY:
            return 8 * 3 * header.rows
        case Operation.MOVE | Operation.GIVE | Operation.COPY_STATES | Operation.GIVE_STATES:
            return 8 * 2 * header.rows
    return 0


def pass_message(store: int, batch: Batch, number_of: Callable[[Adapter], int]) -> Message:
    """One forward pass over `batch` with the cache number `store`. `number_of`: the number of an
    adapter in earlier ADAPT messages."""
    parts = [
        *(batch.token_ids, batch.positions, batch.slots, batch.logit_rows),
        *(batch.row_starts, batch.past_lens, batch.page_table),
    ]
    embedded_rows = hidden_size = 0
    if batch.embedded is not None:
        embedded_rows, hidden_size = batch.embedded.vectors.shape
        parts.insert(4, batch.embedded.rows)
        parts.append(batch.embedded.vectors.float())
    uses = [(first, last, use) for first, last, uses in batch.adapters for use in uses]
    numbers = [(first, last, number_of(use.adapter)) for first, last, use in uses]
    parts.append(torch.tensor(numbers, dtype=torch.int64))
    parts.append(torch.tensor([use.scale for _, _, use in uses], dtype=torch.float64))
    if batch.states is not None:
        parts.append(batch.states)
    sequences, pages = batch.page_table.shape
    header = Header(
        Operation.PASS,
        store=store,
        pages=pages,
        rows=len(batch.token_ids),
        sequences=sequences,
        logit_rows=len(batch.logit_rows),
        embedded_rows=embedded_rows,
        hidden_size=hidden_size,
        adapter_uses=len(uses),
        states=int(batch.states is not None),
    )
    return Message(header, b"".join(_bytes(part) for part in parts))


def batch_of(message: Message, adapter_of: Callable[[int], Adapter]) -> Batch:
    """The batch of a PASS message. `adapter_of`: the adapter with a number."""
    header, reader = message.header, _Reader(message.payload)
    token_ids, positions, slots = (reader.wide(header.rows) for _ in range(3))
    logit_rows = reader.wide(header.logit_rows)
    embedded_ids = reader.wide(header.embedded_rows)
    batch = Batch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        logit_rows=logit_rows,
        row_starts=reader.narrow(header.sequences + 1),
        past_lens=reader.narrow(header.sequences),
        page_table=reader.narrow(header.sequences * header.pages).view(header.sequences, -1),
        embedded=EmbeddedRows(
            embedded_ids,
            reader.floats(header.embedded_rows * header.hidden_size).view(
                header.embedded_rows, header.hidden_size
            ),
        )
        if header.embedded_rows
        else None,
    )
    numbers = reader.wide(3 * header.adapter_uses).view(-1, 3).tolist()
    scales = reader.doubles(header.adapter_uses).tolist()
    states = reader.wide(header.sequences) if header.states else None
    reader.check_end()
    uses: dict[tuple[int, int], list[AdapterUse]] = {}
    for (first, last, number), scale in zip(numbers, scales, strict=True):
        uses.setdefault((first, last), []).append(AdapterUse(adapter_of(number), scale))
    rows = tuple(AdapterRows(*ends, tuple(found)) for ends, found in uses.items())
    return replace(batch, adapters=rows, states=states)


def replay_message(store: int, segments: Sequence[Segment]) -> Message:
    """A pass over `segments` as a graph, with the cache number `store`."""
    numbers: list[int] = []
    for one in segments:
        kind = _LOGIT_ROWS.index(one.logit_rows)
        slot = 0 if one.state_slot is None else 1 + one.state_slot
        numbers += (one.past_len, len(one.token_ids), len(one.page_ids), kind, slot)
    sequences, rows = len(segments), sum(len(one.token_ids) for one in segments)
    numbers += chain.from_iterable(one.token_ids for one in segments)
    numbers += chain.from_iterable(one.page_ids for one in segments)
    pages = len(numbers) - 5 * sequences - rows
    header = Header(Operation.REPLAY, store=store, pages=pages, rows=rows, sequences=sequences)
    return Message(header, np.array(numbers, dtype=np.int64).tobytes())


def segments_of(message: Message) -> list[Segment]:
    """The segments of a REPLAY message. RankError for lengths that contradict each other."""
    header = message.header
    numbers = np.frombuffer(message.payload, np.int64).tolist()
    heads, rest = numbers[: 5 * header.sequences], iter(numbers[5 * header.sequences :])
    parts = [heads[at : at + 5] for at in range(0, len(heads), 5)]
    lengths = sum(part[1] for part in parts), sum(part[2] for part in parts)
    is_known = all(part[3] < len(_LOGIT_ROWS) for part in parts)
    if lengths != (header.rows, header.pages) or min(heads, default=0) < 0 or not is_known:
        raise RankError("a message has no such segments", got=lengths)
    tokens = [tuple(islice(rest, part[1])) for part in parts]
    pages = [tuple(islice(rest, part[2])) for part in parts]
    return [
        Segment(ids, past_len, held, _LOGIT_ROWS[kind], state_slot=slot - 1 if slot else None)
        for (past_len, _, _, kind, slot), ids, held in zip(parts, tokens, pages, strict=True)
    ]


def adapter_message(number: int, digest: str, path: Path) -> Message:
    """A new adapter of this number."""
    payload = digest.encode() + b"\n" + os.fsencode(path.absolute())
    return Message(Header(Operation.ADAPT, adapter=number, rows=len(payload)), payload)


def adapter_source(message: Message) -> tuple[str, Path]:
    """Digest and folder of an ADAPT message's adapter."""
    digest, _, path = message.payload.partition(b"\n")
    return digest.decode(errors="replace"), Path(os.fsdecode(path))


def numbers_message(
    operation: Operation, numbers: Tensor, store: int = 0, target_store: int = 0
) -> Message:
    """EMBED, JOIN, or copies of pages or states, with these numbers, int64, one row for each
    item."""
    header = Header(operation, store=store, rows=len(numbers), target_store=target_store)
    return Message(header, _bytes(numbers))


def numbers_of(message: Message) -> Tensor:
    """Numbers of such a message: int64 [rows], or [rows, n]."""
    if not message.payload:
        return torch.empty(0, dtype=torch.int64)
    numbers = torch.frombuffer(bytearray(message.payload), dtype=torch.int64)
    if message.header.operation in (Operation.EMBED, Operation.JOIN):
        return numbers
    return numbers.view(message.header.rows, -1)


def join_message(sample_ids: Sequence[int]) -> Message:
    """JOIN: followers need no tokenizer for the text on which key smoothing is measured."""
    return numbers_message(Operation.JOIN, torch.tensor(sample_ids, dtype=torch.int64))


def store_message(store: int, kv_format: KVFormat, num_pages: int, num_states: int = 0) -> Message:
    """A new cache of number `store`."""
    header = Header(
        Operation.STORE,
        store=store,
        kv_format=_FORMATS.index(kv_format),
        pages=num_pages,
        states=num_states,
    )
    return Message(header, b"")


def format_of(message: Message) -> KVFormat:
    """Format of a STORE message's cache."""
    return _FORMATS[message.header.kv_format]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


class _Reader:
    """Takes tensors off the front of a payload."""

    def __init__(self, payload: bytes) -> None:
        self._payload = bytearray(payload)
        self._at = 0

    def wide(self, count: int) -> Tensor:
        return self._take(count, np.int64)

    def narrow(self, count: int) -> Tensor:
        return self._take(count, np.int32)

    def floats(self, count: int) -> Tensor:
        return self._take(count, np.float32)

    def doubles(self, count: int) -> Tensor:
        return self._take(count, np.float64)

    def check_end(self) -> None:
        assert self._at == len(self._payload), "the header's lengths were checked"

    def _take(self, count: int, dtype: type[np.generic]) -> Tensor:
        found = np.frombuffer(self._payload, dtype, count, self._at)
        self._at += found.nbytes
        return torch.from_numpy(found.copy())
