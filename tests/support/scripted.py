"""Scripted model with known logits, and a tokenizer of bytes, for tests of engine, CLI and server.

The model writes each token and its position into the pages of the batch, and computes the next
logits only from the values that it reads back through the page table. Rows under adapters are
marked. A page that is mixed up, evicted or shared wrongly changes the reply or fails an assertion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from exl_core.arch.layers import KVShape, StateShape
from exl_core.cache.state_store import StateStore
from exl_core.cache.store import KVStore
from exl_core.model.adapters import AdapterUse
from exl_core.model.batch import Batch
from exl_core.model.segment import Segment
from exl_core.ops.open import get_table
from exl_core.ops.table import OpTable
from exl_core.tokenizer.base import ControlIds, Tokenizer

BOS_ID = 256
EOS_ID = 257
VOCAB_SIZE = 258

Rule = Callable[[Sequence[int]], Tensor]
"""Maps all tokens so far to the logits of the next, float32 [vocab_size]."""


class ByteTokenizer(Tokenizer):
    """A token is a byte of UTF-8; `<bos>` and `<eos>` are the only special ones."""

    kind = "bytes"

    def __init__(self) -> None:
        control = ControlIds(bos_id=BOS_ID, eos_ids=(EOS_ID,))
        super().__init__(control, {"<bos>": BOS_ID, "<eos>": EOS_ID}, "ByteTokenizer")

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    def _encode(self, text: str, *, allow_special: bool) -> list[int]:
        if allow_special:
            for special, token_id in self.special_tokens.items():
                before, found, after = text.partition(special)
                if found:
                    head = self._encode(before, allow_special=True)
                    return [*head, token_id, *self._encode(after, allow_special=True)]
        return list(text.encode())

    def _piece(self, token_id: int) -> bytes | None:
        return bytes([token_id]) if token_id < BOS_ID else None


class PieceTokenizer(ByteTokenizer):
    """Byte tokenizer with longer tokens, from id 258 on; encoding takes the longest match."""

    def __init__(self, *pieces: str, leading_spaces_dropped: int = 0) -> None:
        super().__init__()
        self._pieces = [piece.encode() for piece in pieces]
        self._leading_spaces_dropped = leading_spaces_dropped

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE + len(self._pieces)

    @property
    def leading_spaces_dropped(self) -> int:
        return self._leading_spaces_dropped

    def id_of(self, piece: str) -> int:
        return VOCAB_SIZE + self._pieces.index(piece.encode())

    def _encode(self, text: str, *, allow_special: bool) -> list[int]:
        data, ids = text.encode(), []
        while data:
            fitting = [piece for piece in self._pieces if data.startswith(piece)]
            longest = max(fitting, key=len, default=data[:1])
            ids.append(self.id_of(longest.decode()) if fitting else longest[0])
            data = data[len(longest) :]
        return ids

    def _piece(self, token_id: int) -> bytes | None:
        known = token_id >= VOCAB_SIZE
        return self._pieces[token_id - VOCAB_SIZE] if known else super()._piece(token_id)


@dataclass(frozen=True, slots=True)
class ScriptedShape:
    vocab_size: int = VOCAB_SIZE
    max_seq_len: int = 2048  # half precision counts positions exactly up to here
    hidden_size: int = 1
    kv_shapes: tuple[KVShape, ...] = (KVShape(1, 1),)
    state_shapes: tuple[StateShape, ...] = ()

    @property
    def state_bytes(self) -> int:
        return sum(shape.size_bytes for shape in self.state_shapes)


@dataclass(frozen=True, slots=True)
class ScriptedStage:
    """All layers of a model that follows a rule, on one device."""

    ops: OpTable
    layers: range

    @staticmethod
    def copy_from(x: Tensor, into: Tensor) -> None:
        into.copy_(x)


@dataclass
class ScriptedModel:
    """Model that follows `rule`.

    rows_of_pass  number of rows of each pass so far
    failure       raised by the next pass, once set, after it has overwritten its pages with zeros
    """

    rule: Rule
    config: ScriptedShape = field(default_factory=ScriptedShape)
    rows_of_pass: list[int] = field(default_factory=list)
    failure: BaseException | None = None
    num_ranks: int = 1
    has_head: bool = True
    ops: OpTable = field(default_factory=lambda: get_table("reference", threads=1))

    def check_loaded(self) -> None:
        """A scripted model has no weights."""

    def check_adapters(self, uses: Iterable[AdapterUse]) -> None:
        """An adapter changes nothing, so that any one fits."""

    @property
    def can_capture(self) -> bool:
        return True

    def replaying(
        self,
        store: KVStore,
        segments: Sequence[Segment],
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def replayed(self, found: Tensor, segments: Sequence[Segment]) -> Tensor:
        return found

    @property
    def stages(self) -> tuple[ScriptedStage, ...]:
        return (ScriptedStage(self.ops, range(len(self.config.kv_shapes))),)

    def run_stage(
        self, index: int, batch: Batch, store: KVStore, x: Tensor | None = None
    ) -> Tensor:
        assert index == 0 and x is None, "the model has one stage"
        return self.forward(batch, store)

    def reserve_positions(self, end: int) -> None:
        """Does nothing: the rule has no position tables."""

    def forward(self, batch: Batch, store: KVStore) -> Tensor:
        self.rows_of_pass.append(len(batch.token_ids))
        assert int(batch.token_ids.max()) < self.config.vocab_size
        layer = store.layer(0)
        keys, values = layer.keys, layer.values  # [pages, 1, page_size, 1]
        pages, offsets = batch.slots // store.page_size, batch.slots % store.page_size
        if self.failure is not None:
            failure, self.failure = self.failure, None
            keys[pages, 0, offsets, 0] = 0
            raise failure
        marks = torch.ones_like(batch.positions)
        for part in batch.adapters:
            marks[part.first_row : part.last_row] = -1
        keys[pages, 0, offsets, 0] = batch.token_ids.to(keys.dtype)
        values[pages, 0, offsets, 0] = (marks * (batch.positions + 1)).to(values.dtype)
        wanted = set(batch.logit_rows.tolist())
        logits = []
        for seq, (first, last) in enumerate(pairwise(batch.row_starts.tolist())):
            past_len = int(batch.past_lens[seq])
            length = past_len + last - first
            table = batch.page_table[seq, : -(-length // store.page_size)].long()
            history = keys[table, 0].flatten()[:length].long().tolist()
            positions = values[table, 0].flatten()[:length].long()
            expected = marks[first] * torch.arange(1, length + 1)
            assert torch.equal(positions, expected), "a page holds other positions or adapters"
            if store.states is not None:
                self._advance_state(batch, store.states, seq, history)
            for row in range(first, last):
                if row in wanted:
                    logits.append(self.rule(history[: past_len + row - first + 1]))
        return torch.stack(logits) if logits else torch.empty(0, self.config.vocab_size)

    @staticmethod
    def _advance_state(batch: Batch, states: StateStore, seq: int, history: list[int]) -> None:
        """Checks that the state of a sequence is that of its cached tokens, and adds the others."""
        assert batch.states is not None, "a hybrid has a slot for each sequence"
        slot, past_len = int(batch.states[seq]), int(batch.past_lens[seq])
        held = states.layer(0).inputs  # [slots, 1, 1]
        if past_len:
            assert int(held[slot]) == state_of(history[:past_len]), "the state of another text"
        held[slot] = state_of(history)


def state_of(history: Sequence[int]) -> int:
    """A number that depends on all tokens and fits a float32."""
    value = 1
    for token_id in history:
        value = (value * 31 + token_id + 1) % 65521
    return value


class HashRule:
    """Random logits that depend on every token so far and on its position."""

    def __init__(self, seed: int = 0, *, vocab_size: int = VOCAB_SIZE, spread: float = 3.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._table = torch.randn(997, vocab_size, generator=generator) * spread
        self._factor = torch.randint(1, 997, (4096,), generator=generator)

    def __call__(self, history: Sequence[int]) -> Tensor:
        ids = torch.tensor(history)
        return self._table[int(((ids + 1) * self._factor[: len(ids)]).sum() % 997)]


def always(logits: Tensor) -> Rule:
    """Rule with the same logits for every history."""
    return lambda _history: logits


def certain(token_id: int, vocab_size: int = VOCAB_SIZE) -> Tensor:
    """Logits that make one token certain."""
    logits = torch.full((vocab_size,), -50.0)
    logits[token_id] = 50.0
    return logits


def reply_with(
    reply: str | bytes | Sequence[int], then: int = EOS_ID, vocab_size: int = VOCAB_SIZE
) -> Rule:
    """Rule that continues any prompt with `reply`, and after it with `then`.

    The progress of the reply is derived from the end of the history, so a prompt must not end with
    a beginning of the reply.
    """
    data = reply.encode() if isinstance(reply, str) else reply
    script = (*data, then)

    def rule(history: Sequence[int]) -> Tensor:
        tail = tuple(history[-len(script) :])
        for done in range(min(len(script) - 1, len(tail)), 0, -1):
            if tail[-done:] == script[:done]:
                return certain(script[done], vocab_size)
        return certain(script[0], vocab_size)

    return rule
