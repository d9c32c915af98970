"""Joined matrices of more parts than one launch takes: neighbors of one layout are merged."""

from __future__ import annotations

import pytest
import torch
from kernel_support import assert_norm_within, normal, packed
from quant_support import GPU_BOUND, Shape, filled, make_matrix

from exl_core.ops.backends.cuda.matmul import CudaJoined
from exl_core.ops.table import OpTable
from exl_kernels import cuda

pytestmark = pytest.mark.cuda

COLUMNS = (64, 32, 96, 128)
ALIKE = [Shape(((4, 2, 128),), n) for n in COLUMNS]
CASES = {
    "alike": (ALIKE, 1),
    "with-zeros": ([Shape(((4, 2, 128),), n, "zeros") for n in COLUMNS], 1),
    "of-other-widths": ([*ALIKE[:3], Shape(((5, 2, 128),), 128)], 4),
    "within-a-panel": ([*ALIKE[:3], Shape(((4, 2, 128),), 40)], 4),
    "with-bias": ([*ALIKE[:3], Shape(((4, 2, 128),), 32, has_bias=True)], 4),
    "few": (ALIKE[: cuda.MAX_PARTS], cuda.MAX_PARTS),
}
"""Shapes, and the number of matrices that are left."""


@pytest.mark.parametrize("name", CASES)
def test_many_parts(gpu_table: OpTable, rng: torch.Generator, name: str) -> None:
    shapes, left = CASES[name]
    matrices = [make_matrix(rng, shape) for shape in shapes]
    weight = normal(rng, 40, 256).half()
    parts = [*(filled(gpu_table, one) for one in matrices), packed(gpu_table, weight)]
    joined = gpu_table.join(parts)
    assert isinstance(joined, CudaJoined)
    assert len(joined.parts) == left + 1
    assert joined.out_features == sum(shape.n for shape in shapes) + 40
    for rows in (1, 5, 33, 200):
        x = normal(rng, rows, 256).half().float()
        exact = [
            x.double() @ one.weights().double().T + (0 if one.bias is None else one.bias.double())
            for one in matrices
        ]
        got = gpu_table.linear(x, joined)
        ends = [sum(shape.n for shape in shapes[: i + 1]) for i in range(len(shapes))]
        for y, part in zip(exact, torch.tensor_split(got, ends, 1), strict=False):
            assert_norm_within(part, y, GPU_BOUND)
        assert_norm_within(got[:, ends[-1] :], x.double() @ weight.double().T, GPU_BOUND)
