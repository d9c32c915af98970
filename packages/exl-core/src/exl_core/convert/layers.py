"""Weights of one layer, read from a checkpoint as float32, and the states between layers.

Tensors are in the model's form: rows of heads in its order, norms as factors. `stored_vector` and
`in_file_order` give them the form of EXL2 files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from exl_core.arch.modules import Kind, ModuleRow, module_table
from exl_core.arch.spec import ModelConfig
from exl_core.errors import WeightValueError
from exl_core.formats.checkpoint import Checkpoint
from exl_core.ops.backends.autograd.linear import Product

LARGEST_FP16 = 65504.0

Vectors = Mapping[str, Tensor]
"""Vectors of a layer, or the final norm, float32: norms as factors and numbers by role, biases of
norms by `bias_role`."""


def bias_role(role: str) -> str:
    """Key of the bias of the norm `role`."""
    return f"{role}.bias"


@dataclass(frozen=True, slots=True)
class LayerSource:
    """Tensors of one layer by canonical name, float32: matrices [out, in], biases, numbers, and
    norms as factors. All values are finite. `rows` are the layer's weights by key, which is the
    role, and the index of the expert for weights of experts."""

    layer: int
    rows: Mapping[str, ModuleRow]
    tensors: Mapping[str, Tensor]

    def matrix(self, key: str) -> Tensor:
        return self.tensors[self.rows[key].name]

    def bias(self, key: str) -> Tensor | None:
        name = self.rows[key].bias
        return None if name is None else self.tensors[name]

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def vectors(self, *, is_stored: bool = False) -> Vectors:
        """Vectors of the layer; with `is_stored` rounded as EXL2 files store them."""
        return _vectors(self.rows.values(), self.tensors, is_stored=is_stored)

    @property
    def matrix_keys(self) -> tuple[str, ...]:
        """Keys of the matrices that a conversion quantizes."""
        return tuple(key for key, row in self.rows.items() if row.is_converted)

    def kept(self, *, is_stored: bool = False) -> dict[str, Tensor]:
        """Matrices by key that are not quantized; with `is_stored` rounded to float16 as EXL2 files
        store them."""
        kept = {key: row for key, row in self.rows.items() if is_kept(row)}
        values = {key: self.matrix(key) for key in kept}
        if is_stored:
            values = {key: x.half().float() for key, x in values.items()}
        return {key: values[key].to(product_type(row, self.device)) for key, row in kept.items()}

    def products(self) -> Product:
        """Products with the source's matrices."""
        weights = {
            key: self.matrix(key).to(product_type(self.rows[key], self.device))
            for key in self.matrix_keys
        }
        return product_of(weights | self.kept(), self.bias)


def is_kept(row: ModuleRow) -> bool:
    """Whether this is a matrix of a layer that is never quantized: a router, small projections of a
    delta net, or one that no op reads as codes."""
    return row.kind is Kind.LINEAR and not row.is_converted


def product_type(row: ModuleRow, device: torch.device) -> torch.dtype:
    """Type of products with a matrix of a layer. It is float32 where rounding is not just noise of
    one token: a router's could change the choice of experts, and a recurrent mixer's acts on every
    later token."""
    is_recurrent = row.packed in ("mixer_in", "mixer_out")
    is_small = is_kept(row) and not row.is_dense
    return torch.float32 if is_recurrent or is_small else compute_type(device)


EXACT_KINDS = (Kind.ROUTER_VECTOR, Kind.SINKS, Kind.TAPS, Kind.VECTOR)
"""Numbers that EXL2 files store in float32: rounding those of a router could change the choice of
experts, and the others are few."""


def product_of(weights: Mapping[str, Tensor], bias: Callable[[str], Tensor | None]) -> Product:
    """Products with `weights` by key, each in the weight's own type. `bias` returns the bias of a
    key."""

    def product(key: str, x: Tensor) -> Tensor:
        weight, added = weights[key], bias(key)
        return linear(x.to(weight), weight, None if added is None else added.to(weight))

    return product


def _vectors(
    rows: Iterable[ModuleRow], tensors: Mapping[str, Tensor], *, is_stored: bool
) -> Vectors:
    """Vectors among `rows`, from all tensors by canonical name."""
    found: dict[str, Tensor] = {}
    for row in rows:
        if row.is_matrix:
            continue
        values = tensors[row.name]
        found[row.role] = as_factor(row, stored_vector(row, values)) if is_stored else values
        if row.bias is not None:
            bias = tensors[row.bias]
            found[bias_role(row.role)] = bias.half().float() if is_stored else bias
    return found


def stored_vector(row: ModuleRow, values: Tensor, *, repeats_norms: bool = True) -> Tensor:
    """A norm's factors, or a number, as the converted files store them, in float16.

    Norms are rounded as factors. With `repeats_norms`, a norm of one head is repeated for every
    head, as in EXL2 files. `EXACT_KINDS` stay float32.
    """
    if row.kind in EXACT_KINDS:
        return values
    rounded, addend = values.half(), row.written.addend
    stored = in_file_order(row, (rounded - addend).half() if addend else rounded)
    if row.kind is Kind.HEAD_NORM:
        return stored.expand(row.num_heads, -1).contiguous() if repeats_norms else stored
    return stored.view(row.num_heads, -1) if row.num_heads else stored


def as_factor(row: ModuleRow, stored: Tensor) -> Tensor:
    """Inverse of `stored_vector`: float32, with one dimension unless it is a convolution's."""
    if row.kind in EXACT_KINDS:
        return stored
    one = stored[0] if row.kind is Kind.HEAD_NORM and stored.dim() > 1 else stored.flatten()
    values = in_model_order(row, one.float())
    return values + row.written.addend if row.written.addend else values


def in_file_order(row: ModuleRow, values: Tensor) -> Tensor:
    """The rows of a matrix or vector in the order in which EXL2 files of the family store them."""
    permutation = row.written.permutation
    return values if permutation is None else values[torch.tensor(permutation.model_rows())]


def in_model_order(row: ModuleRow, values: Tensor) -> Tensor:
    """Inverse of `in_file_order`."""
    permutation = row.written.permutation
    return values if permutation is None else values[torch.tensor(permutation.stored_rows())]


def compute_type(device: torch.device) -> torch.dtype:
    """Type of matrix products with states: bfloat16 where that is fast, else float32."""
    if device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32
    return torch.bfloat16


def read_layer(
    checkpoint: Checkpoint, config: ModelConfig, layer: int, device: torch.device
) -> LayerSource:
    """Reads one layer.

    Raises WeightValueError with the tensor's name for values that are not finite or exceed float16.
    """
    table = module_table(config)
    tensors = {
        row.name: read_tensor(checkpoint, row.name).to(device) for row in table.rows_of(layer)
    }
    return LayerSource(layer, table.weights_of(layer), tensors)


def read_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """Reads a matrix [out, in], a bias, or a norm's factors, as float32 on the CPU.

    Raises WeightValueError for values that are not finite or exceed float16.
    """
    row = checkpoint.rows[name]
    if row.is_norm or row.kind in EXACT_KINDS:
        values = checkpoint.norm(name)
    else:
        values = torch.empty(checkpoint.stored[name].shape)
        for chunk in checkpoint.chunks(name, torch.float32):
            # Copy each chunk: it may be a view of the mapped file, which is released after it.
            values[chunk.first_row : chunk.first_row + len(chunk.values)] = chunk.values
    largest = float(values.abs().max())
    if not largest <= LARGEST_FP16:
        raise WeightValueError(
            f"tensor {name!r} has values that EXL2 cannot hold",
            where=checkpoint.stored[name].file,
            expected=f"up to {LARGEST_FP16:.0f}, which is what float16 reaches",
            got=f"{largest:g}",
        )
    return values


def read_final_norm(
    checkpoint: Checkpoint, config: ModelConfig, *, is_stored: bool = False
) -> Vectors:
    """Vectors of the norm before the head; with `is_stored` rounded as EXL2 files store them."""
    row = module_table(config).final_norm
    names = (row.name, *([] if row.bias is None else [row.bias]))
    tensors = {name: read_tensor(checkpoint, name) for name in names}
    return _vectors([row], tensors, is_stored=is_stored)


def embed_rows(checkpoint: Checkpoint, config: ModelConfig, token_ids: Tensor) -> Tensor:
    """Input of the first layer for token_ids int64 [rows, length]: float32 [rows, length, hidden].

    The embedding is rounded to float16, as it will be stored.
    """
    table = read_tensor(checkpoint, module_table(config).embed.name).half()  # [vocab, hidden]
    x = table[token_ids].float()
    return x * config.embed_factor


@dataclass(slots=True)
class States:
    """Hidden states of the calibration rows between two layers: those of the source's layers and
    those of the quantized layers, each float32 [rows, length, hidden].

    They are on the computing device if they are small, else on the CPU. Later layers depend on
    them and on the finished tensors only. The stages overwrite them in place.
    """

    source: Tensor
    quantized: Tensor
