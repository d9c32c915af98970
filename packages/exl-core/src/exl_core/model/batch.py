"""Input of the model: the rows of all sequences of one pass, flattened.

A row is one token of one sequence. Rows of a sequence are consecutive and in order. A sequence in
decode has one row, a sequence in prefill has a chunk. The model knows neither requests nor text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from exl_core.model.adapters import AdapterUse


class AdapterRows(NamedTuple):
    """Rows first_row .. last_row - 1 use these adapters. None of the scales is 0."""

    first_row: int
    last_row: int
    uses: tuple[AdapterUse, ...]


class EmbeddedRows(NamedTuple):
    """Rows, int64 [n], whose embedding is replaced by vectors, float32 [n, hidden_size]."""

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
    slots        int64 [rows]        slot of each row's key and value: page_id * page_size + offset
    logit_rows   int64 [n]           rows that get logits, ascending
    adapters     ranges of rows that use adapters, ascending
    embedded     rows with an embedded vector, whose token id is an arbitrary valid one; or None
    states       int64 [seqs]        slot of the recurrent state of s; None: the model has none
    is_fresh     True: the rows are those of one sequence without cached tokens, and padding. False
                 says nothing
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
    states: Tensor | None = None
    is_fresh: bool = False
