"""Passage of states through one layer, in steps that expose the inputs of its matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from exl_core.convert.block import DOWN, GATE_UP, OUTPUT, QKV, Block, Linear
from exl_core.convert.layers import compute_type
from exl_core.convert.parallel import Workers


class Stream:
    """Runs `states` float32 [rows, T, hidden] through one layer, which replaces them in place.

    `steps` yields the names of the next matrices. Their inputs are then in `inputs`, a list of
    pieces [R, T, K]. `product` is called for these matrices only when the iteration continues.
    """

    def __init__(
        self, block: Block, product: Linear, states: Tensor, device: torch.device, workers: Workers
    ) -> None:
        self.inputs: list[Tensor] = []
        self._block = block
        self._product = product
        self._states = states
        self._device = device
        self._dtype = compute_type(device)
        self._workers = workers

    def steps(self) -> Iterator[tuple[str, ...]]:
        block = self._block
        self._advance(lambda piece: block.qkv_input(self._at(piece)))
        yield QKV
        self._advance(lambda piece: block.attention(*self._outputs(piece, QKV)))
        yield (OUTPUT,)
        self._advance(self._to_mlp)
        yield GATE_UP
        self._advance(lambda piece: block.gated_activation(*self._outputs(piece, GATE_UP)))
        yield (DOWN,)
        self._advance(self._to_end)
        self.inputs = []

    def _advance(self, work: Callable[[int], Tensor]) -> None:
        pieces = range(-(-len(self._states) // self._workers.rows_per_piece))
        self.inputs = self._workers.map(lambda piece: work(piece).to(self._dtype), pieces)

    def _rows(self, piece: int) -> slice:
        step = self._workers.rows_per_piece
        return slice(piece * step, piece * step + step)

    def _at(self, piece: int) -> Tensor:
        return self._states[self._rows(piece)].to(self._device)

    def _outputs(self, piece: int, parts: tuple[str, ...]) -> list[Tensor]:
        return [self._product(part, self.inputs[piece]) for part in parts]

    def _to_mlp(self, piece: int) -> Tensor:
        x = self._block.after_attention(self._at(piece), *self._outputs(piece, (OUTPUT,)))
        self._states[self._rows(piece)] = x.to(self._states.device)
        return self._block.gate_up_input(x)

    def _to_end(self, piece: int) -> Tensor:
        x = self._block.after_mlp(self._at(piece), *self._outputs(piece, (DOWN,)))
        self._states[self._rows(piece)] = x.to(self._states.device)
        return x[:, :0]
