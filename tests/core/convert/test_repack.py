"""Copies with unchanged tensors: other sizes of weight files, and pickles as safetensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from exl_core.convert.repack import repack
from exl_core.convert.unpickle import pickle_files, unpickle
from exl_core.errors import ModelError, ModelNotFoundError, RequestError, UnsupportedModelError
from exl_core.formats.containers.safetensors import SafetensorsSource
from support.quantized_models import quantized_llama
from support.tiny_models import save, tiny_llama

BIG = 1 << 30


def tensors_of(folder: Path) -> dict[str, Tensor]:
    source = SafetensorsSource(folder)
    return {name: source.read_raw(name).clone() for name in source.tensors}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype is theirs[name].dtype
        assert tensor.shape == theirs[name].shape
        as_bytes = (one.reshape(-1).view(torch.uint8) for one in (tensor, theirs[name]))
        assert torch.equal(*as_bytes), name


@pytest.mark.parametrize("method", ["exl2", "fp8"])
def test_splitting_and_joining_keep_every_tensor(tmp_path: Path, method: str) -> None:
    source = quantized_llama(method, tmp_path / "source")
    count = repack(source, tmp_path / "split", 80_000)
    assert count == len(list((tmp_path / "split").glob("*.safetensors"))) > 1
    assert repack(tmp_path / "split", tmp_path / "joined", BIG) == 1
    for folder in ("split", "joined"):
        assert_same(tensors_of(tmp_path / folder), tensors_of(source))
        ours = (tmp_path / folder / "config.json").read_bytes()
        assert ours == (source / "config.json").read_bytes()
    assert not list(tmp_path.glob("*.partial"))


def test_an_existing_output_or_a_tensor_larger_than_a_file_is_refused(tmp_path: Path) -> None:
    source = save(tiny_llama(), tmp_path / "source")
    with pytest.raises(RequestError, match="exists already"):
        repack(source, source, BIG)
    with pytest.raises(RequestError, match="is larger than a shard may be"):
        repack(source, tmp_path / "out", 100)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    with pytest.raises(RequestError, match="is no model directory"):
        repack(tmp_path / "nothing", tmp_path / "out", BIG)


def as_pickles(source: Path, target: Path, names: list[str], **options: Any) -> dict[str, Tensor]:
    """Writes the model's tensors as pickles, spread over `names`. Returns the tensors."""
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    for i, name in enumerate(names):
        part = {key: tensors[key] for key in list(tensors)[i :: len(names)]}
        torch.save(part, target / name, **options)
    return tensors


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
def test_pickles_become_safetensors(tmp_path: Path, is_zip: bool) -> None:
    source = save(tiny_llama(), tmp_path / "source")
    names = ["pytorch_model-1.bin", "pytorch_model-2.bin"]
    tensors = as_pickles(source, tmp_path / "bin", names, _use_new_zipfile_serialization=is_zip)
    torch.save({}, tmp_path / "bin/training_args.bin")  # of a trainer, not read
    assert repack(tmp_path / "bin", tmp_path / "out", BIG, from_bin=True) == 1
    assert_same(tensors_of(tmp_path / "out"), tensors)
    assert not list((tmp_path / "out").glob("*.bin"))


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_runs_code_is_refused_and_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    torch.save({"a": Malicious(tmp_path / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="holds more than tensors") as caught:
        repack(folder, tmp_path / "out", BIG, from_bin=True)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (["a"], "is no table of tensors"),
        ({"a": 1}, "entry 'a' is no tensor"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, "tensor 'a' has a type that safetensors"),
        (b"", "cannot be read"),
        (b"no pickle", "holds more than tensors, or is no pickle|cannot be read"),
    ],
    ids=["list", "number", "complex", "empty", "text"],
)
def test_other_content_is_refused(tmp_path: Path, content: object, message: str) -> None:
    if isinstance(content, bytes):
        (tmp_path / "model.bin").write_bytes(content)
    else:
        torch.save(content, tmp_path / "model.bin")
    with pytest.raises(ModelError, match=message):
        unpickle(tmp_path, tmp_path / "out", BIG)


def test_files_of_an_index_are_the_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no pickled weights"):
        pickle_files(tmp_path)
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "x.bin"}}')
    assert pickle_files(tmp_path) == [tmp_path / "x.bin"]
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "../x.bin"}}')
    with pytest.raises(ModelError, match="is not a weight index"):
        pickle_files(tmp_path)
