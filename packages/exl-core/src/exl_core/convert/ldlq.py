"""LDLQ: trellis codes (EXL3) of one matrix that change its outputs least on given inputs.

The method is that of QTIP (Tseng et al. 2024, arXiv 2406.11235). A matrix W [I, N] is divided by
scales with random signs and rotated on both sides, so that its values look Gaussian:

    T = H diag(1 / suh) W diag(1 / svh) H            codes of V are those nearest to T

With the Hessian A of the inputs, an error E of W costs tr(E' A E). In rotated coordinates the
Hessian is M = H diag(suh) A diag(suh) H = L D L', where L is unit lower triangular in blocks of 16.
Rows of tiles are coded from the last to the first. The target of row b of tiles is

    T_b + sum over c > b of L_cb' (T_c - V_c)

so that the rows before make up for the errors of those after them. Columns are independent.

Both sizes are padded to multiples of 128 with zeros. All tensors are float32 on one device unless
said otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from exl_core.convert.gptq import DAMPING_STEPS, damped
from exl_core.formats.codecs.exl3 import layout as exl3
from exl_core.formats.codecs.exl3.layout import Exl3Linear, rotate
from exl_core.formats.codecs.exl3.matrix import stored_size
from exl_core.ops.rings import POSITIONS, RingOps
from exl_core.ops.weights import HADAMARD, TILE, Codebook

DAMPING = 0.025  # share of the mean diagonal that is added to the diagonal
SPREAD = {1: 1.05, 1.5: 1.05, 2: 1.03, 2.5: 0.98, 3: 0.93, 3.5: 0.9, 4: 0.87, 5: 0.82, 6: 0.78}
"""Root mean square of the targets over that of the codebook, by rate, at which the search for the
best one begins. Above 6 bits it is that of 6."""

SPREAD_STEPS = (0.9, 1.0, 1.1)  # multiples that are tried; a parabola through them has the best one
SAMPLED_TILES = 48
FIT_ROUNDS = 2
LEAST_WEIGHT = 0.05
"""Share of the mean weight of errors that is added to the weight of each column. It limits the
errors of columns whose weight is close to zero on the calibration text."""


class EncodedTiles(NamedTuple):
    """Words of the rings, int16 [n, 16 * rate], and the values that they stand for,
    float32 [n, 16, 16]."""

    words: Tensor
    values: Tensor


class TrellisWeights(NamedTuple):
    """Codes of a matrix, on the CPU; the weights as readers see them, float32 [I, N], without
    padding; and tr(E' A E) / tr(W' A W)."""

    linear: Exl3Linear
    weight: Tensor
    error: float


def encode_tiles(values: Tensor, rate: float, codebook: Codebook, ops: RingOps) -> EncodedTiles:
    """Nearest codes of tiles [n, 16, 16], by input feature and column."""
    table, places = _tables(codebook, values.device)
    targets = values.reshape(-1, POSITIONS)[:, places].contiguous()
    states = ops.nearest_rings(targets, table, rate)
    decoded = torch.empty_like(targets)
    decoded[:, places] = table[states.long()]
    return EncodedTiles(exl3.pack_states(states, rate), decoded.view(-1, TILE, TILE))


@lru_cache(maxsize=4)
def _tables(codebook: Codebook, device: torch.device) -> tuple[Tensor, Tensor]:
    """Values of all states, float32, and the place of each position in its tile."""
    values = exl3.codebook_values(codebook).float()
    return values.to(device), exl3.tile_places().to(device)


class TrellisQuantizer:
    """Quantizes matrices that read the same input, with the Hessian [I, I] of their inputs.

    `seed` selects the signs of the inputs. `check` is called at every row of tiles and may raise.
    """

    def __init__(
        self,
        hessian: Tensor,
        ops: RingOps,
        *,
        seed: int = 0,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._features = len(hessian)
        self._ops = ops
        self._check = check
        padding = stored_size(self._features) - self._features
        self._hessian = pad(hessian.double(), (0, padding, 0, padding))  # [I', I']
        self._seed = seed
        self._is_usable = bool(hessian.isfinite().all()) and float(hessian.diagonal().mean()) > 0

    def quantize(
        self, weight: Tensor, rate: float, codebook: Codebook, importance: Tensor | None = None
    ) -> TrellisWeights:
        """Quantizes weights [I, N]. Without feedback if no damping makes the Hessian positive
        definite. `importance` [N] are factors on the squared errors of columns, which are equal
        without it."""
        rows, columns = (stored_size(size) for size in weight.shape)
        source = pad(weight, (0, columns - weight.shape[1], 0, rows - weight.shape[0])).double()
        importance = column_importance(importance, columns).to(source)
        suh, svh = initial_scales(source, importance, self._seed)
        feedback = self._feedback(suh)
        target = rotate(rotate((source / suh[:, None] / svh).T).T).float()
        spread = exl3.codebook_values(codebook).double().square().mean().sqrt().item()
        spread *= _best_spread(target, rate, codebook, self._ops)
        words, values = self._search(target * spread, feedback, rate, codebook)
        rotated = rotate(rotate(values.double().T).T)  # [I', N']
        suh, svh = self._fitted(rotated, source, importance, suh / spread, svh)
        svh[(source == 0).all(0)] = 0
        linear = Exl3Linear(words.cpu(), suh.half().cpu(), svh.half().cpu(), codebook)
        stored = (suh.half().double()[:, None] * rotated * svh.half().double()).float()
        stored = stored[: weight.shape[0], : weight.shape[1]]
        return TrellisWeights(linear, stored, self._error(stored, weight))

    def _feedback(self, suh: Tensor) -> Tensor | None:
        """L - 1 of the rotated Hessian [I', I']; None if there is none."""
        if not self._is_usable:
            return None
        scaled = suh[:, None] * self._hessian * suh
        rotated = rotate(rotate(scaled).T)
        for step in DAMPING_STEPS:
            lower, info = torch.linalg.cholesky_ex(damped(rotated, DAMPING * step))
            if int(info) == 0 and bool(lower.isfinite().all()):
                return _unit_blocks(lower).float()
        return None

    def _search(
        self, target: Tensor, feedback: Tensor | None, rate: float, codebook: Codebook
    ) -> tuple[Tensor, Tensor]:
        """Words [I' / 16, N' / 16, 16 * rate] and values [I', N'] of the codes."""
        rows, columns = target.shape
        values, errors = torch.empty_like(target), torch.zeros_like(target)
        words = []
        for first in range(rows - TILE, -1, -TILE):
            if self._check is not None:
                self._check()
            block = slice(first, first + TILE)
            wanted = target[block]
            if feedback is not None and first + TILE < rows:
                wanted = wanted + feedback[first + TILE :, block].T @ errors[first + TILE :]
            tiles = wanted.view(TILE, -1, TILE).transpose(0, 1)  # [N' / 16, 16, 16]
            encoded = encode_tiles(tiles, rate, codebook, self._ops)
            values[block] = encoded.values.transpose(0, 1).reshape(TILE, columns)
            errors[block] = target[block] - values[block]
            words.append(encoded.words)
        return torch.stack(words[::-1]), values

    def _fitted(
        self, rotated: Tensor, source: Tensor, importance: Tensor, suh: Tensor, svh: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scales that bring diag(suh) rotated diag(svh) closest to the source: least squares, with
        the columns weighted by `importance` [N']."""
        if not self._is_usable:
            return suh, svh
        hessian = damped(self._hessian, DAMPING)
        wanted = hessian @ source
        for _ in range(FIT_ROUNDS):
            q = rotated * svh
            weighted = q * importance
            normal = (weighted @ q.T) * hessian
            right = (weighted * wanted).sum(1)
            solved = torch.linalg.solve(damped(normal, 1e-6), right)
            suh = torch.where((solved / suh > 0.1) & (solved / suh < 10), solved, suh)
            q = rotated * suh[:, None]
            ratio = (q * wanted).sum(0) / (q * (hessian @ q)).sum(0)
            svh = torch.where(ratio.isfinite() & (ratio / svh > 0), ratio, svh)
        return suh, svh

    def _error(self, stored: Tensor, weight: Tensor) -> float:
        hessian = self._hessian[: self._features, : self._features]
        source = weight.double()
        error = stored.double() - source
        energy = float((source * (hessian @ source)).sum())
        return float((error * (hessian @ error)).sum()) / energy if energy > 0 else 0.0


def _unit_blocks(lower: Tensor) -> Tensor:
    """L of the block LDL' factorization, less its unit diagonal, from the Cholesky factor."""
    unit = torch.zeros_like(lower)
    for first in range(0, len(lower) - TILE, TILE):
        block, after = slice(first, first + TILE), slice(first + TILE, None)
        unit[after, block] = torch.linalg.solve_triangular(
            lower[block, block], lower[after, block], upper=False, left=False
        )
    return unit


def column_importance(given: Tensor | None, columns: int) -> Tensor:
    """Factors on the squared errors of columns, float64 [N'], with a mean of 1 over the `given`
    ones [N]. They are equal if there are none, or if their mean is not finite and positive."""
    full = torch.ones(columns, dtype=torch.float64)
    mean = 0.0 if given is None else float(given.double().mean())
    if given is not None and math.isfinite(mean) and mean > 0:
        full[: len(given)] = (given.double().cpu() / mean + LEAST_WEIGHT) / (1 + LEAST_WEIGHT)
    return full


def initial_scales(source: Tensor, importance: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Scales of inputs and outputs with random signs, float64 [I'], [N'].

    The quotient has a mean square of 1 over each block of 128 columns, and in each row. Codes of a
    block have equal errors, which the scales multiply. The sum of all errors times `importance`
    [N'] is least if the square of a column's scale is proportional to its size over the square root
    of its importance. Feedback moves errors between rows, and then the size of a row is better.
    """
    energy = source.square().mean(0)
    columns = _block_scales(energy, (energy / importance).pow(0.25))
    energy = (source / columns).square().mean(1)
    rows = _block_scales(energy, energy.sqrt())
    generator = torch.Generator().manual_seed(seed)
    suh, svh = (
        scales * (torch.randint(0, 2, scales.shape, generator=generator) * 2 - 1).to(scales)
        for scales in (rows, columns)
    )
    return suh, svh


def _block_scales(energy: Tensor, sizes: Tensor) -> Tensor:
    """Scales proportional to `sizes` in each block of 128, with which the mean squares [n] of the
    features become 1 on average. Features that are zero get the mean scale of their block."""
    blocks, scales = energy.view(-1, HADAMARD), sizes.view(-1, HADAMARD)
    used = scales > 0
    mean = (scales.sum(1, keepdim=True) / used.sum(1, keepdim=True)).nan_to_num(1.0)
    scales = torch.where(used, scales, mean)
    size = (blocks / scales.square()).mean(1, keepdim=True).sqrt()
    return (scales * torch.where(size > 0, size, 1.0)).flatten()


def _best_spread(target: Tensor, rate: float, codebook: Codebook, ops: RingOps) -> float:
    """Factor of the target, over the codebook's root mean square, with the least relative error."""
    rows, columns = (size // TILE for size in target.shape)
    tiles = target.view(rows, TILE, columns, TILE).transpose(1, 2).reshape(-1, TILE, TILE)
    step = max(1, len(tiles) // SAMPLED_TILES)
    # Diagonals: an odd step meets all rows and columns.
    sample = tiles[torch.arange(0, len(tiles), step | 1, device=target.device)[:SAMPLED_TILES]]
    middle = SPREAD.get(rate, SPREAD[6])
    unit = exl3.codebook_values(codebook).double().square().mean().sqrt().item()
    costs = []
    for multiple in SPREAD_STEPS:
        scaled = sample * (middle * multiple * unit)
        error = encode_tiles(scaled, rate, codebook, ops).values - scaled
        costs.append(float(error.double().square().sum()) / multiple**2)
    low, mid, high = costs
    curvature = low - 2 * mid + high
    best = 1.0 if curvature <= 0 else 1.0 + 0.1 * (low - high) / (2 * curvature)
    return middle * min(max(best, SPREAD_STEPS[0]), SPREAD_STEPS[-1])
