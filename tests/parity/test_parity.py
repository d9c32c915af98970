"""Each model family against transformers, in float32: prefill, chunks and decode, paged cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.session.load import LoadOptions, load_model
from support.families import save_family
from support.paged import PagedRun, logits_of
from support.profiles import first_by_default
from support.tiny_gemmoe import tiny_gemmoe
from support.tiny_hybrids import (
    tiny_granite_hybrid,
    tiny_kimi_linear,
    tiny_lfm2,
    tiny_lfm2_moe,
    tiny_nemotron_h,
    tiny_qwen3_next,
    tiny_qwen35,
    tiny_qwen35_moe,
)
from support.tiny_latent import tiny_deepseek2, tiny_deepseek3, tiny_glm4_moe_lite, tiny_mistral4
from support.tiny_models import (
    VOCAB_SIZE,
    converted,
    save,
    tiny_apertus,
    tiny_arcee,
    tiny_bigcode,
    tiny_cohere,
    tiny_cohere2,
    tiny_dbrx,
    tiny_ernie,
    tiny_ernie_moe,
    tiny_exaone4,
    tiny_gemma,
    tiny_gemma2,
    tiny_gemma3,
    tiny_gemma4,
    tiny_gemma4_moe,
    tiny_glm4,
    tiny_glm4_moe,
    tiny_gpt2,
    tiny_gpt_oss,
    tiny_granite,
    tiny_granite4,
    tiny_granite_moe,
    tiny_hunyuan,
    tiny_hunyuan_moe,
    tiny_index,
    tiny_llama,
    tiny_llama4,
    tiny_minimax_m2,
    tiny_ministral3,
    tiny_mistral,
    tiny_mixtral,
    tiny_olmo2,
    tiny_olmo3,
    tiny_orion,
    tiny_phi3,
    tiny_phi3_longrope,
    tiny_pixtral,
    tiny_qwen2,
    tiny_qwen2_5_vl,
    tiny_qwen2_moe,
    tiny_qwen3,
    tiny_qwen3_moe,
    tiny_qwen3_vl,
    tiny_qwen3_vl_moe,
    tiny_seed_oss,
    tiny_smollm3,
    tiny_starcoder2,
)

TOLERANCE = 1e-4  # relative to the largest logit; both sides sum in float32, in different orders

SCORE_SOFTCAP = 2.0
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS: dict[str, Any] = {
    "llama": tiny_llama,
    "llama-tied-bias": lambda: tiny_llama(
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "llama-one-kv-head": lambda: tiny_llama(num_key_value_heads=1, num_attention_heads=4),
    "llama-rope-linear": lambda: tiny_llama(
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    ),
    "llama-rope-llama3": lambda: tiny_llama(
        rope_parameters={**LLAMA3, "original_max_position_embeddings": 64, "rope_theta": 500000.0}
    ),
    "llama-rope-yarn": lambda: tiny_llama(
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "rope_theta": 10000.0,
        }
    ),
    "llama-rope-yarn-betas": lambda: tiny_llama(
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 1.3,
            "truncate": False,
        }
    ),
    "mistral": lambda: tiny_mistral(sliding_window=None),
    "mistral-window": lambda: tiny_mistral(sliding_window=50),
    "qwen2": lambda: tiny_qwen2(sliding_window=50, tie_word_embeddings=True),
    "qwen2-window": lambda: tiny_qwen2(
        sliding_window=50, use_sliding_window=True, max_window_layers=1
    ),
    "qwen3": lambda: tiny_qwen3(sliding_window=50),
    "seed-oss": tiny_seed_oss,
    "seed-oss-output-bias": lambda: tiny_seed_oss(attention_out_bias=True),
    "phi3": tiny_phi3,
    "phi3-window-partial": lambda: tiny_phi3(sliding_window=50, partial_rotary_factor=0.5),
    "phi3-longrope": tiny_phi3_longrope,
    "pixtral": tiny_pixtral,
    "qwen2.5-vl": tiny_qwen2_5_vl,
    "qwen3-vl": tiny_qwen3_vl,
    "glm4": tiny_glm4,
    "glm4-no-bias-whole-rope": lambda: tiny_glm4(
        attention_bias=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
        },
    ),
    "ernie4.5": tiny_ernie,
    "ernie4.5-bias": lambda: tiny_ernie(use_bias=True, tie_word_embeddings=False),
    "yi": tiny_llama,
    "internlm2": tiny_llama,
    "smollm3": tiny_smollm3,
    "smollm3-layers": lambda: tiny_smollm3(no_rope_layers=[0, 1, 1, 0, 1]),
    "olmo2": tiny_olmo2,
    "olmo3": tiny_olmo3,
    "exaone4": tiny_exaone4,
    "exaone4-global": lambda: tiny_exaone4(sliding_window=None, layer_types=["full_attention"] * 4),
    "ministral3": tiny_ministral3,
    "granite": tiny_granite,
    "granite-tied": lambda: tiny_granite(tie_word_embeddings=True),
    "minicpm": lambda: tiny_granite(attention_multiplier=0.25),
    "gemma4": tiny_gemma4,
    "gemma4-values": lambda: tiny_gemma4(attention_k_eq_v=False),
    "gemma4-moe": tiny_gemma4_moe,
    "granite4": tiny_granite4,
    "hunyuan": tiny_hunyuan,
    "apertus": tiny_apertus,
    "cohere": tiny_cohere,
    "cohere-head-norm": lambda: tiny_cohere(use_qk_norm=True, attention_bias=True),
    "cohere2": tiny_cohere2,
    "starcoder2": lambda: tiny_starcoder2(sliding_window=50),
    "starcoder2-no-bias": lambda: tiny_starcoder2(use_bias=False),
    "arcee": tiny_arcee,
    "arcee-bias": lambda: tiny_arcee(mlp_bias=True, attention_bias=True),
    "orion": tiny_orion,
    "index": tiny_index,
    "qwen3-moe": tiny_qwen3_moe,
    "qwen3-moe-unnormalized": lambda: tiny_qwen3_moe(norm_topk_prob=False),
    "qwen3-vl-moe": tiny_qwen3_vl_moe,
    "qwen3-vl-moe-transposed": tiny_qwen3_vl_moe,
    "mixtral": tiny_mixtral,
    "gemmoe": tiny_gemmoe,
    "qwen2-moe": tiny_qwen2_moe,
    "qwen2-moe-normalized": lambda: tiny_qwen2_moe(norm_topk_prob=True, decoder_sparse_step=2),
    "glm4-moe": tiny_glm4_moe,
    "glm4-moe-groups-head-norm": lambda: tiny_glm4_moe(n_group=4, topk_group=2, use_qk_norm=True),
    "deepseek2": tiny_deepseek2,
    "deepseek2-groups-q-rank": lambda: tiny_deepseek2(
        q_lora_rank=24, topk_method="group_limited_greedy", attention_bias=True
    ),
    "deepseek3": tiny_deepseek3,
    "deepseek3-no-q-rank": lambda: tiny_deepseek3(q_lora_rank=None, norm_topk_prob=False),
    "glm4-moe-lite": tiny_glm4_moe_lite,
    "mistral4": tiny_mistral4,
    "mistral4-groups-no-q-rank": lambda: tiny_mistral4(
        n_group=4, topk_group=2, q_lora_rank=None, norm_topk_prob=False
    ),
    "ernie4.5-moe": tiny_ernie_moe,
    "hunyuan-moe": tiny_hunyuan_moe,
    "minimax-m2": tiny_minimax_m2,
    "granite-moe": tiny_granite_moe,
    "dbrx": tiny_dbrx,
    "dbrx-renamed": tiny_dbrx,
    "llama4": tiny_llama4,
    "llama4-two-experts-no-norm": lambda: tiny_llama4(
        num_experts_per_tok=2,
        use_qk_norm=False,
        attn_temperature_tuning=False,
        moe_layers=[0, 2],
        no_rope_layers=[1, 0, 1, 1, 1],
        layer_types=[f"{'full' if i == 1 else 'chunked'}_attention" for i in range(5)],
        attention_bias=True,
        rope_parameters={
            **{**LLAMA3, "high_freq_factor": 1.0, "rope_theta": 500000.0},
            "original_max_position_embeddings": 64,
        },
    ),
    "gpt-oss": tiny_gpt_oss,
    "gpt2": tiny_gpt2,
    "gpt2-inner": lambda: tiny_gpt2(n_inner=112, tie_word_embeddings=False),
    "gpt2-renamed": tiny_gpt2,
    "bigcode": tiny_bigcode,
    "lfm2": tiny_lfm2,
    "lfm2-bias": lambda: tiny_lfm2(
        conv_bias=True, conv_L_cache=5, tie_word_embeddings=False, block_auto_adjust_ff_dim=False
    ),
    "lfm2-moe": tiny_lfm2_moe,
    "lfm2-moe-unnormalized": lambda: tiny_lfm2_moe(norm_topk_prob=False, num_dense_layers=2),
    "granite4-hybrid": tiny_granite_hybrid,
    "granite4-hybrid-moe": lambda: tiny_granite_hybrid(
        num_local_experts=4,
        intermediate_size=40,
        mamba_n_groups=1,
        position_embedding_type="rope",
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        time_step_limit=[0.0, float("inf")],
    ),
    "nemotron-h": lambda: tiny_nemotron_h(
        layers_block_type=["mamba", "mlp", "attention", "mlp"], use_bias=True, use_conv_bias=False
    ),
    "nemotron-h-moe": tiny_nemotron_h,
    "nemotron-h-latent": lambda: tiny_nemotron_h(
        moe_latent_size=32, norm_topk_prob=False, n_group=1, topk_group=1
    ),
    "kimi-linear": tiny_kimi_linear,
    "kimi-linear-q-rank": lambda: tiny_kimi_linear(
        q_lora_rank=24, norm_topk_prob=False, linear_conv_kernel_dim=3, n_group=1, topk_group=1
    ),
    "qwen3.5": tiny_qwen35,
    "qwen3.5-equal-heads": lambda: tiny_qwen35(
        linear_num_key_heads=3, linear_num_value_heads=3, tie_word_embeddings=True
    ),
    "qwen3.5-moe": tiny_qwen35_moe,
    "qwen3-next": tiny_qwen3_next,
    "gemma": tiny_gemma,
    "gemma2": tiny_gemma2,
    "gemma3": tiny_gemma3,
    # transformers applies the soft-cap of scores only if it is passed to the call (see the test).
    "gemma3-softcaps": lambda: tiny_gemma3(
        final_logit_softcapping=1.5,
        attn_logit_softcapping=SCORE_SOFTCAP,
        attn_implementation="eager",
    ),
    "gemma3-rope-linear-global": lambda: tiny_gemma3(
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    ),
}


@pytest.fixture(scope="module", params=VARIANTS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Any, Path]:
    """A random transformers model, and the folder of its checkpoint."""
    model = VARIANTS[request.param]()
    return model, save_family(request.param, model, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("backend", first_by_default(["cpu", "reference"]))
def test_logits_equal_transformers_in_prefill_chunks_and_decode(
    reference: tuple[Any, Path], backend: str
) -> None:
    model, folder = reference
    ids = random_ids(2, 300)  # two sequences; 300 tokens exceed a page and the attention window
    with torch.inference_mode():
        own = model.config
        softcap = own.attn_logit_softcapping if own.model_type == "gemma3_text" else None
        expected = (model(ids, softcap=softcap) if softcap else model(ids)).logits
    ours = load_model(str(folder), LoadOptions(device=backend)).model

    run = PagedRun(ours, num_seqs=2, max_len=300)
    tokens = ids.tolist()
    prefill = run.feed({0: tokens[0][:290]})[0]
    assert_close(prefill, expected[0, :290])
    # The other sequence arrives in chunks while the first one decodes.
    for step in range(10):
        rows = {0: [tokens[0][290 + step]], 1: tokens[1][step * 30 : step * 30 + 30]}
        logits = run.feed(rows)
        assert_close(logits[0], expected[0, 290 + step : 291 + step])
        assert_close(logits[1], expected[1, step * 30 : step * 30 + 30])


def test_rope_alpha_raises_the_rope_base(tmp_path: Path) -> None:
    alpha, head_dim, base = 2.6, 20, 10000.0
    scaled = base * alpha ** (head_dim / (head_dim - 2))
    model = tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": scaled})
    ids = random_ids(1, 64)
    with torch.inference_mode():
        expected = model(ids).logits[0]
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": base}
    folder = save(model, tmp_path)

    logits = logits_of(folder, ids[0].tolist(), LoadOptions(rope_alpha=alpha))

    assert_close(logits, expected)


@pytest.mark.parametrize("context", [64, 65], ids=["short", "long"])
def test_longrope_is_chosen_by_the_context_size(tmp_path: Path, context: int) -> None:
    model, ids = tiny_phi3_longrope(), random_ids(1, context)
    folder = save(model, tmp_path)
    with torch.inference_mode():
        expected = model(ids).logits[0]  # transformers chooses by the length of the text

    logits = logits_of(folder, ids[0].tolist(), LoadOptions(max_seq_len=context))

    assert_close(logits, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_checkpoints_give_the_logits_of_their_rounded_weights(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = save(converted(tiny_llama(), dtype), tmp_path)
    model, ids = tiny_llama(), random_ids(1, 50)
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
        expected = model(ids).logits[0]  # the rounded weights in float32 arithmetic

    logits = logits_of(folder, ids[0].tolist())

    assert_close(logits, expected)


def random_ids(*shape: int) -> Tensor:
    return torch.randint(3, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(7))


def assert_close(logits: Tensor, expected: Tensor) -> None:
    assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()
