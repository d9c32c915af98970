"""`scripts/compare_exl3.py`: lines of a whole run, and what the other quantizers are given."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from exl_core.convert import trellis
from exl_core.engine.score import score_tokens
from exl_core.session.load import load_model
from support import tiny_models
from support.gguf_models import write_gguf
from support.quick_rings import QuickRings

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SIZES = {
    **{"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 4},
}
"""Sizes that EXL3 does not pad."""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("compare_exl3")


@pytest.fixture
def peers(script: ModuleType) -> ModuleType:
    return importlib.import_module("quantizer_peers")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The pilots stay in port when the wind turns north. " * 4, encoding="utf-8")
    return path


@pytest.mark.thorough
def test_a_run_compares_two_formats_and_goes_on(
    script: ModuleType,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(trellis, "open_rings", lambda _: QuickRings())
    source = tiny_models.save(tiny_models.tiny_llama(**SIZES), tmp_path / "source")
    sizes = ("--windows", 2, "--ctx", 64, "--rows", 2, "--length", 64)
    options = ("--device", "cpu", "--rates", "3.0,4.0", "--exl2", "--work", tmp_path / "work")
    words = ["compare_exl3.py", source, text, *sizes, *options]
    monkeypatch.setattr(script.sys, "argv", [str(word) for word in words])

    def run() -> dict[str, dict[str, Any]]:
        assert script.main() == 0
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return {line.pop("result"): line for line in found}

    first = run()
    assert list(first) == ["calibration rows", "exl3 3", "exl3 4", "exl2 3", "exl2 4"]
    assert first.pop("calibration rows")["tokens"] == 128
    for name, line in first.items():
        asked = float(name.split()[1])
        assert asked - 0.1 < line["bits"] < asked + 0.01  # the codebook's marker is not planned
        assert line["tokens"] == 2 * 63
        assert 0 < line["kl_stderr"] < line["kl"]
        # The first conversion to a format measures, the second takes its measurement.
        assert ("measure" in line["stages"]) == name.endswith("3")
        assert line["seconds"] >= max(line["stages"].values())
    for kind in ("exl3", "exl2"):
        assert first[f"{kind} 4"]["kl"] < first[f"{kind} 3"]["kl"]

    again = run()
    kept = {name: {**line} for name, line in first.items()}
    for line in kept.values():
        del line["seconds"], line["stages"]
    assert again == kept


def test_a_failed_result_is_a_line_with_an_error(
    script: ModuleType, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    source = tiny_models.save(tiny_models.tiny_llama(**SIZES), tmp_path / "source")
    words = ["compare_exl3.py", source, text, "--device", "cpu", "--rates", 99, "--windows", 1]
    words += ["--ctx", 64, "--rows", 1, "--length", 16]
    monkeypatch.setattr(script.sys, "argv", [str(word) for word in words])
    assert script.main() == 1
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["result"] == "exl3 99"
    assert "cannot have so many bits" in line["error"]


def test_a_missing_peer_is_one_line_before_any_work(
    script: ModuleType,
    peers: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nModuleNotFoundError: no ninja\n")
    monkeypatch.setattr(peers.subprocess, "run", lambda *_, **__: failed)
    for option in (["--exllamav3"], ["--load-in-exllamav3"], ["--llama", "Q2_K"]):
        monkeypatch.setattr(sys, "argv", ["compare_exl3.py", "no-model", "no-text", *option])
        assert script.main() == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        assert "no ninja" in line


def test_safetensors_of_a_gguf_file_are_the_same_model(peers: ModuleType, tmp_path: Path) -> None:
    model = tiny_models.tiny_gemma3()  # its norms are stored less 1
    path = write_gguf(model, tmp_path / "tiny.gguf", GGMLQuantizationType.F16)
    folder = peers.write_safetensors(path, tmp_path / "written")
    assert (folder / "tokenizer.json").is_file()
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    ids = range(3, 67)
    own, written = (
        score_tokens(load_model(one, device="cpu").model, ids) for one in (path, folder)
    )
    torch.testing.assert_close(written, own, rtol=0, atol=2e-2)  # norms are rounded to float16


def test_matrices_with_one_input_have_one_importance(peers: ModuleType, tmp_path: Path) -> None:
    model = tiny_models.tiny_llama(**SIZES)
    path = write_gguf(model, tmp_path / "tiny.gguf", GGMLQuantizationType.F16)
    ids = torch.arange(3, 67).view(2, 32)
    found = peers.importance_matrix(path, ids, "cpu")
    assert set(found) == {
        f"blk.0.{name}.weight"
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    }
    torch.testing.assert_close(found["blk.0.attn_q.weight"], found["blk.0.attn_v.weight"])
    with torch.no_grad():
        states = model.model.embed_tokens(ids)
        expected = model.model.layers[0].input_layernorm(states).square().mean((0, 1))
    torch.testing.assert_close(found["blk.0.attn_q.weight"], expected, rtol=2e-2, atol=1e-4)
