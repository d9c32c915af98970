"""Write a model with random weights. Usage: random_family.py OUT FAMILY FORMAT [--layers N]

Speed depends on shapes and formats, not on values. The families have the widths of published models
and fewer layers. Names and shapes of the tensors come from the module table.
Formats apply to the matrices of the layers: fp16; gptq, gptq-act-order, awq and ct (packed
compressed-tensors) with 4 bits in groups of 128; fp8 with blocks of 128 x 128; fp8-channel; exl2
and exl3 with 4 bits and an untied head of 6 bits, under the names that exllamav2 and exllamav3
read. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from exl_core.arch.hf_config import read_hf_config
from exl_core.arch.modules import Kind, ModuleRow, module_table
from random_exl2 import MIXES, Exl2Writer, Exl3Writer, byte_tokenizer, halves, parse_mix, words

GROUP, BLOCK, SCALE = 128, 128, 0.004
DENSE = ("router", "shared_router", "delta_a", "delta_b")
"""Roles of small matrices that converters leave in float16."""

SHARED = {
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float16",
    "tie_word_embeddings": True,
}


def family(name: str, hidden: int, inner: int, heads: tuple[int, int], **more: Any) -> Any:
    return SHARED | {
        "architectures": [f"{name}ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        **more,
    }


FAMILIES = {
    "llama": family("Llama", 4096, 14336, (32, 8), model_type="llama"),
    "qwen3": family("Qwen3", 4096, 12288, (32, 8), model_type="qwen3", head_dim=128),
    "gemma3": family(
        "Gemma3", 3840, 15360, (16, 8), model_type="gemma3_text", head_dim=256,
        hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256, sliding_window=1024,
        sliding_window_pattern=6, rope_local_base_freq=10000.0,
    ),
    "command-r": family(
        "Cohere", 4096, 14336, (32, 8), model_type="cohere", layer_norm_eps=1e-5,
        logit_scale=0.0625, use_qk_norm=False,
    ),
    "starcoder2": family(
        "Starcoder2", 4608, 18432, (36, 4), model_type="starcoder2", norm_epsilon=1e-5,
        use_bias=True, hidden_act="gelu_pytorch_tanh",
    ),
    "qwen3-30b-a3b": family(
        "Qwen3Moe", 2048, 6144, (32, 4), model_type="qwen3_moe", head_dim=128, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, rope_theta=1e6,
        decoder_sparse_step=1, mlp_only_layers=[], vocab_size=151936,
    ),
    # As many matrices per layer as qwen3-30b-a3b, but tiny ones: to time the work per matrix.
    "tiny-experts": family(
        "Qwen3Moe", 128, 128, (2, 1), model_type="qwen3_moe", head_dim=64, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=128, norm_topk_prob=True, rope_theta=1e6,
        decoder_sparse_step=1, mlp_only_layers=[], vocab_size=512,
    ),
    "qwen3.5-35b-a3b": family(
        "Qwen3_5Moe", 2048, 512, (16, 2), model_type="qwen3_5_moe_text", head_dim=256,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4, full_attention_interval=4,
        num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, vocab_size=248320,
        rope_parameters={"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_type": "default"},
    ),
    "qwen3.5-0.8b": family(
        "Qwen3_5", 1024, 3584, (8, 2), model_type="qwen3_5_text", head_dim=256,
        linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4, full_attention_interval=4,
        rope_parameters={"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_type": "default"},
    ),
    "deepseek-v2-lite": family(
        "DeepseekV2", 2048, 11008, (16, 16), model_type="deepseek_v2", kv_lora_rank=512,
        q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408,
        first_k_dense_replace=1, topk_method="greedy", norm_topk_prob=False, rope_theta=10000.0,
        vocab_size=102400,
    ),
    # The sizes of V2-Lite with the router of V3, for programs that know V3 only.
    "deepseek-v3-lite": family(
        "DeepseekV3", 2048, 11008, (16, 16), model_type="deepseek_v3", kv_lora_rank=512,
        q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408,
        first_k_dense_replace=1, topk_method="noaux_tc", scoring_func="sigmoid", n_group=1,
        topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0, rope_theta=10000.0,
    ),
}  # fmt: skip


def gptq(row: ModuleRow, order: Tensor | None) -> dict[str, Tensor]:
    out_features, in_features = row.shape
    groups = in_features // GROUP
    index = torch.arange(in_features) // GROUP
    return {
        "qweight": words(in_features // 8, out_features),
        "qzeros": torch.full((groups, out_features // 8), 0x77777777, dtype=torch.int32),
        "scales": (torch.rand(groups, out_features) * SCALE).half(),
        "g_idx": (index if order is None else index[order]).int(),
    }


def awq(row: ModuleRow, _: Tensor | None) -> dict[str, Tensor]:
    out_features, in_features = row.shape
    groups = in_features // GROUP
    return {
        "qweight": words(in_features, out_features // 8),
        "qzeros": words(groups, out_features // 8),
        "scales": (torch.rand(groups, out_features) * SCALE).half(),
    }


def compressed(row: ModuleRow, _: Tensor | None) -> dict[str, Tensor]:
    out_features, in_features = row.shape
    return {
        "weight_packed": words(out_features, in_features // 8),
        "weight_scale": (torch.rand(out_features, in_features // GROUP) * SCALE).half(),
        "weight_shape": torch.tensor(row.shape),
    }


def fp8(row: ModuleRow, _: Tensor | None, *, by_channel: bool = False) -> dict[str, Tensor]:
    out_features, in_features = row.shape
    blocks = (-(-out_features // BLOCK), -(-in_features // BLOCK))
    shape = (out_features, 1) if by_channel else blocks
    return {
        "weight": halves(out_features, in_features).clamp(-8, 8).to(torch.float8_e4m3fn),
        "weight_scale" if by_channel else "weight_scale_inv": torch.rand(shape) * SCALE,
    }


Maker = Callable[[ModuleRow, Tensor | None], dict[str, Tensor]]

WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": GROUP,
}
CHANNELS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
CT = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}


def scheme(weights: dict[str, Any]) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


SETTINGS: dict[str, dict[str, Any]] = {
    "fp16": {},
    "gptq": GPTQ,
    "gptq-act-order": {**GPTQ, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
    "ct": {**CT, "format": "pack-quantized", **scheme(WEIGHTS)},
    "fp8": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    "fp8-channel": {**CT, "format": "float-quantized", **scheme(CHANNELS)},
}
MAKERS: dict[str, Maker] = {
    "gptq": gptq,
    "gptq-act-order": gptq,
    "awq": awq,
    "ct": compressed,
    "fp8": fp8,
    "fp8-channel": partial(fp8, by_channel=True),
}
EXL: dict[str, Callable[[], Exl2Writer | Exl3Writer]] = {
    "exl2": lambda: Exl2Writer(parse_mix(MIXES["4"]), 6, has_own_orders=False),
    "exl3": lambda: Exl3Writer(4, 6),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("format", choices=[*SETTINGS, *EXL])
    parser.add_argument("--layers", type=int, default=12)
    args = parser.parse_args()
    written = {**FAMILIES[args.family], "num_hidden_layers": args.layers}
    writer = EXL[args.format]() if args.format in EXL else None
    if writer is not None:
        written |= {"quantization_config": writer.settings, "tie_word_embeddings": False}
    elif SETTINGS[args.format]:
        written["quantization_config"] = SETTINGS[args.format]
    args.out.mkdir(parents=True)
    (args.out / "config.json").write_text(json.dumps(written, indent=2), encoding="utf-8")
    rows = module_table(read_hf_config(args.out)).rows
    tensors = plain(rows, args.format) if writer is None else exl_tensors(rows, writer)
    save_file(tensors, args.out / "model.safetensors", metadata={"format": "pt"})
    byte_tokenizer().save(str(args.out / "tokenizer.json"))
    print(json.dumps({"out": str(args.out), "bytes": sum(x.nbytes for x in tensors.values())}))
    return 0


def plain(rows: Sequence[ModuleRow], form: str) -> dict[str, Tensor]:
    """Tensors in any format but EXL2 and EXL3, under canonical names."""
    orders: dict[int, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for row in rows:
        is_layers = row.kind is Kind.LINEAR and row.layer is not None
        if is_layers and row.role not in DENSE and form in MAKERS:
            order = None
            if form == "gptq-act-order":
                order = orders.setdefault(row.shape[1], torch.randperm(row.shape[1]))
            parts = MAKERS[form](row, order)
            tensors |= {f"{row.stem}.{part}": tensor for part, tensor in parts.items()}
        else:
            tensors[row.name] = unquantized(row)
    return tensors


def exl_tensors(rows: Sequence[ModuleRow], writer: Exl2Writer | Exl3Writer) -> dict[str, Tensor]:
    """Tensors in EXL2 or EXL3. Matrices that the checkpoints of a family fuse are one matrix."""
    gated = {row.layer for row in rows if row.role == "q_gate"}
    has_delta_net = any(row.role == "delta_q" for row in rows)
    root = "model.language_model." if has_delta_net else "model."  # all of these see images, too
    tensors: dict[str, Tensor] = {}
    for row in rows:
        name, num_rows = stored_as(row, has_gate=row.layer in gated)
        name = name.replace("model.", root, 1)
        stem = name.removesuffix(".weight")
        if not (row.is_converted or row.kind is Kind.HEAD):
            tensors[name] = unquantized(row, is_tied=False)
        elif f"{stem}.{writer.first_part}" not in tensors:
            parts = writer.linear(stem, row.shape[1], num_rows, f"{row.layer} {row.expert} input")
            tensors |= {f"{stem}.{part}": tensor for part, tensor in parts.items()}
    return tensors


def stored_as(row: ModuleRow, *, has_gate: bool) -> tuple[str, int]:
    """Name in a published checkpoint, and the number of rows of the stored tensor."""
    places = row.safetensors
    if row.role in ("delta_q", "delta_k", "delta_v") or (has_gate and row.role in ("q", "q_gate")):
        place = places[0]
    else:
        place = next((p for p in places if ".in_proj_" in p.name), row.written)
    return place.name, place.num_rows


def unquantized(row: ModuleRow, *, is_tied: bool = True) -> Tensor:
    if row.is_matrix:
        # An untied embedding outweighs the layers, so that different tokens keep different states.
        scale = 1.0 if row.kind is Kind.EMBEDDING and not is_tied else row.shape[1] ** -0.5
        return halves(row.shape[0], row.shape[1], scale)
    ones = torch.ones(row.shape)
    if row.kind is Kind.TAPS:
        return ones.unsqueeze(1).bfloat16()
    # exllamav3's kernels read these of a delta net as bfloat16, the type of published checkpoints.
    return ones.bfloat16() if row.role in ("step_bias", "decay", "mixer_norm") else ones.half()


if __name__ == "__main__":
    sys.exit(main())
