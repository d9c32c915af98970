"""`scripts/write_rtn_exl2.py` writes EXL2 models that are close to their sources."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

from exl_core.arch.modules import module_table
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.codecs.exl2 import layout as exl2
from exl_core.session.load import LoadOptions, load_model
from exl_core.session.open import open_checkpoint
from exl_eval.perplexity import PerplexityOptions, measure_perplexity
from support import tiny_models
from support.gguf_models import write_gguf

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/write_rtn_exl2.py"
SHAPE = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
TEXT = (
    "The harbour lies at the mouth of the river, and for most of the year its quays are busy from "
    "early morning until late in the evening. Ships bring grain, timber and machines, and leave "
    "with cloth, glass and fish. When the wind turns north in winter the pilots stay in port, and "
    "the town is so quiet that one can hear the bells of the old church across the water. "
)

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


Run = Callable[..., int]
Summary = Callable[..., dict[str, float]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(model, out, *options)` runs the script in this process and returns its exit code."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    script = importlib.import_module(SCRIPT.stem)

    def main(*args: object) -> int:
        monkeypatch.setattr(sys, "argv", [SCRIPT.name, *map(str, args)])
        return script.main()

    return main


@pytest.fixture
def summary_of(run: Run, capsys: pytest.CaptureFixture[str]) -> Summary:
    """Runs the script, which must succeed, and returns the JSON of its last line."""

    def last_line(*args: object) -> dict[str, float]:
        assert run(*args) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return last_line


def dense(path: Path, name: str) -> torch.Tensor:
    """A matrix [out_features, in_features] or a vector, as float32."""
    source, config, quantization = open_checkpoint(path)
    chunks = Checkpoint(source, config, quantization).chunks(name, torch.float32)
    return torch.cat([chunk.values for chunk in chunks])


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.thorough
@pytest.mark.parametrize("is_tied", [False, True])
def test_directory_model_is_complete_and_close(
    is_tied: bool, tmp_path: Path, summary_of: Summary
) -> None:
    model = tiny_models.tiny_llama(
        **SHAPE, tie_word_embeddings=is_tied, attention_bias=True, mlp_bias=True
    )
    source = tiny_models.save(model, tmp_path / "source")
    (source / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    options = ("--bits", 8, "--head-bits", 6, "--group-size", 64)
    result = summary_of(source, tmp_path / "out", *options)

    tensors = load_file(tmp_path / "out/output.safetensors")
    stored = sum(t.nbytes for name, t in tensors.items() if name.rsplit(".", 1)[-1] in exl2.PARTS)
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    weights = sum(matrix.numel() for matrix in matrices) + (300 * 96 if is_tied else 0)
    assert result["quantized_weights"] == weights
    assert result["bits_per_weight"] == pytest.approx(8 * stored / weights, abs=1e-4)

    loaded = load_model(str(tmp_path / "out"))
    assert not loaded.config.has_tied_embeddings  # the head is stored separately
    for name in (row.name for row in module_table(loaded.config).rows):
        expected = model.get_parameter(EMBED if is_tied and name == HEAD else name).detach()
        bound = 0.03 if name == HEAD else 0.01 if expected.dim() == 2 else 2**-11
        assert relative_error(dense(tmp_path / "out", name), expected) < bound, name
    assert (tmp_path / "out/chat_template.jinja").is_file()
    block = json.loads((tmp_path / "out/config.json").read_text(encoding="utf-8"))
    assert block["quantization_config"]["quant_method"] == "exl2"
    assert (block["quantization_config"]["bits"], block["quantization_config"]["head_bits"]) == (
        8,
        6,
    )


EIGHT = ("--bits", 8, "--head-bits", 8)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "options", "nll_away"),
    [("llama", EIGHT, 0.02), ("gemma3", EIGHT, 0.02), ("llama", (), 0.1)],
    ids=["llama", "gemma3", "llama-defaults"],
)
def test_gguf_becomes_directory_of_the_same_model(
    kind: str, options: tuple[object, ...], nll_away: float, tmp_path: Path, summary_of: Summary
) -> None:
    make = tiny_models.tiny_llama if kind == "llama" else tiny_models.tiny_gemma3
    gguf = write_gguf(make(**SHAPE), tmp_path / "tiny.gguf", GGMLQuantizationType.Q8_0)
    summary_of(gguf, tmp_path / "out", *options)

    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "tokenizer.json", "output.safetensors"} <= files
    tensors = load_file(tmp_path / "out/output.safetensors")
    assert tensors[EMBED].dtype is tensors[FINAL_NORM].dtype is torch.float16
    if kind == "gemma3":  # the format stores one for each head
        assert tensors["model.layers.0.self_attn.q_norm.weight"].shape == (6, 32)
    exact = LoadOptions(exact=True)
    ours, theirs = load_model(str(tmp_path / "out"), exact), load_model(str(gguf), exact)
    assert ours.tokenizer.encode("cab 12") == theirs.tokenizer.encode("cab 12")
    text = PerplexityOptions(ctx=64)
    nll = [measure_perplexity(loaded, TEXT, text).nll for loaded in (ours, theirs)]
    assert nll[0] == pytest.approx(nll[1], abs=nll_away)


@pytest.mark.thorough
def test_smollm2_bit_rate_and_perplexity(
    smollm2_path: Path, tmp_path: Path, summary_of: Summary
) -> None:
    result = summary_of(smollm2_path, tmp_path / "out")
    assert 4.0 < result["bits_per_weight"] <= 4.25
    loaded = [load_model(str(path)) for path in (tmp_path / "out", smollm2_path)]
    ids = [model.tokenizer.encode(TEXT + "Où? 2026 🙂") for model in loaded]
    assert ids[0] == ids[1]
    nll = [measure_perplexity(model, TEXT, PerplexityOptions(ctx=64)).nll for model in loaded]
    assert nll[0] - nll[1] < 0.7  # rounding to nearest adds 0.3 nats on a long text


def test_unstorable_model_is_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny_models.save(tiny_models.tiny_llama(), tmp_path / "odd")  # 72 input features
    assert run(source, tmp_path / "out") != 0
    assert "multiple of 32" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_output_folder_in_use_is_untouched(smollm2_path: Path, tmp_path: Path) -> None:
    """Runs the script as a process."""
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    command = [sys.executable, str(SCRIPT), str(smollm2_path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "in use" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
