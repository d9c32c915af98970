"""EXAONE 4: norms after each part instead of before it, and of each query and key head.

The 32B model has a window in three of four layers, and RoPE only in these.
"""

from __future__ import annotations

from exl_core.arch.layers import HeadNorm, NormPlacement
from exl_core.arch.names import GGUF_SANDWICH, HF_POST
from exl_core.arch.spec import ArchSpec, NoRope, Window

EXAONE4 = ArchSpec(
    name="exaone4",
    hf_names=("Exaone4ForCausalLM",),
    gguf_names=("exaone4",),
    norm_placement=NormPlacement.POST,
    head_norm=HeadNorm.RMS,
    window_pattern=(*(Window.LOCAL,) * 3, Window.GLOBAL),
    is_window_optional=True,
    no_rope=NoRope.GLOBAL,
    norm_eps_default=1e-5,
    safetensors=HF_POST,
    gguf=GGUF_SANDWICH,
)
