"""Quantized checkpoints of models with experts give the logits of their dequantized weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exl_core.formats.codecs.exl2 import layout as exl2
from exl_core.formats.codecs.exl3 import layout as exl3
from exl_core.formats.codecs.gptq import layout as gptq
from support.quantized_models import (
    GPTQ_SETTINGS,
    METHODS,
    SIZES,
    assert_same_logits,
    quantize,
    separate_experts,
)
from support.renamed_models import as_renamed_dbrx
from support.tiny_models import (
    HALF_ROPE,
    save,
    tiny_dbrx,
    tiny_ernie_moe,
    tiny_glm4_moe,
    tiny_granite_moe,
    tiny_hunyuan_moe,
    tiny_minimax_m2,
    tiny_qwen2_moe,
)

NARROW = {**SIZES, "head_dim": 16}  # for families whose heads share the hidden size
FAMILIES: dict[str, Callable[..., Any]] = {
    "qwen2-moe": lambda **more: tiny_qwen2_moe(
        **NARROW, moe_intermediate_size=64, shared_expert_intermediate_size=96, **more
    ),
    "glm4-moe": lambda **more: tiny_glm4_moe(**SIZES, moe_intermediate_size=64, **more),
    "ernie4.5-moe": lambda **more: tiny_ernie_moe(**SIZES, moe_intermediate_size=64, **more),
    "hunyuan-moe": lambda **more: tiny_hunyuan_moe(**SIZES, **more),
    "minimax-m2": lambda **more: tiny_minimax_m2(**SIZES, rope_parameters=HALF_ROPE, **more),
    "granite-moe": lambda **more: tiny_granite_moe(**NARROW, **more),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_exl2_logits_of_experts(tmp_path: Path, family: str) -> None:
    model = FAMILIES[family](tie_word_embeddings=False)
    pieces = quantize(separate_experts(save(model, tmp_path)), *METHODS["exl2"])
    dense = {stem: exl2.dequantize(exl2.check(p, stem)) for stem, p in pieces.items()}
    assert any(".experts.1." in stem for stem in dense)
    assert_same_logits(tmp_path, model, dense)


@pytest.mark.parametrize("family", FAMILIES)
def test_exl3_logits_of_experts(tmp_path: Path, family: str) -> None:
    model = FAMILIES[family](tie_word_embeddings=False)
    pieces = quantize(separate_experts(save(model, tmp_path)), *METHODS["exl3"])
    dense = {}
    for stem, parts in pieces.items():
        trellis = exl3.check(parts, stem)
        dense[stem] = exl3.dequantize(trellis, 0, trellis.out_features)
    assert any(".experts.1." in stem for stem in dense)
    assert_same_logits(tmp_path, model, dense)


def test_exl2_logits_of_dbrx(tmp_path: Path) -> None:
    attention = {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 10000.0}
    experts = {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}
    model: Any = tiny_dbrx(d_model=64, n_heads=4, attn_config=attention, ffn_config=experts)
    pieces = quantize(as_renamed_dbrx(save(model, tmp_path)), *METHODS["exl2"])
    dense = {stem: exl2.dequantize(exl2.check(p, stem)).T for stem, p in pieces.items()}
    with torch.inference_mode():
        model.lm_head.weight.copy_(dense["lm_head"][: len(model.lm_head.weight)])
        for index, block in enumerate(model.transformer.blocks):
            layer = f"model.layers.{index}"
            parts = [dense[f"{layer}.self_attn.{part}_proj"] for part in "qkv"]
            block.norm_attn_norm.attn.Wqkv.weight.copy_(torch.cat(parts))
            block.norm_attn_norm.attn.out_proj.weight.copy_(dense[f"{layer}.self_attn.o_proj"])
            for name in ("w1", "v1", "w2"):
                stem = f"{layer}.block_sparse_moe.experts"
                own = [dense[f"{stem}.{expert}.{name}"] for expert in range(4)]
                stacked = torch.cat([one.T if name == "w2" else one for one in own])
                getattr(block.ffn.experts.mlp, name).copy_(stacked)

    assert_same_logits(tmp_path, model, {})


@pytest.mark.parametrize("family", FAMILIES)
def test_gptq_logits_of_experts(tmp_path: Path, family: str) -> None:
    model = FAMILIES[family](tie_word_embeddings=True)
    pieces = quantize(separate_experts(save(model, tmp_path)), *METHODS["gptq"])
    settings = gptq.parse_settings(GPTQ_SETTINGS, "test")
    dense = {stem: gptq.dequantize(gptq.check(p, settings, stem)) for stem, p in pieces.items()}
    assert any(".experts.1." in stem for stem in dense)
    assert_same_logits(tmp_path, model, dense)
