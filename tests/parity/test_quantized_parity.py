"""EXL2 and GPTQ checkpoints give the logits of their exactly dequantized weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationMethod

from exl_core.arch.quantization import SUPPORTED, read_quantization
from exl_core.errors import ModelError, UnsupportedModelError, WeightShapeError
from exl_core.formats.codecs.exl2 import layout as exl2
from exl_core.formats.codecs.exl3 import layout as exl3
from exl_core.formats.codecs.gptq import layout as gptq
from exl_core.ops.weights import CODEBOOKS, Codebook
from exl_core.session.describe import describe_model
from exl_core.session.load import LoadOptions, load_model
from support.paged import logits_of
from support.quantized_models import (
    EXL3_SETTINGS,
    GPTQ_SETTINGS,
    METHODS,
    SIZES,
    assert_same_logits,
    exl2_pieces,
    exl3_pieces,
    parameter_of,
    quantize,
    quantized_llama,
)
from support.tiny_gemmoe import tiny_gemmoe
from support.tiny_models import (
    save,
    tiny_cohere,
    tiny_ernie,
    tiny_gemma3,
    tiny_glm4,
    tiny_granite,
    tiny_llama,
    tiny_mixtral,
    tiny_qwen2,
    tiny_qwen3_moe,
    tiny_starcoder2,
)

SMALL_EXPERTS = partial(tiny_qwen3_moe, moe_intermediate_size=64)
EXL2_FAMILIES = [
    *(tiny_llama, tiny_gemma3, tiny_ernie, tiny_cohere, tiny_starcoder2, tiny_granite, tiny_glm4),
    *(SMALL_EXPERTS, tiny_mixtral, tiny_gemmoe),
]


@pytest.mark.parametrize("build", EXL2_FAMILIES)
def test_exl2_logits(tmp_path: Path, build: Callable[..., Any]) -> None:
    sizes = SIZES if build is not tiny_starcoder2 else {**SIZES, "head_dim": 16}
    model = build(**sizes, tie_word_embeddings=False)
    folder = save(model, tmp_path)
    pieces = quantize(folder, {"quant_method": "exl2", "bits": 4.0}, exl2_pieces)
    # Converters copy the source model's index of shards, which lists files that the quantized model
    # does not have. Loading must ignore it.
    leftover = {"weight_map": {"x": "gone.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(leftover))
    dense = {stem: exl2.dequantize(exl2.check(p, stem)) for stem, p in pieces.items()}
    assert_same_logits(folder, model, dense)


@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("build", [*EXL2_FAMILIES, tiny_qwen2])
def test_exl3_logits(tmp_path: Path, build: Callable[..., Any], codebook: Codebook) -> None:
    sizes = SIZES if build is not tiny_starcoder2 else {**SIZES, "head_dim": 16}
    model = build(**sizes, tie_word_embeddings=False)
    folder = save(model, tmp_path)
    pieces = quantize(folder, EXL3_SETTINGS, partial(exl3_pieces, codebook=codebook))
    dense = {}
    for stem, parts in pieces.items():
        linear = exl3.check(parts, stem)
        padded = exl3.dequantize(linear, 0, linear.out_features)
        in_features = parameter_of(dict(model.named_parameters()), stem).shape[1]
        dense[stem] = padded[:in_features]
    assert_same_logits(folder, model, dense)


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_exl3_codes_give_the_logits_of_their_exact_values(
    tmp_path: Path, codebook: Codebook
) -> None:
    folder = save(tiny_llama(**SIZES, tie_word_embeddings=False), tmp_path)
    quantize(folder, EXL3_SETTINGS, partial(exl3_pieces, codebook=codebook))
    ids = list(range(3, 40))
    exact = logits_of(folder, ids, LoadOptions(exact=True))
    logits = logits_of(folder, ids, LoadOptions())
    # Rounding of the values (mul1) or of nothing, and of the inputs to 16 bits.
    assert (logits - exact).norm() <= 2e-3 * exact.norm()


def test_a_tied_exl3_model_has_a_quantized_head(tmp_path: Path) -> None:
    folder = save(tiny_llama(**SIZES), tmp_path)
    quantize(folder, EXL3_SETTINGS, exl3_pieces)
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    described = describe_model(str(folder))
    assert not described.config.has_tied_embeddings
    assert described.unused_tensors == ()


def test_a_tied_exl2_model_may_have_a_quantized_head(tmp_path: Path) -> None:
    model = tiny_llama(**SIZES)  # untied in memory; the configuration below says tied
    folder = save(model, tmp_path)
    pieces = quantize(folder, *METHODS["exl2"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    dense = {stem: exl2.dequantize(exl2.check(p, stem)) for stem, p in pieces.items()}
    assert_same_logits(folder, model, dense)


def test_head_norms_may_be_stored_per_head(tmp_path: Path) -> None:
    model = tiny_gemma3(**SIZES)
    folder = save(model, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for name, weight in list(tensors.items()):
        if "q_norm" in name or "k_norm" in name:
            heads = 4 if "q_norm" in name else 2
            tensors[name] = weight.expand(heads, -1).contiguous()
    save_file(tensors, folder / "model.safetensors")
    assert_same_logits(folder, model, {})

    tensors["model.layers.0.self_attn.q_norm.weight"][1, 0] += 1.0
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="differs between heads"):
        load_model(str(folder))


@pytest.mark.parametrize("build", [tiny_llama, tiny_ernie, tiny_glm4, SMALL_EXPERTS])
@pytest.mark.parametrize("in_older_file", [False, True])
def test_gptq_logits(tmp_path: Path, in_older_file: bool, build: Callable[..., Any]) -> None:
    model = build(**SIZES, tie_word_embeddings=True)
    folder = save(model, tmp_path)
    pieces = quantize(folder, *METHODS["gptq"])
    if in_older_file:
        config = json.loads((folder / "config.json").read_text())
        (folder / "quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
        (folder / "config.json").write_text(json.dumps(config))
    settings = gptq.parse_settings(GPTQ_SETTINGS, "test")
    dense = {stem: gptq.dequantize(gptq.check(p, settings, stem)) for stem, p in pieces.items()}
    assert_same_logits(folder, model, dense)


def test_a_description_has_the_size_of_quantized_matrices(tmp_path: Path) -> None:
    folder = quantized_llama("exl2", tmp_path)

    described = describe_model(str(folder))

    layer = next(layer for layer in described.layers if layer.name == "layer 1")
    assert "EXL2" in layer.dtypes
    assert 2.0 < layer.bits_per_weight < 16.0
    assert described.unused_tensors == ()


OTHER_METHODS = sorted(
    {
        *(method.value for method in QuantizationMethod),
        *AUTO_QUANTIZER_MAPPING,
        *("modelopt", "marlin", "squeezellm", "spinquant"),
    }
    - set(SUPPORTED)
)


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_other_methods_are_refused_by_name(tmp_path: Path, method: str) -> None:
    config = {"quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=f"'{method}'.*([Uu]se|Name)") as caught:
        read_quantization(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("section", [{"load_in_4bit": True}, {"load_in_8bit": True}])
def test_early_files_of_bitsandbytes_are_refused_by_name(
    tmp_path: Path, section: dict[str, bool]
) -> None:
    folder = save(tiny_llama(), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    with pytest.raises(UnsupportedModelError, match=r"'bitsandbytes'.*unquantized"):
        load_model(str(folder))


def test_a_missing_tensor_of_a_matrix_is_refused(tmp_path: Path) -> None:
    folder = quantized_llama("exl2", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.q_scale"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"up_proj.*q_scale"):
        load_model(str(folder))


@pytest.mark.parametrize("method", METHODS)
def test_a_matrix_of_another_shape_is_refused(tmp_path: Path, method: str) -> None:
    folder = save(tiny_llama(**SIZES), tmp_path)
    settings, make = METHODS[method]
    is_padded = method == "exl3"  # to 128 in both dimensions: 96 and 64 look alike
    wrong = 160 if is_padded else 64
    stems = quantize(folder, settings, lambda k, n: make(k, wrong if n == 96 else -(-n // 32) * 32))
    assert "model.layers.0.mlp.up_proj" in stems
    expected, got = ([128, 128], [128, 256]) if is_padded else ([64, 96], [64, 64])
    message = re.escape(f"expected {expected}, got {got}")
    with pytest.raises(WeightShapeError, match=message):
        load_model(str(folder))
