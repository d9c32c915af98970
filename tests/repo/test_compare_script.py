"""`scripts/compare_llama_cpp.py`: order of measurements and derived figures, with a fake peer."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from support import tiny_models
from support.gguf_models import write_gguf

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("compare_llama_cpp")


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    model = tiny_models.tiny_llama(hidden_size=96, intermediate_size=128, head_dim=32)
    return write_gguf(model, tmp_path / "tiny.gguf", GGMLQuantizationType.Q8_0)


def test_a_missing_peer_is_an_error_with_the_install_command(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(script.sys, "argv", ["compare_llama_cpp.py"])
    monkeypatch.setattr(script.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert script.main() != 0
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "pip install llama-cpp-python" in line


def test_programs_alternate_and_medians_are_compared(
    script: ModuleType,
    tiny_gguf: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[str] = []
    peer_rates, own_rates = iter([90, 100, 500] * 2), iter([150, 1, 200] * 2)

    def run(*command: str, python: str = sys.executable) -> str:
        calls.append(command[1])
        if command[0] == "write_rtn_exl2.py":
            return 'a line\n{"bits_per_weight": 4.1}\n'
        if command[1] == "requantize":
            tiny_gguf.with_name("q4_0.gguf").write_bytes(b"")
            Path(command[3]).symlink_to(tiny_gguf)
            return ""
        if command[1] == "speed":
            rate: float = next(peer_rates)
            facts: dict[str, Any] = {"version": "1", "features": "AVX"}
        else:
            rate, facts = next(own_rates), {"instruction_set": "avx2", "read_bytes_per_s": 1e6}
            facts |= {"bytes_per_token": 1100, "decode_weight_bytes": 1000}
        return json.dumps({"prefill_tok_s": 2 * rate, "decode_tok_s": rate, **facts})

    monkeypatch.setattr(script, "run", run)
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda _name: object())
    monkeypatch.setattr(script.sys, "argv", ["compare_llama_cpp.py", "-m", str(tiny_gguf)])
    assert script.main() == 0

    assert calls[2:] == ["speed", "exl_cli"] * 6
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    first, _ = summary["cases"]
    assert first["llama_cpp"]["decode_tok_s"] == 100
    assert first["llama_cpp"]["decode_tok_s_rounds"] in ([90, 500, 100], [90, 100, 500])
    assert first["exl"]["bytes_per_token"] == 1100
    assert first["exl"]["floor_tok_s"] == pytest.approx(1e6 / 1100)
    for case in summary["cases"]:
        for side in ("llama_cpp", "exl"):
            figures = case[side]
            share = figures["decode_tok_s"] / figures["floor_tok_s"]
            assert figures["floor_share"] == pytest.approx(share)
        ratio = case["exl"]["prefill_tok_s"] / case["llama_cpp"]["prefill_tok_s"]
        assert case["ratios"]["prefill"] == pytest.approx(ratio)


def test_an_untied_embedding_is_not_counted_as_read(
    script: ModuleType, tiny_gguf: Path, tmp_path: Path
) -> None:
    shape = {"hidden_size": 96, "intermediate_size": 128, "head_dim": 32}
    tied = write_gguf(
        tiny_models.tiny_llama(**shape, tie_word_embeddings=True),
        tmp_path / "tied.gguf",
        GGMLQuantizationType.Q8_0,
    )
    assert script.gguf_decode_bytes(tied) == script.gguf_decode_bytes(tiny_gguf)


def test_a_failed_measurement_shows_the_last_line(script: ModuleType) -> None:
    with pytest.raises(script.ExlError, match=r"exit code 2: exl: error: .*sreve"):
        script.run("-m", "exl_cli", "sreve")
