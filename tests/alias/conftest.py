"""Fixtures that run programs written for exllamav2 on a tiny model, in this process."""

from __future__ import annotations

import importlib
import json
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from alias.originals import rename_tokens
from exl_exllamav2 import environment, notices
from exl_exllamav2.activation import SHADOW
from support import tiny_models
from support.real_models import smollm2_gguf

PROGRAMS = Path(__file__).parent / "programs"

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 1,024 positions with a byte tokenizer. A GPU takes it. Read-only."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_models.save(tiny_models.tiny_llama(max_position_embeddings=1024, head_dim=32), folder)
    (folder / "tokenizer_config.json").write_text(
        '{"bos_token": "<s>", "eos_token": "</s>"}', encoding="utf-8"
    )
    return folder


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch, tiny_dir: Path) -> Iterator[Any]:
    """The module `exllamav2`; every model path means the tiny model. Forgotten after the test."""
    monkeypatch.syspath_prepend(str(SHADOW))
    monkeypatch.setenv("EXL_ALIAS_MODELS", json.dumps({"*": str(tiny_dir)}))
    assert environment.model_paths() == {"*": str(tiny_dir)}
    notices.forget_warnings()
    yield importlib.import_module("exllamav2")
    for name in [name for name in sys.modules if name.split(".")[0] == "exllamav2"]:
        del sys.modules[name]


@pytest.fixture
def run_program(old: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run_program("name", *args)` runs a file of `programs/`; returns its global variables."""

    def run(name: str, *args: str) -> dict[str, Any]:
        path = PROGRAMS / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *args])
        return runpy.run_path(str(path), run_name="__main__")

    return run


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as an EXL2 directory."""
    folder = tmp_path_factory.mktemp("exl2") / "model"
    script = Path(__file__).parents[2] / "scripts" / "write_rtn_exl2.py"
    command = [sys.executable, str(script), str(smollm2_gguf()), str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def llama3_dir(model_dir: Path) -> Path:
    """The same model with the special tokens of Llama 3."""
    folder = model_dir.with_name("llama3")
    shutil.copytree(model_dir, folder)
    rename_tokens(folder)
    return folder


@pytest.fixture(scope="session")
def brief_dir(model_dir: Path) -> Path:
    """The same model with the full stop as its end token: replies of programs without a limit of
    tokens end after a sentence."""
    return _with_end_token(model_dir, "brief", ".")


@pytest.fixture(scope="session")
def endless_dir(model_dir: Path) -> Path:
    """The same model with an end token that it never writes."""
    return _with_end_token(model_dir, "endless", "<jupyter_script>")


@pytest.fixture(scope="session")
def llama3_chat_dir(model_dir: Path) -> Path:
    """The same model with tokens of Llama 3, and its own end token as <|eot_id|>."""
    folder = model_dir.with_name("llama3-chat")
    shutil.copytree(model_dir, folder)
    rename_tokens(folder, end="<|im_end|>")
    return folder


def _with_end_token(model_dir: Path, name: str, token: str) -> Path:
    folder = model_dir.with_name(name)
    shutil.copytree(model_dir, folder)
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    token_id = vocabulary["model"]["vocab"][token]
    for file, key, value in (
        ("config.json", "eos_token_id", [token_id]),
        ("generation_config.json", "eos_token_id", [token_id]),
        ("tokenizer_config.json", "eos_token", token),
    ):
        found = json.loads((folder / file).read_text(encoding="utf-8"))
        (folder / file).write_text(json.dumps({**found, key: value}), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def lora_dir(model_dir: Path) -> Path:
    """A random adapter of rank 8 for this model."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    hidden, head = config["hidden_size"], config["head_dim"]
    rows = {"q_proj": config["num_attention_heads"], "v_proj": config["num_key_value_heads"]}
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, heads in rows.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(8, hidden, generator=generator) / 20
            tensors[f"{stem}.lora_B.weight"] = (
                torch.randn(heads * head, 8, generator=generator) / 20
            )
    folder = model_dir.with_name("lora")
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": list(rows)}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
