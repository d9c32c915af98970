"""LoRA adapters: from a PEFT directory to the deltas that the forward pass applies.

Names, shapes, ranks and memory are checked against the model, from the file's header, before any
tensor is read. Adapters are not merged: the model's weights stay as they are, each row of a batch
can use other adapters, and an adapter is freed when its last reference goes. Adapters have their
outputs in the order of the family's checkpoints, which the module table knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from exl_core.arch.modules import LoraTarget, Packed
from exl_core.arch.spec import ModelConfig
from exl_core.lora.config import AdapterConfig, read_adapter_config
from exl_core.lora.reader import AdapterFile, Pair
from exl_core.model.adapters import Delta, Ends
from exl_core.model.transformer import Transformer
from exl_core.ops.table import OpTable

if TYPE_CHECKING:
    from exl_core.model.adapters import Adapter

_serials = count(1)


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter:
    """A loaded adapter for one model, and for other models of the same dimensions.

    `modules` are the names of the trained modules, such as `self_attn.q_proj`, sorted.
    `layer_deltas` are by layer and matrix. `serial` is unique in this process.
    """

    path: Path
    config: AdapterConfig
    model_config: ModelConfig
    modules: tuple[str, ...]
    layer_deltas: Mapping[tuple[int, Packed], tuple[Delta, ...]]
    ends: Ends | None
    serial: int = field(default_factory=lambda: next(_serials))

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that the adapter takes."""
        ends = self.ends or Ends()
        deltas = [delta for found in self.layer_deltas.values() for delta in found]
        deltas += [delta for delta in (ends.embed_delta, ends.head_delta) if delta is not None]
        whole = [matrix for matrix in (ends.embed, ends.head) if matrix is not None]
        return sum(delta.down.nbytes + delta.up.nbytes for delta in deltas) + sum(
            matrix.size_bytes for matrix in whole
        )

    def deltas(self, layer: int, matrix: Packed) -> tuple[Delta, ...]:
        return self.layer_deltas.get((layer, matrix), ())

    def fits(self, config: ModelConfig) -> bool:
        return _sizes(self.model_config) == _sizes(config)


def load_adapter(path: str | Path, model: Transformer) -> LoraAdapter:
    """Loads the adapter in a directory for `model`. Raises AdapterError if it does not fit.

    Its strength is set per use (`AdapterUse`).
    """
    directory = Path(path)
    config = read_adapter_config(directory)
    file = AdapterFile(directory, config, model.config)
    deltas: dict[tuple[int, Packed], tuple[Delta, ...]] = {}
    for target, pair in file.layer_pairs.items():
        row = target.rows[0]
        if row.layer is None or row.packed is None:
            raise AssertionError(f"{row.name} is not a matrix of a layer")
        key = row.layer, row.packed
        delta = _delta(file, pair, model.ops.device, target)
        deltas[key] = (*deltas.get(key, ()), delta)
    ends = _ends(file, model.ops)
    return LoraAdapter(directory, config, model.config, file.modules, deltas, ends)


def _sizes(config: ModelConfig) -> tuple[object, ...]:
    """Dimensions that an adapter depends on."""
    return (
        config.arch.name,
        config.hidden_size,
        config.vocab_size,
        tuple(
            (layer.attention.q_size, layer.attention.kv_size, layer.dense.intermediate_size)
            for layer in config.layers
        ),
    )


def _delta(
    file: AdapterFile, pair: Pair, device: torch.device, target: LoraTarget | None = None
) -> Delta:
    """A and B transposed, so that x @ down @ up gives the delta. `up` includes the scale.

    `target`: matrices of a layer, whose rows give the place and the order of the outputs.
    """
    down = file.read(pair.down).T.contiguous()  # [in_features, r]
    up = file.read(pair.up)  # [out_features, r]
    stored_rows = None if target is None else target.stored_rows()
    if stored_rows is not None:
        up = up[torch.tensor(stored_rows)]
    up = up.T.contiguous()  # [r, out_features]
    first_out = 0 if target is None else target.rows[0].first_out
    return Delta(first_out, down.to(device), up.mul_(pair.scale).to(device))


def _ends(file: AdapterFile, ops: OpTable) -> Ends | None:
    if not file.end_pairs and not file.whole:
        return None
    deltas = {end: _delta(file, pair, ops.device) for end, pair in file.end_pairs.items()}
    whole = {}
    for end, name in file.whole.items():
        values = file.read_as_stored(name)
        whole[end] = ops.new_linear(values.shape[0], values.shape[1], values.dtype)
        ops.fill_linear(whole[end], 0, values, None)
    return Ends(whole.get("embed"), whole.get("head"), deltas.get("embed"), deltas.get("head"))


if TYPE_CHECKING:

    def _is_an_adapter(adapter: LoraAdapter) -> Adapter:
        return adapter
