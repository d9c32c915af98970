"""What the model receives: the rows of all sequences of one step, flattened.

A row is one token of one sequence. Rows of a sequence are consecutive and in order; a decoding
sequence has one row, a prefilling one has a chunk. The model knows neither requests nor text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from exl_core.model.adapters import AdapterUse


class AdapterRows(NamedTuple):
    """Rows first_row .. last_row - 1 are under these adapters, none of which has scale 0."""

    first_row: int
    last_row: int
    uses: tuple[AdapterUse, ...]


class EmbeddedRows(NamedTuple):
    """Rows, int64 [n], that get vectors, float32 [n, hidden_size], and no token's embedding."""

    rows: Tensor
    vectors: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass over `rows` tokens of `seqs` sequences.

    token_ids    int64 [rows]
    positions    int64 [rows]        index of each row in its own sequence
    row_starts   int32 [seqs + 1]    rows of sequence s: row_starts[s] .. row_starts[s + 1]
    past_lens    int32 [seqs]        tokens of s cached before this pass
    page_table   int32 [seqs, pages] page ids of s in order; unused entries are 0
    slots        int64 [rows]        where each row's key and value go: page_id * page_size + offset
    logit_rows   int64 [n]           rows whose logits are wanted, ascending
    adapters     rows that have any, ascending
    embedded     rows whose token id is a stand-in (any valid one), or None
    logits       buffer for the logits, float32 [n or more, vocab_size]; None: one is allocated
    """

    token_ids: Tensor
    positions: Tensor
    row_starts: Tensor
    past_lens: Tensor
    page_table: Tensor
    slots: Tensor
    logit_rows: Tensor
    adapters: tuple[AdapterRows, ...] = ()
    embedded: EmbeddedRows | None = None
    logits: Tensor | None = None
