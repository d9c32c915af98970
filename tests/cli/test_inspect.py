"""`exl inspect model`: sums in its JSON, and the table with the same values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.commands import Command, JsonCommand


@pytest.fixture
def inspect_json(exl: Command) -> JsonCommand:
    def run(*args: object) -> dict[str, object]:
        done = exl("inspect", "model", *args, "--json")
        assert (done.code, done.err) == (0, "")
        return json.loads(done.out)

    return run


def test_default_model(inspect_json: JsonCommand, smollm2_path: Path) -> None:
    model = inspect_json("--tensors")
    assert model["schema_version"] == 1
    assert model["path"] == str(smollm2_path)
    assert (model["format"], model["architecture"]) == ("gguf", "llama")
    assert model["file_bytes"] == smollm2_path.stat().st_size
    assert model["parameters"] == pytest.approx(134.5e6, rel=0.01)
    assert 4.5 < model["bits_per_weight"] < 6.5
    assert model["config"]["num_layers"] == 30
    assert model["tokenizer"]["has_chat_template"]
    assert not model["tokenizer"]["adds_bos"]


def test_sizes_of_tensors_and_layers_agree(inspect_json: JsonCommand) -> None:
    model = inspect_json("--tensors")
    layers = model["layers"]
    assert sum(layer["parameters"] for layer in layers) == model["parameters"]
    assert sum(tensor["bytes"] for tensor in model["tensors"]) == sum(
        layer["bytes"] for layer in layers
    )
    assert sum(layer["name"].startswith("layer ") for layer in layers) == 30
    for layer in layers:
        bits = 8 * layer["bytes"] / layer["parameters"]
        assert layer["bits_per_weight"] == pytest.approx(bits)


def test_memory_at_a_context(inspect_json: JsonCommand) -> None:
    small = inspect_json("--ctx", 1000)["memory"]
    large = inspect_json("--ctx", 3000)["memory"]
    assert small["ctx"] == 1000
    assert large["total_bytes"] - small["total_bytes"] == 2000 * small["kv_bytes_per_token"]
    assert small["kv_bytes_per_token"] == 30 * 3 * 64 * 2 * 2  # layers, heads, K and V, fp16


def test_safetensors_directory(inspect_json: JsonCommand, tiny_llama_dir: Path) -> None:
    model = inspect_json(tiny_llama_dir)
    assert model["format"] == "safetensors"
    assert model["bits_per_weight"] == 32
    assert "tensors" not in model
    assert set(model["backends"]) == {"cpu", "reference", "cuda"}


def test_table(exl: Command, tiny_llama_dir: Path) -> None:
    done = exl("inspect", "model", tiny_llama_dir, "--tensors", "--ctx", 256)
    assert (done.code, done.err) == (0, "")
    for expected in ("llama", "layer 2", "32.00", "256", "model.layers.0.mlp.down_proj.weight"):
        assert expected in done.out
    assert "\x1b" not in done.out
    assert all(line == line.rstrip() for line in done.out.splitlines())


def test_names_in_a_file_cannot_control_the_terminal(exl: Command, damaged_dir: Path) -> None:
    path = damaged_dir / "model.safetensors"
    evil = "[/bold]\x1b]0;owned\x07\x9b2J"
    tensors = load_file(path)
    save_file({**tensors, evil: torch.zeros(2)}, path, metadata={"format": "pt"})
    done = exl("inspect", "model", damaged_dir, "--tensors")
    assert (done.code, done.err) == (0, "")
    assert r"[/bold]\x1b]0;owned\x07\x9b2J" in done.out
    assert not {"\x1b", "\x07", "\x9b"} & set(done.out)
    assert json.loads(exl("inspect", "model", damaged_dir, "--tensors", "--json").out)[
        "unused_tensors"
    ] == [{"name": evil, "shape": [2], "dtype": "F32", "bytes": 8}]
