"""DeepSeek V2 and V3 with their relatives, Kimi K2, GLM-4.7-Flash and Mistral Small 4: latent
attention, and experts beside a shared one. The first layers are dense.

V2 chooses experts by softmax scores, and groups of them by their best score. The others choose by
sigmoid scores with a bias. Rotated rows are interleaved in all files. Checkpoints and GGUF files
may have a layer for multi-token prediction after the others. All GGUF files have
the same architecture name; the scores tell V2 from the others.
"""

from __future__ import annotations

from dataclasses import replace

from exl_core.arch.layers import RouterBias, Scores
from exl_core.arch.names import GGUF, HF, MULTIMODAL_ROOTS, NEXTN, Fused
from exl_core.arch.spec import ArchSpec, ExpertForm

_V2_EXPERTS = ExpertForm(
    num_experts_keys=("n_routed_experts", "num_local_experts"),
    scores=Scores.SOFTMAX,
    normalizes=False,
    gguf_normalizes=False,
    factor_default=1.0,
    has_groups=True,
    group_scores=1,
    shared_count_key="n_shared_experts",
    shared_count_default=2,
)
_V3_EXPERTS = replace(
    _V2_EXPERTS,
    scores=Scores.SIGMOID,
    bias=RouterBias.CHOICE,
    normalizes=None,
    normalizes_default=True,
    gguf_normalizes=True,
    eps=1e-20,
    factor_default=2.5,
    group_scores=2,
    shared_count_default=1,
    first_sparse_default=3,
)
_COMMON = (("rope_interleave", (True, None)), ("moe_layer_freq", (1, None)))

DEEPSEEK2 = ArchSpec(
    name="deepseek2",
    hf_names=("DeepseekV2ForCausalLM",),
    gguf_names=("deepseek2",),
    has_latent=True,
    experts=_V2_EXPERTS,
    required=(
        *_COMMON,
        ("norm_topk_prob", (False, None)),
        ("topk_method", ("greedy", "group_limited_greedy", None)),
    ),
    safetensors=replace(HF, is_interleaved=True),
    gguf=replace(GGUF, is_interleaved=True),
)

DEEPSEEK3 = ArchSpec(
    name="deepseek3",
    hf_names=("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"),
    gguf_names=("deepseek2",),
    has_latent=True,
    experts=_V3_EXPERTS,
    required=(*_COMMON, ("topk_method", ("noaux_tc", None))),
    safetensors=replace(HF, is_interleaved=True, roots=MULTIMODAL_ROOTS),
    gguf=replace(GGUF, is_interleaved=True),
    mtp=NEXTN,
)

GLM4_MOE_LITE = ArchSpec(
    name="glm4moelite",
    hf_names=("Glm4MoeLiteForCausalLM",),
    gguf_names=(),  # its GGUF files are those of V3 with other numbers
    has_latent=True,
    norm_eps_default=1e-5,
    experts=replace(_V3_EXPERTS, factor_default=1.8, first_sparse_default=1),
    required=(*_COMMON, ("topk_method", ("noaux_tc", None))),
    safetensors=replace(HF, is_interleaved=True),
    gguf=replace(GGUF, is_interleaved=True),
    mtp=NEXTN,
)

MISTRAL4 = ArchSpec(
    name="mistral4",
    hf_names=("Mistral4ForCausalLM", "Mistral3ForConditionalGeneration"),
    text_types=("mistral4",),
    gguf_names=("mistral4",),
    has_latent=True,
    has_query_temperature=True,
    experts=replace(
        _V2_EXPERTS,
        normalizes=None,
        normalizes_default=True,
        gguf_normalizes=True,
        eps=1e-20,
        group_scores=2,
        shared_count_default=1,
    ),
    required=_COMMON,
    safetensors=replace(
        HF,
        is_interleaved=True,
        roots=MULTIMODAL_ROOTS,
        aliases={"expert_down": ("mlp.experts.down_proj",)},
        fused=(Fused("mlp.experts.gate_up_proj", ("expert_gate", "expert_up"), is_bare=True),),
        bare=("router_bias", "mlp.experts.down_proj"),
    ),
    gguf=replace(
        GGUF,
        is_interleaved=True,
        fused=(Fused("ffn_gate_up_exps", ("expert_gate", "expert_up")),),
    ),
)
"""Queries grow with the logarithm of their position. The scores of the experts are a softmax."""
