"""Quantized checkpoints that stay quantized give the logits of their dequantized weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from exl_core.formats.codecs.awq import layout as awq
from exl_core.formats.codecs.awq.matrix import AwqMatrix
from exl_core.formats.codecs.compressed import layout as compressed
from exl_core.formats.codecs.compressed.matrix import CompressedMatrix
from exl_core.formats.codecs.exl2 import layout as exl2
from exl_core.formats.codecs.exl2.matrix import Exl2Matrix
from exl_core.formats.codecs.exl3 import layout as exl3
from exl_core.formats.codecs.fp8 import layout as fp8
from exl_core.formats.codecs.fp8.matrix import Fp8Matrix
from exl_core.formats.codecs.gptq import layout as gptq
from exl_core.formats.codecs.gptq.matrix import GptqMatrix
from exl_core.formats.codecs.runtime import RuntimeMatrix
from exl_core.session.describe import describe_model
from exl_core.session.load import LoadOptions, load_model
from support.paged import logits_of
from support.quantized_models import (
    AWQ_SETTINGS,
    COMPRESSED_SETTINGS,
    FP8_SETTINGS,
    GPTQ_SETTINGS,
    METHODS,
    SIZES,
    TIED,
    Pieces,
    parameter_of,
    quantize,
    quantized_llama,
    separate_experts,
)
from support.runtime_form import evaluate
from support.tiny_gemmoe import tiny_gemmoe
from support.tiny_hybrids import (
    tiny_granite_hybrid,
    tiny_lfm2_moe,
    tiny_nemotron_h,
    tiny_qwen35,
)
from support.tiny_latent import tiny_deepseek2, tiny_deepseek3, tiny_glm4_moe_lite
from support.tiny_models import (
    HALF_ROPE,
    VOCAB_SIZE,
    save,
    tiny_ernie_moe,
    tiny_gemma3,
    tiny_gemma4_moe,
    tiny_glm4_moe,
    tiny_hunyuan_moe,
    tiny_llama,
    tiny_llama4,
    tiny_minimax_m2,
    tiny_mixtral,
    tiny_qwen2_moe,
    tiny_qwen3_moe,
    tiny_qwen3_vl_moe,
)

IDS = torch.randint(3, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def unrounded(method: str, pieces: Pieces) -> Tensor:
    """Dequantized weight without rounding: float32 [stored out_features, in_features], where EXL3
    has padded features."""
    matrix: RuntimeMatrix
    if method == "exl2":
        linear = exl2.check(pieces, "test")
        matrix = Exl2Matrix(linear, linear.out_features)
    elif method == "exl3":
        trellis = exl3.check(pieces, "test")
        return exl3.dequantize(trellis, 0, trellis.out_features).T
    elif method == "awq":
        awq_layer = awq.check(pieces, awq.parse_settings(AWQ_SETTINGS, "test"), "test")
        matrix = AwqMatrix(awq_layer, awq_layer.out_features)
    elif method == "compressed-tensors":
        settings = compressed.parse_settings(COMPRESSED_SETTINGS, "test")
        in_features = int(pieces["weight_shape"][1])
        packed = compressed.check(pieces, settings, in_features, "test")
        matrix = CompressedMatrix(packed, packed.out_features)
    elif method == "fp8":
        floats = fp8.check(pieces, fp8.parse_block(FP8_SETTINGS, "test"), "test")
        matrix = Fp8Matrix(floats, floats.out_features)
    else:
        layer = gptq.check(pieces, gptq.parse_settings(GPTQ_SETTINGS, "test"), "test")
        matrix = GptqMatrix(layer, layer.out_features)
    return torch.from_numpy(evaluate(matrix)).T.float()


def expected_logits(model: Any, weights: dict[str, Tensor]) -> Tensor:
    """Logits of `model` with these weights, which may have padding rows at the end."""
    parameters = dict(model.named_parameters())
    with torch.inference_mode():
        for stem, weight in weights.items():
            parameter = parameter_of(parameters, stem)
            parameter.copy_(weight[: parameter.shape[0], : parameter.shape[1]])
        return model(torch.tensor([IDS])).logits[0]


def assert_same_logits(folder: Path, expected: Tensor) -> None:
    """Checks the reference table, its exact path (which rounds each weight to float16), and the
    default table."""
    size = expected.abs().max()
    ours = logits_of(folder, IDS, LoadOptions(device="reference"))
    assert (ours - expected).abs().max() <= 1e-4 * size
    exact = logits_of(folder, IDS, LoadOptions(device="reference", exact=True))
    assert (ours - exact).abs().max() <= 5e-3 * size
    fast = logits_of(folder, IDS)
    assert (fast - expected).abs().max() <= 0.05 * size  # bfloat16 activations


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
def test_logits_match_transformers_with_dequantized_weights(
    tmp_path: Path, build: Callable[..., Any], method: str
) -> None:
    model = build(**SIZES, tie_word_embeddings=method in TIED)
    folder = save(model, tmp_path)
    pieces = quantize(folder, *METHODS[method])
    weights = {stem: unrounded(method, parts) for stem, parts in pieces.items()}
    assert_same_logits(folder, expected_logits(model, weights))


EXPERTS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "qwen3-moe": (tiny_qwen3_moe, {"moe_intermediate_size": 64}),
    "mixtral": (tiny_mixtral, {}),
    "gemmoe": (tiny_gemmoe, {}),
    "qwen2-moe": (
        tiny_qwen2_moe,
        {"head_dim": 16, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96},
    ),
    "glm4-moe": (tiny_glm4_moe, {"moe_intermediate_size": 64}),
    "ernie4.5-moe": (tiny_ernie_moe, {"moe_intermediate_size": 64}),
    "hunyuan-moe": (tiny_hunyuan_moe, {}),
    "minimax-m2": (tiny_minimax_m2, {"rope_parameters": HALF_ROPE}),
}
"""Families with experts, with sizes that all formats can store."""


def assert_experts_match(folder: Path, expected: Tensor) -> None:
    ours = logits_of(folder, IDS, LoadOptions(device="reference"))

    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()
    # Rounded activations change the choice of experts at some positions, and with it their logits.
    error = (logits_of(folder, IDS) - expected).abs().amax(-1).median()
    assert error <= 0.05 * expected.abs().max()


@pytest.mark.parametrize("method", [*TIED, "exl3"])
@pytest.mark.parametrize("family", EXPERTS)
def test_quantized_experts_match_transformers(tmp_path: Path, family: str, method: str) -> None:
    build, sizes = EXPERTS[family]
    model = build(**{**SIZES, **sizes}, tie_word_embeddings=method in TIED)
    folder = save(model, tmp_path)
    pieces = quantize(folder, *METHODS[method])
    assert sum(".experts." in stem for stem in pieces) >= 3 * 3 * 4
    weights = {stem: unrounded(method, parts) for stem, parts in pieces.items()}
    expected = expected_logits(model, weights)

    assert_experts_match(folder, expected)
    assert describe_model(str(folder)).unused_tensors == ()


SEPARATED: dict[str, Callable[..., Any]] = {
    "qwen3-vl-moe": lambda: tiny_qwen3_vl_moe(**SIZES, vocab_size=304, moe_intermediate_size=64),
    "gemma4-moe": lambda: tiny_gemma4_moe(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=64
    ),
    "llama4": lambda: tiny_llama4(
        **{**SIZES, "intermediate_size": 64, "intermediate_size_mlp": 96},
        tie_word_embeddings=True,
    ),
}
"""Families that stack their experts. Files that tools quantize have a tensor for each matrix."""


@pytest.mark.parametrize("method", TIED)
@pytest.mark.parametrize("family", SEPARATED)
def test_quantized_experts_of_stacks_match_transformers(
    tmp_path: Path, family: str, method: str
) -> None:
    model = SEPARATED[family]()
    folder = separate_experts(save(model, tmp_path))
    pieces = quantize(folder, *METHODS[method])
    assert sum(".experts." in stem for stem in pieces) >= 2 * 3 * 6
    weights = {stem: unrounded(method, parts) for stem, parts in pieces.items()}
    expected = expected_logits(model, weights)

    assert_experts_match(folder, expected)


# k and v have 8 columns each. In a fused matrix they begin inside a word of scale codes, and are
# followed by padding.
LATENT: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "moe_intermediate_size": 64, "kv_lora_rank": 64},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32, "q_lora_rank": 96},
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
OTHERS: dict[str, Callable[..., Any]] = {
    "deepseek2": lambda **more: tiny_deepseek2(**{**LATENT, "q_lora_rank": None}, **more),
    "deepseek3": lambda **more: tiny_deepseek3(**LATENT, **more),
    "glm4-moe-lite": lambda **more: tiny_glm4_moe_lite(**LATENT, **more),
    "lfm2-moe": lambda **more: tiny_lfm2_moe(
        **{**SIZES, "head_dim": 16}, moe_intermediate_size=64, **more
    ),
    "qwen3.5": lambda **more: tiny_qwen35(
        **SIZES, linear_num_value_heads=8, linear_value_head_dim=16, **more
    ),
    "granite4-hybrid": lambda **more: tiny_granite_hybrid(
        **{**SIZES, **MAMBA, "head_dim": 16}, shared_intermediate_size=96, **more
    ),
    "nemotron-h": lambda **_: tiny_nemotron_h(  # its head cannot be tied
        **{**SIZES, "vocab_size": 304, "mamba_num_heads": 8, "mamba_head_dim": 16},
        **{"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 96},
        moe_latent_size=64,
    ),
}
"""Latent attention and recurrent layers, with sizes that all formats can store."""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", OTHERS)
def test_quantized_latent_attention_and_hybrids_match_transformers(
    tmp_path: Path, family: str, method: str
) -> None:
    model = OTHERS[family](tie_word_embeddings=method in TIED)
    folder = save(model, tmp_path)
    pieces = quantize(folder, *METHODS[method])
    weights = {stem: unrounded(method, parts) for stem, parts in pieces.items()}
    expected = expected_logits(model, weights)

    ours = logits_of(folder, IDS, LoadOptions(device="reference"))
    # Matrices from latent vectors to keys and values are 16-bit numbers.
    tolerance = 5e-3 if "kv_lora_rank" in model.config.to_dict() else 1e-4
    assert (ours - expected).abs().max() <= tolerance * expected.abs().max()
    # Rounded activations change the choice of experts at some positions, and with it their logits.
    error = (logits_of(folder, IDS) - expected).abs().amax(-1).median()
    assert error <= 0.05 * expected.abs().max()
    assert describe_model(str(folder)).unused_tensors == ()


NARROW = {**SIZES, "head_dim": 8, "num_attention_heads": 8, "num_key_value_heads": 1}
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def fuse(folder: Path, has_bias: bool = False) -> None:
    """Stores q, k, v and gate, up as one tensor each, as Phi-3 does."""
    tensors = load_file(folder / "model.safetensors")
    for fused, parts in FUSED.items():
        for layer in range(3):
            prefix = f"model.layers.{layer}."
            for kind in ("weight", "bias") if has_bias else ("weight",):
                rows = [tensors.pop(f"{prefix}{part}.{kind}") for part in parts]
                tensors[f"{prefix}{fused}.{kind}"] = torch.cat(rows)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_fused_projections_of_a_plain_checkpoint(tmp_path: Path, has_bias: bool) -> None:
    model = tiny_llama(**NARROW, attention_bias=has_bias, mlp_bias=has_bias)
    folder = save(model, tmp_path)
    fuse(folder, has_bias)
    assert_same_logits(folder, expected_logits(model, {}))
    described = describe_model(str(folder))
    assert described.unused_tensors == ()
    assert described.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_fused_projections_of_a_quantized_checkpoint(tmp_path: Path, method: str) -> None:
    model = tiny_llama(**NARROW, tie_word_embeddings=method in TIED)
    folder = save(model, tmp_path)
    fuse(folder)
    pieces = quantize(folder, *METHODS[method])
    weights = {}
    for stem, parts in pieces.items():
        weight = unrounded(method, parts)
        fused = next((f for f in FUSED if stem.endswith(f)), None)
        if fused is None:
            weights[stem] = weight
            continue
        first = 0
        for part in FUSED[fused]:
            rows = {"self_attn.q_proj": 64, "mlp.gate_proj": 96, "mlp.up_proj": 96}.get(part, 8)
            weights[stem.replace(fused, part)] = weight[first : first + rows]
            first += rows
    assert len(weights) == 3 * 7 + (method not in TIED)
    assert_same_logits(folder, expected_logits(model, weights))


def test_a_fused_tensor_takes_precedence_over_separate_ones(tmp_path: Path) -> None:
    model = tiny_llama(**NARROW)
    folder = save(model, tmp_path)
    fuse(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(64, 64)
    save_file(tensors, folder / "model.safetensors")
    assert_same_logits(folder, expected_logits(model, {}))


def test_biases_of_exl2_are_padded_like_their_matrices(tmp_path: Path) -> None:
    model = tiny_llama(**NARROW, attention_bias=True, mlp_bias=True)
    folder = save(model, tmp_path)
    pieces = quantize(folder, *METHODS["exl2"])
    tensors = load_file(folder / "model.safetensors")
    for name, bias in tensors.items():
        if name.endswith(".bias"):
            padding = torch.full((-bias.shape[0] % 32,), 7.0)  # must have no effect
            tensors[name] = torch.cat([bias, padding]).contiguous()
    assert tensors["model.layers.0.self_attn.k_proj.bias"].shape == (32,)
    save_file(tensors, folder / "model.safetensors")
    weights = {stem: unrounded("exl2", parts) for stem, parts in pieces.items()}
    assert_same_logits(folder, expected_logits(model, weights))


def test_plain_matrices_are_joined_with_quantized_ones(tmp_path: Path) -> None:
    model = tiny_llama(**SIZES, tie_word_embeddings=True)
    folder = save(model, tmp_path)
    plain = load_file(folder / "model.safetensors")
    pieces = quantize(folder, *METHODS["gptq"])
    kept = ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.gate_proj")
    tensors = load_file(folder / "model.safetensors")
    for stem in kept:
        for part in pieces.pop(stem):
            del tensors[f"{stem}.{part}"]
        tensors[f"{stem}.weight"] = plain[f"{stem}.weight"]
    save_file(tensors, folder / "model.safetensors")
    weights = {stem: unrounded("gptq", parts) for stem, parts in pieces.items()}
    assert_same_logits(folder, expected_logits(model, weights))


@pytest.mark.parametrize("method", METHODS)
def test_described_and_loaded_sizes_agree(tmp_path: Path, method: str) -> None:
    folder = quantized_llama(method, tmp_path)
    described = describe_model(str(folder))
    loaded = load_model(str(folder))
    assert described.weights_bytes_in_memory == pytest.approx(loaded.weights_bytes, rel=0.02)
    widths = {run.bits for matrix in described.matrices for run in matrix.groups}
    assert widths == {"exl2": {2, 3, 4, 5, 6, 8}, "exl3": set(), "fp8": {8}}.get(method, {4})
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"] == METHODS[method][0]
