"""Checkpoints whose experts do not fit: one line, exit code 3, and no large allocation before it.

The headers alone tell what is wrong. No tensor is read, and what Python and torch allocate does not
depend on what the file claims.
"""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from exl_core.arch.modules import module_table
from exl_core.errors import ModelError
from exl_core.formats.containers.gguf import GgufSource
from exl_core.formats.containers.safetensors import SafetensorsSource
from exl_core.session import weights
from exl_core.session.load import load_model
from support.commands import Command
from support.gguf_models import write_gguf
from support.mxfp4 import save_as_mxfp4
from support.tiny_hybrids import tiny_kimi_linear, tiny_nemotron_h
from support.tiny_latent import tiny_deepseek3
from support.tiny_models import save, tiny_gpt_oss, tiny_mixtral, tiny_qwen3_moe

LIMIT_BYTES = 4 << 20
"""Bytes that Python may allocate at most, and by which the process may grow: headers, tokenizer and
module table of a tiny model take 2 MiB."""


@pytest.fixture(autouse=True)
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_read(*_: object, **__: object) -> None:
        raise AssertionError("a tensor is read before the headers are compared")

    for source in (SafetensorsSource, GgufSource):
        monkeypatch.setattr(source, "read", no_read)
        monkeypatch.setattr(source, "read_raw", no_read)
    monkeypatch.setattr(weights, "build_weights", no_read)


class Growth:
    """Growth of the process's resident memory, from the peak since the start of the block."""

    def __enter__(self) -> Growth:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
        self._before = self._peak()
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = self._peak() - self._before

    @staticmethod
    def _peak() -> int:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) * 1024


@pytest.fixture
def refuse(exl: Command) -> Callable[[Path], str]:
    """Loads a model that must be refused. Returns the line that the command prints."""

    def run(path: Path) -> str:
        line = exl("generate", "-m", path, "-p", "x").error_line(3)
        module_table.cache_clear()
        with Growth() as growth, pytest.raises(ModelError) as error:
            load_model(str(path))
        tracemalloc.start()
        with pytest.raises(ModelError):
            load_model(str(path))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        print(f"{peak / 2**20:.1f} MiB in Python, {growth.bytes / 2**20:.1f} MiB in all: {line}")
        assert str(error.value) == line
        assert peak < LIMIT_BYTES
        assert growth.bytes < LIMIT_BYTES
        return line

    return run


def change_config(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def qwen3(tmp_path: Path) -> Path:
    return save(tiny_qwen3_moe(), tmp_path / "model")


LAST = "model.layers.3.mlp.experts"


def missing(tmp_path: Path) -> Path:
    name = f"{LAST}.7.down_proj.weight"
    return change_tensors(qwen3(tmp_path), lambda tensors: tensors.pop(name))


def surplus(tmp_path: Path) -> Path:
    def add(tensors: dict[str, Tensor]) -> None:
        for part in ("gate_proj", "up_proj", "down_proj"):
            found = tensors[f"{LAST}.7.{part}.weight"]
            tensors[f"{LAST}.8.{part}.weight"] = found.clone()

    return change_tensors(qwen3(tmp_path), add)


def wide_router(tmp_path: Path) -> Path:
    name = "model.layers.3.mlp.gate.weight"
    wide = torch.zeros(9, 72)
    return change_tensors(qwen3(tmp_path), lambda tensors: tensors.update({name: wide}))


def narrow_router(tmp_path: Path) -> Path:
    """The tensor with all experts has another number of them than the router."""
    folder = save_as_mxfp4(tiny_gpt_oss(), tmp_path / "model")
    name, narrow = "model.layers.2.mlp.router.weight", torch.zeros(5, 96)
    return change_tensors(folder, lambda tensors: tensors.update({name: narrow}))


def greedy_tokens(tmp_path: Path) -> Path:
    return change_config(qwen3(tmp_path), num_experts_per_tok=9)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (missing, f"tensor '{LAST}.7.down_proj.weight' is missing"),
        (surplus, "layer 3 has more experts than the configuration says"),
        (wide_router, "expected [8, 72], got [9, 72]"),
        (narrow_router, "'model.layers.2.mlp.router.weight' has the wrong shape"),
        (greedy_tokens, "each token uses more experts than the model has"),
    ],
)
def test_experts_that_do_not_fit(
    tmp_path: Path, refuse: Callable[[Path], str], damage: Callable[[Path], Path], expected: str
) -> None:
    assert expected in refuse(damage(tmp_path))


CLAIMS: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "qwen3-moe": (tiny_qwen3_moe, {"num_experts": 16384}),
    "qwen3-moe-layers": (tiny_qwen3_moe, {"num_experts": 1024, "num_hidden_layers": 4000}),
    "mixtral": (tiny_mixtral, {"num_local_experts": 16384}),
    "gpt-oss": (tiny_gpt_oss, {"num_local_experts": 16384}),
    "deepseek3": (tiny_deepseek3, {"n_routed_experts": 16384}),
    "nemotron-3-super": (
        lambda: tiny_nemotron_h(moe_latent_size=40),
        {"n_routed_experts": 16384, "num_experts_per_tok": 16384 // 4},
    ),
    "kimi-linear": (tiny_kimi_linear, {"num_experts": 16384}),
}
"""Numbers in `config.json` of a file of less than a megabyte: up to 12 million matrices."""


@pytest.mark.parametrize("name", CLAIMS)
def test_a_configuration_that_claims_many_experts(
    tmp_path: Path, refuse: Callable[[Path], str], name: str
) -> None:
    build, claim = CLAIMS[name]
    folder = change_config(save(build(), tmp_path / "model"), **claim)
    if "num_hidden_layers" in claim:
        change_config(folder, layer_types=None)
    line = refuse(folder)
    assert "has more experts than the weight files can hold" in line
    size = (folder / "model.safetensors").stat().st_size
    needed, found = map(int, re.findall(r"at least (\d+) bytes of tensors, got (\d+)", line)[0])
    assert found <= size < needed


def test_gguf_metadata_that_claim_many_experts(
    tmp_path: Path, refuse: Callable[[Path], str]
) -> None:
    model = tiny_mixtral()
    model.config.num_local_experts = 16384  # in the metadata only; the tensors have 4
    line = refuse(write_gguf(model, tmp_path / "tiny.gguf"))
    assert "has more experts than the weight files can hold" in line


def test_a_stack_whose_header_claims_many_experts(
    tmp_path: Path, refuse: Callable[[Path], str]
) -> None:
    """A header that agrees with the configuration, and not with the file."""
    folder = save(tiny_gpt_oss(), tmp_path / "model")
    change_config(folder, num_local_experts=16384)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name, entry in header.items():
        if ".experts." in name or ".router." in name:
            entry["shape"][0] = 16384
            size = torch.tensor(entry["shape"]).prod().item() * 4
            entry["data_offsets"] = [entry["data_offsets"][0], entry["data_offsets"][0] + size]
    fresh = json.dumps(header).encode()
    path.write_bytes(len(fresh).to_bytes(8, "little") + fresh + data[8 + length :])
    assert "lies outside the file" in refuse(folder)
