"""Tiny checkpoints whose matrices are random layers of a quantized format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from exl_core.ops.weights import Codebook
from exl_core.session.load import LoadOptions
from support.paged import logits_of
from support.quantized import (
    random_awq,
    random_compressed,
    random_exl2,
    random_fp8,
    random_gptq,
)
from support.tiny_models import VOCAB_SIZE, save, tiny_llama
from support.trellis import random_exl3

Pieces = dict[str, Tensor]

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
GPTQ_SETTINGS = {
    "bits": 4,
    "group_size": 32,
    "desc_act": True,
    "sym": False,
    "quant_method": "gptq",
}
ROUTERS = (
    *("mlp.gate.weight", "block_sparse_moe.gate.weight", "mlp.gate.wg.weight"),
    *("block_sparse_moe.router.layer.weight", "feed_forward.gate.weight", "mixer.gate.weight"),
    *("mlp.shared_expert_gate.weight", "router.proj.weight", "feed_forward.router.weight"),
    "ffn.router.layer.weight",
    *("linear_attn.in_proj_a.weight", "linear_attn.in_proj_b.weight"),
)
"""Endings of the names of routers and of other narrow matrices, which are never quantized."""
# Groups of stored rows by in_features; these are the values that occur with the sizes above.
GROUPS = {
    64: [(6, 32), (4, 32)],
    96: [(5, 32), (3, 32), (2, 32)],
    128: [(8, 64), (4, 64)],
}


def quantize(
    folder: Path, settings: dict[str, Any], make: Callable[[int, int], Pieces]
) -> dict[str, Pieces]:
    """Replaces every matrix but the embedding by a random layer. Returns the tensors by stem."""
    tensors = load_file(folder / "model.safetensors")
    pieces: dict[str, Pieces] = {}
    for name, weight in list(tensors.items()):
        is_plain = "embed" in name or name.endswith(ROUTERS) or not name.endswith(".weight")
        is_plain = is_plain or ".visual." in name or ".wte." in name
        if weight.dim() == 2 and not is_plain:
            stem = name.removesuffix(".weight")
            pieces[stem] = make(weight.shape[1], weight.shape[0])
            del tensors[name]
            tensors |= {f"{stem}.{part}": value for part, value in pieces[stem].items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return pieces


def separate_experts(folder: Path) -> Path:
    """Replaces stacked experts by a tensor for each matrix, which tools quantize."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".experts.gate_up_proj")]:
        owner = name.rpartition(".")[0]
        for index in range(len(tensors[name])):
            for role, matrix in matrices_of_expert(tensors, owner, index).items():
                tensors[f"{owner}.{index}.{role}_proj.weight"] = matrix.clone().contiguous()
        del tensors[name], tensors[f"{owner}.down_proj"]
    for name in [name for name in tensors if "_linear.weight" in name]:
        layer, stack = name.partition(".block_sparse_moe.")[0], tensors.pop(name)
        for index, matrix in enumerate(stack):
            parts = matrix.chunk(2) if "input_linear" in name else (matrix,)
            roles = ("gate", "up") if "input_linear" in name else ("down",)
            for role, part in zip(roles, parts, strict=True):
                tensors[f"{layer}.mlp.experts.{index}.{role}_proj.weight"] = part.clone()
    save_file(tensors, folder / "model.safetensors")
    return folder


def parameter_of(parameters: dict[str, Tensor], stem: str) -> Tensor:
    """The part of a parameter that is stored under `stem`. Experts are stacked in transformers."""
    stem = re.sub(r"^backbone\.", "model.", stem)
    owners = ("mlp.", "block_sparse_moe.", "feed_forward.", "mixer.", "")
    expert = re.fullmatch(rf"(.+\.\d+)\.(?:{'|'.join(owners)})experts\.(\d+)\.(\w+)", stem)
    if expert is None or f"{stem}.weight" in parameters:
        return parameters[f"{stem}.weight"]
    layer, index, part = expert.groups()
    candidates = (f"{layer}.{owner}experts" for owner in owners)  # files may have other names
    stacked = next(one for one in candidates if f"{one}.down_proj" in parameters)
    role = {"w1": "gate", "w2": "down", "w3": "up"}.get(part, part.removesuffix("_proj"))
    return matrices_of_expert(parameters, stacked, int(index))[role]


def matrices_of_expert(tensors: dict[str, Tensor], stacked: str, index: int) -> dict[str, Tensor]:
    """Matrices [out, in] of an expert by role: views of the tensors of all experts `stacked`."""
    down = tensors[f"{stacked}.down_proj"][index]
    if f"{stacked}.up_proj" in tensors:  # no gate
        return {"up": tensors[f"{stacked}.up_proj"][index], "down": down}
    wide = tensors[f"{stacked}.gate_up_proj"][index]
    if wide.shape[1] == 2 * down.shape[0]:  # Llama 4 has [in, out]
        wide, down = wide.T, down.T
    gate, up = wide.chunk(2)
    return {"gate": gate, "up": up, "down": down}


def assert_same_logits(folder: Path, model: Any, dense: dict[str, Tensor]) -> None:
    """Checks the exact path against the model with the weights `dense`, [in, out] by stem."""
    parameters = dict(model.named_parameters())
    with torch.inference_mode():
        for stem, weight in dense.items():
            parameter = parameter_of(parameters, stem)
            parameter.copy_(weight[: parameter.shape[1], : parameter.shape[0]].T.float())
        ids = torch.randint(3, VOCAB_SIZE, (1, 40), generator=torch.Generator().manual_seed(1))
        expected = model(ids).logits[0]
    logits = logits_of(folder, ids[0].tolist(), LoadOptions(exact=True))
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def exl2_pieces(in_features: int, out_features: int) -> Pieces:
    """Tensors of a random EXL2 layer, scaled to keep the magnitude of its input."""
    columns = -(-out_features // 32) * 32
    layer = random_exl2(in_features + out_features, GROUPS[in_features], columns)
    size = layer.dense().float().std() * in_features**0.5
    parts = layer.parts
    parts["q_scale_max"] = (parts["q_scale_max"] / size).half()
    return parts


def gptq_pieces(in_features: int, out_features: int) -> Pieces:
    """Tensors of a random GPTQ layer, scaled likewise."""
    layer = random_gptq(
        in_features + out_features,
        4,
        32,
        rows=in_features,
        columns=out_features,
        has_act_order=True,
    )
    size = layer.dense().float().std() * in_features**0.5
    parts = layer.parts
    parts["scales"] = (parts["scales"] / size).half()
    return parts


def awq_pieces(in_features: int, out_features: int) -> Pieces:
    """Tensors of a random AWQ layer, scaled likewise."""
    layer = random_awq(in_features + out_features, 32, rows=in_features, columns=out_features)
    size = layer.dense().std() * in_features**0.5
    parts = layer.parts
    parts["scales"] = (parts["scales"] / size).half()
    return parts


def compressed_pieces(in_features: int, out_features: int) -> Pieces:
    """Tensors of a random packed compressed-tensors layer, scaled likewise."""
    seed = in_features + out_features
    layer = random_compressed(
        seed, 4, 32, rows=in_features, columns=out_features, is_symmetric=seed % 3 > 0
    )
    size = layer.dense().std() * in_features**0.5
    parts = layer.parts
    scales = (parts["weight_scale"] / size).clamp(2.0**-17)  # float16 then represents all of them
    parts["weight_scale"] = scales.bfloat16()
    return parts


def fp8_pieces(in_features: int, out_features: int) -> Pieces:
    """Tensors of a random FP8 matrix in blocks, scaled likewise."""
    seed = in_features + out_features
    layer = random_fp8(seed, FP8_BLOCK, rows=in_features, columns=out_features)
    size = layer.dense().float().std() * in_features**0.5
    return layer.parts | {layer.name: layer.scales / size}


EXL3_RATES = {64: 2.5, 96: 4, 128: 3}
"""Bits per weight by in_features."""


def exl3_pieces(in_features: int, out_features: int, codebook: Codebook = "mul1") -> Pieces:
    """Tensors of a random EXL3 layer, padded, scaled likewise. Padded outputs are 0."""
    seed, rate = in_features + out_features, EXL3_RATES[in_features]
    rate = rate if codebook == "mul1" else int(rate)
    layer = random_exl3(seed, rate, codebook, rows=in_features, columns=out_features)
    parts = layer.parts
    parts["svh"][out_features:] = 0
    size = layer.dense()[:in_features, :out_features].std() * in_features**0.5
    parts["suh"] = (parts["suh"] / size).half()
    return parts


FP8_BLOCK = (48, 32)
EXL3_SETTINGS = {"quant_method": "exl3", "bits": 3.0, "head_bits": 3, "codebook": "mul1"}
FP8_SETTINGS = random_fp8(0, FP8_BLOCK, rows=32).config()
AWQ_SETTINGS = random_awq(0, 32, rows=32).config()
COMPRESSED_SETTINGS = random_compressed(0, 4, 32, rows=32).config()
# `quantization_config` of each method, and the function that makes a matrix's tensors.
METHODS: dict[str, tuple[dict[str, Any], Callable[[int, int], Pieces]]] = {
    "exl2": ({"quant_method": "exl2"}, exl2_pieces),
    "exl3": (EXL3_SETTINGS, exl3_pieces),
    "gptq": (GPTQ_SETTINGS, gptq_pieces),
    "awq": (AWQ_SETTINGS, awq_pieces),
    "compressed-tensors": (COMPRESSED_SETTINGS, compressed_pieces),
    "fp8": (FP8_SETTINGS, fp8_pieces),
}
TIED = ("gptq", "awq", "compressed-tensors", "fp8")
"""Methods whose files keep the head unquantized: their tiny models tie it to the embedding."""


def quantized_llama(method: str, folder: Path) -> Path:
    """Writes a quantized tiny Llama to `folder`. With EXL2 and EXL3, the head is a matrix of
    its own."""
    save(tiny_llama(**SIZES, tie_word_embeddings=method in TIED), folder)
    quantize(folder, *METHODS[method])
    return folder
