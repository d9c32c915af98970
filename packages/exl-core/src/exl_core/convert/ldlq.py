"""LDLQ: trellis codes (EXL3) of one matrix that change its outputs least on given inputs.

The method is that of QTIP (Tseng et al. 2024, arXiv 2406.11235). A matrix W [I, N] is divided by
scales with random signs and rotated on both sides, so that its values look Gaussian:

    T = H diag(1 / suh) W diag(1 / svh) H            codes of V are those nearest to T

With the Hessian A of the inputs, an error E of W costs tr(E' A E). In rotated coordinates the
Hessian is M = H diag(suh) A diag(suh) H = L D L', where L is unit lower triangular in blocks of 16.
Rows of tiles are coded from the last to the first. The target of row b of tiles is

    T_b + sum over c > b of L_cb' (T_c - V_c)

so that the rows before make up for the errors of those after them.

Columns are independent, unless the Hessian B of the loss by the matrix's outputs is given. Then E
costs tr(E' A E B), and columns make up for each other too (YAQA, Tseng et al. 2025, arXiv
2505.22988). Of B only the blocks of 128 outputs are known, which the rotation keeps apart. With
H diag(svh) B diag(svh) H = K G K' in each block, the target of tile (b, n) is

    T_bn + sum over the coded tiles (c, m) of L_cb' (T_cm - V_cm) K_mn

Tile (b, n) comes after all tiles (c, m) with c >= b and m >= n. Those with equal b + n are coded
together, in all blocks of columns at once.

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


OUTPUT_DAMPING = 0.3
"""Share of the mean diagonal of a block of B that is added to its diagonal. B comes from few tokens
(`sensitivity.py`): on other tokens, errors of the outputs grow with less of it."""


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
        self,
        weight: Tensor,
        rate: float,
        codebook: Codebook,
        importance: Tensor | None = None,
        outputs: Tensor | None = None,
    ) -> TrellisWeights:
        """Quantizes weights [I, N]. Without feedback if no damping makes the Hessian positive
        definite.

        `importance` [N] are factors on the squared errors of columns, which are equal without it.
        `outputs` [N' / 128, 128, 128] are blocks of B, with `importance` on their diagonals.
        """
        rows, columns = (stored_size(size) for size in weight.shape)
        source = pad(weight, (0, columns - weight.shape[1], 0, rows - weight.shape[0])).double()
        importance = column_importance(importance, columns).to(source)
        suh, svh = initial_scales(source, importance, self._seed)
        feedback = self._feedback(suh)
        spreading = None if outputs is None else output_feedback(outputs.to(source), svh).float()
        metric = _output_metric(importance, outputs, weight.shape[1])
        target = rotate(rotate((source / suh[:, None] / svh).T).T).float()
        spread = exl3.codebook_values(codebook).double().square().mean().sqrt().item()
        spread *= _best_spread(target, rate, codebook, self._ops)
        if feedback is None or spreading is None:
            words, values = self._search(target * spread, feedback, rate, codebook)
        else:
            words, values = self._search_both(target * spread, feedback, spreading, rate, codebook)
        rotated = rotate(rotate(values.double().T).T)  # [I', N']
        suh, svh = self._fitted(rotated, source, metric, suh / spread, svh)
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

    def _search_both(
        self, target: Tensor, feedback: Tensor, spreading: Tensor, rate: float, codebook: Codebook
    ) -> tuple[Tensor, Tensor]:
        """As `_search`, with `spreading`, K of every block of columns [N' / 128, 128, 128]."""
        rows, blocks, steps = len(target) // TILE, len(spreading), HADAMARD // TILE
        targets = target.view(rows, TILE, blocks, steps, TILE)
        values, spread = torch.empty_like(targets), torch.zeros_like(targets)  # spread = E K
        words = torch.empty(rows, blocks, steps, int(TILE * rate), dtype=torch.int16)
        words = words.to(target.device)
        for wave in range(rows + steps - 2, -1, -1):
            if self._check is not None:
                self._check()
            places = [(b, wave - b) for b in range(rows) if 0 <= wave - b < steps]
            wanted = torch.stack(
                [
                    targets[b, :, :, n] + spread[b, :, :, n] + _passed_on(feedback, spread, b, n)
                    for b, n in places
                ]
            )  # [W, 16, N' / 128, 16]
            tiles = wanted.transpose(1, 2).reshape(-1, TILE, TILE)
            encoded = encode_tiles(tiles, rate, codebook, self._ops)
            found = encoded.values.view(len(places), blocks, TILE, TILE)
            for (b, n), own, codes in zip(
                places, found, encoded.words.view(len(places), blocks, -1), strict=True
            ):
                values[b, :, :, n] = own.transpose(0, 1)
                words[b, :, n] = codes
                error = targets[b, :, :, n].transpose(0, 1) - own  # [N' / 128, 16, 16]
                rest = slice(0, (n + 1) * TILE)
                spread[b].flatten(2)[:, :, rest] += (
                    error @ spreading[:, n * TILE : (n + 1) * TILE, rest]
                ).transpose(0, 1)
        return words.flatten(1, 2), values.view_as(target)

    def _fitted(
        self, rotated: Tensor, source: Tensor, metric: Tensor, suh: Tensor, svh: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scales that bring diag(suh) rotated diag(svh) closest to the source: least squares in the
        inputs' Hessian, and in `metric` [N' / 128, 128, 128] of the outputs."""
        if not self._is_usable:
            return suh, svh
        hessian = damped(self._hessian, DAMPING)
        wanted = _times_blocks(hessian @ source, metric)
        for _ in range(FIT_ROUNDS):
            q = rotated * svh
            normal = (_times_blocks(q, metric) @ q.T) * hessian
            suh = _solved(normal, (q * wanted).sum(1), suh)
            q = rotated * suh[:, None]
            parts, weighted = (
                x.T.reshape(-1, HADAMARD, len(x)) for x in (q, hessian @ q)
            )  # [N' / 128, 128, I'] each
            normal = (parts @ weighted.mT) * metric
            svh = _solved(normal, (q * wanted).sum(0).view(-1, HADAMARD), svh)
        return suh, svh

    def _error(self, stored: Tensor, weight: Tensor) -> float:
        hessian = self._hessian[: self._features, : self._features]
        source = weight.double()
        error = stored.double() - source
        energy = float((source * (hessian @ source)).sum())
        return float((error * (hessian @ error)).sum()) / energy if energy > 0 else 0.0


def _passed_on(feedback: Tensor, spread: Tensor, row: int, column: int) -> Tensor:
    """Sum over the rows of tiles after `row` of their spread errors [R, 16, B, 8, 16] in one column
    of tiles of each block, times the feedback: [16, B, 16]."""
    after = spread[row + 1 :, :, :, column]
    factors = feedback[(row + 1) * TILE :, row * TILE : (row + 1) * TILE]
    blocks = after.shape[2]
    return (factors.T @ after.reshape(len(factors), blocks * TILE)).view(TILE, blocks, TILE)


def _solved(normal: Tensor, right: Tensor, scales: Tensor) -> Tensor:
    """Solutions of normal equations; the old scale where the new one differs too much."""
    mean = normal.diagonal(0, -2, -1).mean(-1)[..., None, None]
    eye = torch.eye(normal.shape[-1]).to(normal)
    solved = torch.linalg.solve_ex(normal + 1e-6 * mean * eye, right[..., None]).result.flatten()
    ratio = solved / scales
    return torch.where((ratio > 0.1) & (ratio < 10), solved, scales)


def _times_blocks(x: Tensor, blocks: Tensor) -> Tensor:
    """x [I', N'] times a block-diagonal matrix [N' / 128, 128, 128]."""
    return (x.view(len(x), -1, HADAMARD).transpose(0, 1) @ blocks).transpose(0, 1).flatten(1)


def _output_metric(importance: Tensor, outputs: Tensor | None, columns: int) -> Tensor:
    """Blocks of B [N' / 128, 128, 128], in the unit of `importance` [N'], which is its diagonal.
    The diagonal alone without `outputs`. `columns` is N."""
    diagonal = torch.diag_embed(importance.view(-1, HADAMARD))
    if outputs is None:
        return diagonal
    own = outputs.to(importance)
    sizes = own.diagonal(0, 1, 2)
    between = (own - torch.diag_embed(sizes)) * columns / (sizes.sum() * (1 + LEAST_WEIGHT))
    return diagonal + between if bool(between.isfinite().all()) else diagonal


def rotated_outputs(outputs: Tensor, svh: Tensor) -> Tensor:
    """Blocks of B in rotated form, [N' / 128, 128, 128]."""
    scales = svh.view(-1, HADAMARD)
    scaled = scales[:, :, None] * outputs * scales[:, None]
    return rotate(rotate(scaled.flatten(0, 1)).view_as(scaled).mT.flatten(0, 1)).view_as(scaled)


def output_feedback(outputs: Tensor, svh: Tensor) -> Tensor:
    """K of each block; the identity for blocks without positive finite values."""
    rotated = rotated_outputs(outputs, svh)
    eye = torch.eye(HADAMARD).to(rotated)
    mean = rotated.diagonal(0, 1, 2).mean(1)[:, None, None]
    is_usable = rotated.flatten(1).isfinite().all(1)[:, None, None] & (mean > 0)
    lower, failed = torch.linalg.cholesky_ex(
        torch.where(is_usable, rotated / mean + OUTPUT_DAMPING * eye, eye)
    )
    is_usable &= (failed == 0)[:, None, None]
    return torch.where(is_usable, eye + _unit_blocks(lower), eye)


def _unit_blocks(lower: Tensor) -> Tensor:
    """L of the block LDL' factorization, less its unit diagonal, from the Cholesky factor."""
    unit = torch.zeros_like(lower)
    for first in range(0, lower.shape[-1] - TILE, TILE):
        block, after = slice(first, first + TILE), slice(first + TILE, None)
        unit[..., after, block] = torch.linalg.solve_triangular(
            lower[..., block, block], lower[..., after, block], upper=False, left=False
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
