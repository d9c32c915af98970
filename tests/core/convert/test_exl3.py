"""Conversion to EXL3: files, rates, tuning, resume, and what the loaded model computes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from exl_core.arch.modules import module_table
from exl_core.convert import trellis
from exl_core.convert.calibration import CalibrationRows
from exl_core.convert.events import ConversionStopped, Stage
from exl_core.convert.hessian import InputStatistics, measure_hessian, token_hessian
from exl_core.convert.job import MEASUREMENT_NAME, RECORD_NAME, Conversion, convert_model
from exl_core.convert.measurement import MeasurementError
from exl_core.convert.parallel import Workers
from exl_core.convert.plan import ConvertOptions, TrellisCodes, parse_layout, rates_of
from exl_core.convert.preflight import rate_problems, shape_problems
from exl_core.convert.sensitivity import MatrixSensitivity
from exl_core.convert.target import MAX_WIDTH, Target
from exl_core.errors import ProblemsError, RequestError
from exl_core.formats.codecs.exl3 import layout as exl3
from exl_core.formats.verify import verify
from exl_core.ops.open import get_table
from exl_core.session.open import open_checkpoint
from support import tiny_models
from support.conversions import content, conversion, hooks, run, stops_until_done
from support.paged import logits_of
from support.quantized_models import SIZES, assert_same_logits
from support.quick_rings import QuickRings
from support.thread_ranks import mean_kl
from support.trellis import MARKERS, Exl3Layer

FAST = ConvertOptions(format="exl3", fast=True)
HEAD = "lm_head.weight"


@pytest.fixture(scope="module", autouse=True)
def quick_search() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trellis, "open_rings", lambda _: QuickRings())
        yield


def make_rows(step: Any) -> CalibrationRows:
    ids = torch.randint(3, 259, (2, 64), generator=torch.Generator().manual_seed(5))
    return CalibrationRows(ids, "0" * 64, "random bytes")


def task(source: Path, folder: Path, **changes: Any) -> Conversion:
    settings = {"bits": 12.0, "rows": 2, "length": 64, "shard_bytes": 1 << 20, "stages": FAST}
    return conversion(source, folder, **(settings | changes))


def convert(source: Path, folder: Path, **changes: Any) -> Path:
    return run(task(source, folder, **changes), hooks(make_rows=make_rows))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_models.tiny_llama(**SIZES, tie_word_embeddings=True, attention_bias=True)
    return tiny_models.save(model, tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(source, tmp_path_factory.mktemp("converted"))


def stored_layer(tensors: dict[str, Tensor], stem: str) -> Exl3Layer:
    """A layer as the independent decoder of the tests reads it."""
    words, suh, svh = (tensors[f"{stem}.{part}"].numpy() for part in ("trellis", "suh", "svh"))
    return Exl3Layer(words, suh, svh, "mul1")


def test_files_have_the_names_and_settings_of_the_format(converted: Path) -> None:
    names = {path.name for path in converted.iterdir()}
    assert {"model.safetensors", "config.json", "quantization_config.json"} <= names
    assert {"tokenizer.json", RECORD_NAME, MEASUREMENT_NAME} <= names
    config = json.loads((converted / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    settings = config["quantization_config"]
    assert settings == {
        "quant_method": "exl3",
        "version": "1.6.5",
        "bits": 12.0,
        "head_bits": 6,
        "calibration": {"rows": 2, "cols": 64},
        "out_scales": "always",
        "codebook": "mul1",
    }
    detailed = json.loads((converted / "quantization_config.json").read_text())
    storage = detailed.pop("tensor_storage")
    assert detailed == settings
    tensors = load_file(converted / "model.safetensors")
    assert {name for one in storage.values() for name in one["stored_tensors"]} == set(tensors)
    head = storage["lm_head"]
    assert (head["quant_format"], head["bits_per_weight"]) == ("exl3", 6)
    assert head["mul1_multiplier"] == exl3.MULTIPLIERS["mul1"]
    words = tensors["lm_head.trellis"]
    assert head["stored_tensors"]["lm_head.trellis"] == {
        "shape": list(words.shape),
        "n_bytes": words.nbytes,
        "dtype": "torch.int16",
    }
    assert "quant_format" not in storage["model.norm"]


def test_every_matrix_is_stored_as_padded_trellis_codes(converted: Path) -> None:
    source, config, quantization = open_checkpoint(converted)
    report = verify(source, config, quantization)
    assert not report.problems
    tensors = load_file(converted / "model.safetensors")
    record = json.loads((converted / RECORD_NAME).read_text())
    layouts = {one["name"]: parse_layout(one["layout"]) for one in record["matrices"]}
    matrices = [row for row in module_table(config).rows if row.is_converted]
    assert {row.name for row in matrices} == set(layouts)
    for row in matrices:
        (n, k), layout = row.shape, layouts[row.name]
        assert isinstance(layout, TrellisCodes)
        rows, columns = -(-k // 128) * 128, -(-n // 128) * 128
        words = tensors[f"{row.stem}.trellis"]
        assert words.shape == (rows // 16, columns // 16, int(16 * layout.rate))
        marker = tensors[f"{row.stem}.mul1"]
        assert (marker.shape, int(marker)) == ((), MARKERS["mul1"])
        dense = stored_layer(tensors, row.stem).dense()
        assert not dense[:, n:].any()  # padded outputs are exactly 0
        bits = sum(t.nbytes * 8 for t in (words, tensors[f"{row.stem}.suh"]))
        bits += tensors[f"{row.stem}.svh"].nbytes * 8
        if row.bias is not None:
            bias = tensors[row.bias]
            assert bias.shape == (columns,)
            bits += bias.nbytes * 8
        assert layout.cost_bits(k, n, has_bias=row.bias is not None) == bits


def test_layers_take_the_bits_that_were_asked_for(source: Path, converted: Path) -> None:
    record = json.loads((converted / RECORD_NAME).read_text())
    rows = [row for row in module_table(open_checkpoint(source)[1]).rows if row.is_converted]
    numel = sum(row.shape[0] * row.shape[1] for row in rows if row.layer is not None)
    bits = sum(one["bits"] for one in record["matrices"] if one["name"] != HEAD)
    assert 11.5 * numel < bits <= 12.0 * numel
    assert len({one["layout"] for one in record["matrices"]}) > 2


def test_loaded_model_has_the_logits_of_its_dequantized_weights(converted: Path) -> None:
    model = tiny_models.tiny_llama(**SIZES, tie_word_embeddings=False, attention_bias=True)
    tensors = load_file(converted / "model.safetensors")
    stems = [name.removesuffix(".trellis") for name in tensors if name.endswith(".trellis")]
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name in tensors:
                parameter.copy_(tensors[name][: len(parameter)].float())
    dense = {stem: stored_layer(tensors, stem).dense() for stem in stems}
    dense = {
        stem: weight[: parameters[f"{stem}.weight"].shape[1]] for stem, weight in dense.items()
    }
    assert_same_logits(converted, model, dense)


def test_converted_model_is_close_to_its_source(source: Path, tmp_path: Path) -> None:
    out = convert(source, tmp_path, bits=22.0, stages=ConvertOptions("cpu", 8, 0, True, "exl3"))
    record = json.loads((out / RECORD_NAME).read_text())
    errors = {one["name"]: one["error"] for one in record["matrices"]}
    assert max(errors.values()) < 0.1


@pytest.mark.thorough
@pytest.mark.parametrize(("codebook", "head_bits"), [("mcg", 4), ("3inst", 16)])
def test_codebooks_and_unquantized_heads(
    source: Path, tmp_path: Path, codebook: Any, head_bits: float
) -> None:
    options = ConvertOptions(format="exl3", codebook=codebook, fast=True, head_bits=head_bits)
    out = convert(source, tmp_path, stages=options)
    tensors = load_file(out / "model.safetensors")
    assert any(name.endswith(".mcg") for name in tensors) == (codebook == "mcg")
    assert not any(name.endswith(".mul1") for name in tensors)
    assert (HEAD in tensors) == (head_bits == 16)
    assert not verify(*open_checkpoint(out)).problems
    assert not open_checkpoint(out)[1].has_tied_embeddings


@pytest.mark.thorough
def test_norms_of_heads_are_stored_once(tmp_path: Path) -> None:
    model = tiny_models.tiny_qwen3(**SIZES)
    out = convert(tiny_models.save(model, tmp_path / "source"), tmp_path)
    tensors = load_file(out / "model.safetensors")
    assert tensors["model.layers.0.self_attn.q_norm.weight"].shape == (SIZES["head_dim"],)
    assert not verify(*open_checkpoint(out)).problems


@pytest.mark.thorough
def test_resume_after_stops_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    options = ConvertOptions(format="exl3")  # with tuning
    whole = content(convert(source, tmp_path, out=tmp_path / "whole", stages=options))
    stopped = task(source, tmp_path, stages=options)
    stages = set(stops_until_done(stopped, 400, make_rows=make_rows))
    assert Stage.TUNE in stages
    assert content(stopped.out) == whole
    tensors = load_file(stopped.out / "model.safetensors")
    fast = convert(source, tmp_path, out=tmp_path / "fast")
    untuned = load_file(fast / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    assert torch.equal(tensors[f"{name}.trellis"], untuned[f"{name}.trellis"])
    assert not torch.equal(tensors[f"{name}.suh"], untuned[f"{name}.suh"])
    assert not torch.equal(tensors[f"{name}.svh"], untuned[f"{name}.svh"])
    ids = make_rows(None).token_ids[0].tolist()
    exact, before, after = (logits_of(path, ids) for path in (source, fast, stopped.out))
    assert mean_kl(exact, after) < 0.95 * mean_kl(exact, before)


def test_measurement_of_another_format_is_refused(
    source: Path, converted: Path, tmp_path: Path
) -> None:
    given = converted / MEASUREMENT_NAME
    for options in (ConvertOptions(), ConvertOptions(format="exl3", codebook="mcg")):
        with pytest.raises(MeasurementError, match="another format or codebook"):
            convert(source, tmp_path, bits=6.0, stages=options, measurement=given)
    again = convert(source, tmp_path, measurement=given)
    assert content(again)["model.safetensors"] == content(converted)["model.safetensors"]


def test_a_work_directory_of_the_other_format_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversionStopped):
        convert_model(task(source, tmp_path), hooks(make_rows=make_rows, should_stop=lambda: True))
    with pytest.raises((RequestError, ProblemsError), match="format"):
        convert(source, tmp_path, stages=ConvertOptions(fast=True))


def test_rates_and_sizes_that_the_format_cannot_store(source: Path) -> None:
    _, config, _ = open_checkpoint(source)
    least, most = list(rate_problems(config, 0.5, 6, Target("mul1"))), []
    assert "--bits of" in str(least[0])
    most = list(rate_problems(config, 40, 6, Target("mul1")))
    assert "--bits of" in str(most[0])
    for head_bits, codebook in ((2.5, "mcg"), (9, "mul1"), (1.5, "3inst")):
        (problem,) = rate_problems(config, 12, head_bits, Target(codebook))  # type: ignore[arg-type]
        assert "--head-bits" in str(problem)
    assert not list(shape_problems(source, config, Target("mul1")))
    assert Target("mul1").width_problem(MAX_WIDTH + 128) is not None


@pytest.mark.parametrize("text", ["2.5 mcg", "9 mul1", "0 mul1", "2.5 mul2", "2,5 mul1"])
def test_layouts_that_do_not_exist(text: str) -> None:
    with pytest.raises(RequestError):
        parse_layout(text)


@pytest.mark.parametrize("rate", rates_of("mul1"))
def test_layouts_round_trip_through_text(rate: float) -> None:
    layout = TrellisCodes(rate, "mul1")
    assert parse_layout(str(layout)) == layout


WORKERS = Workers(None, lambda: False)


@pytest.mark.parametrize("rate", [1.5, 3, 5])
@pytest.mark.parametrize("has_weights", [False, True])
def test_expected_losses_are_those_of_the_search(
    monkeypatch: pytest.MonkeyPatch, *, rate: float, has_weights: bool
) -> None:
    monkeypatch.setattr(trellis, "open_rings", lambda _: get_table("cpu", threads=1))
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(128, 200, generator=generator) * torch.rand(128, 1, generator=generator)
    mixed = torch.randn(200, 200, generator=generator) * torch.linspace(0.1, 2, 200)
    x = (torch.randn(1000, 200, generator=generator) @ mixed).view(10, 100, 200)
    outputs, tokens = torch.rand(128, generator=generator), torch.ones(10, 100)
    if has_weights:  # the weights of small inputs are large, as those of first tokens are
        x[:, 0] *= 0.02
        tokens[:, 0] = 2000.0
        tokens[:, 1:] = torch.rand(10, 99, generator=generator) * 2
        x[:, 50] *= 10
        tokens[:, 50] *= 0.01
    statistics = measure_hessian([x], None, WORKERS)
    sensitivity, layout = MatrixSensitivity(outputs, tokens), TrellisCodes(rate, "mul1")

    expected = trellis.expected_losses(
        weight,
        statistics.weighted(sensitivity.first),
        outputs,
        [layout],
        token_hessian([x[:4], x[4:]], tokens, WORKERS),
    )[layout][0]

    quantizer = trellis.Exl3Quantizer(statistics, "w", FAST, {"w": sensitivity})
    error = quantizer.quantize("w", weight, layout).weight - weight
    squares = (x @ error.T).double().square() @ outputs.double()  # [10, 100]
    loss = float((squares * tokens).mean()) / 2
    # Below 1, because the scales are fitted after the search: 328 of them for 25,600 weights.
    # Above 1 at few bits: the feedback of such inputs enlarges the targets.
    assert 0.6 < loss / expected < 1.6


def test_first_tokens_have_a_weight_of_their_own() -> None:
    x = torch.randn(6, 32, 16, generator=torch.Generator().manual_seed(5))
    statistics = measure_hessian([x[:2], x[2:]], None, WORKERS)
    weights = torch.ones(6, 32)
    weights[:, 0] = 40.0
    expected = torch.einsum("rtk,rt,rtl->kl", x, weights / weights.mean(), x) / (6 * 32)
    torch.testing.assert_close(statistics.weighted(40.0), expected, rtol=1e-2, atol=1e-3)
    assert torch.equal(statistics.weighted(1.0), statistics.hessian)


def test_sensitive_first_tokens_get_smaller_errors() -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(128, 256, generator=generator)
    x = torch.randn(8, 64, 256, generator=generator)
    x[:, 0] = torch.randn(256, generator=generator)  # the same token, such as BOS
    statistics, errors = measure_hessian([x], None, WORKERS), []
    for factor in (1.0, 1000.0):
        tokens = torch.ones(8, 64)
        tokens[:, 0] = factor
        sensitivity = {"w": MatrixSensitivity(torch.ones(128), tokens)}
        quantizer = trellis.Exl3Quantizer(statistics, "w", FAST, sensitivity)
        error = quantizer.quantize("w", weight, TrellisCodes(2, "mul1")).weight - weight
        spans = (slice(1), slice(1, 64))
        errors.append([float((x[:, span] @ error.T).square().mean()) for span in spans])
    (first, others), (weighted_first, weighted_others) = errors
    assert weighted_first < 0.2 * first
    assert weighted_others < 1.2 * others


@pytest.mark.parametrize("fill", [0.0, float("nan")])
def test_an_unusable_hessian_is_reported(fill: float) -> None:
    statistics = InputStatistics(torch.full((128, 128), fill), None)
    quantizer = trellis.Exl3Quantizer(statistics, "w", FAST, {})
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(1))
    matrix = quantizer.quantize("w", weight, TrellisCodes(8, "mul1"))
    assert [incident.kind for incident in matrix.report.incidents] == ["rounded"]
    assert float((matrix.weight - weight).norm() / weight.norm()) < 0.3


def test_expected_losses_fall_with_the_rate_and_scale_with_the_sensitivity() -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(96, 64, generator=generator)
    x = torch.randn(500, 64, generator=generator) * torch.linspace(0.1, 2, 64)
    hessian, sensitivity = x.T @ x / 500, torch.rand(96, generator=generator)
    layouts = Target("mul1").trellis_layouts
    losses = trellis.expected_losses(weight, hessian, sensitivity, layouts)
    values = [losses[layout][0] for layout in layouts]
    assert values == sorted(values, reverse=True)
    twice = trellis.expected_losses(weight, hessian, 2 * sensitivity, layouts)
    assert twice[layouts[3]][0] == pytest.approx(2 * values[3])


def test_experts_are_stored_one_by_one_with_their_router(tmp_path: Path) -> None:
    sizes = {**SIZES, "moe_intermediate_size": 64, "num_hidden_layers": 2}
    model = tiny_models.tiny_qwen3_moe(**sizes, tie_word_embeddings=False)
    out = convert(tiny_models.save(model, tmp_path / "source"), tmp_path)
    tensors = load_file(out / "model.safetensors")
    config = open_checkpoint(out)[1]
    for row in module_table(config).rows:
        if row.expert is not None:
            assert tensors[f"{row.stem}.trellis"].dtype is torch.int16
    assert tensors["model.layers.0.mlp.gate.weight"].dtype is torch.float16
    report = verify(*open_checkpoint(out))
    assert (report.problems, report.zeros) == ((), ())
