"""A GGUF file gives the logits of its source model in transformers, for every family and type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from exl_core.formats.containers.gguf import GgufSource
from exl_core.session.load import LoadOptions, load_model
from support.gguf_families import GGUF_FAMILIES
from support.gguf_models import write_gguf
from support.paged import logits_of
from support.tiny_models import VOCAB_SIZE, tiny_llama, tiny_mixtral

EXACT = LoadOptions(exact=True)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}


def expected_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(11)).tolist()


@pytest.mark.parametrize("name", GGUF_FAMILIES)
def test_gguf_logits_match_transformers(tmp_path: Path, ids: list[int], name: str) -> None:
    arch, build = GGUF_FAMILIES[name]
    model = build()
    ours = logits_of(write_gguf(model, tmp_path / "tiny.gguf", arch=arch), ids, EXACT)

    expected = expected_logits(model, ids)
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_old_files_of_mixtral_have_a_tensor_for_each_matrix(
    tmp_path: Path, ids: list[int], kind: str
) -> None:
    """`blk.0.ffn_gate.3.weight`, as llama.cpp wrote until April 2024."""
    model = tiny_mixtral(**SIZES)
    quantization = GGMLQuantizationType[kind]
    paths = [tmp_path / f"{name}.gguf" for name in ("old", "new")]
    old = write_gguf(model, paths[0], quantization, stacks_experts=False)
    new = write_gguf(model, paths[1], quantization)
    names = GgufSource(old).tensors
    assert "blk.2.ffn_down.3.weight" in names
    assert not any("_exps" in name for name in names)

    ours = logits_of(old, ids, EXACT)

    assert torch.equal(ours, logits_of(new, ids, EXACT))
    assert torch.equal(logits_of(old, ids), logits_of(new, ids))
    if kind == "F32":
        expected = expected_logits(model, ids)
        assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_rope_factors_from_a_tensor_divide_the_frequencies(tmp_path: Path, ids: list[int]) -> None:
    # Linear scaling by 4, stored as a tensor of factors as in Llama 3 files.
    model = tiny_llama(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})
    assert model.config.head_dim is not None
    factors = np.full(model.config.head_dim // 2, 4.0, dtype=np.float32)

    extra = {"rope_freqs.weight": factors}
    ours = logits_of(write_gguf(model, tmp_path / "t.gguf", extra_tensors=extra), ids, EXACT)

    expected = expected_logits(model, ids)
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()


def replace_weights(model: Any, kind: str, kept: torch.dtype) -> None:
    """Replaces each matrix by its quantized and dequantized values."""
    quantization = GGMLQuantizationType[kind]
    for parameter in model.parameters():
        if parameter.dim() == 2:
            exact = dequantize(quantize(parameter.detach().numpy(), quantization), quantization)
            parameter.data = torch.from_numpy(exact).to(kept).float()


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_exact_path_gives_the_logits_of_dequantized_weights(
    tmp_path: Path, ids: list[int], kind: str
) -> None:
    model = tiny_llama(**SIZES)  # widths are multiples of the block size 32
    path = write_gguf(model, tmp_path / "tiny.gguf", GGMLQuantizationType[kind])
    replace_weights(model, kind, torch.bfloat16 if kind == "BF16" else torch.float16)

    ours = logits_of(path, ids, EXACT)

    expected = expected_logits(model, ids)
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_default_path_gives_the_logits_of_unrounded_weights(
    tmp_path: Path, ids: list[int], kind: str, is_tied: bool
) -> None:
    model = tiny_llama(**SIZES, tie_word_embeddings=is_tied, attention_bias=True, mlp_bias=True)
    path = write_gguf(model, tmp_path / "tiny.gguf", GGMLQuantizationType[kind])
    replace_weights(model, kind, torch.float32)

    ours = logits_of(path, ids, LoadOptions(device="reference"))
    fast = logits_of(path, ids)

    expected = expected_logits(model, ids)
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (fast - expected).abs().max() <= 0.05 * expected.abs().max()  # bfloat16 activations


def test_a_tied_matrix_is_stored_once_and_quantized(tmp_path: Path) -> None:
    kind = GGMLQuantizationType.Q8_0
    tied = write_gguf(tiny_llama(**SIZES, tie_word_embeddings=True), tmp_path / "tied.gguf", kind)
    untied = write_gguf(tiny_llama(**SIZES), tmp_path / "untied.gguf", kind)
    sizes = [load_model(str(path)).weights_bytes for path in (tied, untied)]
    one_copy = 304 * (64 + 2 * 2)  # 300 columns in panels of 16, two groups with a float16 each
    assert sizes[1] - sizes[0] == one_copy


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_projections_with_different_block_types_are_joined(
    tmp_path: Path, ids: list[int], backend: str
) -> None:
    # Real files mix block types too, for example v_proj and down_proj in a wider one.
    model = tiny_llama(**SIZES)
    kinds = {"attn_v": "Q8_0", "ffn_up": "Q5_1", "attn_q": "F16"}
    path = write_gguf(model, tmp_path / "tiny.gguf", GGMLQuantizationType.Q4_0, kinds=kinds)
    ours = logits_of(path, ids, LoadOptions(device=backend))
    exact = logits_of(path, ids, EXACT)
    assert (ours - exact).abs().max() <= 0.05 * exact.abs().max()


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q6_K"])
def test_groups_of_16_stay_quantized_and_give_the_logits_of_the_reference(
    tmp_path: Path, ids: list[int], kind: str
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}
    kinds = {"attn_q": "F16", "ffn_up": "Q8_0"}  # joined with others, as in Q4_K_M files
    path = write_gguf(
        tiny_llama(**sizes), tmp_path / "tiny.gguf", GGMLQuantizationType[kind], kinds=kinds
    )
    ours = logits_of(path, ids, LoadOptions(device="reference"))
    fast = logits_of(path, ids)
    exact = logits_of(path, ids, EXACT)
    for got in (ours, fast):
        assert (got - exact).abs().max() <= 0.05 * exact.abs().max()
    assert load_model(str(path)).weights_bytes < 0.7 * load_model(str(path), EXACT).weights_bytes
