"""Checkpoint: checks of names, shapes and finite values; names and row orders of other writers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from exl_core.arch.modules import module_table
from exl_core.errors import MissingTensorError, WeightShapeError, WeightValueError
from exl_core.formats import checkpoint as checkpoint_module
from exl_core.formats import quantized
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.codecs.runtime import RuntimeMatrix
from exl_core.ops.open import get_table
from exl_core.ops.weights import DenseColumns, GroupedLayout
from exl_core.session.open import open_checkpoint
from support.gguf_models import write_gguf
from support.quantized_models import (
    GPTQ_SETTINGS,
    SIZES,
    Pieces,
    exl2_pieces,
    gptq_pieces,
    quantize,
)
from support.runtime_form import evaluate, half_ulp
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


def is_grouped(checkpoint: Checkpoint, name: str) -> bool:
    return checkpoint.rows[name].is_matrix and isinstance(checkpoint.layout(name), GroupedLayout)


def read_all(folder: Path) -> None:
    checkpoint = Checkpoint(*open_checkpoint(folder))
    for name in checkpoint.stored:
        for _ in checkpoint.chunks(name, checkpoint.dtype(name)):
            pass


def test_a_missing_tensor_is_named_with_its_shape(folder: Path) -> None:
    edit(folder, **{GATE: None})
    with pytest.raises(MissingTensorError, match=r"gate_proj.*missing.*\[112, 72\]"):
        read_all(folder)


def test_a_wrong_shape_is_reported_with_the_expected_one(folder: Path) -> None:
    edit(folder, **{GATE: torch.zeros(112, 71)})
    with pytest.raises(WeightShapeError, match=r"gate_proj.*\[112, 72\].*\[112, 71\]"):
        read_all(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [GATE, "model.norm.weight", "model.embed_tokens.weight"])
def test_non_finite_values_are_counted(folder: Path, name: str, value: float) -> None:
    weight = load_file(folder / "model.safetensors")[name]
    weight.view(-1)[[0, -1]] = value
    edit(folder, **{name: weight})
    with pytest.raises(WeightValueError, match="2 values that are NaN or infinite"):
        read_all(folder)


def test_dense_columns_are_checked_after_the_move(folder: Path) -> None:
    matrix = Checkpoint(*open_checkpoint(folder)).matrix(GATE)
    moved: list[torch.Tensor] = []

    def double(values: torch.Tensor) -> torch.Tensor:
        moved.append(values * 2)
        return moved[-1]

    columns = matrix.columns(32, 64, double)
    assert isinstance(columns, DenseColumns)
    assert columns.weight is moved[0]
    assert torch.equal(columns.weight, 2 * load_file(folder / "model.safetensors")[GATE][32:64])
    with pytest.raises(WeightValueError, match=rf"{GATE}.*2304 values that are NaN or infinite"):
        matrix.columns(0, 32, lambda values: values / 0)


def test_finite_values_whose_sum_overflows_are_accepted(folder: Path) -> None:
    edit(folder, **{GATE: torch.full((112, 72), 3e38)})
    read_all(folder)
    checkpoint = Checkpoint(*open_checkpoint(folder))
    assert next(checkpoint.chunks(GATE, torch.float32)).values.max() == torch.tensor(3e38)


@pytest.mark.parametrize("root", ["model.language_model.", "language_model.model."])
def test_the_language_model_of_a_multimodal_checkpoint_is_found(tmp_path: Path, root: str) -> None:
    folder = save(tiny_gemma3(), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", root, 1): t for name, t in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    read_all(folder)
    checkpoint = Checkpoint(*open_checkpoint(folder))
    expected = tensors["model.norm.weight"] + 1.0  # the family stores its norms minus one
    assert torch.equal(checkpoint.norm("model.norm.weight"), expected)


def test_rows_of_a_gguf_file_are_returned_in_the_models_order(tmp_path: Path) -> None:
    model = tiny_llama(attention_bias=True)
    path = write_gguf(model, tmp_path / "m.gguf", GGMLQuantizationType.F32)
    checkpoint = Checkpoint(*open_checkpoint(path))
    for name, weight in model.state_dict().items():
        rows = torch.cat([chunk.values for chunk in checkpoint.chunks(name, torch.float32)])
        assert torch.equal(rows, weight), name


def test_a_dense_matrix_keeps_its_stored_dtype(folder: Path) -> None:
    edit(folder, **{GATE: load_file(folder / "model.safetensors")[GATE].bfloat16()})
    checkpoint = Checkpoint(*open_checkpoint(folder))
    assert checkpoint.dtype(GATE) is torch.bfloat16
    assert checkpoint.dtype(GATE.replace("gate", "up")) is torch.float32


def test_only_the_rotated_rows_of_a_gguf_head_are_permuted(tmp_path: Path) -> None:
    path = write_gguf(tiny_llama(), tmp_path / "m.gguf", GGMLQuantizationType.F32)
    source, config, _ = open_checkpoint(path)
    partial = replace(config, ropes=(replace(config.ropes[0], rotary_dim=8),))
    name = "model.layers.0.self_attn.k_proj.weight"
    stored = source.read("blk.0.attn_k.weight", slice(None)).view(2, 20, 72)
    permutation = [0, 2, 4, 6, 1, 3, 5, 7, *range(8, 20)]
    rows = torch.cat([c.values for c in Checkpoint(source, partial).chunks(name, torch.float32)])
    assert torch.equal(rows.view(2, 20, 72), stored[:, permutation])


def test_overflow_of_the_packed_dtype_is_not_reported_as_damage(folder: Path) -> None:
    edit(folder, **{GATE: torch.full((112, 72), 1e6)})
    checkpoint = Checkpoint(*open_checkpoint(folder))
    with pytest.raises(WeightValueError, match=r"As torch\.float16 they overflow"):
        next(checkpoint.chunks(GATE, torch.float16))


def test_packed_bytes_follow_the_stored_dtype(folder: Path) -> None:
    before = Checkpoint(*open_checkpoint(folder)).packed_bytes
    edit(folder, **{GATE: load_file(folder / "model.safetensors")[GATE].bfloat16()})
    assert before - Checkpoint(*open_checkpoint(folder)).packed_bytes == 112 * 72 * 2


@pytest.mark.parametrize(
    "settings, pieces, columns",  # EXL2 pads 100 columns in the file; GPTQ needs a multiple of 8
    [({"quant_method": "exl2"}, exl2_pieces, 100), (GPTQ_SETTINGS, gptq_pieces, 104)],
    ids=["exl2", "gptq"],
)
def test_packed_bytes_match_the_op_tables_matrix(
    tmp_path: Path, settings: dict[str, Any], pieces: Callable[[int, int], Pieces], columns: int
) -> None:
    folder = save(tiny_llama(**SIZES, tie_word_embeddings=True), tmp_path)
    quantize(folder, settings, pieces)
    stem = GATE.removesuffix("weight")
    edit(folder, **{stem + part: value for part, value in pieces(64, columns).items()})
    opened = open_checkpoint(folder)
    gate = module_table(opened[1])[GATE]
    place = replace(gate.written, num_rows=columns)
    gate = replace(gate, shape=(columns, 64), safetensors=(place,))
    checkpoint = Checkpoint(*opened, rows=[gate])
    packed = get_table("cpu", threads=1).new_linear(checkpoint.matrix(GATE).layout)
    permutation_bytes = 64 * 4  # int32 per input feature
    assert packed.size_bytes - permutation_bytes <= checkpoint.packed_bytes <= packed.size_bytes


def test_a_scalar_in_place_of_codes_is_refused(tmp_path: Path) -> None:
    folder = save(tiny_llama(**SIZES), tmp_path)
    quantize(folder, {"quant_method": "exl2"}, exl2_pieces)
    edit(folder, **{GATE.replace("weight", "q_weight"): torch.tensor(1, dtype=torch.int32)})
    checkpoint = Checkpoint(*open_checkpoint(folder))
    for read in (checkpoint.matrix, checkpoint.group_runs, lambda _: checkpoint.packed_bytes):
        with pytest.raises(WeightShapeError, match=r"gate_proj: tensor 'q_weight' has an imposs"):
            read(GATE)


def test_matrices_opened_ahead_are_returned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tiny_llama(**SIZES), tmp_path)
    quantize(folder, {"quant_method": "exl2"}, exl2_pieces)
    checkpoint = Checkpoint(*open_checkpoint(folder))
    names = [name for name in checkpoint.stored if is_grouped(checkpoint, name)]
    opened: list[str] = []

    def open_matrix(source: Any, matrix: Any, *others: Any) -> RuntimeMatrix:
        opened.append(matrix.name)
        return quantized.open_matrix(source, matrix, *others)

    monkeypatch.setattr(checkpoint_module, "open_matrix", open_matrix)
    checkpoint.open_ahead(until=lambda: False)
    ahead = [checkpoint.matrix(name) for name in names]
    assert sorted(opened) == sorted(name.removesuffix(".weight") for name in names)
    later = [checkpoint.matrix(name) for name in names]
    assert len(opened) == 2 * len(names)
    for one, other in zip(ahead, later, strict=True):
        assert np.array_equal(evaluate(one), evaluate(other))


def test_open_ahead_finds_damage_and_stops_when_told(tmp_path: Path) -> None:
    folder = save(tiny_llama(**SIZES), tmp_path)
    quantize(folder, {"quant_method": "exl2"}, exl2_pieces)
    edit(folder, **{GATE.replace("weight", "q_groups"): torch.zeros(3, dtype=torch.int16)})
    checkpoint = Checkpoint(*open_checkpoint(folder))
    checkpoint.open_ahead(until=lambda: True)
    with pytest.raises(WeightShapeError, match=r"gate_proj: tensor 'q_groups'"):
        checkpoint.open_ahead(until=lambda: False)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K"])
def test_codes_and_exact_values_have_the_same_order(tmp_path: Path, kind: str) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}
    model = tiny_llama(**sizes, intermediate_size=256, num_hidden_layers=1, attention_bias=True)
    path = write_gguf(model, tmp_path / "m.gguf", GGMLQuantizationType[kind])
    checkpoint = Checkpoint(*open_checkpoint(path))
    assert is_grouped(checkpoint, "model.layers.0.self_attn.q_proj.weight")
    for name, tensor in checkpoint.stored.items():
        if len(tensor.shape) != 2:
            continue
        exact = torch.cat([chunk.values for chunk in checkpoint.chunks(name, torch.float32)])
        matrix = checkpoint.matrix(name)
        distance = np.abs(evaluate(matrix, step=48).T - exact.double().numpy())
        assert (distance <= half_ulp(exact)).all(), name
        assert torch.equal(matrix.dense(16, 80), exact[16:80])
        bias = checkpoint.stored.get(name.replace("weight", "bias"))
        assert matrix.layout.has_bias == (bias is not None)
        if bias is not None:
            part = matrix.columns(32, 64).bias
            assert part is not None
            assert torch.equal(part, model.state_dict()[name.replace("weight", "bias")][32:64])


def test_an_exact_checkpoint_keeps_nothing_quantized(tmp_path: Path) -> None:
    model = tiny_llama(hidden_size=64, intermediate_size=96, head_dim=16, num_attention_heads=4)
    path = write_gguf(model, tmp_path / "m.gguf", GGMLQuantizationType.Q8_0)
    opened = open_checkpoint(path)
    fast, exact = Checkpoint(*opened), Checkpoint(*opened, is_exact=True)
    matrices = [name for name, tensor in exact.stored.items() if len(tensor.shape) == 2]
    assert all(is_grouped(fast, name) for name in matrices)
    assert not any(is_grouped(exact, name) for name in matrices)
    assert exact.packed_bytes > 1.8 * fast.packed_bytes
    assert exact.dtype(matrices[0]) is torch.float16
