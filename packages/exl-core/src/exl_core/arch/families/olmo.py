"""OLMo 2 and 3: norms after each part instead of before it, and over all queries and all keys.

OLMo 3 has a window in three of four layers, and scales RoPE only in the others. GGUF files of both
have the architecture name `olmo2`.
"""

from __future__ import annotations

from exl_core.arch.layers import HeadNorm, NormPlacement
from exl_core.arch.names import GGUF_SANDWICH, HF_POST
from exl_core.arch.spec import ArchSpec, Window

OLMO2 = ArchSpec(
    name="olmo2",
    hf_names=("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
    gguf_names=("olmo2",),
    norm_placement=NormPlacement.POST,
    head_norm=HeadNorm.RMS_WHOLE,
    window_pattern=(*(Window.LOCAL,) * 3, Window.GLOBAL),
    is_window_optional=True,
    has_plain_local_rope=True,
    rope_base_default=500_000.0,
    norm_eps_default=1e-5,
    safetensors=HF_POST,
    gguf=GGUF_SANDWICH,
)
