"""Stages of a conversion on tiny models: their results, and that these are reproducible."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from exl_core.arch.modules import module_table
from exl_core.convert import sensitivity as sensitivity_module
from exl_core.convert import tune
from exl_core.convert.allocate import allocate
from exl_core.convert.layers import LayerSource, States, embed_rows, read_layer
from exl_core.convert.measure import measure_layer
from exl_core.convert.parallel import Workers, worker_pool
from exl_core.convert.plan import ConvertOptions, LayerMeasurement
from exl_core.convert.quantize import quantize_ends, quantize_layer
from exl_core.convert.sensitivity import Sensitivity, measure_sensitivity, with_pairs
from exl_core.convert.tune import scratch_bytes, tune_model
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.codecs.exl2 import layout as exl2
from exl_core.session.open import open_checkpoint
from exl_core.settings import Settings
from support.quantized_models import SIZES
from support.tiny_models import VOCAB_SIZE, save, tiny_gemma3, tiny_llama

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"

CPU = torch.device("cpu")
OPTIONS = ConvertOptions(fast=True)
FULL = ConvertOptions()


def cpu_workers() -> AbstractContextManager[Workers]:
    return worker_pool(CPU, lambda: False)


class Source(NamedTuple):
    checkpoint: Checkpoint
    config: Any
    token_ids: Tensor
    sensitivity: Sensitivity


def make_source(folder: Path, build: Callable[..., Any], **options: Any) -> Source:
    source, config, quantization = open_checkpoint(save(build(**SIZES, **options), folder))
    checkpoint = Checkpoint(source, config, quantization, is_exact=True)
    ids = torch.randint(3, VOCAB_SIZE, (4, 96), generator=torch.Generator().manual_seed(9))
    with cpu_workers() as workers:
        sensitivity = measure_sensitivity(checkpoint, config, ids, options=OPTIONS, workers=workers)
    return Source(checkpoint, config, ids, sensitivity)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return make_source(tmp_path_factory.mktemp("llama"), tiny_llama, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def measured(llama: Source) -> list[LayerMeasurement]:
    states = embed_rows(llama.checkpoint, llama.config, llama.token_ids)
    return [measure(llama, layer, states) for layer in range(llama.config.num_layers)]


def measure(source: Source, layer: int, states: Tensor) -> LayerMeasurement:
    weights = read_layer(source.checkpoint, source.config, layer, CPU)
    with cpu_workers() as workers:
        return measure_layer(
            weights, source.config, states, source.sensitivity, options=OPTIONS, workers=workers
        )


def convert(source: Source, layers: list[LayerMeasurement], bits: float) -> dict[str, Tensor]:
    allocation = allocate(layers, bits)
    states = States(
        *(embed_rows(source.checkpoint, source.config, source.token_ids) for _ in range(2))
    )
    tensors: dict[str, Tensor] = {}
    for layer in range(source.config.num_layers):
        weights = read_layer(source.checkpoint, source.config, layer, CPU)
        with cpu_workers() as workers:
            part = quantize_layer(
                weights,
                source.config,
                allocation,
                states,
                workers,
                options=OPTIONS,
                sensitivity=source.sensitivity,
            )
        tensors |= part.tensors
        assert [r.layout for r in part.reports] == [
            allocation.layouts[report.name] for report in part.reports
        ]
    with cpu_workers() as workers:
        ends = quantize_ends(source.checkpoint, source.config, states, OPTIONS, workers)
    return tensors | dict(ends.tensors)


def test_conversion_covers_every_tensor(llama: Source, measured: list[LayerMeasurement]) -> None:
    tensors = convert(llama, measured, 4.0)
    matrices = 0
    for name in (row.name for row in module_table(llama.config).rows):
        stem = name.removesuffix(".weight")
        if f"{stem}.q_weight" in tensors:
            exl2.check({piece: tensors[f"{stem}.{piece}"] for piece in exl2.PARTS}, stem)
            matrices += 1
        else:
            assert tensors[name].dtype is torch.float16
    assert matrices == 7 * llama.config.num_layers
    head = exl2.check({piece: tensors[f"lm_head.{piece}"] for piece in exl2.PARTS}, "head")
    assert head.out_features == VOCAB_SIZE + -VOCAB_SIZE % 32  # tied, padded to a multiple of 32
    assert tensors[EMBED].shape == (VOCAB_SIZE, llama.config.hidden_size)
    dense = exl2.dequantize(head).T.float()
    assert not dense[VOCAB_SIZE:].any()
    likeness = torch.cosine_similarity(dense[:VOCAB_SIZE], tensors[EMBED].float())
    assert likeness.min() > 0.9  # not equal: the head compensates for errors of the layers


def test_measurements_round_trip_through_json(measured: list[LayerMeasurement]) -> None:
    assert [LayerMeasurement.from_json(layer.to_json()) for layer in measured] == measured
    for matrix in measured[0].matrices:
        assert len(matrix.candidates) > 20
        assert all(candidate.error >= 0 for candidate in matrix.candidates)


def test_measured_errors_fall_with_width(measured: list[LayerMeasurement]) -> None:
    for layer in measured:
        for matrix in layer.matrices:
            errors = {c.layout: c.error for c in matrix.candidates}
            pure = [errors[f"{bits}:100/64"] for bits in (2, 3, 4, 5, 6, 8)]
            assert pure == sorted(pure, reverse=True)


def test_results_do_not_depend_on_thread_count(
    llama: Source, measured: list[LayerMeasurement], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = convert(llama, measured, 3.0)
    monkeypatch.setattr(
        "exl_core.convert.parallel.read_settings", lambda: Settings(isa=None, threads=3)
    )
    states = embed_rows(llama.checkpoint, llama.config, llama.token_ids)
    assert measure(llama, 0, states) == measured[0]
    second = convert(llama, measured, 3.0)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.thorough
def test_conversion_of_sandwich_norms_and_head_norms(tmp_path: Path) -> None:
    gemma = make_source(tmp_path, tiny_gemma3, tie_word_embeddings=True)
    states = embed_rows(gemma.checkpoint, gemma.config, gemma.token_ids)
    layers = [measure(gemma, layer, states) for layer in range(gemma.config.num_layers)]
    tensors = convert(gemma, layers, 5.0)
    assert tensors["model.layers.0.self_attn.q_norm.weight"].shape == (
        gemma.config.layers[0].attention.num_q_heads,
        gemma.config.layers[0].attention.head_dim,
    )


def last_layer(model: Source, ids: Tensor) -> tuple[LayerSource, Tensor]:
    """Weights of the last layer, and the gradient of its states [rows, length, hidden]."""
    states = embed_rows(model.checkpoint, model.config, ids)
    with cpu_workers() as workers:
        for layer in range(model.config.num_layers):
            source = read_layer(model.checkpoint, model.config, layer, CPU)
            sensitivity_module._forward(source, model.config, states, workers)
        gradient = sensitivity_module._head_gradient(
            model.checkpoint, model.config, states, OPTIONS, workers
        )
    return source, gradient


def test_sensitivity_is_the_mean_square_of_gradients(llama: Source) -> None:
    """The output gradient of the last down projection is that of the states after the layer."""
    name = "model.layers.2.mlp.down_proj.weight"
    ids = llama.token_ids.clone()
    ids[:, 0] = 1  # as BOS
    source, gradient = last_layer(llama, ids)
    with cpu_workers() as workers:
        found = measure_sensitivity(
            llama.checkpoint, llama.config, ids, options=OPTIONS, workers=workers
        )[name]
    squares, sizes = gradient.square(), source.matrix("down").square().mean(1)
    assert torch.allclose(found.outputs, squares[:, 1:].mean((0, 1)), rtol=0.05)
    by_token = squares @ sizes
    assert torch.allclose(found.tokens, by_token / by_token[:, 1:].mean(), rtol=0.05)
    assert found.first == pytest.approx(float(found.tokens[:, 0].mean()))


def test_pairs_are_the_correlations_of_gradients_after_the_first_tokens(llama: Source) -> None:
    """As above: the output gradient of the last down projection is known."""
    name = "model.layers.2.mlp.down_proj.weight"
    ids, pairs = llama.token_ids.clone(), dict[int, Mapping[str, Tensor]]()
    ids[:, 0] = 1  # as BOS
    _, gradient = last_layer(llama, ids)
    with cpu_workers() as workers:
        found = measure_sensitivity(
            llama.checkpoint,
            llama.config,
            ids,
            options=OPTIONS,
            workers=workers,
            on_pairs=pairs.__setitem__,
        )
    assert list(pairs) == [2, 1, 0]
    assert {name for layer in pairs.values() for name in layer} == set(found)
    flat = gradient[:, 1:].flatten(0, 1)
    size = flat.square().mean(0).sqrt()
    expected = flat.T @ flat / len(flat) / size[:, None] / size
    width = len(expected)
    assert torch.allclose(pairs[2][name][0, :width, :width].float(), expected, atol=0.03)
    assert expected.triu(1).abs().max() > 0.1
    complete = with_pairs(found, pairs[2])
    assert complete[name].pairs is pairs[2][name]
    assert complete["model.layers.1.mlp.down_proj.weight"].pairs is None


def test_rows_that_begin_with_different_tokens_have_no_weights_of_tokens(llama: Source) -> None:
    assert len(set(llama.token_ids[:, 0].tolist())) > 1
    _, gradient = last_layer(llama, llama.token_ids)
    last = llama.sensitivity["model.layers.2.mlp.down_proj.weight"]
    assert torch.allclose(last.outputs, gradient.square().mean((0, 1)), rtol=0.05)
    for one in llama.sensitivity.values():
        assert (one.tokens.numel(), one.first) == (0, 1.0)


def tuned(source: Source, tensors: dict[str, Tensor], folder: Path, **options: Any) -> Any:
    folder.mkdir()
    with cpu_workers() as workers:
        return tune_model(
            source.checkpoint,
            source.config,
            tensors,
            source.token_ids,
            options=FULL,
            workers=workers,
            scratch=folder,
            **options,
        )


def test_pieces_of_tuning_begin_as_their_rows(
    llama: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SeenError(Exception):
        pass

    def see(_: object, __: object, token_ids: Tensor, *___: object) -> Tensor:
        raise SeenError(token_ids)

    monkeypatch.setattr(tune, "_source_states", see)
    monkeypatch.setattr(tune, "LENGTH", 16)
    with pytest.raises(SeenError) as caught:
        tuned(llama, {}, tmp_path / "work")
    pieces, rows = caught.value.args[0], llama.token_ids
    count = rows.shape[1] // 16
    assert count > 1
    assert pieces.shape == (len(rows) * count, 16)
    assert torch.equal(pieces[:, 0], rows[:, 0].repeat_interleave(count))
    assert torch.equal(pieces[:, 1:], rows[:, : 16 * count].reshape(-1, 16)[:, 1:])


def test_steps_are_as_long_as_the_root_of_the_divergence(
    llama: Source, measured: list[LayerMeasurement], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Adam's first step changes every value with a gradient by the learning rate. That of the first
    of two steps is half of the largest."""
    tensors = convert(llama, measured, 3.0)
    monkeypatch.setattr(tune, "STEPS", 2)
    largest: dict[float, float] = {}
    for divergence in (0.01, 0.04, -1e-9):

        def measure(*_: object, found: float = divergence) -> float:
            return found

        def on_step(_: int, state: Mapping[str, Tensor], of: float = divergence) -> None:
            values = [value for name, value in state.items() if name.endswith(" parameter")]
            largest.setdefault(of, max(float(value.abs().max()) for value in values))

        monkeypatch.setattr(tune._TunedModel, "mean_divergence", measure)
        tuned(llama, tensors, tmp_path / str(divergence), on_step=on_step)
    assert largest[0.01] == pytest.approx(0.05 * tune.LEARNING_RATE, rel=1e-3)
    assert largest[0.04] == pytest.approx(0.1 * tune.LEARNING_RATE, rel=1e-3)
    assert largest[-1e-9] == 0  # rounding errors of a model that equals its source


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_few_rows_are_tuned_on(
    llama: Source,
    measured: list[LayerMeasurement],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    rows: int,
) -> None:
    monkeypatch.setattr(tune, "STEPS", 2)
    tensors = convert(llama, measured, 2.6)
    few = llama._replace(token_ids=llama.token_ids[:rows])
    seen: list[int] = []
    whole = tune._TunedModel.mean_divergence

    def measure(model: Any, token_ids: Tensor, *rest: Any) -> float:
        seen.append(len(token_ids))
        return whole(model, token_ids, *rest)

    monkeypatch.setattr(tune._TunedModel, "mean_divergence", measure)
    assert tuned(few, tensors, tmp_path / "work")
    assert set(seen) == {1 if rows == 4 else rows}


@pytest.mark.thorough
def test_tuning_reduces_divergence_and_is_resumable(
    llama: Source, measured: list[LayerMeasurement], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tensors = convert(llama, measured, 2.6)
    monkeypatch.setattr(tune, "STEPS", 10)
    monkeypatch.setattr(tune, "LENGTH", llama.token_ids.shape[1])
    steps: list[tuple[int, dict[str, Tensor]]] = []
    waited: list[int] = []

    def on_step(done: int, state: dict[str, Tensor]) -> None:
        waited.append(sum(path.stat().st_size for path in (tmp_path / "a").iterdir()))
        steps.append((done, {name: value.clone() for name, value in state.items()}))

    new = tuned(llama, tensors, tmp_path / "a", on_step=on_step)
    assert [done for done, _ in steps] == list(range(1, 11))
    assert new
    for name, value in new.items():
        assert value.shape == tensors[name].shape
        assert value.dtype is tensors[name].dtype
        assert name.endswith(("norm.weight", ".q_scale_max"))
    before, after = divergence(llama, tensors), divergence(llama, tensors | new)
    assert after < 0.99 * before
    first, saved_state = steps[5]
    for options in ({}, {"steps_done": first, "saved_state": saved_state}):  # repeated, and resumed
        again = tuned(llama, tensors, tmp_path / f"b{len(options)}", **options)
        assert all(torch.equal(new[name], again[name]) for name in new)
    assert max(waited) == pytest.approx(scratch_bytes(llama.config, CPU), rel=0.05)


def divergence(source: Source, tensors: dict[str, Tensor]) -> float:
    with cpu_workers() as workers, tempfile.TemporaryDirectory() as folder:
        model, source_states = open_tuned(source, tensors, Path(folder), workers)
        return model.divergence(source.token_ids, source_states, workers)


def open_tuned(
    source: Source, tensors: dict[str, Tensor], folder: Path, workers: Workers
) -> tuple[Any, Tensor]:
    """The tuned model, and the inputs of the source's head."""
    with torch.no_grad():
        source_states = tune._source_states(
            source.checkpoint, source.config, source.token_ids, CPU, workers
        )
        return tune._TunedModel.of(
            source.checkpoint, source.config, tensors, folder, FULL
        ), source_states


def test_layerwise_gradients_match_full_autograd(
    llama: Source, measured: list[LayerMeasurement], tmp_path: Path
) -> None:
    tensors = convert(llama, measured, 3.0)
    with cpu_workers() as workers:
        model, source_states = open_tuned(llama, tensors, tmp_path, workers)
        for n, parameter in enumerate(model.parameters.values()):
            parameter.data += 0.01 * n
        gradients = model.gradients(llama.token_ids, source_states, workers)
    assert gradients.keys() == model.parameters.keys()
    x = tensors[EMBED][llama.token_ids].float()
    for layer in range(llama.config.num_layers):
        x = model._layer_function(layer)(x)
    norm = model.norms[FINAL_NORM] * model.parameters[FINAL_NORM].exp()
    x = model._scale_inputs("lm_head", rms_norm(x, norm.shape, norm, llama.config.norm_eps))
    head = model.matrices["lm_head"].weight()[:VOCAB_SIZE]
    prediction = (x.to(head.dtype) @ head.T).float().log_softmax(-1)
    target = (source_states @ model.source_head.T).float().log_softmax(-1)
    loss = (target.exp() * (target - prediction)).sum(-1).mean()
    expected = torch.autograd.grad(loss, list(model.parameters.values()))
    for name, whole in zip(model.parameters, expected, strict=True):
        assert float((gradients[name] - whole).norm()) < 0.02 * float(whole.norm()), name


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ((1.0, 0.25, 0.0), 1.0),  # (1 - x)^2
        ((0.0, 0.25, 1.0), 0.0),
        ((0.0625, 0.0625, 0.5625), 0.25),
        ((0.0, 1.0, 1.0), 0.0),  # opens downwards
        ((1.0, 1.0, 0.5), 1.0),
        ((0.0, 0.0, 0.0), 0.0),
    ],
)
def test_least_of_a_parabola(values: tuple[float, float, float], best: float) -> None:
    assert tune.least_of_parabola(*values) == pytest.approx(best)


@pytest.mark.parametrize("direction", ["downhill", "random"])
def test_steps_that_lose_are_undone(
    llama: Source, measured: list[LayerMeasurement], tmp_path: Path, direction: str
) -> None:
    """Steps too far in the right direction become shorter. Steps in a wrong one are undone."""
    tensors = convert(llama, measured, 3.0)
    with cpu_workers() as workers:
        model, source_states = open_tuned(llama, tensors, tmp_path, workers)
        gradients = model.gradients(llama.token_ids, source_states, workers)
        start = model.divergence(llama.token_ids, source_states, workers)
        with torch.no_grad():
            for name, parameter in model.parameters.items():
                downhill = -4 * gradients[name]
                random = 0.5 * torch.randn_like(parameter)
                parameter.copy_(downhill if direction == "downhill" else random)
        whole = {name: parameter.detach().clone() for name, parameter in model.parameters.items()}
        far = model.divergence(llama.token_ids, source_states, workers)
        model.keep_best_share(llama.token_ids, source_states, workers, untuned=start)
        near = model.divergence(llama.token_ids, source_states, workers)
    steps, kept = (
        torch.cat([one.flatten() for one in each.values()]) for each in (whole, model.parameters)
    )
    has_moved = steps != 0  # not without a gradient
    shares = kept[has_moved] / steps[has_moved]
    assert shares.std() < 1e-4 and not kept[~has_moved].any()
    if direction == "downhill":
        assert near < 0.96 * start < start < far
        assert 0.1 < shares.min() <= shares.max() < 0.4
    else:
        assert near <= start and 1.1 * start < far / 2
        assert shares.min() >= 0 and shares.max() < 0.3
