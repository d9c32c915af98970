"""Sampler chain: the steps of given settings, in order. It defines the result of every sample.

The order is: penalties, bans, biases, DRY, allowed tokens, mask; top-n-sigma, smoothing and
temperature; top-k, top-p, top-a, min-p, tail-free, typical, the mirostat cut; dynamic or last
temperature; XTC.
Guidance comes before the chain (`guide` in `sampler.py`), the draw, with or without skew, after it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from exl_core.sampling.feedback import SurpriseCut, ZipfCut
from exl_core.sampling.params import SamplerParams
from exl_core.sampling.penalties import Allow, Ban, Bias, Dry, Mask, Penalties
from exl_core.sampling.steps import (
    DynamicTemperature,
    ExcludeTop,
    LogitStep,
    MinP,
    Smoothing,
    TailFree,
    Temperature,
    TopA,
    TopK,
    TopNSigma,
    TopP,
    Typical,
)


def steps_for(
    params: SamplerParams,
    history: Sequence[int],
    banned: Collection[int] = (),
    mask: Tensor | None = None,
    mu: float | None = None,
) -> list[LogitStep]:
    """Steps that define the result of `Sampler.sample`, in order.

    `mu` is the current mirostat cut; None is its initial value.
    """
    steps: list[LogitStep] = []
    ids = tuple(history)
    if params.has_penalties:
        steps.append(penalties_of(params, ids))
    if params.banned_tokens or banned:
        steps.append(Ban(params.banned_tokens | frozenset(banned)))
    if params.token_bias:
        steps.append(Bias(params.token_bias))
    if params.dry_multiplier > 0.0:
        steps.append(dry_of(params, ids))
    if params.allowed_tokens is not None:
        steps.append(Allow(params.allowed_tokens))
    if mask is not None:
        steps.append(Mask(mask))
    if params.is_greedy:
        return [*steps, TopK(1)]
    return steps + scaling(params) + first_cuts(params) + later_steps(params, mu)


def penalties_of(params: SamplerParams, token_ids: tuple[int, ...] = ()) -> Penalties:
    return Penalties(
        token_ids,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
        params.penalty_range,
        params.penalty_decay,
    )


def dry_of(params: SamplerParams, token_ids: tuple[int, ...] = ()) -> Dry:
    return Dry(
        token_ids,
        params.dry_multiplier,
        params.dry_base,
        params.dry_allowed_length,
        params.dry_range,
        params.dry_max_ngram,
        params.dry_breakers,
    )


def scaling(params: SamplerParams) -> list[LogitStep]:
    """Steps on the whole vocabulary, before the cuts that keep few tokens."""
    steps: list[LogitStep] = []
    if params.top_n_sigma > 0.0:
        steps.append(TopNSigma(params.top_n_sigma))
    if params.smoothing_factor > 0.0:
        steps.append(Smoothing(params.smoothing_factor, params.smoothing_curve))
    if params.temperature != 1.0 and not params.temperature_last:
        steps.append(Temperature(params.temperature))
    return steps


def first_cuts(params: SamplerParams) -> list[LogitStep]:
    """Cuts that keep few tokens and that the kernel implements."""
    steps: list[LogitStep] = []
    if params.top_k > 0:
        steps.append(TopK(params.top_k))
    if params.top_p < 1.0:
        steps.append(TopP(params.top_p))
    return steps


def later_steps(
    params: SamplerParams, mu: float | None = None, protected: frozenset[int] | None = None
) -> list[LogitStep]:
    """The remaining steps. `protected` replaces `xtc_protected` if the ids are renumbered."""
    steps: list[LogitStep] = []
    if params.top_a > 0.0:
        steps.append(TopA(params.top_a))
    if params.min_p > 0.0:
        steps.append(MinP(params.min_p))
    if params.tfs < 1.0:
        steps.append(TailFree(params.tfs))
    if params.typical < 1.0:
        steps.append(Typical(params.typical))
    if params.mirostat_tau is not None:
        bits = 2.0 * params.mirostat_tau if mu is None else mu
        steps.append(ZipfCut(bits) if params.mirostat_version == 1 else SurpriseCut(bits))
    if params.has_dynamic_temperature:
        low, high = params.min_temp, params.max_temp
        steps.append(DynamicTemperature(low, high, params.temp_exponent))
    elif params.temperature_last and params.temperature != 1.0:
        steps.append(Temperature(params.temperature))
    if params.xtc_probability > 0.0:
        kept = params.xtc_protected if protected is None else protected
        steps.append(ExcludeTop(params.xtc_probability, params.xtc_threshold, kept))
    return steps


def is_common(params: SamplerParams) -> bool:
    """The kernel implements the whole chain of these settings, apart from changes to logits."""
    if params.is_greedy:
        return True
    return (
        params.top_n_sigma == 0.0
        and params.smoothing_factor == 0.0
        and params.top_a == 0.0
        and params.tfs == 1.0
        and params.typical == 1.0
        and params.mirostat_tau is None
        and not params.has_dynamic_temperature
        and not (params.temperature_last and params.temperature != 1.0)
        and params.xtc_probability == 0.0
        and params.skew == 0.0
    )
