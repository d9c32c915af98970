"""Checkpoints of gpt-oss: replies, descriptions, and refusals of files that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from exl_core.session.describe import describe_model
from support.adapters import write_adapter
from support.commands import Command
from support.mxfp4 import save_as_mxfp4
from support.tiny_models import tiny_gpt_oss

STEM = "model.layers.1.mlp.experts."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_as_mxfp4(tiny_gpt_oss(), tmp_path / "model")


def test_a_reply(folder: Path, exl: Command) -> None:
    assert exl("generate", "-m", folder, "-p", "Hello", "-n", 8, "--temperature", 0).code == 0


def test_all_ids_of_the_generation_config_end_a_reply(folder: Path) -> None:
    ends = {"eos_token_id": [200, 2, 210]}  # gpt-oss: <|return|>, <|endoftext|>, <|call|>
    (folder / "generation_config.json").write_text(json.dumps(ends))
    assert describe_model(str(folder)).stop_ids == (2, 200, 210)


def test_adapters_may_not_change_experts(folder: Path, tmp_path: Path, exl: Command) -> None:
    tensors = {}
    for name, shape in (("lora_A", (2, 96)), ("lora_B", (64, 2))):
        tensors[f"base_model.model.{STEM}0.gate_proj.{name}.weight"] = torch.ones(shape)
    adapter = write_adapter(tmp_path / "adapter", tensors)
    line = exl("generate", "-m", folder, "-p", "x", "--lora", adapter).error_line(3)
    assert "experts" in line


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_scales_of_another_shape(folder: Path, exl: Command) -> None:
    name = f"{STEM}down_proj_scales"
    change_tensors(folder, lambda t: t.update({name: t[name][:, :-1].contiguous()}))
    line = exl("generate", "-m", folder, "-p", "x").error_line(3)
    assert "'scales' does not go with the others" in line
    assert f"{STEM}down_proj" in line


@pytest.mark.parametrize(
    "name",
    [
        *(f"{STEM}down_proj_scales", f"{STEM}gate_up_proj_bias", f"{STEM}down_proj_bias"),
        *("model.layers.0.self_attn.sinks", "model.layers.2.mlp.router.bias"),
    ],
)
def test_a_missing_tensor(folder: Path, exl: Command, name: str) -> None:
    change_tensors(folder, lambda tensors: tensors.pop(name))
    line = exl("generate", "-m", folder, "-p", "x").error_line(3)
    assert "is missing" in line
    assert name.rpartition("_")[2].rpartition(".")[2] in line


def test_experts_of_another_model(folder: Path, exl: Command) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_local_experts": 5}))
    line = exl("generate", "-m", folder, "-p", "x").error_line(3)
    assert "wrong shape" in line


def test_an_exponent_that_is_nan(folder: Path, exl: Command) -> None:
    change_tensors(folder, lambda t: t[f"{STEM}gate_up_proj_scales"][2, 3].fill_(255))
    assert "NaN" in exl("generate", "-m", folder, "-p", "x").error_line(3)


def test_another_limit_of_the_activation_is_refused(folder: Path, exl: Command) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "swiglu_limit": 10.0}))
    assert "'swiglu_limit'" in exl("generate", "-m", folder, "-p", "x").error_line(3)


def test_inspect_counts_active_parameters_and_bytes(folder: Path, exl: Command) -> None:
    model = tiny_gpt_oss()
    config = model.config
    found = json.loads(exl("inspect", "model", folder, "--json").out)
    width, hidden = config.intermediate_size, config.hidden_size
    unused = (config.num_local_experts - config.num_experts_per_tok) * config.num_hidden_layers
    weights, biases = 3 * width * hidden, 2 * width + hidden
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert found["parameters"] - found["active_parameters"] == unused * (weights + biases)
    active = (
        found["active_parameters"] - config.num_hidden_layers * config.num_experts_per_tok * weights
    )
    packed = config.num_hidden_layers * config.num_experts_per_tok * weights * 17 // 32
    assert found["active_bytes"] == 4 * active + packed
