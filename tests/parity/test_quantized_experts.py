"""Quantized checkpoints of models with experts give the logits of their dequantized weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
from support.renamed_models import DBRX_NAMES, as_converted_dbrx, as_renamed_dbrx
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


def narrow_dbrx(**changes: Any) -> Any:
    attention = {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 10000.0}
    experts = {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}
    sizes = {"d_model": 64, "n_heads": 4, "attn_config": attention, "ffn_config": experts}
    return tiny_dbrx(**sizes, **changes)


def set_weights_of_dbrx(model: Any, dense: dict[str, Tensor]) -> None:
    """Gives the model the matrices `dense`, [out, in] by the stem in EXL2 files."""
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


def test_exl2_logits_of_dbrx(tmp_path: Path) -> None:
    model = narrow_dbrx()
    pieces = quantize(as_renamed_dbrx(save(model, tmp_path)), *METHODS["exl2"])
    dense = {stem: exl2.dequantize(exl2.check(p, stem)).T for stem, p in pieces.items()}
    set_weights_of_dbrx(model, dense)
    assert_same_logits(tmp_path, model, {})


def test_gptq_logits_of_dbrx(tmp_path: Path) -> None:
    """Names of LnL-AI/dbrx-base-converted-v2-4bit-gptq, whose experts are linear layers."""
    model = narrow_dbrx(vocab_size=304)
    pieces = quantize(as_converted_dbrx(save(model, tmp_path)), *METHODS["gptq"])
    assert "transformer.blocks.2.ffn.experts.mlp.3.w2" in pieces
    assert "transformer.blocks.0.norm_attn_norm.attn.k_proj" in pieces
    settings = gptq.parse_settings(GPTQ_SETTINGS, "test")
    names = {
        **{old: new for old, new in DBRX_NAMES.items() if "norm_" not in old},
        **{"norm_attn_norm.attn.out_proj": "self_attn.o_proj"},
        **{"norm_attn_norm.attn": "self_attn", "ffn.experts.mlp": "block_sparse_moe.experts"},
    }
    dense = {}
    for stem, parts in pieces.items():
        name = stem
        for old, new in names.items():
            name = name.replace(old, new)
        dense[name] = gptq.dequantize(gptq.check(parts, settings, stem)).T
    set_weights_of_dbrx(model, dense)
    assert_same_logits(tmp_path, model, {})


@pytest.mark.parametrize("family", FAMILIES)
def test_gptq_logits_of_experts(tmp_path: Path, family: str) -> None:
    model = FAMILIES[family](tie_word_embeddings=True)
    pieces = quantize(separate_experts(save(model, tmp_path)), *METHODS["gptq"])
    settings = gptq.parse_settings(GPTQ_SETTINGS, "test")
    dense = {stem: gptq.dequantize(gptq.check(p, settings, stem)) for stem, p in pieces.items()}
    assert any(".experts.1." in stem for stem in dense)
    assert_same_logits(tmp_path, model, dense)
