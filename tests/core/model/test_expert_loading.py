"""Matrices of experts are read, checked and uploaded some at a time, with the results and the
errors of one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from exl_core.errors import ModelError
from exl_core.formats import quantized
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.codecs.exl2 import layout as exl2
from exl_core.formats.containers.mapped import MappedFile
from exl_core.formats.containers.safetensors import SafetensorsSource
from exl_core.model import packer
from exl_core.model.packer import Packer
from exl_core.ops.backends.cuda import upload
from exl_core.ops.backends.cuda.library import ALIGNMENT, Slab, aligned
from exl_core.ops.backends.cuda.quantized import CudaQuantLinear, tiles_bytes
from exl_core.ops.backends.cuda.trellis import CudaTrellis, trellis_bytes
from exl_core.ops.open import get_table
from exl_core.ops.weights import GroupedLayout, GroupRun, TrellisColumns, TrellisLayout
from exl_core.session.open import open_checkpoint
from support.quantized_models import METHODS, SIZES, TIED, quantize, separate_experts
from support.runtime_form import evaluate, weights
from support.tiny_models import save, tiny_qwen3_moe

EXPERTS = 8
METHOD_NAMES = ("exl2", "exl3", "gptq", "awq")


@pytest.fixture(scope="module", params=METHOD_NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of(request.param, tmp_path_factory.mktemp(request.param))


def model_of(method: str, folder: Path, **changes: Any) -> Path:
    settings, make = METHODS[method]
    is_tied = method in TIED
    model = tiny_qwen3_moe(
        **SIZES, moe_intermediate_size=64, num_experts=EXPERTS, tie_word_embeddings=is_tied
    )
    quantize(separate_experts(save(model, folder)), settings | changes, make)
    return folder


def expert_names(checkpoint: Checkpoint) -> list[str]:
    return [name for name, row in checkpoint.rows.items() if row.expert is not None]


def test_joint_matrices_equal_single_ones(folder: Path) -> None:
    checkpoint = Checkpoint(*open_checkpoint(folder))
    names = expert_names(checkpoint)
    assert len(names) == EXPERTS * 3 * sum(map(bool, checkpoint.expert_bytes))
    matrices = checkpoint.matrices(names)
    for name, matrix, columns in zip(
        names, matrices, quantized.whole_columns(matrices), strict=True
    ):
        alone = checkpoint.matrix(name)
        if isinstance(columns, TrellisColumns):
            expected = cast(TrellisColumns, alone.columns(0, alone.layout.out_features))
            for part in ("words", "in_scales", "out_scales"):
                assert torch.equal(getattr(columns, part), getattr(expected, part))
        else:
            assert np.array_equal(weights(matrix.layout, columns), evaluate(alone))
        n = matrix.layout.out_features
        assert torch.equal(matrix.dense(0, n), alone.dense(0, n))


def test_work_per_layer_and_not_per_matrix(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's experts are one job, one range of the file, and one check per form of matrix."""
    checkpoint = Checkpoint(*open_checkpoint(folder))
    calls: Counter[str] = Counter()

    def count(owner: type, name: str) -> None:
        inner = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    for owner, name in (
        (MappedFile, "prefetch"),
        (MappedFile, "release"),
        (SafetensorsSource, "read_raw"),
        (Checkpoint, "matrix"),
        (Checkpoint, "matrices"),
    ):
        count(owner, name)
    layer = [row for row in checkpoint.rows.values() if row.expert is not None and row.layer == 0]
    experts = [
        [[row for row in layer if row.expert == index and row.role in roles] for roles in PACKED]
        for index in range(EXPERTS)
    ]
    with Packer(checkpoint, get_table("cpu", threads=1), 1, None) as jobs:
        jobs.start_experts(experts)
        packed = [jobs.packed(rows) for matrices in experts for rows in matrices]
    assert len(packed) == 2 * EXPERTS
    assert calls["matrices"] == 1
    assert calls["matrix"] == 0
    assert calls["prefetch"] <= 2
    assert calls["release"] <= 2
    parts = sum(len(checkpoint._stored_names(row.name)) for row in layer)
    assert calls["read_raw"] <= 2 * parts  # each tensor, and the group tables of layouts


PACKED = (("expert_gate", "expert_up"), ("expert_down",))


def test_jobs_are_limited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packer, "JOINT_MATRICES", 9)
    checkpoint = Checkpoint(*open_checkpoint(folder))
    sizes: list[int] = []
    inner = Checkpoint.matrices

    def matrices(self: Checkpoint, names: Any) -> Any:
        sizes.append(len(names))
        return inner(self, names)

    monkeypatch.setattr(Checkpoint, "matrices", matrices)
    rows = [row for row in checkpoint.rows.values() if row.expert is not None and row.layer == 0]
    experts = [[[row for row in rows if row.expert == index]] for index in range(EXPERTS)]
    reported: list[int] = []
    with Packer(
        checkpoint, get_table("cpu", threads=1), 1, lambda n, _: reported.append(n)
    ) as jobs:
        jobs.start_experts(experts)
        for (of_expert,) in experts:
            jobs.packed(of_expert)
    assert sizes == [9, 9, 6]
    assert reported[-1] == sum(checkpoint.stored[row.name].size_bytes for row in rows)


def nan(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[1] = float("nan")
    return tensor


def negative(tensor: Tensor) -> Tensor:
    return -tensor - 1


def repeated(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor[1] = tensor[0]
    return tensor


def beyond(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor[1] = len(tensor)
    return tensor


def huge(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, 60000.0)


DAMAGE: list[tuple[str, str, Callable[[Tensor], Tensor]]] = [
    ("exl2", "q_scale_max", nan),
    ("exl2", "q_scale_max", negative),
    ("exl2", "q_scale_max", huge),
    ("exl2", "q_invperm", repeated),
    ("exl2", "q_invperm", beyond),
    ("exl2", "q_groups", negative),
    ("exl3", "suh", nan),
    ("exl3", "svh", nan),
    ("exl3", "mul1", negative),
    ("gptq", "scales", nan),
    ("gptq", "scales", huge),
    ("gptq", "g_idx", beyond),
    ("gptq", "qzeros", lambda tensor: torch.full_like(tensor, -0x77777778)),
]


@pytest.mark.parametrize(("method", "part", "damage"), DAMAGE)
def test_damage_of_one_expert_has_its_own_error(
    tmp_path: Path, method: str, part: str, damage: Callable[[Tensor], Tensor]
) -> None:
    model_of(method, tmp_path, **({"sym": True} if part == "qzeros" else {}))
    stem = "model.layers.0.mlp.experts.5.up_proj"
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{stem}.{part}"] = damage(tensors[f"{stem}.{part}"])
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(*open_checkpoint(tmp_path))
    names = [name for name in expert_names(checkpoint) if ".layers.0." in name]
    with pytest.raises(ModelError) as alone:
        for name in names:
            checkpoint.matrix(name)
    with pytest.raises(ModelError) as joint:
        checkpoint.matrices(names)
    assert str(joint.value) == str(alone.value)
    assert stem in str(joint.value)


def test_scales_of_several_layers_are_those_of_each() -> None:
    torch.manual_seed(3)
    layers = []
    for groups in (1, 3, 2):
        layers.append(
            exl2.Exl2Linear(
                torch.zeros(1, 64, dtype=torch.int32),
                torch.randint(-(2**31), 2**31, (groups, 8), dtype=torch.int64).int(),
                torch.rand(groups).half(),
                torch.zeros(2, dtype=torch.int16),
                torch.zeros(1, dtype=torch.int32),
            )
        )
    joint = exl2.unpack_joint_scales(layers, 0.5, lambda tensor: tensor)
    for layer, scales in zip(layers, joint, strict=True):
        assert torch.equal(scales, exl2.unpack_scales(layer, prescale=0.5))


class _HostBuffer(upload._Buffer):
    """A buffer of ordinary memory, whose contents are overwritten when it is used again."""

    def __init__(self, size: int) -> None:
        self._memory = torch.zeros(size, dtype=torch.uint8)
        self.uploads = 0

    def wait(self) -> None:
        self._memory.fill_(255)

    def send(self, target: Tensor) -> None:
        target.copy_(self._memory[: target.numel()])
        self.uploads += 1


def test_tensors_share_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    size = 4 * ALIGNMENT
    monkeypatch.setattr(upload, "BUFFER_BYTES", size)
    tensors = [
        torch.randn(7, 3),
        torch.randint(-99, 99, (5, 4, 8), dtype=torch.int16)[:, 1:3],
        torch.tensor(3, dtype=torch.int32),
        torch.randn(200).half(),
        torch.randn(128, 2),
        torch.randint(0, 9, (1,), dtype=torch.uint8),
    ]
    places, total = [], 0
    for tensor in tensors:
        places.append(total)
        total += aligned(tensor.nbytes)
    target, pair = torch.zeros(total, dtype=torch.uint8), (_HostBuffer(size), _HostBuffer(size))
    upload.send_all(list(zip(tensors, places, strict=True)), target, cast(Any, pair))
    for tensor, at in zip(tensors, places, strict=True):
        assert torch.equal(upload._view(target, tensor, at), tensor)
    assert [one.uploads for one in pair] == [2, 2]  # of six tensors


class _HostGpu:
    """`Gpu` with memory of the host, which counts allocations."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.allocated: list[int] = []

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        self.allocated.append(tensor.nbytes)
        return tensor


def test_matrices_on_a_gpu_share_one_allocation() -> None:
    grouped = [
        GroupedLayout(96, 256, (GroupRun(4, 2, 128),), None, torch.float16, "zeros"),
        GroupedLayout(40, 160, (GroupRun(4, 5, 32),), None, torch.uint8, "mxfp4"),
        GroupedLayout(64, 512, (GroupRun(3, 4, 128),), None, torch.float16, "middle"),
    ]
    trellis = TrellisLayout(128, 256, 16 * 3, "mul1")
    gpu = _HostGpu()
    sizes = [*map(tiles_bytes, grouped), *trellis_bytes(trellis)]
    slab = Slab(cast(Any, gpu), sizes)
    assert gpu.allocated == [sum(map(aligned, sizes))]
    matrices = [CudaQuantLinear(one, cast(Any, gpu), memory=slab) for one in grouped]
    last = CudaTrellis(trellis, cast(Any, gpu), slab)
    held = [(one.matrix.tiles, one.size_bytes) for one in matrices]
    addresses = last.matrix.words, last.matrix.suh, last.matrix.svh
    held += zip(addresses, trellis_bytes(trellis), strict=True)
    first = held[0][0]
    for (address, _), size in zip(held, sizes, strict=True):
        assert address == first
        first += aligned(size)
    assert [size for _, size in held] == sizes
    assert len(gpu.allocated) == 1
    alone = CudaQuantLinear(grouped[0], cast(Any, gpu))
    assert gpu.allocated[1:] == [alone.size_bytes]
