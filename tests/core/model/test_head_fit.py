"""Heads that few bits hold well: what is taken from keys, and who gets it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.engine.score import score_tokens
from exl_core.load import LoadedModel, LoadOptions, load_model
from exl_core.model.head_fit import head_fit
from exl_core.ops.reference_cache import decode_rows, encode_rows

HEADS, KV_HEADS, D = 4, 2, 64


def a_text() -> tuple[Tensor, Tensor]:
    """Queries and keys; elements of the keys differ in size, and hardly change from row to row."""
    rng = torch.Generator().manual_seed(7)
    sizes = torch.logspace(-1, 1, D)
    offset = 30 * torch.randn(KV_HEADS, D, generator=rng)
    keys = offset + sizes * torch.randn(200, KV_HEADS, D, generator=rng)
    return torch.randn(200, HEADS, D, generator=rng), keys


def scores(queries: Tensor, keys: Tensor) -> Tensor:
    keys = keys.repeat_interleave(HEADS // KV_HEADS, dim=1)
    return torch.einsum("qhd,khd->hqk", queries.double(), keys.double())


@pytest.mark.parametrize("is_shifted", [False, True])
def test_weights_stay_and_codes_come_closer(is_shifted: bool) -> None:
    queries, keys = a_text()
    fit = head_fit(queries, keys, is_shifted=is_shifted)
    scale, shift = fit.scale.view(-1, D), fit.shift.view(-1, D)
    fitted_q = queries * scale[:HEADS] + shift[:HEADS]
    fitted_k = keys * scale[HEADS:] + shift[HEADS:]

    wanted, fitted = scores(queries, keys), scores(fitted_q, fitted_k)
    moved = fitted - wanted
    if is_shifted:
        moved -= moved.mean(-1, keepdim=True)
    assert float(moved.abs().max()) < 1e-4 * float(wanted.abs().max())

    def error(q: Tensor, k: Tensor) -> Tensor:
        lost = scores(q, decode_rows(encode_rows(k, torch.uint8)) - k)
        return (lost - lost.mean(-1, keepdim=True)).std()

    assert float(error(fitted_q, fitted_k)) < (0.3 if is_shifted else 0.9) * float(
        error(queries, keys)
    )


def test_elements_that_say_nothing_leave_finite_numbers() -> None:
    for queries, keys in (
        (torch.zeros(3, HEADS, D), torch.ones(3, KV_HEADS, D)),
        (torch.ones(3, HEADS, D), torch.zeros(3, KV_HEADS, D)),
    ):
        fit = head_fit(queries, keys, is_shifted=True)
        assert bool(fit.scale.isfinite().all() and fit.shift.isfinite().all())
        assert 1 / 8 <= float(fit.scale.min()) <= float(fit.scale.max()) <= 8


@pytest.fixture(scope="module")
def twice(smollm2_path: Path) -> tuple[LoadedModel, LoadedModel]:
    return load_model(str(smollm2_path)), load_model(str(smollm2_path), LoadOptions(threads=1))


def test_every_load_stores_the_same_whatever_came_first(
    twice: tuple[LoadedModel, LoadedModel],
) -> None:
    ids = list(range(1000, 1040))
    first, second = (loaded.model for loaded in twice)
    score_tokens(first, ids[::-1], kv_format=KVFormat.Q4)
    pair = [score_tokens(model, ids, kv_format=KVFormat.Q4) for model in (first, second)]
    assert torch.equal(*pair)
