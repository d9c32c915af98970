"""States on their way through one layer, stopping where a matrix's inputs are there to be seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from exl_core.convert.block import DOWN, GATE_UP, OUTPUT, QKV, Block, Linear
from exl_core.convert.layers import compute_type
from exl_core.convert.parallel import Workers


class Stream:
    """`states` float32 [rows, T, hidden], on the CPU, become those after the layer.

    `steps` yields the matrices that come next; their inputs, [1, T, K] of each row, are then in
    `inputs`. `product` is asked for a matrix only after that.
    """

    def __init__(
        self, block: Block, product: Linear, states: Tensor, device: torch.device, crew: Workers
    ) -> None:
        self.inputs: list[Tensor] = []
        self._block = block
        self._product = product
        self._states = states
        self._device = device
        self._dtype = compute_type(device)
        self._crew = crew

    def steps(self) -> Iterator[tuple[str, ...]]:
        block = self._block
        self._advance(lambda row: block.qkv_input(self._at(row)))
        yield QKV
        self._advance(lambda row: block.mixed(*self._outputs(row, QKV)))
        yield (OUTPUT,)
        self._advance(self._to_mlp)
        yield GATE_UP
        self._advance(lambda row: block.gated(*self._outputs(row, GATE_UP)))
        yield (DOWN,)
        self._advance(self._to_end)
        self.inputs = []

    def _advance(self, work: Callable[[int], Tensor]) -> None:
        rows = range(len(self._states))
        self.inputs = self._crew.each(lambda row: work(row).to(self._dtype), rows)

    def _at(self, row: int) -> Tensor:
        return self._states[row : row + 1].to(self._device)

    def _outputs(self, row: int, parts: tuple[str, ...]) -> list[Tensor]:
        return [self._product(part, self.inputs[row]) for part in parts]

    def _to_mlp(self, row: int) -> Tensor:
        x = self._block.after_attention(self._at(row), *self._outputs(row, (OUTPUT,)))
        self._states[row : row + 1] = x.to(self._states.device)
        return self._block.gate_up_input(x)

    def _to_end(self, row: int) -> Tensor:
        x = self._block.after_mlp(self._at(row), *self._outputs(row, (DOWN,)))
        self._states[row : row + 1] = x.to(self._states.device)
        return x[:, :0]
