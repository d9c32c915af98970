"""Real conversions of tiny models from every source form, checked with an independent reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from exl_core.arch.modules import module_table
from exl_core.convert.calibration import CalibrationRows
from exl_core.convert.events import Stage
from exl_core.convert.plan import ConvertOptions, Layout
from exl_core.engine.score import score_tokens
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.verify import verify
from exl_core.session.load import load_model
from exl_core.session.open import open_checkpoint
from support import tiny_models
from support.conversions import SHAPE, content, conversion, hooks, run, stops_until_done
from support.exl2_directory import read_model
from support.gguf_models import write_gguf
from support.profiles import first_by_default

EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

FAST = ConvertOptions(fast=True)


def make_rows(step: Any) -> CalibrationRows:
    ids = torch.randint(3, 259, (2, 64), generator=torch.Generator().manual_seed(5))
    return CalibrationRows(ids, "0" * 64, "random bytes")


def convert(source: Path, folder: Path, **changes: Any) -> Path:
    settings = {"bits": 6.0, "rows": 2, "length": 64, "stages": FAST, **changes}
    return run(conversion(source, folder, **settings), hooks(make_rows=make_rows))


def dense(path: Path, name: str) -> torch.Tensor:
    """A tensor as float32: a matrix [out, in] or a vector."""
    source, config, quantization = open_checkpoint(path)
    checkpoint = Checkpoint(source, config, quantization)
    if name.endswith("norm.weight"):
        return checkpoint.norm(name)
    return torch.cat([chunk.values for chunk in checkpoint.chunks(name, torch.float32)])


def sharded(folder: Path) -> Path:
    model = tiny_models.tiny_llama(**SHAPE, attention_bias=True, mlp_bias=True)
    converted = tiny_models.converted(model, torch.bfloat16)
    return tiny_models.save(converted, folder, max_shard_size="200KB")


def tied(folder: Path) -> Path:
    return tiny_models.save(tiny_models.tiny_llama(**SHAPE, tie_word_embeddings=True), folder)


def gguf_gemma(folder: Path) -> Path:
    folder.mkdir()
    model = tiny_models.tiny_gemma3(
        **{**SHAPE, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    )
    return write_gguf(model, folder / "tiny.gguf", GGMLQuantizationType.Q8_0)


def gguf_llama(folder: Path) -> Path:
    folder.mkdir()
    return write_gguf(
        tiny_models.tiny_llama(**SHAPE), folder / "tiny.gguf", GGMLQuantizationType.F16
    )


def gguf_qwen(folder: Path) -> Path:
    """GGUF file of a model with biases of q, k and v only."""
    folder.mkdir()
    model = tiny_models.tiny_qwen2(**SHAPE)
    return write_gguf(model, folder / "tiny.gguf", GGMLQuantizationType.Q8_0)


def fused(folder: Path) -> Path:
    return tiny_models.save(tiny_models.tiny_phi3(**SHAPE), folder)


def soft_capped(folder: Path) -> Path:
    return tiny_models.save(tiny_models.tiny_gemma2(**{**SHAPE, "num_hidden_layers": 2}), folder)


@pytest.mark.parametrize(
    "make",
    first_by_default([sharded, tied, gguf_gemma, gguf_llama, gguf_qwen, fused, soft_capped]),
)
def test_conversion_of_each_source_form(make: Any, tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    if make is sharded:
        assert len(list(source.glob("model-*.safetensors"))) > 1
    out = convert(source, tmp_path)
    if make is tied:
        assert content(convert(source, tmp_path, out=tmp_path / "again")) == content(out)
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "tokenizer.json", "exl_conversion.json"} <= names
    assert "model.safetensors" not in names
    assert not any(name.startswith("model-") for name in names)

    opened = open_checkpoint(out)
    assert not verify(*opened).problems
    config = opened[1]
    assert not config.has_tied_embeddings  # the head is stored separately
    plain = read_model(out)
    record = {
        m["name"]: m for m in json.loads((out / "exl_conversion.json").read_text())["matrices"]
    }
    tied_head = make in (tied, gguf_gemma, soft_capped)
    for name, shape in ((row.name, row.shape) for row in module_table(config).rows):
        expected = dense(source, EMBED if tied_head and name == HEAD else name)
        found = dense(out, name)
        assert found.shape == expected.shape == shape
        error = float((found - expected).norm() / expected.norm())
        if len(shape) == 2 and name != EMBED:
            read = torch.from_numpy(plain.pop(name).astype(np.float32)).T
            assert torch.equal(read[: shape[0]], found), name
            assert not read[shape[0] :].any()  # columns that are only padding
            layout = Layout.parse(record[name]["layout"])
            assert record[name]["bits"] == layout.cost_bits(
                shape[1], shape[0], has_bias=name.replace("weight", "bias") in plain
            )
            assert error < 8 / 2.0 ** layout.sections[-1].bits, name
        else:
            assert error < 0.05, name  # rounded to float16, and tuned
    body = [m for name, m in record.items() if name != HEAD]
    numel = sum(np.prod(module_table(config)[m["name"]].shape) for m in body)
    assert sum(m["bits"] for m in body) <= 6.0 * numel

    ids = torch.arange(10, 90).tolist()
    scores = [score_tokens(load_model(str(path)).model, ids) for path in (out, source)]
    assert float((scores[0] - scores[1]).abs().mean()) < 0.3


@pytest.mark.thorough
def test_resume_after_stop_within_a_stage_gives_same_bytes(tmp_path: Path) -> None:
    """Stops repeatedly, each time after more pieces of work."""
    source = tied(tmp_path / "source")
    whole = content(convert(source, tmp_path, out=tmp_path / "whole"))
    task = conversion(source, tmp_path, bits=6.0, rows=2, length=64, stages=FAST)
    stages: list[Stage] = []
    for stage in stops_until_done(task, 150, make_rows=make_rows):
        stages.append(stage)
        assert not list(task.work_folder.glob("scratch*"))
    assert {Stage.MEASURE, Stage.QUANTIZE} <= set(stages)
    assert content(task.out) == whole


@pytest.mark.thorough
def test_conversions_are_byte_equal(tmp_path: Path) -> None:
    source = tied(tmp_path / "source")
    options = ConvertOptions()  # all steps
    first = convert(source, tmp_path, bits=4.5, stages=options)
    second = convert(source, tmp_path, bits=4.5, stages=options, out=tmp_path / "again")
    assert content(first) == content(second)
    measured = first / "exl_measurement.json"
    third = convert(
        source, tmp_path, bits=4.5, stages=options, out=tmp_path / "third", measurement=measured
    )
    weights = [path.name for path in first.glob("*.safetensors")]
    assert {name: content(first)[name] for name in weights} == {
        name: content(third)[name] for name in weights
    }
