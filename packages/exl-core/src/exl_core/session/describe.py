"""Describes a model from its headers: sizes, bits per weight, memory, tokenizer, backends.

`verify_model` also reads all weights to check that they are intact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from exl_core.arch.modules import ModuleRow
from exl_core.arch.spec import ModelConfig
from exl_core.cache.format import KVFormat, kv_bytes_per_token
from exl_core.cache.need import CacheNeed
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.containers.source import Progress, StoredTensor
from exl_core.formats.verify import VerifyReport, verify
from exl_core.ops.backends.cuda.device import default_device
from exl_core.ops.open import available_isas, has_factors, has_transposes, min_group_rows
from exl_core.ops.weights import GroupRun, TrellisLayout
from exl_core.session.mtp import find_mtp, open_mtp
from exl_core.session.open import ModelFiles, open_model, stop_ids
from exl_core.session.parameters import count_parameters
from exl_core.tokenizer.base import Tokenizer


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """One stored tensor. `dtype` is the file's name for the element format."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True, slots=True)
class LayerDescription:
    """A block, the embedding, the last norm or the head. `bytes` is its size in the file."""

    name: str
    parameters: int
    bytes: int
    dtypes: tuple[str, ...]

    @property
    def bits_per_weight(self) -> float:
        return 8.0 * self.bytes / self.parameters


@dataclass(frozen=True, slots=True)
class MatrixDescription:
    """One matrix, by its canonical name. `groups` are in the order of the stored rows; () if it has
    no groups. `trellis` is the layout of trellis codes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bits_per_weight: float
    groups: tuple[GroupRun, ...]
    trellis: TrellisLayout | None = None


@dataclass(frozen=True, slots=True)
class ModelDescription:
    name: str
    path: Path
    format: str
    config: ModelConfig
    layers: tuple[LayerDescription, ...]
    matrices: tuple[MatrixDescription, ...]
    tensors: tuple[TensorDescription, ...]
    unused_tensors: tuple[TensorDescription, ...]
    file_bytes: int
    weights_bytes_in_memory: int
    bytes_by_part: Mapping[int | str, int]
    """Bytes in memory of each layer by its index, and of each tensor outside the layers by its
    role."""
    expert_bytes: tuple[int, ...]
    """Bytes in memory of the experts of each layer."""
    active_parameters: int
    """Parameters that one token uses: of the experts, only those chosen for it."""
    active_bytes: int
    """Their size in the file."""
    mtp_bytes: int
    """Bytes in memory of the layer for multi-token prediction; 0 if there is none."""
    tokenizer: Tokenizer
    has_template: bool
    backends: dict[str, str]

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def bits_per_weight(self) -> float:
        return 8.0 * sum(layer.bytes for layer in self.layers) / self.parameters

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """All tokens that end a reply, ascending."""
        return tuple(sorted(stop_ids(self.tokenizer, self.config)))

    def kv_bytes_per_token(self, kv_format: KVFormat = KVFormat.FP16) -> int:
        return kv_bytes_per_token(self.config.kv_shapes, kv_format)

    def state_bytes(self, need: CacheNeed) -> int:
        """Bytes of the recurrent states of the sequences and snapshots of a cache, on the CPU."""
        return sum(need.state_bytes(self.config, has_spare=False))

    def memory_bytes(self, need: CacheNeed) -> int:
        """Bytes of the weights and of a cache. Of its last page, only the tokens count."""
        keys_and_values = need.tokens * self.kv_bytes_per_token(need.kv_format)
        return self.weights_bytes_in_memory + keys_and_values + self.state_bytes(need)


def describe_model(spec: str | None = None) -> ModelDescription:
    """Reads headers, configuration and tokenizer. Checks names and shapes, loads no weights."""
    files = open_model(spec)
    source = files.source
    checkpoint = _tensors(files, files.config)
    tokenizer = files.tokenizer
    used = checkpoint.used_names
    weight_files = {tensor.file for tensor in source.tensors.values()}
    counted = count_parameters(checkpoint, files.config)
    mtp = None
    if find_mtp(source, files.config) is not None:
        mtp = open_mtp(source, checkpoint, files.config, files.path, partial(_tensors, files))
        used |= mtp.checkpoint.used_names
    unused = [tensor for name, tensor in source.tensors.items() if name not in used]
    return ModelDescription(
        name=files.name,
        path=files.path,
        format=source.format,
        config=files.config,
        layers=_layers(checkpoint),
        matrices=_matrices(checkpoint),
        tensors=tuple(_tensor(tensor) for tensor in checkpoint.stored.values()),
        unused_tensors=tuple(_tensor(tensor) for tensor in unused),
        file_bytes=sum(file.stat().st_size for file in weight_files),
        weights_bytes_in_memory=checkpoint.packed_bytes,
        bytes_by_part=checkpoint.bytes_by_part,
        expert_bytes=checkpoint.expert_bytes,
        active_parameters=counted.active,
        active_bytes=counted.active_bytes,
        mtp_bytes=0 if mtp is None else mtp.packed_bytes,
        tokenizer=tokenizer,
        has_template=files.template is not None,
        backends=_backends(),
    )


def verify_model(spec: str | None = None, progress: Progress | None = None) -> VerifyReport:
    """Reads and checks every tensor that the model needs. `progress` gets bytes read and total
    bytes."""
    files = open_model(spec)
    return verify(files.source, files.config, files.quantization, progress)


def _tensors(
    files: ModelFiles, config: ModelConfig, rows: Sequence[ModuleRow] | None = None
) -> Checkpoint:
    """The tensors of a model, or some of them, as the default device keeps them."""
    device = default_device()
    return Checkpoint(
        files.source,
        config,
        files.quantization,
        min_group_rows=min_group_rows(device),
        rows=rows,
        has_factors=has_factors(device),
        has_transposes=has_transposes(device),
    )


def _tensor(tensor: StoredTensor) -> TensorDescription:
    return TensorDescription(tensor.name, tensor.shape, tensor.storage, tensor.size_bytes)


def _matrices(checkpoint: Checkpoint) -> tuple[MatrixDescription, ...]:
    return tuple(
        MatrixDescription(
            name=checkpoint.rows[name].stem,
            shape=tensor.shape,
            dtype=tensor.storage,
            bits_per_weight=8.0 * tensor.size_bytes / tensor.num_values,
            groups=checkpoint.group_runs(name),
            trellis=checkpoint.trellis(name),
        )
        for name, tensor in checkpoint.stored.items()
        if checkpoint.rows[name].is_matrix
    )


def _layers(checkpoint: Checkpoint) -> tuple[LayerDescription, ...]:
    groups: dict[str, list[StoredTensor]] = {}
    for name, row in checkpoint.rows.items():
        is_end = row.layer is None
        group = row.stem.rpartition(".")[2] if is_end else f"layer {row.layer}"
        groups.setdefault(group, []).append(checkpoint.stored[name])
    return tuple(
        LayerDescription(
            name=group,
            parameters=sum(tensor.num_values for tensor in tensors),
            bytes=sum(tensor.size_bytes for tensor in tensors),
            dtypes=tuple(sorted({tensor.storage for tensor in tensors})),
        )
        for group, tensors in groups.items()
    )


def _backends() -> dict[str, str]:
    sets = available_isas()
    return {
        "cpu": f"all layers ({', '.join(sets)})",
        "reference": "all layers (torch, slow, for checking)",
        "cuda": "all layers" if default_device() == "cuda" else "no GPU, or no kernels for one",
    }
