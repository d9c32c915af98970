"""Head norms, RoPE, key smoothing and cache write in one kernel, against the reference backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exl_core.ops.attention import CacheLayer
from exl_core.ops.backends.cuda.library import TYPES, Gpu
from exl_core.ops.backends.reference.table import ReferenceTable
from exl_core.ops.cache_rows import decode_rows
from exl_core.ops.elementwise import RmsNorm
from exl_kernels import cuda
from support.kv_caches import F16, F32, assert_same_bits, random_caches

pytestmark = pytest.mark.cuda


@pytest.fixture
def rng() -> torch.Generator:
    """A new seed in every run; a failure prints it."""
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return Gpu(torch.device("cuda"))


def cache_struct(key_cache: Tensor, value_cache: Tensor, d: int) -> cuda.Cache:
    pages, kv_heads, page_size, _ = key_cache.shape
    return cuda.Cache(
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        TYPES[key_cache.dtype],
        TYPES[value_cache.dtype],
        kv_heads,
        d,
        page_size,
        pages,
    )


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("is_fitted", [False, True])
@pytest.mark.parametrize(
    ("name", "d", "half"),
    [("f32", 128, 64), ("f32", 64, 32), ("f32", 256, 128), ("f32", 256, 64), ("f32", 80, 16),
     ("f32", 96, 48), ("f32", 128, 0), ("f16", 128, 64), ("q8", 128, 64), ("q4", 64, 32),
     ("fp8", 128, 32), ("f32", 512, 256), ("f16", 512, 64), ("q8", 512, 128), ("q4", 288, 144),
     ("fp8", 264, 132)],
)  # fmt: skip
@pytest.mark.parametrize("rows", [9, 600])  # one head per warp, or several
def test_norms_and_rope_precede_the_cache_write(
    *,
    gpu: Gpu,
    rng: torch.Generator,
    name: str,
    d: int,
    half: int,
    rows: int,
    has_norms: bool,
    is_fitted: bool,
    dtype: torch.dtype,
) -> None:
    q_heads, kv_heads, page_size, pages = 6, 2, 16, -(-rows // 16) + 2
    stored = random_caches(rng, name, d, pages=pages, kv_heads=kv_heads, page_size=page_size)
    on_gpu = [x.cuda() for x in stored]
    fit = torch.randn(2, (q_heads + kv_heads) * d, generator=rng)
    qkv = torch.randn(rows, (q_heads + 2 * kv_heads) * d, generator=rng).to(dtype)
    cos, sin = torch.rand(2, rows, half, generator=rng)
    norms = [torch.rand(d, generator=rng) + 0.5 for _ in range(2)]
    slots = torch.randperm(pages * page_size, generator=rng)[:rows]
    there = {"qkv": qkv.cuda(), "cos": cos.cuda(), "sin": sin.cuda(), "slots": slots.cuda()}
    if has_norms:
        there |= {"q_norm": norms[0].cuda(), "k_norm": norms[1].cuda()}
    if is_fitted:
        there |= {"head_scale": fit[0].cuda(), "head_shift": fit[1].cuda()}
    args = cuda.RopeWrite(
        qkv_stride=qkv.shape[1],
        qkv_dtype=TYPES[dtype],
        rows=rows,
        q_heads=q_heads,
        rotary_half=half,
        eps=1e-5,
        **{name: operand.data_ptr() for name, operand in there.items()},
    )
    gpu.call("rope_write", args, cache_struct(on_gpu[0], on_gpu[1], d))

    table = ReferenceTable(1)
    q, k, v = torch.split(qkv.float().view(rows, -1, d), [q_heads, kv_heads, kv_heads], dim=1)
    q, k = q.contiguous(), k.contiguous()
    for x, weight in zip((q, k), norms, strict=True):
        if has_norms:
            table.rms_norm_heads_(x, RmsNorm(weight, 1e-5))
        if half:
            table.rope_(x, cos, sin)
    if is_fitted:
        scale, shift = fit.view(2, -1, d)
        q, k = q * scale[:q_heads] + shift[:q_heads], k * scale[q_heads:] + shift[q_heads:]
    table.write_kv(k, v, CacheLayer(*stored), slots)
    got_q = there["qkv"][:, : q_heads * d].cpu().double().view(rows, q_heads, d)
    rounding = 5e-4 if dtype == F16 else 1e-6
    assert (got_q - q.double()).norm() <= rounding * q.norm()
    got_k = there["qkv"][:, q_heads * d : -kv_heads * d].cpu().double().view(rows, kv_heads, d)
    assert (got_k - k.double()).norm() <= rounding * k.norm()
    # Keys differ by a rounding of float32 before they are stored, and so by a step of some codes.
    # Values are the same.
    step = {"f32": 1e-6, "f16": 1e-3, "fp8": 2e-2, "q8": 2e-3, "q4": 2e-2}[name]
    page, offset = slots // page_size, slots % page_size
    got, expected = (decode_rows(x.cpu())[page, :, offset] for x in (on_gpu[0], stored[0]))
    assert (got - expected).norm() <= step * expected.norm()
    assert_same_bits(on_gpu[1], stored[1], d)
