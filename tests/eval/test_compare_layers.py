"""Layer comparison: its figures against states of transformers, and the two kinds of error."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from exl_core.cache.format import KVFormat
from exl_core.errors import ExlError, RequestError
from exl_core.session.load import LoadedModel, LoadOptions, load_model
from exl_eval.compare_layers import compare_layers
from exl_eval.divergence import DivergenceOptions
from exl_eval.styles import lay_out
from exl_eval.texts import as_text
from support import tiny_models

TEXT = "The quick brown fox jumps over the lazy dog. " * 40
CHANGED = 1
OPTIONS = DivergenceOptions(ctx=600, windows=2)  # two chunks per window
TOLERANCE = 3e-3  # the cache rounds keys and values to float16


def model_of(layers: int = 3) -> Any:
    return tiny_models.tiny_llama(max_position_embeddings=700, num_hidden_layers=layers)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A model, and a copy whose layer 1 has another MLP."""
    first = model_of()
    second = copy.deepcopy(first)
    with torch.no_grad():
        second.model.layers[CHANGED].mlp.down_proj.weight.mul_(0.5)
    return first, second


@pytest.fixture(scope="module")
def loaded(
    models: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[LoadedModel, LoadedModel]:
    root = tmp_path_factory.mktemp("models")
    first, second = (
        load_model(tiny_models.save(model, root / name), LoadOptions(threads=1))
        for name, model in zip("ab", models, strict=True)
    )
    return first, second


def test_propagated_error_is_that_of_transformers(
    models: tuple[Any, Any], loaded: tuple[LoadedModel, LoadedModel]
) -> None:
    result = compare_layers(*loaded, TEXT, OPTIONS)
    windows = lay_out(as_text(TEXT), loaded[0].tokenizer, OPTIONS, 700).windows
    ids = torch.tensor([window.token_ids for window in windows])
    with torch.inference_mode():
        states = [
            # The last hidden states of transformers are normed, so layers before it are compared.
            model(ids, output_hidden_states=True).hidden_states[:-1]
            for model in models
        ]
    assert result.tokens == ids.numel() == 1200
    assert result.embedding.relative_error.mean == 0
    for layer in (0, CHANGED):
        a, b = (each[layer + 1].double().flatten(0, 1) for each in states)
        errors = (b - a).norm(dim=1) / a.norm(dim=1)
        found = result.layers[layer].propagated
        assert found.relative_error.mean == pytest.approx(float(errors.mean()), abs=TOLERANCE)
        cosine = torch.cosine_similarity(a, b, dim=1).mean()
        assert found.cosine.mean == pytest.approx(float(cosine), abs=TOLERANCE)
    assert result.layers[CHANGED].propagated.relative_error.mean > 0.01
    assert result.layers[2].propagated.relative_error.mean > 0.01


def test_local_error_is_in_the_changed_layer_alone(
    loaded: tuple[LoadedModel, LoadedModel],
) -> None:
    result = compare_layers(*loaded, TEXT, OPTIONS)
    local = [one.local.relative_error.mean for one in result.layers]
    assert local[CHANGED] > 0.01
    assert local[CHANGED] == pytest.approx(
        result.layers[CHANGED].propagated.relative_error.mean, rel=1e-9
    )  # its input is equal in both cases
    assert [error for layer, error in enumerate(local) if layer != CHANGED] == [0, 0]


def test_a_model_equals_itself_except_for_its_cache(
    loaded: tuple[LoadedModel, LoadedModel],
) -> None:
    model = loaded[0]
    same = compare_layers(model, model, TEXT, OPTIONS)
    assert [one.propagated.relative_error.mean for one in same.layers] == [0, 0, 0]
    assert same.layers[-1].local.cosine.mean == pytest.approx(1, abs=1e-12)
    coarse = DivergenceOptions(ctx=600, windows=1, kv_format=KVFormat.FP8)
    errors = [
        one.local.relative_error.mean for one in compare_layers(model, model, TEXT, coarse).layers
    ]
    assert all(0 < error < 0.5 for error in errors)


def test_other_layers_are_refused(loaded: tuple[LoadedModel, LoadedModel], tmp_path: Path) -> None:
    shorter = load_model(tiny_models.save(model_of(2), tmp_path / "two"), LoadOptions(threads=1))
    with pytest.raises(RequestError, match=r"different number of layers \(expected 3, got 2\)"):
        compare_layers(loaded[0], shorter, TEXT, OPTIONS)


def test_damaged_states_are_named(
    models: tuple[Any, Any], loaded: tuple[LoadedModel, LoadedModel], tmp_path: Path
) -> None:
    broken = copy.deepcopy(models[0])
    with torch.no_grad():
        broken.model.layers[1].input_layernorm.weight.fill_(1e38)
    other = load_model(tiny_models.save(broken, tmp_path / "broken"), LoadOptions(threads=1))
    with pytest.raises(ExlError, match="broken, window 1, layer 1: a hidden state is not a number"):
        compare_layers(loaded[0], other, TEXT, OPTIONS)
