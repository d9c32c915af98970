"""Logits of one forward pass. They stay on the model's device until a row of them is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from exl_core.ops.sampling import NextStep, PartLogits, RowSettings, Sampled
from exl_core.ops.table import OpTable


class PassLogits:
    """Logits of the requested rows of a pass, in order."""

    def __init__(
        self,
        logits: Tensor,
        rows: Sequence[int] | None = None,
        parts: Sequence[PartLogits] = (),
    ) -> None:
        """`logits` [n, vocab_size] on the model's device. `rows`: indices of those in use; None:
        all. `parts`: parts of `logits`; if there are several, the next pass does not overwrite
        them."""
        self._computed = logits
        self._rows = rows
        self._parts = parts

    @cached_property
    def _on_cpu(self) -> Tensor:
        return self._computed.cpu()  # all rows at once: if one is read, others usually are too

    def keep(self) -> None:
        """Copy the logits on the device, so that the next pass does not overwrite them."""
        if len(self._parts) < 2:
            self._computed = self._computed.clone()

    def read(self, number: int) -> Tensor:
        """One row, on the CPU."""
        return self._on_cpu[number if self._rows is None else self._rows[number]]

    def block(self, first: int, last: int) -> Tensor:
        """Rows `first` to `last` - 1 on the model's device. All rows of the pass must be in use."""
        return self._computed[first:last]

    def sample(
        self,
        ops: OpTable,
        rows: Sequence[RowSettings],
        vocab_size: int,
        next_step: NextStep | None = None,
    ) -> list[Sampled]:
        """Sample a token below `vocab_size` for each of these rows, on the model's device."""
        if not rows:
            return []
        if self._rows is not None:
            rows = [replace(row, row=self._rows[row.row]) for row in rows]
        if next_step is not None and len(self._parts) > 1:
            divided = _divided(rows, self._parts, next_step.parts)
            if divided:
                parts = [one._replace(logits=one.logits[:, :vocab_size]) for one in self._parts]
                return ops.sample_parts(parts, divided, next_step.parts)
        return ops.sample_rows(self._computed[:, :vocab_size], rows, next_step)


def _divided(
    rows: Sequence[RowSettings], parts: Sequence[PartLogits], next_steps: Sequence[NextStep]
) -> list[Sequence[RowSettings]]:
    """The rows of each part. Empty unless each part of the next pass continues one of `parts`."""
    if len(next_steps) != len(parts):
        return []
    found, start = [], 0
    for part, step in zip(parts, next_steps, strict=True):
        own = rows[start : start + len(step.token_ids)]
        end = part.first_row + len(part.logits)
        if any(not part.first_row <= row.row < end for row in own):
            return []
        found.append(own)
        start += len(own)
    return found if start == len(rows) else []


class LogitRow(NamedTuple):
    """One row of a pass."""

    logits: PassLogits
    number: int

    def read(self) -> Tensor:
        """float32 [vocab_size], on the CPU."""
        return self.logits.read(self.number)
