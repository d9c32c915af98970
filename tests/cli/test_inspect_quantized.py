"""`exl inspect model` of quantized models: bit widths, groups, and `--verify`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.commands import Command
from support.quantized_models import quantized_llama


@pytest.fixture
def exl2_dir(tmp_path: Path) -> Path:
    return quantized_llama("exl2", tmp_path / "exl2")


def test_json_has_the_groups_of_every_matrix(exl: Command, exl2_dir: Path) -> None:
    done = exl("inspect", "model", exl2_dir, "--json")
    matrices = {matrix["name"]: matrix for matrix in json.loads(done.out)["matrices"]}
    assert len(matrices) == 3 * 7 + 2
    down = matrices["model.layers.1.mlp.down_proj"]
    assert (down["shape"], down["dtype"]) == ([64, 96], "EXL2")
    assert down["groups"] == [{"bits": bits, "rows": 32, "count": 1} for bits in (5, 3, 2)]
    stored = 64 * (5 + 3 + 2) * 4 + 3 * (64 // 2 + 2 + 4) + 96 * 4
    assert down["bits_per_weight"] == pytest.approx(8 * stored / (64 * 96))
    assert matrices["model.embed_tokens"]["groups"] == []


def test_the_table_has_a_row_for_each_kind_of_matrix(exl: Command, exl2_dir: Path) -> None:
    lines = exl("inspect", "model", exl2_dir).out.splitlines()
    (down,) = [line for line in lines if line.strip().startswith("down_proj")]
    assert down.split()[1:3] == ["3", "EXL2"]
    assert "5 (33%), 3 (33%), 2 (33%)" in down
    (output,) = [line for line in lines if line.strip().startswith("o_proj")]
    assert "8 (50%), 4 (50%)" in output
    assert " 64 " in output
    (embed,) = [line for line in lines if "embed_tokens" in line and "none" in line]
    assert "F32" in embed


@pytest.mark.thorough
def test_verify_of_an_intact_model(exl: Command, exl2_dir: Path, smollm2_path: Path) -> None:
    done = exl("inspect", "model", exl2_dir, "--verify")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("no problems: 30 tensors, 22 of them quantized matrices, ")
    done = exl("inspect", "model", smollm2_path, "--verify", "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out) == {
        "schema_version": 1,
        "tensors": 272,
        "quantized_matrices": 211,
        "bytes": 96_576_768,
        "problems": [],
        "zeros": [],
    }


def test_verify_warns_of_zeros(exl: Command, exl2_dir: Path) -> None:
    path = exl2_dir / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"].zero_()
    save_file(tensors, path)
    done = exl("inspect", "model", exl2_dir, "--verify")
    assert done.code == 0
    assert done.err.startswith("exl: warning: model.norm.weight: all values are zero")
    assert done.err.count("\n") == 1


def test_verify_prints_one_line_per_problem(exl: Command, exl2_dir: Path) -> None:
    path = exl2_dir / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.q_invperm"][0] = 99
    tensors["model.layers.2.self_attn.o_proj.q_scale_max"][1] = torch.nan
    save_file(tensors, path)
    done = exl("inspect", "model", exl2_dir, "--verify")
    assert (done.code, done.err) == (3, "")
    first, second = done.out.splitlines()
    assert first.startswith("model.layers.0.mlp.up_proj.weight: ")
    assert "'q_invperm' gives feature 0 a row that does not exist" in first
    assert second.startswith("model.layers.2.self_attn.o_proj.weight: ")
    done = exl("inspect", "model", exl2_dir, "--verify", "--json")
    assert done.code == 3
    problems = json.loads(done.out)["problems"]
    assert [problem["tensor"] for problem in problems] == [
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.2.self_attn.o_proj.weight",
    ]


def test_inspect_reports_a_damaged_group_table(exl: Command, exl2_dir: Path) -> None:
    path = exl2_dir / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.q_groups"][0] = 7
    save_file(tensors, path)
    line = exl("inspect", "model", exl2_dir).error_line(3)
    assert "model.layers.0.mlp.up_proj" in line
    assert "7 bits" in line


def test_verify_excludes_other_options(exl: Command, exl2_dir: Path) -> None:
    for other in (("--tensors",), ("--ctx", "100")):
        line = exl("inspect", "model", exl2_dir, "--verify", *other).error_line(2)
        assert other[0] in line
