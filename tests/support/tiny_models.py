"""Tiny checkpoints with random weights, written by transformers.

Deliberately awkward: sizes that are not multiples of a vector, three query heads per key head, norm
weights away from 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    ApertusConfig,
    ApertusForCausalLM,
    ArceeConfig,
    ArceeForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DbrxConfig,
    DbrxForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PixtralVisionConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
VOCAB_SIZE = 300  # 256 bytes, the special tokens, and padding as in real models

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 72,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 40}
HALF_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
"""RoPE of half a head."""


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    return randomized(LlamaForCausalLM(LlamaConfig(**{**COMMON, **changes})))


def tiny_gemma3(**changes: Any) -> Gemma3ForCausalLM:
    defaults = {
        **COMMON,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 40,
        "query_pre_attn_scalar": 24,
    }
    return randomized(Gemma3ForCausalLM(Gemma3TextConfig(**{**defaults, **changes})))


def tiny_mistral(**changes: Any) -> MistralForCausalLM:
    return randomized(MistralForCausalLM(MistralConfig(**{**COMMON, **changes})))


def tiny_qwen2(**changes: Any) -> Qwen2ForCausalLM:
    # Qwen2's configuration has no head_dim: it is hidden_size / num_attention_heads.
    defaults = {**COMMON, "hidden_size": 96, "head_dim": 16}
    return randomized(Qwen2ForCausalLM(Qwen2Config(**{**defaults, **changes})))


def tiny_qwen3(**changes: Any) -> Qwen3ForCausalLM:
    return randomized(Qwen3ForCausalLM(Qwen3Config(**{**COMMON, **changes})))


def tiny_qwen3_moe(**changes: Any) -> Qwen3MoeForCausalLM:
    """Layer 1 is dense."""
    defaults = {
        **COMMON,
        "num_hidden_layers": 4,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    }
    return randomized(Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**defaults, **changes})))


def tiny_qwen2_moe(**changes: Any) -> Qwen2MoeForCausalLM:
    defaults = {**COMMON, "hidden_size": 96, "head_dim": 16, **EXPERTS, "num_experts": 8}
    defaults["shared_expert_intermediate_size"] = 56
    return randomized(Qwen2MoeForCausalLM(Qwen2MoeConfig(**{**defaults, **changes})))


def tiny_glm4_moe(**changes: Any) -> Glm4MoeForCausalLM:
    """Layer 0 is dense."""
    defaults = {
        **{**COMMON, **EXPERTS, "head_dim": 24, "n_routed_experts": 8},
        **{"attention_bias": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1},
    }
    return randomized(Glm4MoeForCausalLM(Glm4MoeConfig(**{**defaults, **changes})))


def tiny_ernie_moe(**changes: Any) -> Ernie4_5_MoeForCausalLM:
    """Layer 0 is dense."""
    defaults = {**COMMON, "moe_intermediate_size": 40, "moe_k": 3, "moe_num_experts": 8}
    return randomized(Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**{**defaults, **changes})))


def tiny_hunyuan_moe(**changes: Any) -> HunYuanMoEV1ForCausalLM:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}
    defaults = {**COMMON, "rope_parameters": rope, "num_experts": 8, "moe_topk": 3}
    return randomized(HunYuanMoEV1ForCausalLM(HunYuanMoEV1Config(**{**defaults, **changes})))


def tiny_minimax_m2(**changes: Any) -> MiniMaxM2ForCausalLM:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.6}
    defaults = {**COMMON, "rope_parameters": rope, "num_local_experts": 8}
    defaults["num_experts_per_tok"] = 3
    return randomized(MiniMaxM2ForCausalLM(MiniMaxM2Config(**{**defaults, **changes})))


def tiny_gpt_oss(**changes: Any) -> GptOssForCausalLM:
    yarn = {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
        "rope_theta": 150000.0,
    }
    defaults = {
        **{**COMMON, "rope_parameters": yarn, "attn_implementation": "eager"},
        **{"num_local_experts": 6, "num_experts_per_tok": 3, "num_hidden_layers": 4},
        **{"hidden_size": 96, "intermediate_size": 64, "sliding_window": 50},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    model = randomized(GptOssForCausalLM(GptOssConfig(**{**defaults, **changes})))
    generator = torch.Generator().manual_seed(21)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("sinks"):
                parameter.copy_(2 * noise)
            elif "experts" in name and parameter.dim() == 2:
                parameter.copy_(0.5 * noise)
            elif "experts" in name:  # [experts, in, out]; some gates reach the limit
                scale = 3.0 if "gate_up" in name else 0.5
                parameter.copy_(scale * noise / parameter.shape[1] ** 0.5)
    return model


def tiny_granite_moe(**changes: Any) -> GraniteMoeForCausalLM:
    defaults = {**COMMON, "hidden_size": 96, "head_dim": 16, **GRANITE_MULTIPLIERS}
    defaults |= {"num_local_experts": 6, "num_experts_per_tok": 2}
    return randomized(GraniteMoeForCausalLM(GraniteMoeConfig(**{**defaults, **changes})))


def tiny_mixtral(**changes: Any) -> MixtralForCausalLM:
    defaults = {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2}
    return randomized(MixtralForCausalLM(MixtralConfig(**{**defaults, **changes})))


def tiny_seed_oss(**changes: Any) -> SeedOssForCausalLM:
    return randomized(SeedOssForCausalLM(SeedOssConfig(**{**COMMON, **changes})))


def tiny_phi3(**changes: Any) -> Phi3ForCausalLM:
    defaults = {**COMMON, "hidden_size": 96, "head_dim": 16}
    return randomized(Phi3ForCausalLM(Phi3Config(**{**defaults, **changes})))


def tiny_gemma2(**changes: Any) -> Gemma2ForCausalLM:
    defaults = {
        **COMMON,
        "num_hidden_layers": 4,
        "sliding_window": 40,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
        "attn_implementation": "eager",  # the other implementations ignore the soft-cap of scores
    }
    return randomized(Gemma2ForCausalLM(Gemma2Config(**{**defaults, **changes})))


def tiny_phi3_longrope(**changes: Any) -> Phi3ForCausalLM:
    """Two lists of 6 factors for the 12 rotated values of each head (three quarters of 16)."""
    long = [1.0, 1.4, 2.3, 4.0, 9.0, 20.0]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.05, 1.1, 1.2, 1.4, 2.0],
        "long_factor": long,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 64,
    }
    defaults = {
        "max_position_embeddings": 256,
        "original_max_position_embeddings": 64,
        "rope_parameters": rope,
        "sliding_window": None,
    }
    return tiny_phi3(**{**defaults, **changes})


def tiny_gemma(**changes: Any) -> GemmaForCausalLM:
    return randomized(GemmaForCausalLM(GemmaConfig(**{**COMMON, **changes})))


def tiny_ernie(**changes: Any) -> Ernie4_5ForCausalLM:
    return randomized(Ernie4_5ForCausalLM(Ernie4_5Config(**{**COMMON, **changes})))


def tiny_glm4(**changes: Any) -> Glm4ForCausalLM:
    defaults = {**COMMON, "head_dim": 24, "tie_word_embeddings": False}
    return randomized(Glm4ForCausalLM(Glm4Config(**{**defaults, **changes})))


def tiny_pixtral(**changes: Any) -> LlavaForConditionalGeneration:
    vision = PixtralVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    text = MistralConfig(**{**COMMON, "sliding_window": None, **changes})
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=299)
    return randomized(LlavaForConditionalGeneration(config))


def tiny_qwen2_5_vl(**changes: Any) -> Qwen2_5_VLForConditionalGeneration:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    text = {**COMMON, "hidden_size": 96, "head_dim": 16, "rope_parameters": rope, **changes}
    vision: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "depth": 1,
        "num_heads": 2,
    }
    vision |= {"out_hidden_size": 96, "fullatt_block_indexes": [0]}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return randomized(Qwen2_5_VLForConditionalGeneration(config))


def tiny_qwen3_vl(**changes: Any) -> Qwen3VLForConditionalGeneration:
    config = Qwen3VLConfig(**_qwen3_vl_parts(changes))
    return randomized(Qwen3VLForConditionalGeneration(config))


def tiny_qwen3_vl_moe(**changes: Any) -> Qwen3VLMoeForConditionalGeneration:
    """Layer 1 is dense."""
    text = {**EXPERTS, "num_experts": 8, "mlp_only_layers": [1], **changes}
    config = Qwen3VLMoeConfig(**_qwen3_vl_parts(text))
    return randomized(Qwen3VLMoeForConditionalGeneration(config))


def _qwen3_vl_parts(changes: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 3, 3]}
    text = {**COMMON, "rope_parameters": {**rope, "mrope_interleaved": True}, **changes}
    vision: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "depth": 1,
        "num_heads": 2,
    }
    vision |= {"out_hidden_size": text["hidden_size"], "deepstack_visual_indexes": [0]}
    vision |= {"num_position_embeddings": 16}
    return {"text_config": text, "vision_config": vision}


def tiny_smollm3(**changes: Any) -> SmolLM3ForCausalLM:
    defaults = {**COMMON, "hidden_size": 96, "head_dim": 16, "num_hidden_layers": 5}
    return randomized(SmolLM3ForCausalLM(SmolLM3Config(**{**defaults, **changes})))


def tiny_olmo2(**changes: Any) -> Olmo2ForCausalLM:
    defaults = {**COMMON, "hidden_size": 96, "head_dim": 16}
    return randomized(Olmo2ForCausalLM(Olmo2Config(**{**defaults, **changes})))


def tiny_olmo3(**changes: Any) -> Olmo3ForCausalLM:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    defaults = {
        **COMMON,
        **{"hidden_size": 96, "head_dim": 16, "num_hidden_layers": 4, "sliding_window": 50},
        "rope_parameters": {
            "full_attention": {**yarn, "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
        },
    }
    return randomized(Olmo3ForCausalLM(Olmo3Config(**{**defaults, **changes})))


def tiny_exaone4(**changes: Any) -> Exaone4ForCausalLM:
    defaults = {**COMMON, "num_hidden_layers": 4, "sliding_window": 50}
    return randomized(Exaone4ForCausalLM(Exaone4Config(**{**defaults, **changes})))


def tiny_ministral3(**changes: Any) -> Ministral3ForCausalLM:
    rope = {
        **{"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "mscale": 1.0},
        **{"original_max_position_embeddings": 32, "mscale_all_dim": 1.0},
        "llama_4_scaling_beta": 0.5,
    }
    defaults = {**COMMON, "rope_parameters": rope}
    return randomized(Ministral3ForCausalLM(Ministral3Config(**{**defaults, **changes})))


GRANITE_MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.11,
    "logits_scaling": 5.0,
}


def tiny_granite(**changes: Any) -> GraniteForCausalLM:
    defaults = {**COMMON, "hidden_size": 96, "head_dim": 16, **GRANITE_MULTIPLIERS}
    return randomized(GraniteForCausalLM(GraniteConfig(**{**defaults, **changes})))


def tiny_gemma4(**changes: Any) -> Gemma4ForCausalLM:
    """Local layers with heads of 16 and global ones with heads of 32. The factors of the layers are
    buffers."""
    defaults = {
        **COMMON,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 40,
        "final_logit_softcapping": 1.5,
    }
    model = randomized(Gemma4ForCausalLM(Gemma4TextConfig(**{**defaults, **changes})))
    for index, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(0.7 + 0.2 * index)
        # Scores are not scaled: with factors of about 1, softmax would amplify rounding errors.
        layer.self_attn.q_norm.weight.data.mul_(0.4)
    return model


def tiny_gemma4_moe(**changes: Any) -> Gemma4ForCausalLM:
    """Each layer has experts beside its MLP."""
    experts = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3}
    return tiny_gemma4(**{**experts, "moe_intermediate_size": 40, **changes})


def tiny_dbrx(**changes: Any) -> DbrxForCausalLM:
    """The clip changes a fifth of queries, keys and values."""
    attention = {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 10000.0}
    experts = {"ffn_hidden_size": 40, "moe_num_experts": 8, "moe_top_k": 3}
    defaults = {key: COMMON[key] for key in COMMON if key.endswith("_id")}
    defaults |= {"d_model": 96, "n_heads": 6, "n_layers": 3, "max_seq_len": 2048}
    defaults |= {"vocab_size": VOCAB_SIZE, "attn_config": attention, "ffn_config": experts}
    return randomized(DbrxForCausalLM(DbrxConfig(**{**defaults, **changes})))


def tiny_llama4(**changes: Any) -> Llama4ForCausalLM:
    """Layers 1 and 3 have experts, layer 3 has no RoPE. Chunks are one page long."""
    defaults = {
        **{**COMMON, "num_hidden_layers": 5, "num_local_experts": 6, "intermediate_size": 40},
        **{"interleave_moe_layer_step": 2, "intermediate_size_mlp": 112},
        **{"attention_chunk_size": 256, "floor_scale": 32, "attn_scale": 0.5},
    }
    return randomized(Llama4ForCausalLM(Llama4TextConfig(**{**defaults, **changes})))


_GPT: dict[str, Any] = {
    **{key: COMMON[key] for key in COMMON if key.endswith("_id")},
    **{"vocab_size": VOCAB_SIZE, "n_embd": 96, "n_head": 6, "n_layer": 3, "n_positions": 400},
}


def tiny_gpt2(**changes: Any) -> GPT2LMHeadModel:
    return randomized(GPT2LMHeadModel(GPT2Config(**{**_GPT, **changes})))


def tiny_bigcode(**changes: Any) -> GPTBigCodeForCausalLM:
    return randomized(GPTBigCodeForCausalLM(GPTBigCodeConfig(**{**_GPT, **changes})))


def tiny_granite4(**changes: Any) -> GraniteMoeHybridForCausalLM:
    defaults = {**COMMON, "hidden_size": 96, "head_dim": 16, **GRANITE_MULTIPLIERS}
    defaults |= {"shared_intermediate_size": 112, "num_local_experts": 0}
    defaults |= {"layer_types": ["attention"] * 3, "position_embedding_type": "rope"}
    defaults |= {"mamba_n_heads": 6, "mamba_d_head": 32}
    config = GraniteMoeHybridConfig(**{**defaults, **changes})
    return randomized(GraniteMoeHybridForCausalLM(config))


def tiny_hunyuan(**changes: Any) -> HunYuanDenseV1ForCausalLM:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}
    defaults = {**COMMON, "rope_parameters": rope}
    return randomized(HunYuanDenseV1ForCausalLM(HunYuanDenseV1Config(**{**defaults, **changes})))


def tiny_apertus(**changes: Any) -> ApertusForCausalLM:
    defaults = {**COMMON, "hidden_size": 96, "head_dim": 16}
    return randomized(ApertusForCausalLM(ApertusConfig(**{**defaults, **changes})))


def tiny_cohere(**changes: Any) -> CohereForCausalLM:
    defaults = {**COMMON, "hidden_size": 96, "head_dim": 16, "logit_scale": 0.3}
    return randomized(CohereForCausalLM(CohereConfig(**{**defaults, **changes})))


def tiny_cohere2(**changes: Any) -> Cohere2ForCausalLM:
    defaults = {**COMMON, "hidden_size": 96, "head_dim": 16, "logit_scale": 0.3}
    defaults |= {"num_hidden_layers": 4, "sliding_window": 50}
    return randomized(Cohere2ForCausalLM(Cohere2Config(**{**defaults, **changes})))


def tiny_starcoder2(**changes: Any) -> Starcoder2ForCausalLM:
    defaults = {**COMMON, "hidden_size": 96, "head_dim": 16}
    return randomized(Starcoder2ForCausalLM(Starcoder2Config(**{**defaults, **changes})))


def tiny_arcee(**changes: Any) -> ArceeForCausalLM:
    return randomized(ArceeForCausalLM(ArceeConfig(**{**COMMON, **changes})))


def tiny_orion(**changes: Any) -> LlamaForCausalLM:
    """A Llama whose norms are LayerNorms with a bias."""
    model = LlamaForCausalLM(LlamaConfig(**{**COMMON, **changes}))
    for module in (*model.model.layers, model.model):
        for name, part in list(module.named_children()):
            if "norm" in name:
                new = torch.nn.LayerNorm(part.weight.shape[0], eps=1e-6)
                setattr(module, name, new)
    return randomized(model)


class _NormedHead(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, torch.nn.functional.normalize(self.weight))


def tiny_index(**changes: Any) -> LlamaForCausalLM:
    """A Llama whose head is normalized by row."""
    model = LlamaForCausalLM(LlamaConfig(**{**COMMON, **changes}))
    model.lm_head = _NormedHead(model.config.hidden_size, VOCAB_SIZE, bias=False)
    return randomized(model)


def randomized(model: Any) -> Any:
    """Random weights, scaled so that logits have magnitude 1 and every part has an effect."""
    generator = torch.Generator().manual_seed(20)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "A_log" in name:  # transformers draws it from an unseeded generator
                parameter.copy_(noise * 0.5)
            elif parameter.dim() == 1:
                parameter.copy_(noise * 0.2 if "bias" in name else parameter + noise * 0.2)
            else:
                parameter.copy_(noise * 1.2 / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
    return model.eval()


def converted(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Converts all weights to `dtype`. Returns the same model."""
    model.to(dtype)  # type: ignore[arg-type]  # transformers wraps it without its signature
    return model


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    """Writes weights, configuration and a byte-level tokenizer."""
    model.save_pretrained(folder, **options)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def byte_tokenizer() -> Tokenizer:
    """Special tokens 0 to 2, then one token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer
