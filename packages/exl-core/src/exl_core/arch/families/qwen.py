"""Qwen 2, 2.5 and 3 (dense): Llama's architecture with biases on q, k, v, or with head norms.

Their checkpoints give a window size, and `use_sliding_window` says whether it is used.
"""

from __future__ import annotations

from exl_core.arch.layers import HeadNorm
from exl_core.arch.spec import ArchSpec, Window

QWEN2 = ArchSpec(
    name="qwen2",
    hf_names=("Qwen2ForCausalLM",),
    gguf_names=("qwen2",),
    has_qkv_bias=True,
    window_pattern=(Window.LOCAL,),
    window_flag="use_sliding_window",
)

QWEN3 = ArchSpec(
    name="qwen3",
    hf_names=("Qwen3ForCausalLM",),
    gguf_names=("qwen3",),
    head_norm=HeadNorm.RMS,
    window_pattern=(Window.LOCAL,),
    window_flag="use_sliding_window",
    head_dim_default=128,
)
