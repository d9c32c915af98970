"""`scripts/compare_exllama.py`, `exllamav3_speed.py` and models of `random_family.py`, without a
GPU and with fake peers."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.session.load import load_model
from exl_core.session.open import open_checkpoint
from exl_eval.workload import Workload

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SMALL = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 384}
ROUTED = {"num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
DELTA_NET = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "head_dim": 64}
LATENT = {"kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
FAMILIES = {
    "qwen3-30b-a3b": {"head_dim": 64},
    "qwen3.5-35b-a3b": {**DELTA_NET, "shared_expert_intermediate_size": 128},
    "deepseek-v3-lite": LATENT,
}


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)


def names(folder: Path) -> set[str]:
    return set(open_checkpoint(folder)[0].tensors)


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["exl2", "exl3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_families_load_and_run(
    family: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = importlib.import_module("random_family")
    sizes = script.FAMILIES[family] | SMALL | ROUTED | FAMILIES[family]
    monkeypatch.setitem(script.FAMILIES, family, sizes)
    command = ["random_family.py", str(tmp_path / "model"), family, form, "--layers", "4"]
    monkeypatch.setattr(sys, "argv", command)
    with torch.random.fork_rng():
        assert script.main() == 0
    loaded = load_model(str(tmp_path / "model"))
    work = Workload(loaded.model, KVFormat.FP16, tokens=9, batch=2)
    first = work.fill(8)[0]
    newest = work.step([first, first], 8)
    assert newest[0] == newest[1]
    part = {"exl2": "q_weight", "exl3": "trellis"}[form]
    found = names(tmp_path / "model")
    root = "model.language_model" if family == "qwen3.5-35b-a3b" else "model"
    assert f"{root}.layers.3.mlp.experts.3.up_proj.{part}" in found
    assert f"{root}.layers.3.mlp.gate.weight" in found
    assert f"lm_head.{part}" in found
    assert (f"{root}.layers.0.linear_attn.in_proj_qkv.{part}" in found) == (root != "model")


class PretendModel:
    """Fake of the parts of exllamav3 that are used. Its next token is the last token plus one."""

    def __init__(self, *, is_recurrent: bool) -> None:
        self.is_recurrent = is_recurrent
        self.calls: list[tuple[object, ...]] = []

    def load(self, *places: str, **options: Any) -> None:
        self.calls.append((*places, *options.items()))

    def unload(self) -> None: ...

    def get_recurrent_layers(self) -> list[int]:
        return [0] * self.is_recurrent

    def prefill(self, ids: Tensor, params: dict[str, Any]) -> None:
        self._note("prefill", ids, params)

    def forward(self, ids: Tensor, params: dict[str, Any]) -> Tensor:
        self._note("forward", ids, params)
        return torch.nn.functional.one_hot((ids + 1) % 2000, 2000).float()

    def _note(self, what: str, ids: Tensor, params: dict[str, Any]) -> None:
        batch, span = params["batch_shape"]
        assert (batch, span % 256, params["attn_mode"]) == (len(ids), 0, "flash_attn")
        assert params["past_len"] + ids.shape[1] <= span
        assert batch * span <= params["cache"].max_num_tokens
        for state in params.get("recurrent_states", []):
            assert state.position == params["past_len"]
            state.position += ids.shape[1]
        assert len(params.get("recurrent_states", [])) == batch * self.is_recurrent
        self.calls.append((what, params["past_len"], ids.shape[1], ids[:, -1].tolist()))


class PretendCache:
    def __init__(self, _model: object, max_num_tokens: int, max_batch_size: int) -> None:
        self.max_num_tokens, self.free = max_num_tokens, max_batch_size

    def get_test_state(self, position: int) -> SimpleNamespace:
        self.free -= 1
        assert self.free >= 0
        return SimpleNamespace(position=position, free=self._release)

    def _release(self) -> None:
        self.free += 1


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_the_peer_runs_the_same_passes(
    is_recurrent: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = PretendModel(is_recurrent=is_recurrent)
    peer, version = ModuleType("exllamav3"), ModuleType("exllamav3.version")
    config = SimpleNamespace(from_directory=lambda folder: folder)
    made = SimpleNamespace(from_config=lambda _config: model)
    peer.__dict__.update({"Config": config, "Model": made, "Cache": PretendCache})
    version.__dict__["__version__"] = "1.6.5"
    monkeypatch.setitem(sys.modules, "exllamav3", peer)
    monkeypatch.setitem(sys.modules, "exllamav3.version", version)
    monkeypatch.delitem(sys.modules, "exllamav3_speed", raising=False)  # it has another peer
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    options = ("--batch", "2", "--prefill", "24", "--decode", "3", "--depth", "5", "--repeat", "1")
    monkeypatch.setattr(sys, "argv", ["exllamav3_speed.py", "somewhere", *options])
    assert importlib.import_module("exllamav3_speed").main() == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["version"], result["facts"]) == ("1.6.5", {"different_tokens": {"2": 2}})
    assert math.isfinite(result["decode_tok_s"]["2"] + result["prefill_tok_s"]["24"])
    assert model.calls[1:3] == [("prefill", 0, 24, [123])] * 2
    steps = [("forward", 5 + i, 1, [105 + i, 106 + i]) for i in range(3)]
    assert model.calls[3:] == [("prefill", 0, 5, [104, 104]), *steps, *steps]


def test_lines_have_ratios_and_a_failed_peer_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = importlib.import_module("compare_exllama")
    for name, method in (("three", "exl3"), ("two", "exl2")):
        (tmp_path / name).mkdir()
        config = json.dumps({"quantization_config": {"quant_method": method}})
        (tmp_path / name / "config.json").write_text(config, encoding="utf-8")
    rates = {"decode_tok_s": {"1": 50.0, "8": 100.0}, "prefill_tok_s": {"64": 10240.0}}

    def run(command: list[str], **_options: object) -> SimpleNamespace:
        if command[1].endswith("exllamav2_speed.py"):
            return SimpleNamespace(returncode=1, stdout="", stderr="a line\nno GPU\n")
        if command[1].endswith("exllamav3_speed.py"):
            return SimpleNamespace(returncode=0, stdout=json.dumps({"load_s": 2.0, **rates}))
        assert "--own" in command
        own = {"decode batch 1": 200.0, "decode batch 8": 200.0, "prefill 64": 20480.0}
        text = json.dumps({"rates": {**own, "load": 2.0}, "facts": {}})
        return SimpleNamespace(returncode=0, stdout=f"a line\n{text}\n")

    monkeypatch.setattr(script, "subprocess", SimpleNamespace(run=run))
    models = [str(tmp_path / "three"), str(tmp_path / "two")]
    monkeypatch.setattr(sys, "argv", ["compare_exllama.py", *models, "--batch", "1,8"])
    assert script.main() == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert next(line for line in lines if "error" in line)["error"] == "no GPU"
    ratios = {(one["model"], one["figure"]): one["ratio"] for one in lines if "ratio" in one}
    expected = {"decode batch 1": 4.0, "decode batch 8": 2.0, "prefill 64": 2.0, "load": 1.0}
    assert ratios == {
        (model, figure): ratio
        for model in ("three", "best of each")
        for figure, ratio in expected.items()
    }


@pytest.mark.thorough
def test_own_rates_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, options = str(tmp_path / "model"), ("--size", "tiny", "--format", "exl3")
    monkeypatch.setattr(sys, "argv", ["random_exl2.py", model, *options])
    assert importlib.import_module("random_exl2").main() == 0
    steps = ("--batch", "1,3", "--prefill", "16", "--decode", "2", "--depth", "4", "--repeat", "1")
    command = ["compare_exllama.py", model, "--own", "--device", "cpu", *steps]
    monkeypatch.setattr(sys, "argv", command)
    assert importlib.import_module("compare_exllama").main() == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["rates"].keys() == {"decode batch 1", "decode batch 3", "prefill 16", "load"}
    assert 1 <= found["facts"]["different_tokens"]["3"] <= 3
