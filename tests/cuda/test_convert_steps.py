"""The converter's inner loops on a GPU, as single launches and as graphs, against the CPU."""

from __future__ import annotations

import pytest
import torch

from exl_core.convert.gptq import Factor, Variant, factorize, quantize_columns
from exl_core.convert.hessian import InputStatistics
from exl_core.convert.plan import ConvertOptions, TrellisCodes
from exl_core.convert.replay import CAPTURE_AT_CALL
from exl_core.convert.scales import group_scales
from exl_core.convert.sensitivity import _block_products, outputs_name
from exl_core.convert.trellis import Exl3Quantizer
from exl_core.formats.codecs.exl3 import layout as exl3
from exl_core.formats.codecs.exl3.layout import Exl3Linear
from exl_core.ops.weights import Codebook

pytestmark = pytest.mark.cuda

TRIALS = 8


@pytest.mark.parametrize(("rows", "columns"), [(32, 7), (64, 333), (17, 1)])
@pytest.mark.parametrize("bits", [(4,), (2, 5, 3, 8, 3)], ids=str)
def test_group_scales_agree_with_the_cpu(rows: int, columns: int, bits: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(rows)
    for _ in range(CAPTURE_AT_CALL + 2):
        values = torch.randn(rows, len(bits), columns, generator=generator)
        curvature = torch.rand(rows, generator=generator)
        near = group_scales(values, curvature, bits, TRIALS)
        far = group_scales(values.cuda(), curvature.cuda(), bits, TRIALS)
        assert (near.codes == far.codes.cpu()).float().mean() > 0.97  # sums in another order
        assert (near.largest == far.largest.cpu()).float().mean() > 0.7


def test_quantized_columns_are_the_same_in_every_run() -> None:
    k, n = 96, 40
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(400, k, generator=generator) * torch.rand(k, generator=generator).mul(3).exp()
    factor = factorize(x.T @ x / len(x))
    assert factor is not None
    far_parts = [part.cuda() for part in factor[:3]]
    far_factor = Factor(far_parts[0], far_parts[1], far_parts[2], factor.damping)
    forms = [[(2, 32)] * 3, [(6, 64), (3, 32)], [(4, 96)]]
    variants = [Variant(slice(i * n, i * n + n), groups) for i, groups in enumerate(forms)]
    weight = torch.randn(k, n, generator=generator).repeat(1, len(forms))
    near = quantize_columns(weight, factor, variants, TRIALS)
    first = quantize_columns(weight.cuda(), far_factor, variants, TRIALS)
    assert (near.codes == first.codes.cpu()).float().mean() > 0.97
    torch.testing.assert_close(first.cost.cpu().sum(0), near.cost.sum(0), rtol=2e-2, atol=0)
    for _ in range(CAPTURE_AT_CALL + 1):
        again = quantize_columns(weight.cuda(), far_factor, variants, TRIALS)
        assert torch.equal(again.codes, first.codes)
        assert torch.equal(again.cost, first.cost)
        assert torch.equal(again.weight, first.weight)
        for (codes, largest), (old_codes, old_largest) in zip(
            again.scales, first.scales, strict=True
        ):
            assert torch.equal(codes, old_codes)
            assert torch.equal(largest, old_largest)


@pytest.mark.parametrize(
    ("rate", "codebook"), [(1, "3inst"), (2.5, "mul1"), (4, "mcg"), (7, "mul1")]
)
def test_trellis_codes_decode_to_the_same_values(rate: float, codebook: Codebook) -> None:
    generator = torch.Generator().manual_seed(int(2 * rate))
    shape = (384 // 16, 256 // 16, int(16 * rate))
    trellis = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator).to(torch.int16)
    suh, svh = (torch.randn(n, generator=generator).half() for n in (384, 256))
    near = Exl3Linear(trellis, suh, svh, codebook)
    far = near.to(torch.device("cuda"))

    codes = exl3.decode_tiles(far.trellis, codebook)
    dense = exl3.dequantize(far, 128, 256)

    assert torch.equal(codes.cpu(), exl3.decode_tiles(trellis, codebook))
    # Sums of 128 float64 values in another order, rounded to float32.
    torch.testing.assert_close(dense.cpu(), exl3.dequantize(near, 128, 256), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("k", "n", "rate"), [(200, 300, 2.5), (640, 128, 3)])
def test_columns_make_up_for_each_other_as_on_the_cpu(k: int, n: int, rate: float) -> None:
    generator = torch.Generator().manual_seed(k)
    weight, x = (torch.randn(size, k, generator=generator) for size in (n, 900))
    mixed, own = (torch.randn(size, n, generator=generator) for size in (n // 8, 2000))
    gradients = torch.randn(2000, n // 8, generator=generator) @ mixed + own
    outputs = _block_products(gradients.T) / 2000  # on the CPU, as work files are read
    importance, products = gradients.square().mean(0), torch.block_diag(*outputs)[:n, :n]
    hessian, losses = x.T @ x / 900, []
    for device in ("cpu", "cuda"):
        given = {"w": importance, outputs_name("w"): outputs}
        options = ConvertOptions(format="exl3")
        statistics = InputStatistics(hessian.to(device), None)
        quantizer = Exl3Quantizer(statistics, "w", options, given)
        matrix = quantizer.quantize("w", weight.to(device), TrellisCodes(rate, "mul1"))
        error = matrix.weight.cpu() - weight
        losses.append(float(((error @ hessian @ error.T) * products).sum()))
    assert losses[1] == pytest.approx(losses[0], rel=0.03)  # sums in another order


def test_a_quantized_matrix_is_decoded_where_it_was_quantized() -> None:
    k, n = 200, 72
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(600, k, generator=generator)
    weight = torch.randn(n, k, generator=generator).cuda()
    statistics = InputStatistics((x.T @ x / len(x)).cuda(), None)
    quantizer = Exl3Quantizer(statistics, "a", ConvertOptions(format="exl3"), {})

    matrix = quantizer.quantize("a", weight, TrellisCodes(3, "mul1"))

    assert matrix.weight.device == weight.device
    stored = exl3.dequantize(exl3.check(matrix.pieces, "a"), 0, 128)[:k, :n].T
    torch.testing.assert_close(matrix.weight.cpu(), stored, rtol=1e-6, atol=1e-7)
    assert (matrix.weight - weight).norm() < 0.3 * weight.norm()
