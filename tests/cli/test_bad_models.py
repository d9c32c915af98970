"""Damaged, incomplete and missing models: a one-line error, exit code 3, no output."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken

from support import tiny_models
from support.commands import Command
from support.profiles import first_by_default

MODEL_FILE = "model.safetensors"
BROKEN_TENSOR = "model.layers.1.mlp.down_proj.weight"

LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    b"size 269060552\n"
)

Damage = Callable[[Path], None]


def rewrite_header(path: Path, change: Callable[[dict[str, dict[str, object]]], None]) -> None:
    """Change the JSON header of a safetensors file and leave the data alone."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    fresh = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(fresh)) + fresh + data[8 + length :])


def rewrite_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def cut_header(folder: Path) -> None:
    path = folder / MODEL_FILE
    path.write_bytes(path.read_bytes()[:100])


def cut_to_nothing(folder: Path) -> None:
    (folder / MODEL_FILE).write_bytes(b"")


def cut_data(folder: Path) -> None:
    path = folder / MODEL_FILE
    path.write_bytes(path.read_bytes()[:-1000])


def move_tensor_outside(folder: Path) -> None:
    def change(header: dict[str, dict[str, Any]]) -> None:
        start, end = header[BROKEN_TENSOR]["data_offsets"]
        header[BROKEN_TENSOR]["data_offsets"] = [start + 10**9, end + 10**9]

    rewrite_header(folder / MODEL_FILE, change)


def change_shape(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[BROKEN_TENSOR] = tensors[BROKEN_TENSOR][:-8].contiguous()

    rewrite_tensors(folder / MODEL_FILE, change)


def drop_tensor(folder: Path) -> None:
    rewrite_tensors(folder / MODEL_FILE, lambda tensors: tensors.pop(BROKEN_TENSOR))


def put_nan(folder: Path) -> None:
    rewrite_tensors(
        folder / MODEL_FILE, lambda tensors: tensors[BROKEN_TENSOR][3].fill_(float("nan"))
    )


def grow_tokenizer(folder: Path) -> None:
    tokenizer = tiny_models.byte_tokenizer()
    tokenizer.add_tokens([AddedToken(f"<extra{number}>") for number in range(100)])
    tokenizer.save(str(folder / "tokenizer.json"))


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def break_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": ', encoding="utf-8")


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{", encoding="utf-8")


def rename_architecture(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["architectures"] = ["MysteryForCausalLM"]
    config["model_type"] = "mystery"
    path.write_text(json.dumps(config), encoding="utf-8")


def only_pickles(folder: Path) -> None:
    (folder / MODEL_FILE).rename(folder / "pytorch_model.bin")


def remove_everything(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (cut_header, [MODEL_FILE]),
        (cut_to_nothing, [MODEL_FILE]),
        (cut_data, [MODEL_FILE]),
        (move_tensor_outside, [MODEL_FILE, BROKEN_TENSOR]),
        (change_shape, [BROKEN_TENSOR, "72", "64"]),
        (drop_tensor, [BROKEN_TENSOR]),
        (put_nan, [BROKEN_TENSOR]),
        (grow_tokenizer, ["tokenizer", "300", "359"]),
        (remove_tokenizer, ["tokenizer"]),
        (break_tokenizer, ["tokenizer.json"]),
        (remove_config, ["config.json"]),
        (break_config, ["config.json"]),
        (rename_architecture, ["MysteryForCausalLM", "LlamaForCausalLM"]),
        (only_pickles, ["pytorch_model.bin", "exl convert --from-bin"]),
        (remove_everything, ["model"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_damaged_directory(
    damage: Damage, expected: list[str], damaged_dir: Path, exl: Command
) -> None:
    damage(damaged_dir)
    line = exl("generate", "-m", damaged_dir, "-p", "Hello", "-n", 4).error_line(3)
    assert str(damaged_dir) in line
    missing = [text for text in expected if text not in line]
    assert not missing, line


@pytest.mark.parametrize("name", [MODEL_FILE, "tokenizer.json", "config.json"])
def test_git_lfs_pointer_in_a_directory(name: str, damaged_dir: Path, exl: Command) -> None:
    (damaged_dir / name).write_bytes(LFS_POINTER)
    for args in (("generate", "-p", "Hello"), ("inspect", "model")):
        line = exl(*args, "-m", damaged_dir).error_line(3)
        assert f"{damaged_dir / name}: is a Git LFS pointer, not the file itself" in line
        assert line.endswith(
            "Run 'git lfs pull' in its folder, or download the model with 'exl pull'."
        )


@pytest.mark.parametrize(
    "verb", [("generate", "-p", "x"), ("chat",), ("inspect", "model")], ids=lambda v: v[0]
)
def test_missing_path(verb: tuple[str, ...], tmp_path: Path, exl: Command) -> None:
    missing = tmp_path / "no-such-model"
    line = exl(*verb, "-m", missing, stdin=b"Hello\n").error_line(3)
    assert str(missing) in line


def test_missing_path_is_reported_before_torch_is_imported(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from exl_cli.main import main\n"
        "assert main(['generate', '-p', 'x', '-m', sys.argv[1]]) == 3\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "no-such-model")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_file_that_is_not_a_model(tmp_path: Path, exl: Command) -> None:
    path = tmp_path / "model.txt"
    path.write_text("Hello", encoding="utf-8")
    assert ".gguf" in exl("generate", path, "-p", "x").error_line(3)


@pytest.mark.parametrize("share", first_by_default([0.5, 0.0, 0.000_000_1, 0.001, 0.999_99]))
def test_truncated_gguf(share: float, smollm2_path: Path, tmp_path: Path, exl: Command) -> None:
    path = tmp_path / "cut.gguf"
    size = smollm2_path.stat().st_size
    with smollm2_path.open("rb") as whole:
        path.write_bytes(whole.read(int(size * share)))
    line = exl("generate", path, "-p", "Hello").error_line(3)
    assert str(path) in line


def test_git_lfs_pointer_in_place_of_a_gguf_file(tmp_path: Path, exl: Command) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(LFS_POINTER)
    line = exl("generate", path, "-p", "Hello").error_line(3)
    assert f"{path}: is a Git LFS pointer, not the file itself. Run 'git lfs pull'" in line


def test_gguf_name_with_other_content(tmp_path: Path, exl: Command) -> None:
    path = tmp_path / "picture.gguf"
    path.write_bytes(bytes(range(256)) * 100)
    assert str(path) in exl("generate", path, "-p", "Hello").error_line(3)


def test_inspect_refuses_a_damaged_header(damaged_dir: Path, exl: Command) -> None:
    cut_header(damaged_dir)
    assert MODEL_FILE in exl("inspect", "model", damaged_dir, "--json").error_line(3)
