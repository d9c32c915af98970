"""EXL2 and GPTQ checkpoints of models with experts give the logits of their dequantized weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exl_core.formats.codecs.exl2 import layout as exl2
from exl_core.formats.codecs.gptq import layout as gptq
from support.quantized_models import (
    GPTQ_SETTINGS,
    METHODS,
    SIZES,
    assert_same_logits,
    quantize,
    separate_experts,
)
from support.tiny_models import (
    save,
    tiny_ernie_moe,
    tiny_glm4_moe,
    tiny_granite_moe,
    tiny_hunyuan_moe,
    tiny_minimax_m2,
    tiny_qwen2_moe,
)

NARROW = {**SIZES, "head_dim": 16}  # for families whose heads share the hidden size
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
FAMILIES: dict[str, Callable[..., Any]] = {
    "qwen2-moe": lambda **more: tiny_qwen2_moe(
        **NARROW, moe_intermediate_size=64, shared_expert_intermediate_size=96, **more
    ),
    "glm4-moe": lambda **more: tiny_glm4_moe(**SIZES, moe_intermediate_size=64, **more),
    "ernie4.5-moe": lambda **more: tiny_ernie_moe(**SIZES, moe_intermediate_size=64, **more),
    "hunyuan-moe": lambda **more: tiny_hunyuan_moe(**SIZES, **more),
    "minimax-m2": lambda **more: tiny_minimax_m2(**SIZES, rope_parameters=ROPE, **more),
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
def test_gptq_logits_of_experts(tmp_path: Path, family: str) -> None:
    model = FAMILIES[family](tie_word_embeddings=True)
    pieces = quantize(separate_experts(save(model, tmp_path)), *METHODS["gptq"])
    settings = gptq.parse_settings(GPTQ_SETTINGS, "test")
    dense = {stem: gptq.dequantize(gptq.check(p, settings, stem)) for stem, p in pieces.items()}
    assert any(".experts.1." in stem for stem in dense)
    assert_same_logits(tmp_path, model, dense)
