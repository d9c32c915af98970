"""Checks before any work: all problems are reported together, each with its cause."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exl_core.arch.layers import Activation, Dense, ShortConv
from exl_core.arch.spec import ModelConfig
from exl_core.convert import preflight
from exl_core.convert.events import Stage
from exl_core.convert.job import MEASUREMENT_NAME
from exl_core.convert.plan import ConvertOptions
from exl_core.convert.target import Target
from exl_core.errors import (
    DiskFullError,
    ExlError,
    ModelError,
    OutOfMemoryError,
    ProblemsError,
    RequestError,
)
from exl_core.formats.checkpoint import Checkpoint
from exl_core.session.open import open_checkpoint
from support import tiny_hybrids, tiny_models
from support.conversions import conversion, hooks, recorder, run
from support.profiles import first_by_default
from support.quantized_models import quantized_llama
from support.tiny_latent import tiny_deepseek3

pytestmark = pytest.mark.usefixtures("stubs")


def refused(source: Path, folder: Path, **changes: Any) -> ExlError:
    """Error of a conversion that must not begin. No file may be left."""
    before = sorted(path.name for path in folder.iterdir())
    events, on_event = recorder()
    with pytest.raises(ExlError) as caught:
        run(conversion(source, folder, **changes), hooks(on_event=on_event))
    assert {event.stage for event in events} <= {Stage.CHECK}
    assert sorted(path.name for path in folder.iterdir()) == before
    assert "\n" not in str(caught.value)
    return caught.value


def config_of(source: Path) -> ModelConfig:
    return open_checkpoint(source)[1]


@pytest.fixture
def damaged(source_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    """Copies the source and changes some of its tensors. `_dot_` in a name stands for a dot."""

    def make(**changes: Callable[[torch.Tensor], torch.Tensor]) -> Path:
        folder = Path(shutil.copytree(source_dir, tmp_path / "damaged"))
        tensors = load_file(folder / "model.safetensors")
        for name, change in changes.items():
            tensors[name.replace("_dot_", ".")] = change(tensors[name.replace("_dot_", ".")])
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


def test_all_unstorable_tensors_are_named(damaged: Callable[..., Path], tmp_path: Path) -> None:
    def put(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda tensor: (
            tensor.flatten().index_fill(0, torch.tensor([7]), value).view_as(tensor)
        )

    up, norm = "model.layers.1.mlp.up_proj.weight", "model.layers.2.input_layernorm.weight"
    down = "model.layers.0.mlp.down_proj.weight"  # finite in float32, not in float16
    source = damaged(**{up: put(float("nan")), norm: put(float("inf")), down: put(1e5)})
    error = refused(source, tmp_path)
    assert isinstance(error, ProblemsError)
    assert error.exit_code == ModelError.exit_code
    messages = [str(problem) for problem in error.problems]
    assert len(messages) == 3
    assert down in messages[0]
    assert "float16" in messages[0]
    assert up in messages[1]
    assert norm in messages[2]


def test_unstorable_sizes_are_refused(tmp_path: Path) -> None:
    source = tiny_models.save(tiny_models.tiny_llama(), tmp_path / "odd")
    error = refused(source, tmp_path)
    assert isinstance(error, ProblemsError)
    found = " ".join(str(problem) for problem in error.problems)
    assert all(text in found for text in ("hidden size", "attention", "intermediate size"))
    assert "multiple of 32" in found
    assert error.exit_code == ModelError.exit_code


@pytest.mark.parametrize("method", ["exl2", "exl3", "gptq"])
def test_quantized_source_is_refused(tmp_path: Path, method: str) -> None:
    source = quantized_llama(method, tmp_path / "source")
    error = refused(source, tmp_path)
    assert f"quantized already, as {method.upper()}" in str(error)
    assert error.exit_code == ModelError.exit_code


@pytest.mark.parametrize("method", ["awq", "compressed-tensors", "fp8"])
def test_other_quantized_sources_are_dequantized(tmp_path: Path, method: str) -> None:
    source = quantized_llama(method, tmp_path / "source")
    assert not list(preflight.model_problems(source, *open_checkpoint(source), target=Target()))


def test_unknown_kinds_of_layers_are_refused_by_name(
    source_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "CONVERTED_MIXERS", (ShortConv,))
    error = refused(source_dir, tmp_path)
    assert "layers of these kinds" in str(error)
    assert "Attention" in str(error)
    assert error.exit_code == ModelError.exit_code


@pytest.mark.parametrize(
    ("build", "changes", "label"),
    [
        (tiny_hybrids.tiny_lfm2, {}, "recurrent layers"),
        (tiny_hybrids.tiny_qwen35, {"linear_value_head_dim": 20}, "recurrent layers"),
        (tiny_hybrids.tiny_kimi_linear, {}, "recurrent layers"),
        (tiny_hybrids.tiny_nemotron_h, {"moe_latent_size": 40}, "experts' inputs"),
        (tiny_deepseek3, {"q_lora_rank": 24}, "rank of the queries"),
    ],
)
def test_unstorable_sizes_of_mixers_are_refused(
    tmp_path: Path, build: Any, changes: dict[str, int], label: str
) -> None:
    source = tiny_models.save(build(**changes), tmp_path / "odd")
    problems = preflight.shape_problems(source, config_of(source), Target())
    assert label in " ".join(map(str, problems))


def test_source_without_tokenizer_is_refused(source_dir: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(source_dir, tmp_path / "source"))
    (source / "tokenizer.json").unlink()
    assert "tokenizer" in str(refused(source, tmp_path))


def test_problems_of_all_kinds_are_listed_together(
    damaged: Callable[..., Path], tmp_path: Path
) -> None:
    source = damaged(**{"model.norm.weight": lambda tensor: tensor * float("nan")})
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine", encoding="utf-8")
    measurement = tmp_path / "none.json"
    options = ConvertOptions(head_bits=7)
    error = refused(
        source, tmp_path, bits=1.5, stages=options, measurement=measurement, shard_bytes=100
    )
    assert isinstance(error, ProblemsError)
    messages = [str(problem) for problem in error.problems]
    expected = ("--bits", "--head-bits", "model.norm.weight", "exists already", "--shard-size")
    assert all(any(text in line for line in messages) for text in (*expected, "none.json")), (
        messages
    )
    assert len(messages) == 6
    assert (tmp_path / "out/notes.txt").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("out", "expected"),
    [("missing/out", "no such directory"), ("model.safetensors/out", "no such directory")],
)
def test_output_without_parent_directory_is_refused(
    out: str, expected: str, source_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_text("a file", encoding="utf-8")
    error = refused(source_dir, tmp_path, out=tmp_path / out)
    assert expected in str(error)
    assert error.exit_code == RequestError.exit_code


def test_output_inside_source_is_refused(source_dir: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(source_dir, tmp_path / "source"))
    assert "lies in the source" in str(refused(source, tmp_path, out=source / "out"))


def test_unwritable_output_is_refused(source_dir: Path, tmp_path: Path) -> None:
    error = refused(source_dir, tmp_path, out=Path("/proc/out"), work=tmp_path / "w")
    assert "/proc" in str(error)
    assert "cannot be written" in str(error)


def test_leftovers_of_another_conversion_are_refused(source_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    assert "another conversion" in str(refused(source_dir, tmp_path))
    (tmp_path / "out.partial").rmdir()
    (tmp_path / "out.work").mkdir()
    (tmp_path / "out.work/letters").write_text("mine", encoding="utf-8")
    assert "holds something else" in str(refused(source_dir, tmp_path))
    assert "is the output" in str(refused(source_dir, tmp_path, work=tmp_path / "out.partial"))


def test_output_that_blocks_the_final_rename_is_refused(
    source_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the rename would fail after all work is done."""
    link = tmp_path / "link"
    for target in ("nowhere", "empty"):
        link.symlink_to(tmp_path / target)
        assert "exists already" in str(refused(source_dir, tmp_path, out=link))
        link.unlink()
        (tmp_path / "empty").mkdir(exist_ok=True)
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "empty")
    error = refused(source_dir, tmp_path, out=tmp_path / "empty")
    assert "mounted" in str(error)
    assert "directory in it" in str(error)


def test_empty_output_directory_is_accepted(source_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert run(conversion(source_dir, tmp_path)).is_dir()


def test_too_little_disk_or_memory_is_refused(
    source_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", ["total", "used", "free"])
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10, 5, 5000))
    error = refused(source_dir, tmp_path)
    assert isinstance(error, DiskFullError)
    assert "5000 bytes free" in str(error)
    monkeypatch.setattr(preflight, "available_memory_bytes", lambda: 1000)
    both = refused(source_dir, tmp_path)
    assert isinstance(both, ProblemsError)
    assert [type(problem) for problem in both.problems] == [DiskFullError, OutOfMemoryError]
    assert both.exit_code == DiskFullError.exit_code == 6


def test_memory_estimate_is_per_layer_and_disk_estimate_per_model(source_dir: Path) -> None:
    source, config, quantization = open_checkpoint(source_dir)
    checkpoint = Checkpoint(source, config, quantization)

    def needed(options: ConvertOptions, **changes: Any) -> preflight.Space:
        changed = replace(config, **changes)
        return preflight.space_needed(
            changed, checkpoint, options, bits=4.0, rows=4, length=64, writes_rows=True
        )

    few, many = (needed(ConvertOptions(), layers=config.layers[:1] * n) for n in (3, 30))
    assert many.memory == few.memory
    assert many.work > 3 * few.work
    assert (
        needed(ConvertOptions(fast=True), layers=config.layers[:1] * 30).work < many.work
    )  # no tuning
    wide = replace(config.layers[1], feed_forward=Dense(1 << 14, Activation.SILU))
    one_wide = (config.layers[0], wide, config.layers[2])
    assert needed(ConvertOptions(), layers=one_wide).memory > 2 * few.memory


@pytest.fixture
def measured(source_dir: Path, tmp_path: Path) -> Path:
    out = run(conversion(source_dir, tmp_path, out=tmp_path / "first"))
    return out / MEASUREMENT_NAME


def change(path: Path, *keys: Any, to: Any) -> Path:
    content = json.loads(path.read_text(encoding="utf-8"))
    node = content
    for key in keys[:-1]:
        node = node[key]
    if to is None:
        del node[keys[-1]]
    else:
        node[keys[-1]] = to
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


_MATRIX = ("layers", 1, "matrices", 2)


@pytest.mark.parametrize(
    ("keys", "to"),
    first_by_default(
        [
            (("layers",), []),
            (("layers", 0), None),
            (("layers", 0, "matrices"), "none"),
            ((*_MATRIX, "name"), "model.layers.9.mlp.up_proj.weight"),
            ((*_MATRIX, "numel"), 12),
            ((*_MATRIX, "candidates"), []),
            ((*_MATRIX, "candidates", 0, "error"), -1.0),
            ((*_MATRIX, "candidates", 0, "bits"), 5),
            ((*_MATRIX, "candidates", 0, "layout"), "9:100/7"),
            ((*_MATRIX, "candidates", 0, "layout"), 5),
            (("calibration",), None),
        ],
        4,
    ),
)
def test_damaged_measurement_is_refused(
    keys: tuple[Any, ...], to: Any, measured: Path, source_dir: Path, tmp_path: Path
) -> None:
    path = change(measured, *keys, to=to)
    error = refused(source_dir, tmp_path, measurement=path)
    assert "is damaged" in str(error)
    assert str(path) in str(error)
    assert error.exit_code == RequestError.exit_code


def test_file_without_measurement_is_refused(
    measured: Path, source_dir: Path, tmp_path: Path
) -> None:
    path = change(measured, "schema_version", to=9)
    assert "schema_version" in str(refused(source_dir, tmp_path, measurement=path))
    path.write_text("[", encoding="utf-8")
    assert "not valid JSON" in str(refused(source_dir, tmp_path, measurement=path))


def test_measurement_of_another_model_is_refused(measured: Path, tmp_path: Path) -> None:
    other = tiny_models.tiny_llama(
        hidden_size=96, intermediate_size=160, head_dim=32, tie_word_embeddings=True
    )
    source = tiny_models.save(other, tmp_path / "other")
    error = refused(source, tmp_path, measurement=measured)
    assert "another model" in str(error)
    assert error.exit_code == RequestError.exit_code
