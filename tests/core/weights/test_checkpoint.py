"""What a checkpoint must hold: names, shapes, finite values; and the names other writers use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from exl_core.errors import MissingTensorError, WeightShapeError, WeightValueError
from exl_core.load import open_checkpoint
from exl_core.weights.checkpoint import Checkpoint
from support.gguf_models import write_gguf
from support.tiny_models import save, tiny_gemma3, tiny_llama

GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tiny_llama(), tmp_path)


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors")


def read_all(folder: Path) -> None:
    checkpoint = Checkpoint(*open_checkpoint(folder))
    for name in checkpoint.stored:
        for _ in checkpoint.chunks(name, checkpoint.dtype(name)):
            pass


def test_a_missing_tensor_is_named_with_its_shape(folder: Path) -> None:
    edit(folder, **{GATE: None})
    with pytest.raises(MissingTensorError, match=r"gate_proj.*missing.*\[112, 72\]"):
        read_all(folder)


def test_a_wrong_shape_is_named_with_both(folder: Path) -> None:
    edit(folder, **{GATE: torch.zeros(112, 71)})
    with pytest.raises(WeightShapeError, match=r"gate_proj.*\[112, 72\].*\[112, 71\]"):
        read_all(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [GATE, "model.norm.weight", "model.embed_tokens.weight"])
def test_values_that_are_not_finite_are_counted(folder: Path, name: str, value: float) -> None:
    weight = load_file(folder / "model.safetensors")[name]
    weight.view(-1)[[0, -1]] = value
    edit(folder, **{name: weight})
    with pytest.raises(WeightValueError, match="2 values that are NaN or infinite"):
        read_all(folder)


def test_values_whose_sum_overflows_are_fine(folder: Path) -> None:
    edit(folder, **{GATE: torch.full((112, 72), 3e38)})
    read_all(folder)
    checkpoint = Checkpoint(*open_checkpoint(folder))
    assert next(checkpoint.chunks(GATE, torch.float32)).values.max() == torch.tensor(3e38)


@pytest.mark.parametrize("root", ["model.language_model.", "language_model.model."])
def test_the_language_part_of_a_multimodal_checkpoint_is_found(tmp_path: Path, root: str) -> None:
    folder = save(tiny_gemma3(), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", root, 1): t for name, t in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    read_all(folder)
    checkpoint = Checkpoint(*open_checkpoint(folder))
    expected = tensors["model.norm.weight"] + 1.0  # the family stores its norms less one
    assert torch.equal(checkpoint.norm("model.norm.weight"), expected)


def test_rows_of_a_gguf_file_come_in_the_order_of_the_model(tmp_path: Path) -> None:
    model = tiny_llama(attention_bias=True)
    path = write_gguf(model, tmp_path / "m.gguf", GGMLQuantizationType.F32)
    checkpoint = Checkpoint(*open_checkpoint(path))
    for name, weight in model.state_dict().items():
        rows = torch.cat([chunk.values for chunk in checkpoint.chunks(name, torch.float32)])
        assert torch.equal(rows, weight), name


def test_matrices_of_different_precision_are_packed_in_the_wider_one(folder: Path) -> None:
    edit(folder, **{GATE: load_file(folder / "model.safetensors")[GATE].bfloat16()})
    checkpoint = Checkpoint(*open_checkpoint(folder))
    up = GATE.replace("gate", "up")
    assert checkpoint.dtype(GATE) is torch.bfloat16
    assert checkpoint.dtype(GATE, up) is torch.float32
