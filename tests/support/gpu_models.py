"""Tiny models that a GPU is compared with the CPU on: sizes that all kernels and caches take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from support import tiny_hybrids
from support.mxfp4 import save_as_mxfp4
from support.quantized_models import SIZES, quantized_llama
from support.tiny_latent import tiny_deepseek2, tiny_glm4_moe_lite
from support.tiny_models import save, tiny_gemma3, tiny_gpt_oss, tiny_llama

# Some outputs of Qwen3.5's delta rule are small differences of large terms. Its norm divides by
# their root mean square, so that with the usual 1e-6 the rounding of activations to float16 alone
# moves rows by more than 0.1 (`tests/cuda/test_recurrent_models.py`, which also has Qwen3.5 with
# experts: there rounding moves whole passes by 6e-3).
_QWEN35 = {"hidden_size": 96, "head_dim": 32, "linear_value_head_dim": 32, "rms_norm_eps": 1e-3}
HYBRIDS: dict[str, Callable[[], Any]] = {
    "lfm2": lambda: tiny_hybrids.tiny_lfm2(hidden_size=192, head_dim=32, block_multiple_of=32),
    "qwen3.5": lambda: tiny_hybrids.tiny_qwen35(**_QWEN35, intermediate_size=160),
    "nemotron-h": lambda: tiny_hybrids.tiny_nemotron_h(
        **{"hidden_size": 96, "head_dim": 32, "num_experts_per_tok": 8},
        **{"n_group": 1, "topk_group": 1},
    ),
    "kimi-linear": lambda: tiny_hybrids.tiny_kimi_linear(
        **{"hidden_size": 96, "num_experts_per_token": 8, "n_group": 1, "topk_group": 1},
        **{"linear_head_dim": 40, "kv_lora_rank": 56, "rms_norm_eps": 1e-3},
    ),
    "granite4-hybrid": lambda: tiny_hybrids.tiny_granite_hybrid(
        hidden_size=192, head_dim=32, mamba_d_head=64, shared_intermediate_size=160
    ),
}
"""Hybrids with heads of 32, which caches of codes need. Tokens pass all experts: a router chooses
others where two have almost the same score."""

_LATENT = {"hidden_size": 96, "kv_lora_rank": 56, "num_experts_per_tok": 8}
LATENT: dict[str, Callable[[], Any]] = {
    "deepseek2": lambda: tiny_deepseek2(**_LATENT, n_group=1, topk_group=1),
    "glm4.7-flash": lambda: tiny_glm4_moe_lite(**_LATENT),
}
"""Latent attention, with rows of 64 in the cache. Tokens pass all experts here too."""


def two_layers_of_gpt_oss() -> Any:
    """Heads of 64, as in the original. With heads of 32, codes of four bits that are rounded the
    other way change the logits of some rows by a fifth, and with four layers of more."""
    kinds = ["sliding_attention", "full_attention"]
    return tiny_gpt_oss(head_dim=64, num_experts_per_tok=6, num_hidden_layers=2, layer_types=kinds)


def _built(name: str, folder: Path) -> Path:
    return save((HYBRIDS | LATENT)[name](), folder)


BUILD: dict[str, Callable[[Path], Path]] = {
    "llama": lambda folder: save(tiny_llama(**SIZES), folder),
    "gemma3": lambda folder: save(tiny_gemma3(**SIZES, query_pre_attn_scalar=32), folder),
    "exl2": lambda folder: quantized_llama("exl2", folder),
    "gptq": lambda folder: quantized_llama("gptq", folder),
    "exl3": lambda folder: quantized_llama("exl3", folder),
    **{name: partial(_built, name) for name in (*HYBRIDS, *LATENT)},
    "gpt-oss": lambda folder: save_as_mxfp4(two_layers_of_gpt_oss(), folder),
}
