"""One request's sampler: from a row of logits to a token, with a random stream of its own.

Knows neither text nor filters; tokens that must not come are given with the call. Nothing here
depends on what else is in the batch, so the same seed gives the same tokens from the same logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from exl_core.errors import ExlError
from exl_core.sampling.fuse import shortlist
from exl_core.sampling.params import SamplerParams
from exl_core.sampling.steps import (
    Ban,
    LogitStep,
    MinP,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
    draw,
    greedy,
    penalize,
)


class LogitsError(ExlError):
    """The model's logits cannot be sampled from: NaN, infinite, or every token dropped."""


def steps_for(
    params: SamplerParams, history: Sequence[int], banned: frozenset[int] = frozenset()
) -> list[LogitStep]:
    """The steps that `Sampler.sample` stands for, in their order."""
    steps: list[LogitStep] = []
    if params.repetition_penalty != 1.0:
        recent = history if params.repetition_range is None else history[-params.repetition_range :]
        steps.append(RepetitionPenalty(params.repetition_penalty, tuple(recent)))
    if banned:
        steps.append(Ban(banned))
    if params.is_greedy:
        steps.append(TopK(1))
        return steps
    if params.temperature != 1.0:
        steps.append(Temperature(params.temperature))
    if params.top_k > 0:
        steps.append(TopK(params.top_k))
    if params.top_p < 1.0:
        steps.append(TopP(params.top_p))
    if params.min_p > 0.0:
        steps.append(MinP(params.min_p))
    return steps


class Sampler:
    def __init__(self, params: SamplerParams) -> None:
        self.params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)
        self._history = _History()

    def sample(
        self, logits: Tensor, history: Sequence[int], banned: frozenset[int] = frozenset()
    ) -> int:
        """The next token. `history`, the prompt and the reply so far, only ever grows at its end.

        `logits` is float32 [vocab_size] and is left as it is.
        """
        params = self.params
        largest = _check(logits)
        if params.repetition_penalty != 1.0:
            ids = self._history.latest(history, params.repetition_range)
            logits = penalize(logits.clone(), ids, params.repetition_penalty)
        if banned:
            logits = Ban(banned)(logits)
        if params.repetition_penalty != 1.0 or banned:
            largest = logits.amax()
            if not math.isfinite(largest):
                raise LogitsError(
                    "the penalty or the ban leaves no token to sample",
                    where="sampler",
                    expected="a finite largest logit",
                    got=float(largest),
                )
        if params.is_greedy:
            return greedy(logits)
        if params.temperature != 1.0:
            logits = (logits - largest).div_(params.temperature)
            largest = torch.zeros(())
        ids_kept, weight = shortlist(
            logits, largest, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
        )
        index = draw(weight, self._uniform())
        return index if ids_kept is None else int(ids_kept[index])

    def _uniform(self) -> float:
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))


class _History:
    """The history as a tensor that is only ever added to: converting it anew each time would cost
    more than the rest of the sampler."""

    def __init__(self) -> None:
        self._ids = torch.empty(256, dtype=torch.int64)
        self._count = 0

    def latest(self, history: Sequence[int], count: int | None) -> Tensor:
        length = len(history)
        if length > len(self._ids):
            grown = torch.empty(2 * length, dtype=torch.int64)
            grown[: self._count] = self._ids[: self._count]
            self._ids = grown
        if length > self._count:
            self._ids[self._count : length] = torch.tensor(history[self._count :])
            self._count = length
        start = 0 if count is None else max(0, length - count)
        return self._ids[start:length]


def _check(logits: Tensor) -> Tensor:
    """The largest logit. A minus infinity is a token that the model itself rules out."""
    largest = logits.amax()
    if math.isfinite(largest):
        return largest
    if math.isnan(largest):
        got, cause = "NaN", "A weight is damaged, or activations overflowed"
    elif largest > 0:
        got, cause = "infinity", "Activations overflowed"
    else:
        got, cause = "minus infinity everywhere", "A weight of the output layer is damaged"
    raise LogitsError(
        "the model's logits are not numbers that can be sampled",
        where="sampler",
        expected="finite values",
        got=got,
        next_step=f"{cause}: 'exl inspect model MODEL --tensors' shows the file's tensors, "
        "'exl doctor' tests the kernels of this machine.",
    )
