"""The logits of one pass: they stay where they were computed until somebody reads one of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from exl_core.ops.table import NextStep, OpTable, RowSettings, Sampled


class PassLogits:
    """Of the rows that a pass was asked for, in order."""

    def __init__(self, computed: Tensor, rows: Sequence[int] | None = None) -> None:
        """`computed`: [n, vocab_size], on the model's device. `rows`: those of them that count;
        None: all."""
        self._computed = computed
        self._rows = rows

    @cached_property
    def _on_cpu(self) -> Tensor:
        return self._computed.cpu()  # all at once: most often, where one row is read, others are

    def keep(self) -> None:
        """They will not be overwritten by the next pass."""
        self._computed = self._computed.clone()

    def read(self, number: int) -> Tensor:
        """One row, on the CPU."""
        return self._on_cpu[number if self._rows is None else self._rows[number]]

    def block(self, first: int, last: int) -> Tensor:
        """Rows `first` to `last` - 1, which all count, where they were computed."""
        return self._computed[first:last]

    def sample(
        self,
        ops: OpTable,
        rows: Sequence[RowSettings],
        vocab_size: int,
        next_step: NextStep | None = None,
    ) -> list[Sampled]:
        """A token for each of these rows, below `vocab_size`, drawn where the logits lie."""
        if not rows:
            return []
        if self._rows is not None:
            rows = [row._replace(row=self._rows[row.row]) for row in rows]
        return ops.sample_rows(self._computed[:, :vocab_size], rows, next_step)


class LogitRow(NamedTuple):
    """One row of a pass."""

    logits: PassLogits
    number: int

    def read(self) -> Tensor:
        """float32 [vocab_size], on the CPU."""
        return self.logits.read(self.number)
