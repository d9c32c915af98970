"""Checkpoints of families without a class in transformers: a Llama's tensors under their names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.tiny_models import GRANITE_MULTIPLIERS

Tensors = dict[str, Tensor]


def as_yi(folder: Path) -> Path:
    """The oldest checkpoints of Yi, with their own names of the norms."""

    def renamed(name: str) -> str:
        return name.replace("input_layernorm", "ln1").replace("post_attention_layernorm", "ln2")

    return _rewrite(
        folder,
        lambda tensors, _: {renamed(name): values for name, values in tensors.items()},
        architectures=["YiForCausalLM"],
        model_type="Yi",
    )


def as_transposed_experts(folder: Path) -> Path:
    """Stacked experts as in checkpoints of the hub, each [in_features, out_features]."""

    def turned(tensors: Tensors, _: dict[str, Any]) -> Tensors:
        return {
            name: values.transpose(1, 2).contiguous() if ".experts." in name else values
            for name, values in tensors.items()
        }

    return _rewrite(folder, turned)


DBRX_NAMES = {
    "transformer.wte": "model.embed_tokens",
    "transformer.norm_f": "model.norm",
    "transformer.blocks": "model.layers",
    "norm_attn_norm.norm_1": "input_layernorm",
    "norm_attn_norm.norm_2": "post_attention_layernorm",
    "norm_attn_norm.attn.out_proj": "self_attn.o_proj",
    "ffn.router.layer": "block_sparse_moe.gate",
}


def as_renamed_dbrx(folder: Path) -> Path:
    """Tensors as in EXL2 files: one for each expert, and q, k and v apart."""

    def rewritten(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        found: Tensors = {}
        experts = config["ffn_config"]["moe_num_experts"]
        size = config["d_model"] // config["n_heads"]
        kv_size = config["attn_config"]["kv_n_heads"] * size
        for name, values in tensors.items():
            new = _renamed(name, DBRX_NAMES)
            stem, _, last = new.rpartition(".")
            if "Wqkv" in name:
                parts = values.split([config["d_model"], kv_size, kv_size])
                for letter, own in zip("qkv", parts, strict=True):
                    key = new.replace("norm_attn_norm.attn.Wqkv", f"self_attn.{letter}_proj")
                    found[key] = own.clone()
            elif stem.endswith("ffn.experts.mlp"):
                stem = stem.replace("ffn.experts.mlp", "block_sparse_moe.experts")
                for index, part in enumerate(values.chunk(experts)):
                    own = part.T if last == "w2" else part
                    found[f"{stem}.{index}.{last}.weight"] = own.contiguous().clone()
            else:
                found[new] = values
        return found

    return _rewrite(folder, rewritten)


def as_converted_dbrx(folder: Path) -> Path:
    """Tensors as in the copy of the model that GPTQ tools take: DBRX's names, and otherwise as in
    EXL2 files."""
    names = {new: old for old, new in DBRX_NAMES.items()}
    names |= {f"self_attn.{part}": f"norm_attn_norm.attn.{part}" for part in "qkv"}
    names |= {"block_sparse_moe.experts": "ffn.experts.mlp"}

    def renamed(tensors: Tensors, _: dict[str, Any]) -> Tensors:
        return {_renamed(name, names): values for name, values in tensors.items()}

    return _rewrite(as_renamed_dbrx(folder), renamed)


def as_oldest_gpt2(folder: Path) -> Path:
    """The first checkpoints of GPT-2, without a root."""
    return _rewrite(
        folder,
        lambda tensors, _: {
            name.removeprefix("transformer."): values for name, values in tensors.items()
        },
    )


INTERNLM2_NAMES = {
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def as_internlm2(folder: Path) -> Path:
    """q, k, v in one matrix: for each key head, its query heads, the key head, the value head."""

    def rewritten(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        found: Tensors = {}
        groups, size = config["num_key_value_heads"], config["head_dim"]
        for name, values in tensors.items():
            if "self_attn.q_proj" in name:
                parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
                split = [part.view(groups, -1, size, *part.shape[1:]) for part in parts]
                fused = torch.cat(split, 1).reshape(-1, *values.shape[1:])
                found[name.replace("self_attn.q_proj", "attention.wqkv")] = fused
            elif not any(f"self_attn.{part}_proj" in name for part in "kv"):
                found[_renamed(name, INTERNLM2_NAMES)] = values.clone()
        return found

    return _rewrite(
        folder,
        rewritten,
        architectures=["InternLM2ForCausalLM"],
        model_type="internlm2",
        bias=False,
        rope_parameters=...,
        rope_scaling={"type": "dynamic", "factor": 2.0},
        rope_theta=10000.0,
    )


def _renamed(name: str, parts: dict[str, str]) -> str:
    for old, new in parts.items():
        name = name.replace(old, new)
    return name


def as_minicpm(folder: Path) -> Path:
    """A Granite with the multipliers' other names; 3 layers, hidden size 96."""
    return _rewrite(
        folder,
        lambda tensors, _: tensors,
        architectures=["MiniCPMForCausalLM"],
        model_type="minicpm",
        scale_emb=3.0,
        scale_depth=0.3 * 3**0.5,
        dim_model_base=96 / 5,
        **dict.fromkeys(GRANITE_MULTIPLIERS, ...),
    )


def as_orion(folder: Path) -> Path:
    return _rewrite(
        folder, lambda tensors, _: tensors, architectures=["OrionForCausalLM"], model_type="orion"
    )


def as_index(folder: Path) -> Path:
    return _rewrite(
        folder,
        lambda tensors, _: tensors,
        architectures=["IndexForCausalLM"],
        model_type="index",
        norm_head=1,
    )


def _rewrite(
    folder: Path, change: Callable[[Tensors, dict[str, Any]], Tensors], **settings: Any
) -> Path:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **settings}
    config = {key: value for key, value in config.items() if value is not ...}
    path.write_text(json.dumps(config))
    weights = folder / "model.safetensors"
    save_file(change(load_file(weights), config), weights)
    return folder
