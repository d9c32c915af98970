"""Models with experts: replies, descriptions, and refusals of checkpoints that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from exl_core.convert import preflight
from exl_core.session.load import LoadOptions, load_model
from support.commands import Command
from support.gguf_models import write_gguf
from support.mxfp4 import save_as_mxfp4
from support.paged import logits_of
from support.quantized_models import METHODS, SIZES, TIED, quantize
from support.tiny_models import (
    save,
    tiny_dbrx,
    tiny_gemma4_moe,
    tiny_gpt_oss,
    tiny_llama4,
    tiny_mixtral,
    tiny_qwen3_moe,
    tiny_qwen3_vl_moe,
)

EXPERT = "model.layers.2.mlp.experts.7.down_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tiny_qwen3_moe(), tmp_path / "moe")


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_reply_of_a_model_with_experts(folder: Path, exl: Command) -> None:
    done = exl("generate", "-m", folder, "-p", "Hello", "-n", 8, "--temperature", 0)
    assert done.code == 0


def test_inspect_counts_active_and_all_parameters(folder: Path, exl: Command) -> None:
    found = json.loads(exl("inspect", "model", folder, "--json").out)
    expert = 3 * 72 * 40
    assert found["parameters"] - found["active_parameters"] == 3 * (8 - 3) * expert
    assert found["active_bytes"] == 4 * found["active_parameters"]
    config = found["config"]
    assert (config["num_experts"], config["experts_per_token"]) == (8, 3)
    assert (config["num_expert_layers"], config["expert_intermediate_size"]) == (3, 40)
    assert config["intermediate_size"] == [0, 112, 0, 0]
    assert "3 of 8 experts of 40 or 112" in exl("inspect", "model", folder).out


def test_a_missing_expert(folder: Path, exl: Command) -> None:
    change_tensors(folder, lambda tensors: tensors.pop(EXPERT))
    assert EXPERT in exl("generate", "-m", folder, "-p", "x").error_line(3)


def test_more_experts_than_the_configuration_says(folder: Path, exl: Command) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("gate_proj", "up_proj", "down_proj"):
            stem = "model.layers.2.mlp.experts"
            tensors[f"{stem}.8.{part}.weight"] = tensors[f"{stem}.7.{part}.weight"].clone()

    change_tensors(folder, add)
    line = exl("generate", "-m", folder, "-p", "x").error_line(3)
    assert "layer 2 has more experts" in line
    assert "experts.8.gate_proj" in line


@pytest.mark.parametrize("rows", [6, 9])
def test_a_router_of_another_size(folder: Path, exl: Command, rows: int) -> None:
    name = "model.layers.0.mlp.gate.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(rows, 72)}))
    line = exl("generate", "-m", folder, "-p", "x").error_line(3)
    assert name in line
    assert f"expected [8, 72], got [{rows}, 72]" in line


@pytest.mark.parametrize("count", [0, 9])
def test_more_experts_per_token_than_experts(folder: Path, exl: Command, count: int) -> None:
    change_config(folder, num_experts_per_tok=count)
    line = exl("generate", "-m", folder, "-p", "x").error_line(3)
    assert str(count) in line


@pytest.mark.parametrize("count", [3, 5])
def test_a_gguf_file_with_another_number_of_experts(
    tmp_path: Path, exl: Command, count: int
) -> None:
    model = tiny_mixtral()
    model.config.num_local_experts = count  # in the metadata only; the tensors have 4
    path = write_gguf(model, tmp_path / "tiny.gguf")
    line = exl("generate", path, "-p", "x").error_line(3)
    assert "ffn_gate_inp" in line


PARTS = {
    **{"awq": "scales", "compressed-tensors": "weight_scale", "fp8": "weight_scale_inv"},
    "exl3": "suh",
}
"""A tensor of each method without which a matrix cannot be read."""


def save_quantized(folder: Path, method: str) -> Path:
    model = tiny_qwen3_moe(**SIZES, moe_intermediate_size=64, tie_word_embeddings=method in TIED)
    quantize(save(model, folder), *METHODS[method])
    return folder


@pytest.mark.parametrize("method", PARTS)
def test_a_quantized_expert_without_one_of_its_tensors(
    tmp_path: Path, exl: Command, method: str
) -> None:
    folder, stem = save_quantized(tmp_path / "moe", method), EXPERT.removesuffix(".weight")
    change_tensors(folder, lambda tensors: tensors.pop(f"{stem}.{PARTS[method]}"))
    assert stem in exl("generate", "-m", folder, "-p", "x").error_line(3)


@pytest.mark.parametrize("method", PARTS)
def test_a_quantized_expert_of_another_width(tmp_path: Path, exl: Command, method: str) -> None:
    folder = save_quantized(tmp_path / "moe", method)
    # EXL3 pads widths to multiples of 128.
    change_config(folder, moe_intermediate_size=160 if method == "exl3" else 32)
    line = exl("generate", "-m", folder, "-p", "x").error_line(3)
    assert ".experts.0." in line


STACKED = {
    "gemma4": (
        tiny_gemma4_moe,
        ("model.layers.1.router.proj.weight", "model.layers.1.experts.down_proj"),
        "top_k_experts",
    ),
    "qwen3-vl": (
        tiny_qwen3_vl_moe,
        (
            "model.language_model.layers.0.mlp.gate.weight",
            "model.language_model.layers.0.mlp.experts.gate_up_proj",
        ),
        "text_config.num_experts_per_tok",
    ),
    "dbrx": (
        tiny_dbrx,
        ("transformer.blocks.0.ffn.router.layer.weight", "transformer.blocks.0.ffn.experts.mlp.w2"),
        "ffn_config.moe_top_k",
    ),
    "llama4": (
        tiny_llama4,
        (
            "model.layers.1.feed_forward.router.weight",
            "model.layers.3.feed_forward.experts.gate_up_proj",
        ),
        "num_experts_per_tok",
    ),
    "gpt-oss": (
        tiny_gpt_oss,
        ("model.layers.0.mlp.router.weight", "model.layers.1.mlp.experts.gate_up_proj"),
        "num_experts_per_tok",
    ),
    "gpt-oss-mxfp4": (
        tiny_gpt_oss,
        ("model.layers.0.mlp.router.weight", "model.layers.1.mlp.experts.gate_up_proj_blocks"),
        "num_experts_per_tok",
    ),
}
"""Families of which one tensor holds all experts: a builder, the names of a router and of such a
tensor, and the key of the number of experts that a token uses."""


@pytest.fixture(params=STACKED)
def stacked(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, tuple[str, str], str]:
    build, names, key = STACKED[request.param]
    store = save_as_mxfp4 if request.param.endswith("mxfp4") else save
    return store(build(), tmp_path / "moe"), names, key


@pytest.mark.parametrize("which", [0, 1], ids=["router", "experts"])
@pytest.mark.parametrize("count", [7, 9])
def test_a_stack_of_another_number_of_experts(
    stacked: tuple[Path, tuple[str, str], str], exl: Command, which: int, count: int
) -> None:
    folder, names, _ = stacked
    name = names[which].removesuffix("_blocks")

    def resize(tensors: dict[str, torch.Tensor]) -> None:
        for part in [key for key in tensors if key.startswith(name)]:  # codes and their scales
            tensors[part] = tensors[part].new_zeros(count, *tensors[part].shape[1:])

    change_tensors(folder, resize)
    line = exl("generate", "-m", folder, "-p", "x").error_line(3)
    assert name in line
    assert f"got [{count}, " in line


@pytest.mark.parametrize("which", [0, 1], ids=["router", "experts"])
def test_a_missing_router_or_stack(
    stacked: tuple[Path, tuple[str, str], str], exl: Command, which: int
) -> None:
    folder, names, _ = stacked
    change_tensors(folder, lambda tensors: tensors.pop(names[which]))
    line = exl("generate", "-m", folder, "-p", "x").error_line(3)
    inside = names[which].partition("layers.")[2]  # the root in the message is the canonical one
    assert inside.rpartition(".")[0] in line
    assert "is missing" in line


def test_more_experts_per_token_than_a_stack_has(
    stacked: tuple[Path, tuple[str, str], str], exl: Command
) -> None:
    folder, _, key = stacked
    section, _, last = key.rpartition(".")
    config = json.loads((folder / "config.json").read_text())
    change_config(folder, **({section: {**config[section], last: 9}} if section else {last: 9}))
    line = exl("generate", "-m", folder, "-p", "x").error_line(3)
    assert "more experts than the model has" in line


def test_chunks_of_attention_that_are_no_pages(tmp_path: Path, exl: Command) -> None:
    folder = save(tiny_llama4(attention_chunk_size=300), tmp_path / "moe")
    line = exl("generate", "-m", folder, "-p", "x").error_line(3)
    assert "multiple of 256" in line


def test_convert_refuses_families_that_it_does_not_know(
    tmp_path: Path, exl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "FAMILIES_WITH_EXPERTS", ("mixtral",))
    folder = save(tiny_gemma4_moe(), tmp_path / "moe")
    line = exl("convert", folder, "-o", tmp_path / "out", "--bits", 4).error_line(3)
    assert "models with experts of the family 'gemma4' cannot be converted yet" in line


@pytest.mark.parametrize("count", [1, 5])
def test_experts_per_token_can_be_overridden(folder: Path, count: int) -> None:
    model = tiny_qwen3_moe(num_experts_per_tok=count)
    ids = list(range(3, 60))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]

    logits = logits_of(folder, ids, LoadOptions(experts_per_token=count))

    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_experts_per_token_beyond_the_model_are_refused(
    folder: Path, tiny_llama_dir: Path, exl: Command
) -> None:
    more = exl("generate", "-m", folder, "-p", "x", "--experts-per-token", 9).error_line(2)
    assert "1 to 8" in more
    dense = exl("generate", "-m", tiny_llama_dir, "-p", "x", "--experts-per-token", 2).error_line(2)
    assert "no experts" in dense


def test_a_pass_reads_the_experts_that_its_rows_choose(folder: Path) -> None:
    model = load_model(str(folder)).model
    expert = 3 * 72 * 40 * 4
    one, two = model.pass_weight_bytes(1), model.pass_weight_bytes(2)
    assert model.decode_weight_bytes == one
    # Panels of 16 columns: 80 and 80 of gate and up, 80 for the 72 of down.
    padded = expert + 8 * 40 * 4
    assert two - one == pytest.approx(3 * 8 * padded * (5 / 8 - (5 / 8) ** 2), abs=2)
