"""Tensors of an adapter: located, paired and checked from the header, then read one by one."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from exl_core.arch.layers import GatedDeltaNet
from exl_core.arch.modules import LoraTarget, ModuleTable, module_table
from exl_core.arch.spec import ModelConfig
from exl_core.cache.memory import available_memory_bytes
from exl_core.errors import AdapterError, OutOfMemoryError
from exl_core.files import is_present
from exl_core.formats.containers.safetensors import read_header
from exl_core.formats.containers.source import PLAIN_TYPES, StoredTensor
from exl_core.lora.config import AdapterConfig
from exl_core.lora.targets import End, Named, end_of, find_target, parse_name

FILE_NAME = "adapter_model.safetensors"
PICKLE_NAME = "adapter_model.bin"
MAX_NAME_CHARS = 256
MAX_BIAS_VALUES = 1 << 24  # biases are read only to check that they are zero
_MIB = 1024 * 1024


class Pair(NamedTuple):
    """Names of the two tensors of one low-rank product, and its scale."""

    down: str
    up: str
    scale: float


class AdapterFile:
    """Tensors that a file declares, checked against the configurations of adapter and model.

    `digest` changes when the files are written again: it is made from the size and the time of the
    weights, and from the settings. `whole` are the embedding and head of an adapter that replaces
    them.
    """

    def __init__(self, directory: Path, config: AdapterConfig, model: ModelConfig) -> None:
        self.path = find_file(directory)
        self.layer_pairs: dict[LoraTarget, Pair] = {}
        self.end_pairs: dict[End, Pair] = {}
        self.whole: dict[End, str] = {}
        self._config = config
        self._model = model
        table = module_table(model)
        self._end_names: dict[End, str] = {
            "embed": table.embed.stem.rpartition(".")[2],
            "head": table.head.stem.rpartition(".")[2],
        }
        self._stored = {tensor.name: tensor for tensor, _ in read_header(self.path)}
        self._file = _opened(self.path)
        self.digest = _digest(self.path, config)
        self._halves: dict[str, dict[str, str]] = {}
        for tensor in self._stored.values():
            self._register(tensor, parse_name(tensor.name), table)
        for module, halves in self._halves.items():
            self._pair(module, halves, find_target(table, module))
        self._check_whole(model)
        self._check_memory()

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the trained modules, without layer prefixes."""
        ends = {self._end_names[end] for end in (*self.end_pairs, *self.whole)}
        inside = {module.rpartition(".layers.")[2].partition(".")[2] for module in self._halves}
        return tuple(sorted((inside | ends) - {""}))

    def read(self, name: str) -> Tensor:
        """A copy of a tensor as float32. Raises AdapterError for NaN or infinity."""
        return self.read_as_stored(name).to(torch.float32, copy=True)

    def read_as_stored(self, name: str) -> Tensor:
        values: Tensor = self._file.get_tensor(name)
        if not torch.isfinite(values).all():
            raise AdapterError(f"tensor {name!r} holds NaN or infinity", where=self.path)
        return values

    def _register(self, tensor: StoredTensor, named: Named, table: ModuleTable) -> None:
        """Records the purpose of a tensor, or refuses it."""
        if len(tensor.name) > MAX_NAME_CHARS:
            raise AdapterError("has a tensor with an endless name", where=self.path)
        if tensor.storage not in PLAIN_TYPES:
            types = ", ".join(PLAIN_TYPES)
            raise self._error(tensor, "has no type of weights", types, tensor.storage)
        if named.role == "bias":
            self._check_bias(tensor)
            return
        target = find_target(table, named.module)
        if named.role == "other" or target is None:
            ends = " or ".join(self._end_names.values())
            raise self._error(
                tensor,
                "belongs to nothing in this model that an adapter can change",
                f"a linear of layers 0 to {len(table.layers) - 1}, {ends}",
            )
        if named.role == "whole":
            self._register_whole(tensor, target)
            return
        self._check_order(tensor, target)
        if named.is_embedding != (end_of(target) == "embed"):
            raise self._error(tensor, "is of another kind than its module")
        rank = self._config.rank_of(named.module)
        shape = (rank, target.in_features) if named.role == "down" else (target.out_features, rank)
        self._check_shape(tensor, shape)
        halves = self._halves.setdefault(named.module, {})
        if named.role in halves:
            raise self._error(tensor, f"is there twice, as {halves[named.role]!r} too")
        halves[named.role] = tensor.name

    def _check_order(self, tensor: StoredTensor, target: LoraTarget) -> None:
        """Refuses matrices whose value heads the model has in another order than the adapter."""
        row = target.rows[0]
        mixer = None if row.layer is None else self._model.layers[row.layer].mixer
        is_mixer = any(one.packed in ("mixer_in", "mixer_out") for one in target.rows)
        if is_mixer and isinstance(mixer, GatedDeltaNet) and mixer.is_reordered:
            raise AdapterError(
                f"tensor {tensor.name!r} belongs to value heads that a GGUF file has in another"
                " order",
                where=self.path,
                next_step="Load the model from safetensors files, or train an adapter without"
                " these modules.",
            )

    def _register_whole(self, tensor: StoredTensor, target: LoraTarget) -> None:
        end = end_of(target)
        if end is None:
            raise self._error(
                tensor, "replaces a matrix of a layer", " or ".join(self._end_names.values())
            )
        shape = (
            target.out_features,
            target.in_features,
        )  # shape as a linear; an embedding is transposed
        self._check_shape(tensor, shape if end == "head" else shape[::-1])
        if end in self.whole:
            raise self._error(tensor, f"is there twice, as {self.whole[end]!r} too")
        self.whole[end] = tensor.name

    def _check_bias(self, tensor: StoredTensor) -> None:
        if tensor.num_values > MAX_BIAS_VALUES or self.read(tensor.name).count_nonzero():
            raise self._error(tensor, "is a bias that is not zero, which is not supported")

    def _check_shape(self, tensor: StoredTensor, expected: tuple[int, ...]) -> None:
        if tensor.shape != expected:
            raise self._error(tensor, "has the wrong shape", list(expected), list(tensor.shape))

    def _pair(self, module: str, halves: dict[str, str], target: LoraTarget | None) -> None:
        tensor = self._stored[next(iter(halves.values()))]
        if len(halves) != 2:
            raise self._error(tensor, "is there without its other half")
        pair = Pair(halves["down"], halves["up"], self._config.scale_of(module))
        if target is None:
            raise AssertionError(f"{module}: registered without a target")
        end = end_of(target)
        if end is None:
            other = self.layer_pairs.setdefault(target, pair)
        else:
            other = self.end_pairs.setdefault(end, pair)
        if other is not pair:
            raise self._error(tensor, "belongs to a matrix that has another pair")

    def _check_whole(self, model: ModelConfig) -> None:
        if not self._halves and not self.whole:
            raise AdapterError("holds no LoRA tensors", where=self.path)
        for changed in (self.end_pairs.keys(), self.whole.keys()):
            if self._config.has_tied_ends and model.has_tied_embeddings and len(changed) == 1:
                raise AdapterError(
                    "embedding and head are trained as one, and only one of them is here",
                    where=self.path,
                    got=f"{next(iter(changed))}, with ensure_weight_tying",
                )

    def _check_memory(self) -> None:
        needed = sum(
            4 * (self._stored[pair.down].num_values + self._stored[pair.up].num_values)
            for pair in (*self.layer_pairs.values(), *self.end_pairs.values())
        ) + sum(self._stored[name].size_bytes for name in self.whole.values())
        available = available_memory_bytes()
        if available is not None and needed > available:
            raise OutOfMemoryError(
                "the adapter does not fit into memory",
                where=self.path,
                expected=f"{needed / _MIB:.0f} MiB",
                got=f"{available / _MIB:.0f} MiB free",
            )

    def _error(
        self, tensor: StoredTensor, what: str, expected: object = None, got: object = None
    ) -> AdapterError:
        return AdapterError(
            f"tensor {tensor.name!r} {what}", where=self.path, expected=expected, got=got
        )


def _digest(path: Path, config: AdapterConfig) -> str:
    status, numbers = path.stat(), replace(config, path=Path())
    return hashlib.sha256(f"{status.st_size} {status.st_mtime_ns} {numbers}".encode()).hexdigest()


def _opened(path: Path) -> Any:
    """The file opened and mapped by the safetensors library. It is closed with its last
    reference."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise AdapterError("cannot be opened", where=path, got=error) from error


def find_file(directory: Path) -> Path:
    path, pickle = directory / FILE_NAME, directory / PICKLE_NAME
    if is_present(path, AdapterError):
        return path
    if is_present(pickle, AdapterError):
        raise AdapterError(
            "is a pickle, which can run code when read, and is refused",
            where=pickle,
            expected=FILE_NAME,
            next_step="Load the adapter with PEFT where it is trusted, and save it again:"
            " save_pretrained writes safetensors.",
        )
    raise AdapterError(
        f"holds no {FILE_NAME}", where=directory, next_step="Download it beside the configuration."
    )
