"""Calibration rows of each expert of a layer.

An expert reads the rows that chose it. Its matrices are quantized for these rows, one expert after
the other, so that only one expert's rows and Hessians are in memory. An expert that few rows chose
has a Hessian of low rank, which says nothing about most directions of its inputs. It reads further
rows: those with the highest scores for it among the rows that did not choose it.

Knows neither matrices nor layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from exl_core.arch.layers import MoE
from exl_core.arch.modules import ModuleRow, expert_matrices, module_table
from exl_core.arch.spec import ModelConfig
from exl_core.convert.parallel import Workers
from exl_core.convert.passes import LayerFunction

ROWS_PER_FEATURE = 2
"""An expert with fewer rows than this for each input feature of its widest matrix gets further
rows. The Hessian of n random rows with K features has eigenvalues between (1 - sqrt(K / n))^2 and
(1 + sqrt(K / n))^2 of the true ones: 0.09 to 2.9 for n = 2 K, and from 0 on for n = K."""


class ExpertKeys(NamedTuple):
    """Keys of one expert's matrices, by the inputs that they read."""

    expert: int
    gate_up: tuple[str, ...]
    down: tuple[str, ...]


class ExpertRows(NamedTuple):
    """Rows of one expert: indices int64, rising, and how many of them chose it."""

    rows: Tensor
    chosen: int


@dataclass(frozen=True, slots=True)
class Routes:
    """Experts of all calibration rows in one layer: `ids` int32 [m, k], `scores` float32 [m, E].
    `weights` float32 [m, k] are factors of the experts' inputs; None if they are factors of the
    outputs."""

    ids: Tensor
    scores: Tensor
    weights: Tensor | None = None

    @classmethod
    def of(cls, function: LayerFunction, inputs: Sequence[Tensor], workers: Workers) -> Routes:
        """Routes `inputs`, pieces [R, T, hidden] of the router's inputs."""

        def run(piece: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            h = piece.flatten(0, 1)
            routed = function.choices(h)
            return routed.ids, routed.weights, function.scores(h)

        ids, weights, scores = map(torch.cat, zip(*workers.map(run, inputs), strict=True))
        return cls(ids, scores, weights if function.weighs_inputs else None)

    def rows_of(self, expert: int, minimum: int) -> ExpertRows:
        """The rows that chose the expert, and further rows up to `minimum` or to all rows."""
        is_used = (self.ids == expert).any(-1)
        chosen = int(is_used.sum())
        missing = min(minimum, len(is_used)) - chosen
        if missing > 0:
            others = self.scores[:, expert].masked_fill(is_used, -torch.inf)
            # A stable sort, and not topk: of equal scores, the first row's comes first.
            is_used[others.sort(stable=True, descending=True).indices[:missing]] = True
        return ExpertRows(is_used.nonzero().flatten(), chosen)

    def inputs_of(self, expert: int, rows: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        """Inputs [n, K] of the expert for `rows`, from those of all experts, pieces [R, T, K]. The
        factor of a row that did not choose the expert is the expert's score."""
        x = gather(pieces, rows)
        if self.weights is None:
            return x
        is_own = self.ids[rows] == expert  # [n, k]
        weights = (self.weights[rows] * is_own).sum(-1)
        factors = torch.where(is_own.any(-1), weights, self.scores[rows, expert])
        return (x * factors[:, None]).to(x.dtype)


def expert_keys(config: ModelConfig, layer: int) -> Iterator[ExpertKeys]:
    """The experts of a layer, in order."""
    for index, expert in enumerate(module_table(config).experts[layer]):
        matrices = expert_matrices(expert)
        yield ExpertKeys(index, _keys(matrices["expert_gate_up"]), _keys(matrices["expert_down"]))


def _keys(rows: Sequence[ModuleRow]) -> tuple[str, ...]:
    return tuple(row.key for row in rows)


def minimum_rows(config: ModelConfig, layer: int) -> int:
    """Rows that each expert of a layer reads at least, if there are as many."""
    spec = config.layers[layer].feed_forward
    assert isinstance(spec, MoE), "the layer has a router"
    return ROWS_PER_FEATURE * max(spec.latent_size or config.hidden_size, spec.intermediate_size)


def gather(pieces: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Rows [n, K] of the tokens of all pieces [R, T, K]; `rows` int64 [n] are rising."""
    ends = torch.tensor([piece.shape[0] * piece.shape[1] for piece in pieces]).cumsum(0)
    stops = torch.searchsorted(rows.cpu(), ends).tolist()
    starts = [0, *stops[:-1]]
    firsts = [0, *ends.tolist()[:-1]]
    return torch.cat(
        [
            piece.flatten(0, 1)[rows[start:stop] - first]
            for piece, start, stop, first in zip(pieces, starts, stops, firsts, strict=True)
        ]
    )
