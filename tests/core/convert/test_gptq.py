"""GPTQ against a slow reference, and on inputs with an unusable Hessian."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from exl_core.convert.gptq import (
    DAMPING,
    Variant,
    cost_curvature,
    factorize,
    identity_factor,
    quantize_columns,
)
from exl_core.convert.hessian import InputStatistics, measure_hessian
from exl_core.convert.matrix import MatrixQuantizer
from exl_core.convert.parallel import Workers
from exl_core.convert.plan import Layout
from exl_core.convert.scales import exact_scales, group_scales
from exl_core.convert.sensitivity import MatrixSensitivity
from exl_core.formats.codecs.exl2 import layout as exl2

TRIALS = 8


def correlated_hessian(features: int, seed: int = 0, tokens: int = 2000) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(features, features, generator=generator) / features**0.5
    spread = torch.rand(features, generator=generator).mul(3).exp()
    x = torch.randn(tokens, features, generator=generator) @ (mixing + torch.eye(features)) * spread
    return x.T @ x / tokens


def random_weight(out_features: int, in_features: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(out_features, in_features, generator=generator)


def outputs_error(weight: Tensor, source: Tensor, hessian: Tensor) -> float:
    """tr(E H E'), both [out, in]."""
    error = (weight - source).double()
    return float(((error @ hessian.double()) * error).sum())


def reference_gptq(
    source: Tensor, hessian: Tensor, order: Tensor, scales: Tensor, zero: int
) -> Tensor:
    """GPTQ by its definition, in float64: each row is followed by a solve for all rows after it."""
    h = hessian.double()[order][:, order]
    h = h + torch.eye(len(h)) * h.diagonal().mean() * DAMPING
    target = source.double()[order]  # [in, out]
    codes = torch.empty(source.shape, dtype=torch.int64)
    current = target.clone()
    for row in range(len(h)):
        step = (current[row] / scales[row]).round().clamp(-zero, zero - 1)
        codes[row] = step.long() + zero
        error = current[row] - step * scales[row]
        remaining = h[row + 1 :, row + 1 :]
        if len(remaining):
            current[row + 1 :] += torch.linalg.solve(remaining, h[row + 1 :, row : row + 1]) * error
        current[row] = step * scales[row]
    return codes


def test_codes_match_the_gptq_definition() -> None:
    k, n = 96, 24
    hessian, weight = correlated_hessian(k), random_weight(n, k).T.contiguous()
    factor = factorize(hessian)
    assert factor is not None
    groups = [(4, 32), (3, 64)]
    rounded = quantize_columns(weight[factor.order], factor, [Variant(slice(n), groups)], TRIALS)
    scale_codes, scale_max = rounded.scales[0]
    scales = exact_scales(scale_max[:, None], scale_codes).double()
    # The reference takes the scales of the first group (4 bits), so only that group is compared.
    first = reference_gptq(weight, hessian, factor.order, scales[0].expand(k, n), 8)
    assert (rounded.codes[:32].long() == first[:32]).float().mean() > 0.999


def test_cost_uses_the_damped_hessian() -> None:
    k, n = 128, 40
    hessian, weight = correlated_hessian(k), random_weight(n, k).T.contiguous()
    factor = factorize(hessian)
    assert factor is not None
    variant = Variant(slice(n), [(3, 64), (3, 64)])
    rounded = quantize_columns(weight[factor.order], factor, [variant], TRIALS)
    damped = hessian + torch.eye(k) * hessian.diagonal().mean() * DAMPING
    read = rounded.weight[factor.order.argsort()].T
    assert float(rounded.cost.sum()) == pytest.approx(
        outputs_error(read, weight.T, damped), rel=1e-3
    )


def test_cost_on_another_hessian_is_that_of_the_errors() -> None:
    k, n = 128, 400
    hessian, other = correlated_hessian(k), correlated_hessian(k, seed=5)
    weight = random_weight(n, k).T.contiguous()
    factor = factorize(hessian)
    assert factor is not None
    damped = hessian + torch.eye(k) * hessian.diagonal().mean() * DAMPING
    torch.testing.assert_close(cost_curvature(factor, damped), factor.curvature, rtol=1e-3, atol=0)
    curvatures = (None, cost_curvature(factor, other))
    variants = [
        Variant(slice(i * n, i * n + n), [(3, 64), (3, 64)], one)
        for i, one in enumerate(curvatures)
    ]
    rounded = quantize_columns(weight[factor.order].repeat(1, 2), factor, variants, TRIALS)
    assert torch.equal(rounded.codes[:, :n], rounded.codes[:, n:])
    read = rounded.weight[factor.order.argsort(), :n].T
    own, foreign = rounded.cost.sum(0).tolist()
    assert own == pytest.approx(outputs_error(read, weight.T, damped), rel=1e-3)
    assert foreign == pytest.approx(outputs_error(read, weight.T, other), rel=0.05)


def test_sensitive_first_tokens_get_smaller_errors() -> None:
    generator = torch.Generator().manual_seed(4)
    weight, x = random_weight(128, 256), torch.randn(8, 64, 256, generator=generator)
    x[:, 0] = torch.randn(256, generator=generator)  # the same token, such as BOS
    statistics = measure_hessian([x], None, Workers(None, lambda: False))
    errors = []
    for factor in (1.0, 1000.0):
        tokens = torch.ones(8, 64)
        tokens[:, 0] = factor
        sensitivity = {"w": MatrixSensitivity(torch.ones(128), tokens)}
        quantizer = MatrixQuantizer(statistics, sensitivity)
        error = quantizer.quantize("w", weight, Layout.parse("3:100/64")).weight - weight
        spans = (slice(1), slice(1, 64))
        errors.append([float((x[:, span] @ error.T).square().mean()) for span in spans])
    (first, others), (weighted_first, weighted_others) = errors
    assert weighted_first < 0.2 * first
    assert weighted_others < 1.2 * others


def test_gptq_error_is_far_below_rounding() -> None:
    k, n = 192, 64
    hessian, weight = correlated_hessian(k), random_weight(n, k)
    layout = Layout.parse("3:100/64")
    good = MatrixQuantizer(InputStatistics(hessian, None), {}).quantize("good", weight, layout)
    plain = identity_factor(k, torch.device("cpu"))
    rounded = quantize_columns(
        weight.T.contiguous(), plain, [Variant(slice(n), layout.groups(k))], TRIALS
    )
    rtn = outputs_error(rounded.weight.T, weight, hessian)
    assert outputs_error(good.weight, weight, hessian) < 0.6 * rtn


@pytest.mark.parametrize("in_features", [576, 96])
def test_error_falls_with_more_bits(in_features: int) -> None:
    hessian, weight = correlated_hessian(in_features), random_weight(40, in_features)
    quantizer = MatrixQuantizer(InputStatistics(hessian, None), {})
    layouts = ["2:100/64", "3:25/64 2:75/64", "3:100/64", "4:100/64", "5:100/64", "6:100/64"]
    reports = [quantizer.quantize("w", weight, Layout.parse(text)).report for text in layouts]
    errors = [report.error for report in reports]
    assert errors == sorted(errors, reverse=True)
    assert [r.bits for r in reports] == sorted(r.bits for r in reports)


def test_variants_side_by_side_equal_single_variants() -> None:
    k, n = 96, 32
    hessian, weight = correlated_hessian(k), random_weight(n, k).T.contiguous()
    factor = factorize(hessian)
    assert factor is not None
    forms = [[(2, 32)] * 3, [(6, 64), (3, 32)], [(8, 96)]]
    variants = [Variant(slice(i * n, i * n + n), groups) for i, groups in enumerate(forms)]
    stored = weight[factor.order]
    together = quantize_columns(stored.repeat(1, 3), factor, variants, TRIALS)
    for variant, groups in zip(variants, forms, strict=True):
        alone = quantize_columns(stored, factor, [Variant(slice(n), groups)], TRIALS)
        assert torch.equal(together.codes[:, variant.columns], alone.codes)


def test_cross_moment_compensates_earlier_errors() -> None:
    """With the cross moment, outputs are closer to the source's than without it.

    The inputs here are mostly along one direction, and have become shorter along it.
    """
    k, n, tokens = 64, 48, 4000
    generator = torch.Generator().manual_seed(5)
    source_x = torch.randn(tokens, k, generator=generator)
    source_x += 3 * torch.randn(1, k, generator=torch.Generator().manual_seed(6))
    x = source_x * 0.9 + 0.1 * torch.randn(tokens, k, generator=generator)
    weight, layout = random_weight(n, k), Layout.parse("4:100/32")
    hessian, cross = x.T @ x / tokens, x.T @ source_x / tokens
    expected = source_x @ weight.T

    def error(statistics: InputStatistics) -> float:
        quantized = MatrixQuantizer(statistics, {}).quantize("w", weight, layout)
        return float((x @ quantized.weight.T - expected).square().mean())

    assert error(InputStatistics(hessian, cross)) < 0.9 * error(InputStatistics(hessian, None))


def one_rank(k: int) -> Tensor:
    x = torch.randn(1, k, generator=torch.Generator().manual_seed(2))
    return x.T @ x


def dead_inputs(k: int) -> Tensor:
    hessian = correlated_hessian(k)
    hessian[:32], hessian[:, :32] = 0, 0
    return hessian


@pytest.mark.parametrize("make", [one_rank, dead_inputs], ids=["rank one", "dead inputs"])
def test_singular_hessian_is_quantized(make: Callable[[int], Tensor]) -> None:
    k, n = 96, 32
    hessian, weight = make(k), random_weight(n, k)
    matrix = MatrixQuantizer(InputStatistics(hessian, None), {}).quantize(
        "w", weight, Layout.parse("4:100/32")
    )
    assert matrix.weight.isfinite().all()
    assert matrix.report.error < 0.02
    assert not [one for one in matrix.report.incidents if one.kind == "rounded"]


def test_indefinite_hessian_raises_damping_and_is_reported() -> None:
    k = 64
    hessian = correlated_hessian(k)
    hessian[0, 1] = hessian[1, 0] = 1.1 * (hessian[0, 0] * hessian[1, 1]).sqrt()  # indefinite
    quantizer = MatrixQuantizer(InputStatistics(hessian, None), {})
    report = quantizer.quantize("w", random_weight(32, k), Layout.parse("4:100/32")).report
    assert [one.kind for one in report.incidents] == ["damped"]
    assert "mean diagonal" in report.incidents[0].detail


@pytest.mark.parametrize("fill", [0.0, float("nan")], ids=["zero", "nan"])
def test_unusable_hessian_falls_back_to_rounding(fill: float) -> None:
    k, n = 64, 32
    weight = random_weight(n, k)
    quantizer = MatrixQuantizer(InputStatistics(torch.full((k, k), fill), None), {})
    matrix = quantizer.quantize("w", weight, Layout.parse("6:100/32"))
    assert [one.kind for one in matrix.report.incidents] == ["rounded"]
    assert (matrix.weight - weight).abs().max() < 0.1
    assert matrix.report.error == matrix.report.error  # not NaN, which JSON cannot hold


def test_zero_matrix_and_constant_column() -> None:
    k, n = 96, 32
    hessian = correlated_hessian(k)
    layout = Layout.parse("3:100/32")
    quantizer = MatrixQuantizer(InputStatistics(hessian, None), {})
    assert not quantizer.quantize("w", torch.zeros(n, k), layout).weight.any()
    weight = random_weight(n, k)
    weight[:, 7] = 0.5  # one input feature has the same weight for all outputs
    weight[3] = 0.25  # one output has the same weight for all inputs
    constant = quantizer.quantize("w", weight, layout)
    assert constant.report.error < 0.1


def test_quantization_is_deterministic() -> None:
    k, n = 160, 48
    hessian, weight = correlated_hessian(k), random_weight(n, k)
    layout = Layout.parse("4:25/64 3:75/64")
    one, two = (
        MatrixQuantizer(InputStatistics(hessian.clone(), hessian * 0.9), {}).quantize(
            "w", weight, layout
        )
        for _ in range(2)
    )
    for piece in ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm"):
        assert torch.equal(one.pieces[piece], two.pieces[piece])


def test_padded_columns_and_short_last_group() -> None:
    k, n = 160, 20  # groups of 64, 64 and 32 rows; 12 columns of padding
    hessian, weight = correlated_hessian(k), random_weight(n, k)
    matrix = MatrixQuantizer(InputStatistics(hessian, None), {}).quantize(
        "w", weight, Layout.parse("5:100/64")
    )
    packed = exl2.check(matrix.pieces, "w")
    assert packed.out_features == 32
    assert [group.rows for group in packed.groups] == [64, 64, 32]
    assert matrix.weight.shape == (n, k)


@pytest.mark.parametrize(("rows", "columns"), [(32, 7), (64, 33), (5, 1)])
def test_batched_scales_equal_single_variants(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    bits = (2, 5, 3, 8, 3)
    values = torch.randn(rows, len(bits), columns, generator=generator)
    values[:, 4] = 0  # a variant of zeros has no scale
    curvature = torch.rand(rows, generator=generator)
    together = group_scales(values, curvature, bits, TRIALS)
    for i, width in enumerate(bits):
        alone = group_scales(values[:, i : i + 1], curvature, (width,), TRIALS)
        for all_of_them, one in zip(together, alone, strict=True):
            assert torch.equal(all_of_them[i], one[0])
