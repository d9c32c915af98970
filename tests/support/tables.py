"""Models whose logits come from a table: the next token depends only on the current one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from exl_core.arch.layers import KVShape
from exl_core.ops.open import get_table
from exl_core.tokenizer.base import ControlIds, Tokenizer
from support.scripted import ScriptedStage

VOCAB_SIZE = 260
BOS = 256


class ByteTokenizer(Tokenizer):
    """One token per byte, and four further tokens, of which the first is BOS."""

    kind = "bytes"

    def __init__(self, *, adds_bos: bool = False, bos_id: int | None = BOS) -> None:
        super().__init__(ControlIds(bos_id=bos_id, adds_bos=adds_bos), {}, "test")

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    def _encode(self, text: str, *, allow_special: bool) -> list[int]:
        return list(text.encode())

    def _piece(self, token_id: int) -> bytes | None:
        return bytes([token_id]) if token_id < 256 else None


class TableModel:
    """Model that returns rows of a table [vocab_size, vocab_size] as logits."""

    def __init__(self, table: torch.Tensor, max_seq_len: int = 512) -> None:
        self.table = table
        self.config = SimpleNamespace(
            vocab_size=table.shape[1],
            max_seq_len=max_seq_len,
            kv_shapes=(KVShape(1, 8),),
            state_shapes=(),
            state_bytes=0,
        )
        self.ops = get_table("reference", threads=1)
        self.stages = (ScriptedStage(self.ops, range(1)),)

    def check_loaded(self) -> None:
        """The table is never unloaded."""

    def forward(self, batch: Any, store: Any) -> torch.Tensor:
        return self.table[batch.token_ids[batch.logit_rows]]


def random_table(seed: int, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB_SIZE, vocab_size, generator=generator) * 2


def loaded_with(table: torch.Tensor, tokenizer: Tokenizer | None = None) -> Any:
    """Stand-in for the result of `load_model`, with the fields that the evaluation reads."""
    model = TableModel(table)
    return SimpleNamespace(
        model=model,
        config=model.config,
        tokenizer=tokenizer or ByteTokenizer(),
        name="table",
        label="table",
        weights_bytes=table.nbytes,
        exact=False,
    )
