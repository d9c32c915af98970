"""LoRA adapters: from a PEFT directory to the deltas that the forward pass applies.

Names, shapes, ranks and memory are checked against the model, from the file's header, before any
tensor is read. Adapters are not merged: the model's weights stay as they are, each row of a batch
can use other adapters, and an adapter is freed when its last reference goes. Adapters have their
outputs in the order of the family's checkpoints, which the module table knows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import torch

from exl_core.arch.modules import LoraTarget, Packed
from exl_core.arch.spec import ModelConfig
from exl_core.cache.memory import return_freed_memory
from exl_core.errors import RequestError
from exl_core.lora.config import AdapterConfig, read_adapter_config
from exl_core.lora.reader import AdapterFile, Pair, find_file
from exl_core.model.adapters import Delta, Ends
from exl_core.model.transformer import Transformer
from exl_core.ops.linear import PackedLinear
from exl_core.ops.table import OpTable
from exl_core.ops.weights import DenseColumns, DenseLayout
from exl_core.option_types import check_option

_serials = count(1)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LoraAdapter:
    """A loaded adapter for one model, and for other models of the same dimensions.

    `modules` are the names of the trained modules, such as `self_attn.q_proj`, sorted.
    `layer_deltas` are by layer and matrix, of one rank and its host's layers if the model is
    divided; None after `unload`. `digest` changes when the files are written again. `serial` is
    unique in this process.
    """

    path: Path
    config: AdapterConfig
    model_config: ModelConfig
    modules: tuple[str, ...]
    layer_deltas: Mapping[tuple[int, Packed], tuple[Delta, ...]] | None
    ends: Ends | None
    digest: str
    serial: int = field(default_factory=lambda: next(_serials))

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that the adapter takes."""
        ends = self.ends or Ends()
        deltas = [delta for found in (self.layer_deltas or {}).values() for delta in found]
        deltas += [delta for delta in (ends.embed_delta, ends.head_delta) if delta is not None]
        whole = [matrix for matrix in (ends.embed, ends.head) if matrix is not None]
        return sum(delta.down.nbytes + delta.up.nbytes for delta in deltas) + sum(
            matrix.size_bytes for matrix in whole
        )

    def unload(self) -> None:
        """Frees the adapter's tensors, even if other objects refer to the adapter.

        Requests that use it must have ended; later ones raise RequestError. May be called again.
        """
        layers = (self.layer_deltas or {}).values()
        devices = {delta.down.device for deltas in layers for delta in deltas}
        del layers
        object.__setattr__(self, "layer_deltas", None)
        object.__setattr__(self, "ends", None)
        return_freed_memory(devices)

    def deltas(self, layer: int, matrix: Packed) -> tuple[Delta, ...]:
        return self._loaded_deltas().get((layer, matrix), ())

    def _loaded_deltas(self) -> Mapping[tuple[int, Packed], tuple[Delta, ...]]:
        if self.layer_deltas is None:
            raise RequestError(
                "the adapter has been unloaded", where=self.path, next_step="Load it again."
            )
        return self.layer_deltas

    def fits(self, config: ModelConfig) -> bool:
        self._loaded_deltas()
        return _sizes(self.model_config) == _sizes(config)


def load_adapter(path: str | Path, model: Transformer) -> LoraAdapter:
    """Loads the adapter in a directory for `model`. Raises AdapterError if it does not fit.

    Its strength is set per use (`AdapterUse`).
    """
    check_option("path", path, str | Path, "load_adapter")
    directory = Path(path)
    config = read_adapter_config(directory)
    whole = model.whole_config
    file = AdapterFile(directory, config, whole)
    deltas: dict[tuple[int, Packed], tuple[Delta, ...]] = {}
    for target, pair in file.layer_pairs.items():
        row = target.rows[0]
        if row.layer is None or row.packed is None:
            raise AssertionError(f"{row.name} is not a matrix of a layer")
        layer = model.own_layer(row.layer)
        if layer is None:
            continue
        key = layer, row.packed
        found = _layer_deltas(file, pair, model.ops_of(layer), model, target)
        deltas[key] = (*deltas.get(key, ()), *found)
    ends = _ends(file, model)
    return LoraAdapter(directory, config, whole, file.modules, deltas, ends, file.digest)


def contents_digest(path: Path) -> str:
    """Digest of an adapter's settings and weights, equal for copies of its folder on other hosts.
    Reads the whole file."""
    digest = hashlib.sha256(repr(replace(read_adapter_config(path), path=Path())).encode())
    with find_file(path).open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _sizes(config: ModelConfig) -> tuple[object, ...]:
    """Dimensions that an adapter depends on."""
    return (
        config.arch.name,
        config.hidden_size,
        config.vocab_size,
        tuple((layer.mixer, layer.feed_forward.inner_size) for layer in config.layers),
    )


def _layer_deltas(
    file: AdapterFile, pair: Pair, ops: OpTable, model: Transformer, target: LoraTarget
) -> Iterator[Delta]:
    """The deltas of matrices of a layer, whose rows give the places and the order of the outputs:
    one for each run of adjacent outputs."""
    down, up = _factors(file, pair)
    stored_rows = target.stored_rows()
    if stored_rows is not None:
        up = up[:, torch.tensor(stored_rows)]
    runs = _runs(target)
    parts = up.split_with_sizes([run.out_features for run in runs], 1)
    for run, part in zip(runs, parts, strict=True):
        own_down, own_up, first_out = model.own_low_rank(run, down, part.contiguous())
        yield _delta(own_down, own_up, ops, first_out)


def _runs(target: LoraTarget) -> list[LoraTarget]:
    """The target in parts, in order. Rows of a part are adjacent outputs of the packed matrix. A
    projection of queries and gates has two, with keys and values in between."""
    found: list[LoraTarget] = []
    end: int | None = None
    for row, place in zip(target.rows, target.places, strict=True):
        before = found.pop() if row.first_out == end else LoraTarget((), ())
        found.append(LoraTarget((*before.rows, row), (*before.places, place)))
        end = row.first_out + row.shape[0]
    return found


def _factors(file: AdapterFile, pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B transposed, so that x @ down @ up gives the delta. `up` includes the scale."""
    down = file.read(pair.down).T  # [in_features, r]
    up = file.read(pair.up).T  # [r, out_features]
    return down.contiguous(), up.contiguous().mul_(pair.scale)


def _delta(down: torch.Tensor, up: torch.Tensor, ops: OpTable, first_out: int = 0) -> Delta:
    if ops.is_batch_invariant and ops.device.type == "cpu":
        linears = _linear(ops, down.T.contiguous()), _linear(ops, up.T.contiguous())
        return Delta(first_out, down, up, linears)
    return Delta(first_out, down.to(ops.device), up.to(ops.device))


def _linear(ops: OpTable, weight: torch.Tensor) -> PackedLinear:
    """weight [out_features, in_features], contiguous, in the kernels' form."""
    linear = ops.new_linear(DenseLayout(weight.shape[0], weight.shape[1], weight.dtype))
    ops.fill_linear(linear, 0, DenseColumns(weight))
    return linear


def _ends(file: AdapterFile, model: Transformer) -> Ends | None:
    if not file.end_pairs and not file.whole:
        return None
    tables = {"embed": model.embedding_ops, "head": model.ops}
    deltas = {
        end: _delta(*_factors(file, pair), tables[end]) for end, pair in file.end_pairs.items()
    }
    whole = {}
    for end, name in file.whole.items():
        whole[end] = _linear(tables[end], file.read_as_stored(name))
    return Ends(whole.get("embed"), whole.get("head"), deltas.get("embed"), deltas.get("head"))
