"""GLM-4.5, 4.6 and 4.7, Air included: experts chosen by sigmoid scores with a bias, and a shared
expert.

The first layers are dense. Half of each head is rotated. The rows are in the order of Llama's
checkpoints, unlike those of GLM-4's dense models. The large models have head norms. After the last
layer, files have one for multi-token prediction.
"""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import HeadNorm, LayerSpec, RouterBias, Scores
from exl_core.arch.names import GGUF, HF, NEXTN
from exl_core.arch.spec import ArchSpec, ExpertForm, LayerNumbers, decoder_layer


def _layer(arch: ArchSpec, numbers: LayerNumbers) -> LayerSpec:
    """Biases are those of q, k and v alone."""
    return decoder_layer(arch, replace(numbers, has_output_bias=False, has_mlp_bias=False))


GLM4_MOE = ArchSpec(
    name="glm4moe",
    hf_names=("Glm4MoeForCausalLM",),
    gguf_names=("glm4moe",),
    optional_head_norm=HeadNorm.RMS,
    partial_rotary_default=0.5,
    norm_eps_default=1e-5,
    experts=ExpertForm(
        num_experts_keys=("n_routed_experts", "num_local_experts"),
        scores=Scores.SIGMOID,
        bias=RouterBias.CHOICE,
        normalizes=None,
        normalizes_default=True,
        eps=1e-20,
        factor_default=1.0,
        has_groups=True,
        shared_count_key="n_shared_experts",
        shared_count_default=1,
        first_sparse_default=1,
    ),
    safetensors=HF,
    gguf=replace(GGUF, names={**GGUF.names, "mlp_norm": "post_attention_norm"}),
    mtp=NEXTN,
    make_layer=_layer,
)
