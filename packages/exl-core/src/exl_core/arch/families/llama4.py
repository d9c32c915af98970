"""Llama 4 Scout and Maverick (the language model): one of 16 or 128 experts, and a shared one.

Three of four layers have interleaved RoPE, norms without factors on queries and keys after it
(Scout), and attention in chunks of 8192 positions. The fourth has none of these, and queries that
grow with the logarithm of their position. The router's sigmoid is a factor of the expert's input.
In Maverick every second layer is dense.
"""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import HeadNorm, LayerSpec, QueryTemperature, Scores
from exl_core.arch.names import GGUF, HF, MULTIMODAL_ROOTS, Fused
from exl_core.arch.spec import ArchSpec, ExpertForm, LayerNumbers, NoRope, decoder_layer


def _layer(arch: ArchSpec, numbers: LayerNumbers) -> LayerSpec:
    """Layers without RoPE have the temperature; the others have head norms and chunks."""
    if numbers.rope is None:
        return decoder_layer(arch, replace(numbers, head_norm=HeadNorm.NONE, chunk=0))
    return decoder_layer(arch, replace(numbers, temperature=None))


_EXPERTS = "feed_forward.experts"
_PARTS = ("gate", "up", "down")

LLAMA4 = ArchSpec(
    name="llama4",
    hf_names=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    gguf_names=("llama4",),
    optional_head_norm=HeadNorm.PLAIN_AFTER_ROPE,
    has_head_norm_default=True,
    no_rope=NoRope.INTERVAL,
    is_rotated_without_list=False,
    temperature_default=QueryTemperature(0.1, 8192, 1),
    chunk_default=8192,
    intermediate_size_key="intermediate_size_mlp",
    norm_eps_default=1e-5,
    rope_base_default=500_000.0,
    experts=ExpertForm(
        num_experts_keys=("num_local_experts",),
        top_k_default=1,
        size_key="intermediate_size",
        scores=Scores.SIGMOID,
        normalizes=False,
        gguf_normalizes=False,
        shared_size_key="intermediate_size",
        weighs_inputs=True,
    ),
    safetensors=replace(
        HF,
        names={
            **HF.names,
            **{part: f"feed_forward.{part}_proj" for part in _PARTS},
            "router": "feed_forward.router",
            **{f"expert_{part}": f"{_EXPERTS}.{{}}.{part}_proj" for part in _PARTS},
            **{f"shared_{part}": f"feed_forward.shared_expert.{part}_proj" for part in _PARTS},
        },
        roots=MULTIMODAL_ROOTS,
        aliases={"expert_down": (f"{_EXPERTS}.down_proj",)},
        fused=(
            *HF.fused,
            Fused(f"{_EXPERTS}.gate_up_proj", ("expert_gate", "expert_up"), is_bare=True),
        ),
        is_interleaved=True,
        bare=(f"{_EXPERTS}.down_proj",),
        transposed=(f"{_EXPERTS}.gate_up_proj", f"{_EXPERTS}.down_proj"),
    ),
    gguf=replace(GGUF, is_interleaved=True),
    make_layer=_layer,
)
