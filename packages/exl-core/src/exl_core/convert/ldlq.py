"""LDLQ: trellis codes (EXL3) of one matrix that change its outputs least on given inputs.

The method is that of QTIP (Tseng et al. 2024, arXiv 2406.11235). A matrix W [I, N] is divided by
scales with random signs and rotated on both sides, so that its values look Gaussian:

    T = H diag(1 / suh) W diag(1 / svh) H            codes of V are those nearest to T

With the Hessian A of the inputs, an error E of W costs tr(E' A E). In rotated coordinates the
Hessian is M = H diag(suh) A diag(suh) H = L D L', where L is unit lower triangular in blocks of 16.
Rows of tiles are coded from the last to the first. The target of row b of tiles is

    T_b + sum over c > b of L_cb' (T_c - V_c)

so that the rows before make up for the errors of those after them.

Columns are independent, unless a Hessian of the outputs G is known (`outputs.py`). An error then
costs tr(E' A E G), and the same holds on the other side: with H diag(svh) G diag(svh) H = K C K',
the target of tile (b, c) is

    T_bc + the tile (b, c) of L' F K        F: errors T - V of the tiles after it, else 0

where (b', c') is after (b, c) if b' >= b and c' >= c, and not both are equal. Tiles of one
anti-diagonal are coded together.

Both sizes are padded to multiples of 128 with zeros. All tensors are float32 on one device unless
said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from exl_core.convert.gptq import DAMPING_STEPS, damped
from exl_core.convert.outputs import OutputHessian, output_hessian
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
OUTPUT_DAMPING = 0.5  # the same for the Hessian of the outputs, which fewer tokens tell


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
        self, weight: Tensor, rate: float, codebook: Codebook, outputs: OutputHessian | None = None
    ) -> TrellisWeights:
        """Quantizes weights [I, N]. Without feedback if no damping makes the Hessian positive
        definite. `outputs` weighs errors of columns, which are equal without it."""
        rows, columns = (stored_size(size) for size in weight.shape)
        source = pad(weight, (0, columns - weight.shape[1], 0, rows - weight.shape[0])).double()
        outputs = (outputs or output_hessian(None, None, columns)).to(source.device)
        suh, svh = initial_scales(source, outputs.diagonal, self._seed)
        target = rotate(rotate((source / suh[:, None] / svh).T).T).float()
        spread = exl3.codebook_values(codebook).double().square().mean().sqrt().item()
        spread *= _best_spread(target, rate, codebook, self._ops)
        search = _Search(rate, codebook, self._ops, self._check)
        feedback, across = self._feedback(suh), _feedback_across(outputs, svh)
        if feedback is None or across is None:
            words, values = search.by_rows(target * spread, feedback)
        else:
            words, values = search.by_tiles(target * spread, feedback, across)
        rotated = rotate(rotate(values.double().T).T)  # [I', N']
        suh, svh = self._fitted(rotated, source, outputs, suh / spread, svh)
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
        return unit_factor(rotate(rotate(scaled).T), DAMPING)

    def _fitted(
        self, rotated: Tensor, source: Tensor, outputs: OutputHessian, suh: Tensor, svh: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scales that bring diag(suh) rotated diag(svh) closest to the source: least squares, with
        the errors weighed by `outputs`."""
        if not self._is_usable:
            return suh, svh
        hessian = damped(self._hessian, DAMPING)
        wanted = hessian @ source
        for _ in range(FIT_ROUNDS):
            q = rotated * svh
            weighted = outputs.times(q)
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


class _Search(NamedTuple):
    """Search of the codes of a whole matrix. `check` is called between pieces of work."""

    rate: float
    codebook: Codebook
    ops: RingOps
    check: Callable[[], None] | None

    def by_rows(self, target: Tensor, feedback: Tensor | None) -> tuple[Tensor, Tensor]:
        """Words [I' / 16, N' / 16, 16 * rate] and values [I', N'] of the codes for targets
        [I', N']. `feedback` is L - 1; None: the nearest codes."""
        rows, columns = target.shape
        values, errors = torch.empty_like(target), torch.zeros_like(target)
        words = []
        for first in range(rows - TILE, -1, -TILE):
            block = slice(first, first + TILE)
            wanted = target[block]
            if feedback is not None and first + TILE < rows:
                wanted = wanted + feedback[first + TILE :, block].T @ errors[first + TILE :]
            encoded = self._encode(wanted.view(TILE, -1, TILE).transpose(0, 1))
            values[block] = encoded.values.transpose(0, 1).reshape(TILE, columns)
            errors[block] = target[block] - values[block]
            words.append(encoded.words)
        return torch.stack(words[::-1]), values

    def by_tiles(self, target: Tensor, feedback: Tensor, across: Tensor) -> tuple[Tensor, Tensor]:
        """The same with feedback between columns, too: `across` is K - 1, in blocks [B, W, W]."""
        (rows, columns), (count, width) = target.shape, across.shape[:2]
        device, per_block = target.device, width // TILE
        tall, wide = rows // TILE, columns // TILE
        # The columns of the factors that a tile needs, next to each other.
        down = feedback.view(rows, tall, TILE).transpose(0, 1).contiguous()  # [tall, I', 16]
        right = across.view(count, width, per_block, TILE).transpose(1, 2).contiguous()
        # Errors, by row of tiles and block; their products with K, by column of tiles.
        errors = target.new_zeros(tall, count, TILE, width)
        mixed = target.new_zeros(count * per_block, rows, TILE)
        targets = target.view(tall, TILE, wide, TILE).transpose(1, 2)  # [tall, wide, 16, 16]
        values = torch.empty_like(targets)
        words: Tensor | None = None
        order = torch.arange(tall - 1, -1, -1)[:, None] + (
            per_block - 1 - torch.arange(wide) % per_block
        )
        ordered = order.flatten().argsort().to(device)
        for tiles in torch.split(ordered, order.flatten().bincount().tolist()):
            b, c = tiles // wide, tiles % wide
            block, place = c // per_block, c % per_block
            own = errors[b, block] @ right[block, place]
            wanted = targets[b, c] + own + down[b].transpose(1, 2) @ mixed[c]
            encoded = self._encode(wanted)
            error = targets[b, c] - encoded.values
            values[b, c] = encoded.values
            errors.view(tall, count, TILE, per_block, TILE)[b, block, :, place] = error
            mixed.view(-1, tall, TILE, TILE)[c, b] = error + own
            if words is None:
                words = encoded.words.new_empty(tall, wide, encoded.words.shape[1])
            words[b, c] = encoded.words
        assert words is not None, "there are tiles"
        return words, values.transpose(1, 2).reshape(rows, columns)

    def _encode(self, tiles: Tensor) -> EncodedTiles:
        if self.check is not None:
            self.check()
        return encode_tiles(tiles, self.rate, self.codebook, self.ops)


def unit_factor(hessian: Tensor, damping: float) -> Tensor | None:
    """L - 1 of the block LDL' factorization of a damped Hessian, float32; None if no damping makes
    it positive definite."""
    for step in DAMPING_STEPS:
        lower, info = torch.linalg.cholesky_ex(damped(hessian, damping * step))
        if int(info) == 0 and bool(lower.isfinite().all()):
            return _unit_blocks(lower).float()
    return None


def _unit_blocks(lower: Tensor) -> Tensor:
    """L of the block LDL' factorization, less its unit diagonal, from the Cholesky factor."""
    unit = torch.zeros_like(lower)
    for first in range(0, len(lower) - TILE, TILE):
        block, after = slice(first, first + TILE), slice(first + TILE, None)
        unit[after, block] = torch.linalg.solve_triangular(
            lower[block, block], lower[after, block], upper=False, left=False
        )
    return unit


def _feedback_across(outputs: OutputHessian, svh: Tensor) -> Tensor | None:
    """K - 1 of the rotated Hessian of the outputs, in its blocks [B, W, W]; None if there is
    none."""
    if outputs.blocks is None:
        return None
    factors = [unit_factor(one, OUTPUT_DAMPING) for one in rotated_blocks(outputs.blocks, svh)]
    found = [one for one in factors if one is not None]
    return torch.stack(found) if len(found) == len(factors) else None


def rotated_blocks(blocks: Tensor, svh: Tensor) -> Tensor:
    """H diag(svh) G diag(svh) H of blocks G [B, W, W] on the diagonal, for svh [N']."""
    count, width = blocks.shape[:2]
    scale = pad(svh, (0, count * width - len(svh))).view(count, width)
    scaled = scale[:, :, None] * blocks * scale[:, None]
    return rotate(rotate(scaled).transpose(1, 2))


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
