"""`exl eval divergence` and `exl eval compare`: options, tables and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from exl_core.session.load import LoadedModel
from exl_core.session.open import ModelFiles
from support import tiny_models
from support.commands import Command, Outcome

TEXT = "The quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture(scope="module")
def near_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with weights rounded to bfloat16."""
    model = tiny_models.tiny_llama(max_position_embeddings=512)
    tiny_models.converted(model, torch.bfloat16)
    return tiny_models.save(model, tmp_path_factory.mktemp("near"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def divergence(exl: Command, tiny_llama_dir: Path, near_dir: Path, text: Path) -> Command:
    """`divergence(*args)` of the rounded model from the tiny one, in windows of 64 tokens."""
    args = ("--reference", tiny_llama_dir, "--text", text, "--ctx", 64)
    return lambda *more: exl("eval", "divergence", near_dir, *args, *more)


def test_json_has_the_figures_under_their_names(
    divergence: Command, tiny_llama_dir: Path, near_dir: Path
) -> None:
    done = divergence("--windows", 3, "--json")
    assert (done.code, done.err) == (0, "")
    result = json.loads(done.out)
    assert {"mean", "stderr", "median", "p99", "max"} <= set(result["kld"])
    assert 0 < result["kld"]["median"] < result["kld"]["p99"] <= result["kld"]["max"] < 0.1
    assert 0.9 < result["same_top"] <= 1
    assert {"mean", "rms", "p1", "p99"} <= set(result["delta_p"])
    assert abs(result["ln_ppl_ratio"]) < 0.1
    assert sum(band["tokens"] for band in result["by_confidence"]) == result["tokens"] == 3 * 63
    assert result["direction"] == "KL(reference || candidate)"
    assert (result["model"], result["reference"]) == (near_dir.name, tiny_llama_dir.name)


def test_table_has_the_figures_of_json(divergence: Command) -> None:
    result = json.loads(divergence("--json").out)
    page = divergence().out
    assert f"{result['kld']['mean']:.6f} ± {result['kld']['stderr']:.6f} nats" in page
    assert "KL(reference || candidate)" in page
    assert f"{result['same_top']:.3%}" in page
    assert result["text_sha256"] in page


def test_reverse_divergence_differs(
    exl: Command, divergence: Command, tiny_llama_dir: Path, near_dir: Path, text: Path
) -> None:
    forth = json.loads(divergence("--json").out)
    args = ("--reference", near_dir, "--text", text, "--ctx", 64, "--json")
    back = json.loads(exl("eval", "divergence", tiny_llama_dir, *args).out)
    assert back["kld"]["mean"] != forth["kld"]["mean"]
    assert back["ln_ppl_ratio"] == pytest.approx(-forth["ln_ppl_ratio"])


def test_cached_reference_is_not_loaded_again(
    divergence: Command,
    tiny_llama_dir: Path,
    near_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from exl_core.session import load

    kept = tmp_path / "reference"
    live = json.loads(divergence("--json").out)
    loads: list[ModelFiles] = []
    original = load.load_model

    def counting(files: ModelFiles, *rest: Any) -> LoadedModel:
        loads.append(files)
        return original(files, *rest)

    monkeypatch.setattr("exl_cli.load.load_model", counting)
    first = json.loads(divergence("--cache-reference", kept, "--json").out)
    assert [files.path for files in loads] == [tiny_llama_dir, near_dir]
    again = json.loads(divergence("--cache-reference", kept, "--json").out)
    assert [files.path for files in loads] == [tiny_llama_dir, near_dir, near_dir]
    assert first["kld"] == again["kld"]
    assert first["kld"]["mean"] == pytest.approx(live["kld"]["mean"], rel=1e-3, abs=1e-6)
    assert "which adds an error of" in divergence("--cache-reference", kept).out
    assert "ctx differs" in divergence("--cache-reference", kept, "--ctx", 32).error_line(2)


def test_different_tokenizer_is_refused_before_loading(
    exl: Command,
    tiny_llama_dir: Path,
    smollm2_path: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("exl_cli.load.load_model", None)
    args = ("--reference", smollm2_path, "--text", text, "--ctx", 64)
    line = exl("eval", "divergence", tiny_llama_dir, *args).error_line(2)
    assert "different tokenizers" in line
    assert "bits per byte" in line


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--ctx", 512), "shorter than one window"),
        (("--windows", 100), "fewer windows"),
        (("--bos", "sometimes"), "sometimes"),
    ],
)
def test_invalid_options(args: tuple[object, ...], expected: str, divergence: Command) -> None:
    assert expected in divergence(*args).error_line(2)


def test_damaged_reference_file_is_not_overwritten(divergence: Command, tmp_path: Path) -> None:
    kept = tmp_path / "reference"
    kept.write_text("text")
    assert "holds no windows" in divergence("--cache-reference", kept).error_line(2)
    assert kept.read_text() == "text"


def record(done: Outcome, path: Path) -> Path:
    assert done.code == 0, done.err
    path.write_text(done.out, encoding="utf-8")
    return path


def test_comparable_records(
    exl: Command, tiny_llama_dir: Path, near_dir: Path, text: Path, tmp_path: Path
) -> None:
    args = ("--text", text, "--ctx", 64, "--json")
    a = record(exl("eval", "perplexity", tiny_llama_dir, *args), tmp_path / "a.json")
    b = record(exl("eval", "perplexity", near_dir, *args), tmp_path / "b.json")
    found = json.loads(exl("eval", "compare", a, b, "--json").out)
    assert found["is_comparable"] is True
    nll = found["differences"][0]
    assert (nll["figure"], nll["is_paired"]) == ("nll", True)
    assert nll["difference"] == pytest.approx(nll["a"] - nll["b"])
    page = exl("eval", "compare", a, b).out
    assert "comparable   yes" in page
    assert "paired" in page


def test_incomparable_records(
    exl: Command, divergence: Command, tiny_llama_dir: Path, text: Path, tmp_path: Path
) -> None:
    run = ("eval", "perplexity", tiny_llama_dir, "--text", text, "--json")
    a = record(exl(*run, "--ctx", 64), tmp_path / "a.json")
    b = record(exl(*run, "--ctx", 64, "--style", "llama.cpp"), tmp_path / "b.json")
    done = exl("eval", "compare", a, b)
    assert (done.code, "comparable   no" in done.out) == (0, True)
    assert "another way of cutting and scoring" in done.out
    c = record(divergence("--json"), tmp_path / "c.json")
    assert "different measurements" in exl("eval", "compare", a, c).error_line(2)
    text_file = tmp_path / "text.txt"
    assert "is not valid JSON" in exl("eval", "compare", a, text_file).error_line(2)
    assert "missing.json" in exl("eval", "compare", a, tmp_path / "missing.json").error_line(2)
