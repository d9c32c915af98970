"""Search for trellis codes: the ring of states whose values come closest to given targets.

A tile of EXL3 is a ring of 256 positions (`formats/codecs/exl3/layout.py`). Every position adds new
bits to a state of 16 bits. A node is what two neighboring states share: the state before a position
without the bits that leave it.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

POSITIONS = 256
STATES = 1 << 16
REACH = POSITIONS // 2  # positions on each side of position 0 that decide where a ring is closed


def new_bits(rate: float) -> tuple[int, ...]:
    """New bits of each position: the rate, or for half rates the integers around it in turn."""
    low = int(rate)
    return (low, low if rate == low else low + 1) * (POSITIONS // 2)


class RingOps(Protocol):
    """Search of rings."""

    def nearest_rings(self, targets: Tensor, values: Tensor, rate: float) -> Tensor:
        """States of the ring that is nearest to each row of targets: int32 [n, 256].

        targets  float32 [n, 256], in the order of positions
        values   float32 [65536], value of each state: a float16 number
        rate     bits per position: one of `TRELLIS_RATES`

        Minimizes the sum of (values[state] - target)^2 over the rings through one node before
        position 0. This node is taken from the best path without ends over the `REACH` positions
        on both sides. Sums are float32 in the order of the positions, with the square added by a
        fused multiply-add where the processor has one. Of equal ones, the state with the lowest
        leading bits wins. Targets are finite.
        """
        ...
