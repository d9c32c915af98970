"""Key smoothing: unchanged attention, smaller quantization error, no dependence on requests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.engine.score import score_tokens
from exl_core.model.key_smoothing import fit_key_smoothing
from exl_core.ops.cache_rows import decode_rows, encode_rows
from exl_core.session.load import LoadedModel, LoadOptions, load_model

HEADS, KV_HEADS, D = 4, 2, 64


def random_heads() -> tuple[Tensor, Tensor]:
    """Queries and keys. Elements of the keys differ in size, and vary little between rows."""
    rng = torch.Generator().manual_seed(7)
    sizes = torch.logspace(-1, 1, D)
    offset = 30 * torch.randn(KV_HEADS, D, generator=rng)
    keys = offset + sizes * torch.randn(200, KV_HEADS, D, generator=rng)
    return torch.randn(200, HEADS, D, generator=rng), keys


def scores(queries: Tensor, keys: Tensor) -> Tensor:
    keys = keys.repeat_interleave(HEADS // KV_HEADS, dim=1)
    return torch.einsum("qhd,khd->hqk", queries.double(), keys.double())


@pytest.mark.parametrize("is_shifted", [False, True])
def test_smoothing_keeps_attention_and_lowers_the_error_of_4_bit_keys(is_shifted: bool) -> None:
    queries, keys = random_heads()
    smoothing = fit_key_smoothing(queries, keys, is_shifted=is_shifted)
    scale, shift = smoothing.scale.view(-1, D), smoothing.shift.view(-1, D)
    smooth_q = queries * scale[:HEADS] + shift[:HEADS]
    smooth_k = keys * scale[HEADS:] + shift[HEADS:]

    expected = scores(queries, keys)
    change = scores(smooth_q, smooth_k) - expected
    if is_shifted:  # softmax ignores a shift that is the same for all keys of a query
        change -= change.mean(-1, keepdim=True)
    assert float(change.abs().max()) < 1e-4 * float(expected.abs().max())

    def error(q: Tensor, k: Tensor) -> Tensor:
        lost = scores(q, decode_rows(encode_rows(k, torch.uint8)) - k)
        return (lost - lost.mean(-1, keepdim=True)).std()

    assert float(error(smooth_q, smooth_k)) < (0.3 if is_shifted else 0.9) * float(
        error(queries, keys)
    )


def test_constant_or_zero_heads_give_finite_factors() -> None:
    for queries, keys in (
        (torch.zeros(3, HEADS, D), torch.ones(3, KV_HEADS, D)),
        (torch.ones(3, HEADS, D), torch.zeros(3, KV_HEADS, D)),
    ):
        smoothing = fit_key_smoothing(queries, keys, is_shifted=True)
        assert bool(smoothing.scale.isfinite().all() and smoothing.shift.isfinite().all())
        assert 1 / 8 <= float(smoothing.scale.min()) <= float(smoothing.scale.max()) <= 8


@pytest.fixture(scope="module")
def two_loads(smollm2_path: Path) -> tuple[LoadedModel, LoadedModel]:
    return load_model(str(smollm2_path)), load_model(str(smollm2_path), LoadOptions(threads=1))


@pytest.mark.thorough
def test_smoothing_does_not_depend_on_earlier_requests_or_threads(
    two_loads: tuple[LoadedModel, LoadedModel],
) -> None:
    ids = list(range(1000, 1040))
    first, second = (loaded.model for loaded in two_loads)
    score_tokens(first, ids[::-1], kv_format=KVFormat.Q4)
    pair = [score_tokens(model, ids, kv_format=KVFormat.Q4) for model in (first, second)]
    assert torch.equal(*pair)
