"""Search of rings in torch, on any device: all states of all positions, tile by tile in parallel.

It is the reference of the compiled searches, and serves GPUs that theirs does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exl_core.ops.checks import OpInputError
from exl_core.ops.rings import POSITIONS, REACH, STATES, new_bits
from exl_core.ops.weights import TRELLIS_RATES

STATE_BITS = 16
CHUNK_ROWS = 16  # rings at a time: their costs and choices take up to 200 MB


class TorchRingOps:
    """RingOps in torch."""

    @staticmethod
    def nearest_rings(targets: Tensor, values: Tensor, rate: float) -> Tensor:
        if rate not in TRELLIS_RATES:
            raise OpInputError(f"nearest_rings: rate (got {rate})")
        for name, x, shape in (
            ("targets", targets, (len(targets), POSITIONS)),
            ("values", values, (STATES,)),
        ):
            if x.dtype is not torch.float32 or tuple(x.shape) != shape:
                raise OpInputError(
                    f"nearest_rings: {name} (expected float32 {list(shape)}, got {x.dtype}"
                    f" {list(x.shape)})"
                )
        chunks = torch.split(targets, CHUNK_ROWS)
        if not chunks:
            return targets.to(torch.int32)
        return torch.cat([search(chunk, values, rate, REACH) for chunk in chunks])


def search(targets: Tensor, values: Tensor, rate: float, reach: int) -> Tensor:
    """`RingOps.nearest_rings` with another reach. Costs have the type of the operands."""
    counts = new_bits(rate)
    around = [(i - reach) % POSITIONS for i in range(2 * reach)]
    choices, cost = _forward(targets, values, counts, around, None)
    node = cost.argmin(1)
    for position in reversed(around):
        node = _back(choices[position], node, counts, position) >> counts[position]
        if position == 0:
            break
    whole = range(POSITIONS)
    choices, _ = _forward(targets, values, counts, whole, node)
    states = torch.empty(targets.shape, dtype=torch.int32, device=targets.device)
    for position in reversed(whole):
        state = _back(choices[position], node, counts, position)
        states[:, position] = state
        node = state >> counts[position]
    return states


def _forward(
    targets: Tensor,
    values: Tensor,
    counts: Sequence[int],
    order: Sequence[int],
    start: Tensor | None,
) -> tuple[dict[int, Tensor], Tensor]:
    """Walks the positions of `order`. Returns the leading bits of the best state of every node
    after each position, uint8 [n, nodes], and the costs of the last nodes. `start` [n] is the only
    node to start from; None: any."""
    rows = len(targets)
    nodes = STATES >> counts[order[0]]
    cost = targets.new_zeros(rows, nodes)
    if start is not None:
        cost.fill_(torch.inf)[torch.arange(rows, device=targets.device), start] = 0
    choices = {}
    for position in order:
        leaving = counts[(position + 1) % POSITIONS]
        error = values - targets[:, position, None]  # [n, states]
        before = cost.repeat_interleave(1 << counts[position], 1)
        total = _added(error, before)
        cost, best = total.view(rows, 1 << leaving, -1).min(1)  # the first of equal ones
        choices[position] = best.to(torch.uint8)
    return choices, cost


def _added(error: Tensor, before: Tensor) -> Tensor:
    """before + error^2, rounded once."""
    if error.dtype is torch.float32:
        return torch.addcmul(before, error, error)
    return error.double().square_().add_(before).to(error.dtype)


def _back(choices: Tensor, node: Tensor, counts: Sequence[int], position: int) -> Tensor:
    """State of a position, by the node after it."""
    leaving = counts[(position + 1) % POSITIONS]
    top = choices.gather(1, node[:, None])[:, 0].long()
    return top << (STATE_BITS - leaving) | node
