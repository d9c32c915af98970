"""`verify` finds every fault that a codec detects, names the tensor, and continues."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor

from exl_core.errors import WeightValueError
from exl_core.formats.verify import VerifyReport
from exl_core.session.describe import verify_model
from exl_core.session.load import load_model
from support.gguf_models import write_gguf
from support.quantized_models import (
    GPTQ_SETTINGS,
    SIZES,
    exl2_pieces,
    gptq_pieces,
    quantize,
)
from support.tiny_models import save, tiny_gemma3, tiny_llama

STEM = "model.layers.1.mlp.down_proj"
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def exl2_dir(tmp_path: Path) -> Path:
    folder = save(tiny_llama(**SIZES), tmp_path / "exl2")
    quantize(folder, {"quant_method": "exl2"}, exl2_pieces)
    return folder


@pytest.fixture
def gptq_dir(tmp_path: Path) -> Path:
    folder = save(tiny_llama(**SIZES, tie_word_embeddings=True), tmp_path / "gptq")
    quantize(folder, GPTQ_SETTINGS, gptq_pieces)
    return folder


def damage(folder: Path, name: str, index: int, value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[index] = value
    save_file(tensors, folder / "model.safetensors")


def single_problem(report: VerifyReport, tensor: str) -> str:
    (problem,) = report.problems
    assert problem.tensor == tensor
    return str(problem)


def test_norms_and_matrices_of_zeros_are_reported(tmp_path: Path, exl2_dir: Path) -> None:
    plain = save(tiny_llama(**SIZES), tmp_path / "plain")
    norm = "model.layers.1.input_layernorm.weight"
    for folder, names, zeroed in (
        (plain, [norm, f"{STEM}.weight"], [norm, f"{STEM}.weight"]),
        (exl2_dir, [f"{STEM}.q_scale_max"], [f"{STEM}.weight"]),
    ):
        assert verify_model(str(folder)).zeros == ()
        tensors = load_file(folder / "model.safetensors")
        for name in names:
            tensors[name].zero_()
        save_file(tensors, folder / "model.safetensors")
        report = verify_model(str(folder))
        assert sorted(report.zeros) == sorted(zeroed)
        assert report.problems == ()


def test_gemmas_norms_stored_as_zeros_are_ones(tmp_path: Path) -> None:
    folder = save(tiny_gemma3(), tmp_path / "gemma")
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("norm.weight"):
            tensors[name].zero_()
    save_file(tensors, folder / "model.safetensors")
    assert verify_model(str(folder)).zeros == ()


def test_intact_models_have_no_problems(exl2_dir: Path, gptq_dir: Path) -> None:
    for folder, quantized in ((exl2_dir, 3 * 7 + 1), (gptq_dir, 3 * 7)):
        seen: list[tuple[int, int]] = []

        def on_progress(done: int, total: int, seen: list[tuple[int, int]] = seen) -> None:
            seen.append((done, total))

        report = verify_model(str(folder), on_progress)
        assert report.problems == ()
        assert report.quantized == quantized
        assert seen[-1] == (report.size_bytes, report.size_bytes)
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize(
    ("part", "index", "value", "message"),
    [
        ("q_groups", 0, 7, "a width of 2, 3, 4, 5, 6, 8, got 7 bits"),
        ("q_groups", 2, 8, "at most 5 bits, as the group before"),
        ("q_groups", 3, 6, "a multiple of 5 rows"),
        ("q_invperm", 3, 96, "a row that does not exist"),
        ("q_invperm", 3, -1, "a row that does not exist"),
        ("q_scale_max", 2, NAN, "no usable value for group 2"),
        ("q_scale_max", 0, INF, "no usable value for group 0"),
        ("q_scale_max", 1, -1.0, "no usable value for group 1"),
        ("q_scale_max", 1, 60000.0, "too large for float16"),
    ],
)
def test_damage_of_an_exl2_matrix_is_reported(
    exl2_dir: Path, part: str, index: int, value: float, message: str
) -> None:
    damage(exl2_dir, f"{STEM}.{part}", index, value)
    problem = single_problem(verify_model(str(exl2_dir)), f"{STEM}.weight")
    assert message in problem
    assert f"'{part}'" in problem


def test_two_features_with_one_row_are_reported(exl2_dir: Path) -> None:
    first = int(load_file(exl2_dir / "model.safetensors")[f"{STEM}.q_invperm"][0])
    damage(exl2_dir, f"{STEM}.q_invperm", 1, first)
    assert "not a permutation" in single_problem(verify_model(str(exl2_dir)), f"{STEM}.weight")


@pytest.mark.parametrize(
    ("part", "index", "value", "message"),
    [
        ("g_idx", 5, 3, "a group that does not exist"),
        ("g_idx", 5, -1, "a group that does not exist"),
        ("scales", 70, NAN, "no usable value for group 1, column 6"),
        ("scales", 70, -INF, "no usable value for group 1, column 6"),
    ],
)
def test_damage_of_a_gptq_matrix_is_reported(
    gptq_dir: Path, part: str, index: int, value: float, message: str
) -> None:
    damage(gptq_dir, f"{STEM}.{part}", index, value)
    problem = single_problem(verify_model(str(gptq_dir)), f"{STEM}.weight")
    assert message in problem
    assert f"'{part}'" in problem


def test_a_group_with_one_row_too_many_is_reported(gptq_dir: Path) -> None:
    g_idx = load_file(gptq_dir / "model.safetensors")[f"{STEM}.g_idx"]
    row = int((g_idx == 0).int().argmax())
    damage(gptq_dir, f"{STEM}.g_idx", row, 1)
    problem = single_problem(verify_model(str(gptq_dir)), f"{STEM}.weight")
    assert "gives group 0 a wrong number of rows" in problem


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_non_finite_values_are_reported(exl2_dir: Path, name: str) -> None:
    damage(exl2_dir, name, 5, NAN)
    assert "NaN or infinite" in single_problem(verify_model(str(exl2_dir)), name)


def edited(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> VerifyReport:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return verify_model(str(folder))


def test_all_problems_are_listed(exl2_dir: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.0.input_layernorm.weight"]
        del tensors[f"{STEM}.q_scale"]
        tensors["model.layers.2.post_attention_layernorm.weight"] = torch.zeros(5)
        tensors["lm_head.q_scale_max"][0] = INF

    report = edited(exl2_dir, edit)
    assert [problem.tensor for problem in report.problems] == [
        "model.layers.0.input_layernorm.weight",
        "model.layers.2.post_attention_layernorm.weight",
        f"{STEM}.weight",
        "lm_head.weight",
    ]


def test_head_norms_that_differ_between_heads_are_reported(tmp_path: Path) -> None:
    folder = save(tiny_gemma3(**SIZES), tmp_path)
    name = "model.layers.0.self_attn.q_norm.weight"

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].repeat(4, 1)
        tensors[name][2, 1] += 1.0

    assert "differs between heads" in single_problem(edited(folder, edit), name)


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
def test_weights_beyond_float16_are_named(tmp_path: Path, kind: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
    model, name = tiny_llama(**sizes), "model.layers.2.mlp.down_proj.weight"
    for value, is_problem in ((65000.0, False), (-65520.0, True)):
        with torch.no_grad():
            model.get_parameter(name)[63, -1] = value
        path = write_gguf(model, tmp_path / "m.gguf", GGMLQuantizationType[kind])
        report = verify_model(str(path))
        if is_problem:
            found = single_problem(report, name)
            assert "too large for float16" in found
            assert "(expected at most 65504 in magnitude, got 65" in found
        else:
            assert report.problems == ()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_block_with_a_non_finite_scale_is_reported(tmp_path: Path, kind: str) -> None:
    quantization = GGMLQuantizationType[kind]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
    model = tiny_llama(**sizes, tie_word_embeddings=True)
    path = write_gguf(model, tmp_path / "m.gguf", quantization)
    assert verify_model(str(path)).problems == ()
    last_matrix = "model.layers.2.mlp.down_proj.weight"
    with torch.no_grad():
        model.get_parameter(last_matrix)[63, -1] = 1e9  # overflows the block's float16
    with np.errstate(over="ignore", invalid="ignore"):
        path = write_gguf(model, tmp_path / "m.gguf", quantization)
    problem = single_problem(verify_model(str(path)), last_matrix)
    assert "blk.2.ffn_down.weight" in problem
    with pytest.raises(WeightValueError, match=r"blk\.2\.ffn_down"):
        load_model(str(path))
