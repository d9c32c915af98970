"""Layers as a conversion reads and computes them, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from exl_core.convert.layers import LayerSource, as_factor, embed_rows, read_layer, stored_vector
from exl_core.convert.passes import LayerFunction
from exl_core.errors import WeightValueError
from exl_core.formats.checkpoint import Checkpoint
from exl_core.session.open import open_checkpoint
from support.quantized_models import SIZES
from support.tiny_models import VOCAB_SIZE, save, tiny_gemma3, tiny_llama

FINAL_NORM = "model.norm.weight"

CPU = torch.device("cpu")


def opened(folder: Path) -> tuple[Checkpoint, Any]:
    source, config, quantization = open_checkpoint(folder)
    return Checkpoint(source, config, quantization, is_exact=True), config


def plain_product(source: LayerSource) -> Callable[[str, Tensor], Tensor]:
    return lambda part, x: linear(x, source.matrix(part), source.bias(part))


def biased_llama(**sizes: Any) -> Any:
    return tiny_llama(**sizes, attention_bias=True, mlp_bias=True)


@pytest.mark.parametrize("build", [tiny_llama, biased_llama, tiny_gemma3])
def test_layers_match_transformers(tmp_path: Path, build: Callable[..., Any]) -> None:
    model = build(**SIZES)
    checkpoint, config = opened(save(model, tmp_path))
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, VOCAB_SIZE, (2, 64), generator=generator)  # beyond the sliding window
    with torch.inference_mode():
        expected = model(ids, output_hidden_states=True).hidden_states
        x = embed_rows(checkpoint, config, ids)
        assert (x - expected[0]).abs().max() < 2e-3  # the embedding is rounded to float16
        x = expected[0]
        for layer in range(config.num_layers):
            source = read_layer(checkpoint, config, layer, CPU)
            y = LayerFunction(config, layer, source.vectors(), plain_product(source))(x)
            last = layer == config.num_layers - 1
            if last:  # transformers' last state is already normalized
                y = rms_norm(y, y.shape[-1:], checkpoint.norm(FINAL_NORM), config.norm_eps)
            assert (y - expected[layer + 1]).abs().max() < 1e-4 * expected[layer + 1].abs().max()
            x = expected[layer + 1]


def test_compute_type_products_are_close(tmp_path: Path) -> None:
    checkpoint, config = opened(save(tiny_llama(**SIZES), tmp_path))
    source = read_layer(checkpoint, config, 1, CPU)
    x = torch.randn(1, 20, config.hidden_size, generator=torch.Generator().manual_seed(1))
    plain = LayerFunction(config, 1, source.vectors(), plain_product(source))
    exact, fast = plain(x), plain.with_product(source.products())(x)
    assert (exact - fast).norm() < 0.02 * (exact - x).norm()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e5])
def test_unstorable_values_are_refused_by_name(tmp_path: Path, value: float) -> None:
    folder = save(tiny_llama(**SIZES), tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name][3, 5] = value
    save_file(tensors, folder / "model.safetensors")
    checkpoint, config = opened(folder)
    read_layer(checkpoint, config, 0, CPU)
    with pytest.raises(WeightValueError, match=name):
        read_layer(checkpoint, config, 1, CPU)


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
def test_stored_norms_round_trip(tmp_path: Path, build: Callable[..., Any]) -> None:
    checkpoint, config = opened(save(build(**SIZES), tmp_path))
    source = read_layer(checkpoint, config, 0, CPU)
    for role, row in source.rows.items():
        if row.is_norm:
            factor = source.tensors[row.name]
            stored = stored_vector(row, factor)
            assert stored.dtype is torch.float16
            assert stored.dim() == (2 if role in ("q_norm", "k_norm") else 1)
            assert (as_factor(row, stored) - factor).abs().max() < 2e-3
