"""`scripts/gpu_check.sh` and the scripts that it calls, without a GPU and with a fake peer."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from exl_core.cache.format import KVFormat
from exl_core.session.load import load_model
from exl_core.session.open import open_checkpoint
from exl_eval.workload import Workload

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
KEYS = {"figure", "value", "unit", "peer", "ratio"}


Imported = Callable[[str], ModuleType]
RandomModel = Callable[..., dict[str, Any]]
Lines = Callable[..., tuple[dict[str, dict[str, Any]], list[tuple[str, ...]]]]


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Imported:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


@pytest.fixture
def random_model(
    imported: Imported, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> RandomModel:
    """`random_model(out, *options)` runs the script in this process and returns its last line."""

    def write(out: Path, *options: str) -> dict[str, Any]:
        command = ["random_exl2.py", str(out), "--size", "tiny", *options]
        monkeypatch.setattr(sys, "argv", command)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            assert imported("random_exl2").main() == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return write


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "method", "bits"),
    [
        ((), "exl2", 3.95),
        (("--mix", "3", "--own-orders"), "exl2", 2.5),
        (("--mix", "6:0.5,2:0.5", "--head-bits", "8"), "exl2", 4.0),
        (("--layers", "3", "--repeat-layer"), "exl2", 3.95),
        (("--format", "gptq"), "gptq", 4),
        (("--format", "exl3", "--bits", "2.5"), "exl3", 2.5),
    ],
)
def test_random_models_load_and_run(
    random_model: RandomModel, tmp_path: Path, options: tuple[str, ...], method: str, bits: float
) -> None:
    facts = random_model(tmp_path / "model", *options)
    assert (facts["quant_method"], facts["bits"]) == (method, bits)
    loaded = load_model(str(tmp_path / "model"))
    work = Workload(loaded.model, KVFormat.FP16, tokens=9, batch=2)
    first = work.fill(8)
    assert first[0] != first[1]
    newest = work.step([first[0]] * 2, 8)
    assert newest[0] == newest[1]
    embed = loaded.config.vocab_size * loaded.config.hidden_size * 2
    on_disk = sum(t.size_bytes for t in open_checkpoint(tmp_path / "model")[0].tensors.values())
    assert facts["bytes_read_per_token"] == on_disk - embed


@pytest.mark.thorough
def test_a_folder_in_use_is_untouched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    command = [sys.executable, str(SCRIPTS / "random_exl2.py"), str(tmp_path), "--size", "tiny"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path} is in use" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_matrices_with_one_input_share_the_feature_order(imported: Imported) -> None:
    script = imported("random_exl2")
    writer = script.Exl2Writer([(4, 1.0)], 6, has_own_orders=False)
    parts = [writer.linear(f"{name}_proj", 256, 64, "attention") for name in "qkv"]
    other = writer.linear("o_proj", 256, 64, "mixed")["q_invperm"]
    assert all(torch.equal(parts[0]["q_invperm"], part["q_invperm"]) for part in parts)
    assert not torch.equal(parts[0]["q_invperm"], other)
    apart = script.Exl2Writer([(4, 1.0)], 6, has_own_orders=True)
    orders = [apart.linear(name, 256, 64, "attention")["q_invperm"] for name in "qk"]
    assert not torch.equal(*orders)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_divided_layer_has_the_shapes_of_a_rank(imported: Imported, ranks: int) -> None:
    script = imported("time_divided_linears")
    layouts = script.divided_layouts(script.SIZES["1b"], ranks)
    shapes = {
        name: [(one.in_features, one.out_features) for one in found]
        for name, found in layouts.items()
    }
    own, inner = 2048 // ranks, 8192 // ranks
    assert shapes == {
        "qkv": [(2048, own), (2048, own // 4), (2048, own // 4)],
        "o": [(own, 2048)],
        "o-spread": [(own, 2048)],
        "gate_up": [(2048, inner)] * 2,
        "down": [(inner, 2048)],
    }
    assert all(one.bits in (3, 4, 5) for one in layouts["down"][0].runs)


@pytest.mark.parametrize("mix", ["7:1", "4", "4:x", "4:-1,3:1", ""])
def test_a_malformed_mix_is_refused(imported: Imported, mix: str) -> None:
    with pytest.raises(ValueError):
        imported("random_exl2").parse_mix(mix)


def speed_of(batches: list[int], prompts: list[int], share: float) -> dict[str, Any]:
    facts = {"launches": 7, "floor_share": share, "bytes_per_token": 1000}
    grid = [(prompt, batch) for prompt in prompts for batch in batches]
    runs = [
        {"prompt_tokens": p, "batch": b, "decode_tok_s": 100.0 * b, "prefill_tok_s": 10.0 * p}
        for p, b in grid
    ]
    memory = {"device_working_bytes": 5e8, "device_peak_bytes": 6e9, "weights_bytes": 4e9}
    return {
        "runs": [run | facts for run in runs],
        "load_s": 0.5,
        "read_bytes_per_s": 4e12,
        "floor_share": share,
        "decode_tok_s": 100.0,
        **memory,
    }


@pytest.fixture
def figures(
    imported: Imported, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Lines:
    """`figures(*options)` runs gpu_figures with fake programs. Returns the printed lines by figure,
    and the commands."""
    script = imported("gpu_figures")
    commands: list[tuple[str, ...]] = []

    def run(*arguments: str) -> str:
        commands.append(arguments)
        if arguments[0].endswith("random_exl2.py"):
            return ""
        if arguments[0].endswith("exllamav2_speed.py"):
            rates = {"decode_tok_s": {"1": 50.0, "8": 100.0}, "prefill_tok_s": {"2048": 10240.0}}
            return json.dumps({"load_s": 2.0, **rates})
        if "--kernels" in arguments:
            kernel = {"op": "linear_add_", "shape": "8 -> 8", "share": 0.7, "bytes": 10}
            kernel |= {"seconds": 1e-6, "calls": 4, "launches": 2.0}
            one = {"past_len": 512, "batch": 8, "rows": 8, "seconds": 1e-3, "calls": 4}
            return json.dumps({"passes": [one | {"kernel_seconds": 4e-6, "launches": 9,
                                                 "kernels": [kernel]}]})  # fmt: skip
        at = arguments.index("--batch") + 1 if "--batch" in arguments else None
        batches = [int(n) for n in arguments[at].split(",")] if at else [1]
        prompts = [int(n) for n in arguments[arguments.index("--prefill") + 1].split(",")]
        share = 0.35 if arguments[3].endswith("8b-3") else 0.5
        return "a line\n" + json.dumps(speed_of(batches, prompts, share))

    def lines(*options: str) -> tuple[dict[str, dict[str, Any]], list[tuple[str, ...]]]:
        monkeypatch.setattr(script, "run", run)
        monkeypatch.setattr(script.importlib.util, "find_spec", lambda _name: object())
        monkeypatch.setattr(script.sys, "argv", ["gpu_figures.py", *options])
        assert script.main() == 0
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert all(line.keys() >= KEYS for line in found)
        return {line["figure"]: line for line in found}, commands

    return lines


def test_every_figure_has_the_peers_value_and_the_ratio(figures: Lines, tmp_path: Path) -> None:
    found, commands = figures("--model", str(tmp_path / "some"), "--peer")
    assert {key: found["some decode batch 8"][key] for key in KEYS - {"figure"}} == {
        "value": 800.0,
        "unit": "tok/s",
        "peer": 100.0,
        "ratio": 8.0,
    }
    assert found["some decode batch 8"]["launches"] == 7
    assert found["some decode batch 32"]["ratio"] is None
    assert found["some prefill 2048"]["ratio"] == 2.0
    assert found["some load"]["ratio"] == 4.0  # less is better
    assert found["some device_working memory"]["value"] == 500.0
    assert not any("random_exl2.py" in command[0] for command in commands)


def test_missing_models_are_written_and_existing_ones_reused(
    figures: Lines, tmp_path: Path
) -> None:
    (tmp_path / "1b").mkdir()
    (tmp_path / "1b/config.json").write_text("{}")
    found, commands = figures("--size", "8b,1b", "--work", str(tmp_path), "--mixes", "--long",
                              "--kernels")  # fmt: skip
    written = [c[1:] for c in commands if c[0].endswith("random_exl2.py")]
    assert written[0] == (str(tmp_path / "8b"), "--size", "8b")
    assert [one[3:] for one in written[1:]] == [
        ("--mix", "3"),
        ("--mix", "5"),
        ("--mix", "8"),
        ("--format", "gptq"),
    ]
    assert found["8b 2-3 bits decode batch 1"]["ratio"] == 0.7
    assert found["8b gptq act-order decode batch 1"]["ratio"] == 1.0
    assert found["1b decode after 32000, q4 cache"]["ratio"] == 1.0
    assert found["8b step of 8: linear_add_ 8 -> 8"]["value"] == 0.7


@pytest.mark.thorough
def test_a_failed_measurement_ends_the_run(imported: Imported) -> None:
    with pytest.raises(SystemExit, match="exit status 2 of -m exl_cli sreve"):
        imported("gpu_figures").run("-m", "exl_cli", "sreve")


class PretendPeer:
    """Fake of the parts of exllamav2 that are used. Its next token is the last token plus one."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.calls: list[tuple[int, int, int, int]] = []

    def load(self) -> None: ...

    def forward(
        self, ids: torch.Tensor, cache: PretendCache, last_id_only: bool = False
    ) -> torch.Tensor:
        self.calls.append((cache.batch_size, cache.current_seq_len, ids.shape[1], int(ids[0, -1])))
        cache.current_seq_len += ids.shape[1]
        assert cache.current_seq_len <= cache.max_seq_len <= self.config.max_seq_len
        return torch.nn.functional.one_hot((ids[:, -1:] + 1) % 2000, 2000).float()


class PretendCache:
    def __init__(self, model: Any, batch_size: int = 1, max_seq_len: int = 0) -> None:
        assert batch_size <= model.config.max_batch_size
        self.batch_size, self.max_seq_len, self.current_seq_len = batch_size, max_seq_len, 0


def test_the_peer_runs_the_same_passes(
    imported: Imported, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[PretendPeer] = []

    def make(config: Any) -> PretendPeer:
        made.append(PretendPeer(config))
        return made[-1]

    peer = ModuleType("exllamav2")
    config = {"ExLlamaV2Config": lambda _folder: SimpleNamespace()}
    peer.__dict__.update({"ExLlamaV2": make, "ExLlamaV2Cache": PretendCache, **config})
    version = ModuleType("exllamav2.version")
    version.__dict__["__version__"] = "0.3.2"
    monkeypatch.setitem(sys.modules, "exllamav2", peer)
    monkeypatch.setitem(sys.modules, "exllamav2.version", version)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    options = ("--batch", "2", "--prefill", "24", "--decode", "3", "--depth", "5", "--repeat", "1")
    monkeypatch.setattr(sys, "argv", ["exllamav2_speed.py", "somewhere", *options])
    assert imported("exllamav2_speed").main() == 0
    result = json.loads(capsys.readouterr().out)
    assert result["version"] == "0.3.2"
    assert math.isfinite(result["decode_tok_s"]["2"] + result["prefill_tok_s"]["24"])
    calls = made[0].calls
    assert calls[:5] == [(2, n, 1, 100) for n in range(5)]
    assert calls[5:11] == [(2, 5, 1, 100), (2, 6, 1, 101), (2, 7, 1, 102)] * 2
    assert calls[11:] == [(1, 0, 24, 123)] * 2


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_check_without_a_gpu_fails_with_one_line() -> None:
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        [SCRIPTS / "gpu_check.sh"], capture_output=True, text=True, env=env, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "gpu_check: torch finds no GPU that it can use\n"


def test_gpu_check_help_lists_all_options() -> None:
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        [SCRIPTS / "gpu_check.sh", "--help"], capture_output=True, text=True, env=env, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    for option in ("--no-build", "--no-tests", "--peer", "--kernels", "--model", "--mixes"):
        assert option in done.stdout
