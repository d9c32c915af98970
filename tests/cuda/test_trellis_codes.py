"""Trellis codes in the packed layout of `exl/cuda/trellis.h`, decoded bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from exl_core.ops.backends.cuda.library import Gpu
from exl_core.ops.backends.cuda.trellis import CudaTrellis
from exl_core.ops.weights import Codebook, TrellisColumns, TrellisLayout
from support.trellis import RATES, random_exl3

pytestmark = pytest.mark.cuda


def decoded(gpu: Gpu, layout: TrellisLayout, columns: TrellisColumns) -> Tensor:
    """The rotated matrix [in, out], in two slices of columns."""
    w = CudaTrellis(layout, gpu)
    w.fill(0, columns)
    k, n = layout.stored_in, layout.stored_out
    out = torch.full((n, k), torch.nan, dtype=torch.float16, device=gpu.device)
    w.unpack(64, n - 64, out[64:])
    w.unpack(0, 64, out[:64])
    place = torch.arange(32)
    q, h, e, b = place // 8, place // 4 % 2, place // 2 % 2, place % 2
    order = (torch.arange(0, k, 32)[:, None] + 16 * h + 2 * q + 8 * e + b).flatten()
    natural = torch.empty_like(out)
    natural[:, order.to(gpu.device)] = out
    return natural.T.cpu()


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("book", ["mul1", "mcg", "3inst"])
def test_decoded_matrices_are_exact(gpu: Gpu, rate: float, book: Codebook) -> None:
    if book != "mul1" and rate != int(rate):
        pytest.skip("there are no such codes")
    layer = random_exl3(3, rate, book, rows=256, columns=384)
    got = decoded(gpu, layer.layout(384, 256), layer.columns())
    assert torch.equal(got.view(torch.int16), torch.from_numpy(layer.rotated()).view(torch.int16))


def test_rows_of_stored_words_may_be_strided(gpu: Gpu) -> None:
    layer = random_exl3(4, 4, rows=128, columns=512)
    whole = layer.columns()
    columns = TrellisColumns(whole.words[:, 8:24], whole.in_scales, whole.out_scales[128:384])
    got = decoded(gpu, TrellisLayout(256, 128, 64, "mul1"), columns)
    assert torch.equal(got, torch.from_numpy(layer.rotated())[:, 128:384])


def test_reference_tensors(gpu: Gpu, shared_dir: Path) -> None:
    """Matrices that exllamav3 decoded on a GPU."""
    count = 0
    with safe_open(shared_dir / "golden/exl3_reference.safetensors", "pt") as file:
        names = {key.rpartition(".")[0] for key in file.keys() if key.endswith(".inner")}  # noqa: SIM118
        for name in sorted(names):
            parts = {
                key.removeprefix(f"{name}."): file.get_tensor(key)
                for key in file.keys()  # noqa: SIM118
                if key.startswith(f"{name}.")
            }
            book: Codebook = "mcg" if "mcg" in parts else "mul1" if "mul1" in parts else "3inst"
            words = parts["trellis"]
            k, n = 16 * words.shape[0], 16 * words.shape[1]
            layout = TrellisLayout(n, k, words.shape[2], book)
            ones = torch.ones(k, dtype=torch.float16), torch.ones(n, dtype=torch.float16)
            got = decoded(gpu, layout, TrellisColumns(words, *ones))
            assert torch.equal(got.view(torch.int16), parts["inner"].view(torch.int16)), name
            count += 1
    assert count
