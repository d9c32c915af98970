"""Prepared inputs: each form has its values in the documented positions, and zeros elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from cuda_support import CHUNK_ROWS, prepared_chunk
from torch import Tensor

from exl_core.ops.backends.cuda.library import TYPES, Gpu
from exl_kernels import cuda

pytestmark = pytest.mark.cuda

ROWS = [1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 64, 127, 130]
DIMS = [32, 576, 1536, 4096, 11008]
EPS = 1e-5
LARGEST = 65504.0


@dataclass(frozen=True)
class Form:
    """`permutation` is one (int32, on the CPU, -1: padding), or None for the identity."""

    num_blocks: int
    permutation: Tensor | None = None
    is_plain: bool = False


def permuted(rng: torch.Generator, k: int, padding: int) -> Form:
    """Random permutation with `padding` blocks of padding at random."""
    num_blocks = -(-k // 32) + padding
    permutation = torch.full((32 * num_blocks,), -1, dtype=torch.int32)
    rows = torch.randperm(32 * num_blocks, generator=rng)[:k]
    permutation[rows] = torch.randperm(k, generator=rng).int()
    return Form(num_blocks, permutation)


def prepare(gpu: Gpu, x: Tensor, norm: Tensor | None, forms: list[Form]) -> list[Tensor]:
    """Content of each prepared form, without the pad after its last chunk."""
    args = cuda.Prepare(
        x=x.data_ptr(),
        x_stride=x.stride(0),
        x_dtype=TYPES[x.dtype],
        norm=None if norm is None else norm.data_ptr(),
        eps=EPS,
        m=x.shape[0],
        k=x.shape[1],
        count=len(forms),
    )
    outs, permutations = [], []
    for i, form in enumerate(forms):
        halves = x.numel() if form.is_plain else cuda.prepared_halves(len(x), form.num_blocks)
        outs.append(torch.full((halves,), torch.nan, dtype=torch.float16, device=x.device))
        permutations.append(None if form.permutation is None else form.permutation.to(x.device))
        permutation = permutations[i]
        args.to[i] = cuda.Prepared(
            None if permutation is None else permutation.data_ptr(),
            outs[i].data_ptr(),
            form.num_blocks,
            int(form.is_plain),
        )
    gpu.call("prepare", args)
    pads = [0 if form.is_plain else cuda.prepared_halves(len(x), 0) for form in forms]
    return [out.cpu()[: out.numel() - pad] for out, pad in zip(outs, pads, strict=True)]


def normed(x: Tensor, norm: Tensor | None) -> Tensor:
    """float64 [m, k]."""
    values = x.double()
    if norm is None:
        return values
    return values / (values.square().mean(1, keepdim=True) + EPS).sqrt() * norm.double()


def laid_out(values: Tensor, form: Form) -> Tensor:
    """Expected content of a form, as `exl/cuda/linear.h` documents it."""
    k = values.shape[1]
    if form.is_plain:
        return values.flatten()
    permutation = (
        torch.arange(32 * form.num_blocks) if form.permutation is None else form.permutation.long()
    )
    is_padding = (permutation < 0) | (permutation >= k)
    stored = torch.where(is_padding, 0.0, values[:, permutation.clamp(0, k - 1)])  # [m, padded]
    return torch.cat([prepared_chunk(chunk) for chunk in torch.split(stored, CHUNK_ROWS)])


def random_x(rng: torch.Generator, rows: int, k: int, dtype: torch.dtype, gap: int = 0) -> Tensor:
    """Random rows of different magnitudes, with `gap` elements between them."""
    wide = torch.randn(rows, k + gap, generator=rng) * torch.rand(rows, 1, generator=rng) * 5
    return wide.to(dtype)[:, :k]


def assert_prepared(got: Tensor, expected: Tensor, is_exact: bool) -> None:
    if is_exact:
        assert torch.equal(got, expected.half())
        return
    assert bool(got.isfinite().all())
    error = (got.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert error < 4e-4  # rounding to float16: 2^-12 on average


@pytest.mark.parametrize("k", DIMS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["f16", "f32"])
def test_one_permutation_without_norm_is_exact(
    gpu: Gpu, rng: torch.Generator, rows: int, k: int, dtype: torch.dtype
) -> None:
    x = random_x(rng, rows, k, dtype)
    form = permuted(rng, k, padding=1)
    (got,) = prepare(gpu, x.to(gpu.device), None, [form])
    assert_prepared(got, laid_out(x.double(), form), is_exact=True)


@pytest.mark.parametrize("k", DIMS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["f16", "f32"])
def test_three_permutations_with_norm(
    gpu: Gpu, rng: torch.Generator, rows: int, k: int, dtype: torch.dtype
) -> None:
    x = random_x(rng, rows, k, dtype)
    norm = torch.randn(k, generator=rng)
    forms = [permuted(rng, k, 2), Form(-(-k // 32)), permuted(rng, k, 0)]
    outs = prepare(gpu, x.to(gpu.device), norm.to(gpu.device), forms)
    for got, form in zip(outs, forms, strict=True):
        assert_prepared(got, laid_out(normed(x, norm), form), is_exact=False)


@pytest.mark.parametrize("rows", [1, 5, 33, 300])
@pytest.mark.parametrize("k", [32, 576, 1540, 14336])
@pytest.mark.parametrize("has_norm", [False, True])
def test_plain_form_beside_a_permutation(
    gpu: Gpu, rng: torch.Generator, rows: int, k: int, has_norm: bool
) -> None:
    x = random_x(rng, rows, k, torch.float32, gap=3)
    norm = torch.randn(k, generator=rng) if has_norm else None
    forms = [Form(0, is_plain=True), permuted(rng, k, 1)]
    x_gpu = torch.empty(rows, k + 3, device=gpu.device)[:, :k]
    x_gpu.copy_(x)
    outs = prepare(gpu, x_gpu, None if norm is None else norm.to(gpu.device), forms)
    for got, form in zip(outs, forms, strict=True):
        assert_prepared(got, laid_out(normed(x, norm), form), is_exact=not has_norm)


@pytest.mark.parametrize("has_norm", [False, True])
def test_plain_form_of_rows_with_gaps(gpu: Gpu, rng: torch.Generator, has_norm: bool) -> None:
    wide = random_x(rng, 40, 3 * 576, torch.float16)
    x, x_gpu = wide[:, 576:1152], wide.to(gpu.device)[:, 576:1152]
    norm = torch.randn(576, generator=rng) if has_norm else None
    on_gpu = None if norm is None else norm.to(gpu.device)
    (got,) = prepare(gpu, x_gpu, on_gpu, [Form(0, is_plain=True)])
    assert_prepared(got, normed(x, norm).flatten(), is_exact=not has_norm)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["f16", "f32"])
@pytest.mark.parametrize(
    ("rows", "k"), [(65, 4096), (200, 14336), (1093, 4096), (1075, 1536), (300, 584)]
)
def test_a_row_does_not_depend_on_the_others(
    *, gpu: Gpu, rng: torch.Generator, rows: int, k: int, dtype: torch.dtype, has_norm: bool
) -> None:
    """Prompts have a kernel of their own, which takes 4 or 8 rows at a time."""
    x = random_x(rng, rows, k, dtype).to(gpu.device)
    norm = torch.randn(k, generator=rng).to(gpu.device) if has_norm else None
    form = permuted(rng, k, 1)
    outs = prepare(gpu, x, norm, [form, form] if rows % 2 else [form])
    chunks = [slice(first, first + CHUNK_ROWS) for first in range(0, rows, CHUNK_ROWS)]
    parts = [prepare(gpu, x[part], norm, [form])[0] for part in chunks]
    for out in outs:
        assert torch.equal(out, torch.cat(parts))
    last = x[chunks[-1]]
    each = torch.stack([prepare(gpu, row[None], norm, [form, form])[0] for row in last])
    assert torch.equal(parts[-1], prepared_chunk(each))


def test_values_beyond_float16_become_the_largest(gpu: Gpu) -> None:
    x = torch.tensor([[1e6, -1e6] + [1.0] * 30], device=gpu.device)
    (got,) = prepare(gpu, x, None, [Form(1)])
    assert got[:3].tolist() == [LARGEST, -LARGEST, 1.0]
