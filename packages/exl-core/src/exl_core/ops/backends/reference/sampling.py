"""Reference ops on logits in plain torch: the whole row is sorted, arithmetic is float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from exl_core.ops.checks import OpInputError, check, check_contiguous, check_range
from exl_core.ops.sampling import (
    NOTHING_SAMPLED,
    NextStep,
    RowSettings,
    Sampled,
    SampleSettings,
    SamplesInTurn,
)

_NUCLEUS_FLOOR = 1e-6
_WEIGHT_FLOOR = -87.33654  # below this x, e^x is not a normal float32 and counts as 0


class ReferenceSamplingOps(SamplesInTurn):
    """SamplingOps in plain torch."""

    @staticmethod
    def log_sum_exp(x: Tensor) -> Tensor:
        check("log_sum_exp", "x", x, (torch.float32,), None, None)
        check_contiguous("log_sum_exp", "x", x, 1)
        if x.shape[1] == 0:
            raise OpInputError("log_sum_exp: x (expected rows of at least one value, got 0)")
        found = x.double().logsumexp(1).float()
        return found.masked_fill(found.isinf(), torch.nan)

    @staticmethod
    def sample(logits: Tensor, settings: SampleSettings) -> Sampled:
        _check(logits, settings)
        if bool((logits.isnan() | (logits == math.inf)).any()):
            return NOTHING_SAMPLED
        x = logits.clone()
        if settings.edits is not None:
            ids, factors, offsets = settings.edits
            was = x[ids]
            x[ids] = torch.where(was > 0.0, was / factors, was * factors) + offsets
        if settings.mask is not None:
            bits = torch.arange(len(x))
            x[(settings.mask[bits // 32] >> (bits % 32)) & 1 == 0] = -math.inf
        if not math.isfinite(x.max()):
            return NOTHING_SAMPLED
        if settings.temperature != 1.0:
            x = (x - x.max()) / settings.temperature
        order = torch.sort(x, descending=True, stable=True).indices
        order = order[: int((x > -math.inf).sum())]
        if settings.top_k > 0:
            order = order[: settings.top_k]
        difference = x[order] - x.max()
        below = difference.double()
        weight = below.exp().masked_fill(difference < _WEIGHT_FLOOR, 0.0)
        if settings.top_p < 1.0:
            total = weight.sum()
            is_kept = (weight.cumsum(0) <= settings.top_p * total) & (
                weight >= _NUCLEUS_FLOOR * total
            )
            is_kept[0] = True
            order, below, weight = order[is_kept], below[is_kept], weight[is_kept]
        if settings.min_p > 0.0:
            is_kept = below >= math.log(settings.min_p)
            order, weight = order[is_kept], weight[is_kept]
        probability = weight / weight.sum()
        by_id = order.argsort()
        running = weight[by_id].cumsum(0)
        above = (running > settings.uniform * running[-1]).nonzero()
        index = int(by_id[int(above[0]) if len(above) > 0 else -1])
        count = settings.num_top
        top = zip(order[:count].tolist(), probability[:count].tolist(), strict=True)
        return Sampled(int(order[index]), float(probability[index]), list(top))

    @staticmethod
    def sample_rows(
        logits: Tensor, rows: Sequence[RowSettings], next_step: NextStep | None = None
    ) -> list[Sampled]:
        sample = ReferenceSamplingOps.sample
        sampled = [sample(logits[settings.row], settings) for settings in rows]
        if next_step is not None:
            next_step.launch_after(sampled)
        return sampled


def _check(logits: Tensor, settings: SampleSettings) -> None:
    op = "sample"
    mask = settings.mask
    check(op, "logits", logits, (torch.float32,), None)
    check_contiguous(op, "logits", logits)
    if len(logits) == 0:
        raise OpInputError(f"{op}: logits (expected at least one)")
    if mask is not None:
        check(op, "mask", mask, (torch.int32,), None)
        check_contiguous(op, "mask", mask)
        if len(mask) * 32 < len(logits):
            raise OpInputError(f"{op}: mask (expected a bit for each of {len(logits)} tokens)")
    if settings.edits is not None:
        ids = settings.edits.ids
        check(op, "ids", ids, (torch.int64,), None)
        check_contiguous(op, "ids", ids)
        check_range(op, "ids", ids, len(logits))
        for name in ("factors", "offsets"):
            values = getattr(settings.edits, name)
            check(op, name, values, (torch.float32,), len(ids))
            check_contiguous(op, name, values)
        if len(torch.unique(ids)) < len(ids):
            raise OpInputError(f"{op}: ids (expected distinct ids)")
        if not bool((settings.edits.factors > 0.0).all()):
            raise OpInputError(f"{op}: factors (expected numbers above 0)")
    if not (
        settings.temperature > 0.0
        and settings.top_k >= 0
        and 0.0 < settings.top_p <= 1.0
        and 0.0 <= settings.min_p <= 1.0
        and 0.0 <= settings.uniform < 1.0
        and settings.num_top >= 0
    ):
        raise OpInputError(f"{op}: a setting is out of range")
