"""Key smoothing: unchanged attention, smaller quantization error, no dependence on requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.engine.score import score_tokens
from exl_core.model.context import Context
from exl_core.model.key_smoothing import fit_key_smoothing
from exl_core.model.transformer import Transformer
from exl_core.ops.cache_rows import decode_rows, encode_rows
from exl_core.session.load import LoadedModel, LoadOptions, load_model
from support.families import FAMILIES, save_family
from support.profiles import first_by_default
from support.tiny_models import save, tiny_gpt_oss

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


HEADS_OF_32: dict[str, Any] = {
    **{"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
}
CHANGES: dict[str, dict[str, Any]] = {
    "gemma4": {"global_head_dim": 64},
    "gemma4-values": {"global_head_dim": 64},
    "granite4": {"mamba_n_heads": 8},
}
CASES = {
    name: {**HEADS_OF_32, **CHANGES.get(name, {})}
    for name in FAMILIES
    if name != "phi3-longrope"  # its lists of factors fit heads of 16
}
LARGE_HEADS: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 256},
    "gemma4": {"head_dim": 256, "global_head_dim": 512},
}
FIRST = ("olmo3", "cohere2", "ministral3", "gemma4")  # whole norms, no RoPE, factors, two sizes


@pytest.mark.parametrize(
    ("family", "changes"),
    first_by_default(
        [
            *((name, CASES[name]) for name in FIRST),
            *LARGE_HEADS.items(),
            *((name, changes) for name, changes in CASES.items() if name not in FIRST),
        ],
        len(FIRST) + len(LARGE_HEADS),
    ),
)
def test_4_bit_keys_are_smoothed_in_every_family(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    model = FAMILIES[family](**changes)
    if changes.get("global_head_dim") == 512:
        # Scores are not scaled: with such heads, softmax would amplify rounding errors.
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.data.mul_(0.25)
    folder = save_family(family, model, tmp_path)
    smoothed = load_model(str(folder)).model
    plain = Transformer(smoothed.config, smoothed._weights, smoothed.ops)  # no text to measure on
    ids = torch.randint(3, 259, (1, 200), generator=torch.Generator().manual_seed(3))

    def logits(model: Transformer, kv_format: KVFormat) -> Tensor:
        return Context(model, 256, batch_size=1, kv_format=kv_format).forward(ids)

    exact = logits(plain, KVFormat.FP32)
    errors = [(logits(m, KVFormat.Q4) - exact).square().mean().sqrt() for m in (smoothed, plain)]
    # Keys of random weights have no common part, so smoothing gains little. An error in it would
    # make the logits unrelated to the exact ones.
    assert 0.0 < float(errors[0]) < 1.1 * float(errors[1])
    assert float(errors[0]) < 0.7 * float(exact.square().mean().sqrt())


def test_keys_of_layers_with_sinks_are_not_shifted(tmp_path: Path) -> None:
    """A shift would change their scores against those of the sinks."""
    model = load_model(str(save(tiny_gpt_oss(**HEADS_OF_32), tmp_path))).model
    found = [one for one in model._key_smoothing if one is not None]
    assert len(found) == model.config.num_layers
    assert all(one.scale.std() > 0 for one in found)
    assert not any(one.shift.any() for one in found)


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
