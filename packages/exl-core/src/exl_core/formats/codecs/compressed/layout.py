"""compressed-tensors, "pack-quantized": meaning of one quantized linear's tensors, and its values.

    weight_packed      int32 [N, ceil(K*b/32)]   codes of a row, lowest bits first (`bits.py`)
    weight_scale       float [N, G]              [N, 1] or one number: one group
    weight_zero_point  int32 [ceil(N*b/32), G]   zero points packed down each column, or int8 [N, G]
                                                 less 2^(b-1); missing if symmetric
    weight_shape       int   [2]                 N, K
    weight_g_idx       int   [K]                 group of each input feature; may be missing

    weight[n, k] = scale[n, g] * (code - zero),  g = g_idx[k] or k // group_size

The zero of a symmetric layer is 2^(b-1). The configuration describes groups of layers (schemes);
which one a matrix belongs to follows from the shapes of its tensors. Quantization of activations
and of the cache is not applied. Knows neither files nor models; the caller handles the bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from exl_core.arch.fields import Fields
from exl_core.errors import ConfigError, UnsupportedModelError, WeightFileError, WeightShapeError
from exl_core.formats.codecs import bits as bitstream
from exl_core.formats.codecs.runtime import check_scales

PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
WIDTHS = (4, 8)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS = (torch.int64, torch.int32)
PACKED = "pack-quantized"
FLOAT_FORMATS = ("float-quantized", "naive-quantized")
STRATEGIES = {"int": ("tensor", "channel", "group"), "float": ("tensor", "channel", "block")}


@dataclass(frozen=True, slots=True)
class Scheme:
    """How some of the matrices are quantized. `bits` and `group_size` are those of integers,
    `block` the shape of FP8 blocks (rows, columns); None: one group, or no blocks."""

    is_float: bool
    bits: int
    group_size: int | None = None
    block: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class CompressedSettings:
    """Schemes of a checkpoint."""

    schemes: tuple[Scheme, ...]

    def block(self) -> tuple[int, int] | None:
        """Block shape of the FP8 matrices; None if their scales have no blocks."""
        return next((scheme.block for scheme in self.schemes if scheme.block), None)


def parse_settings(config: Mapping[str, object], where: object) -> CompressedSettings:
    """Settings from `quantization_config` in `config.json`."""
    fields = Fields(config, where)
    if fields.has("sparsity_config"):
        sparsity = fields.nested("sparsity_config")
        form = sparsity.text("format", "dense")
        if sparsity.values and form != "dense":
            raise _refusal(where, "sparse weights cannot be read", "'format' dense", form)
    groups = fields.nested("config_groups")
    if not groups.values:
        raise ConfigError("'config_groups' is empty", where=where)
    form = fields.text("format", PACKED)
    schemes = [_scheme(groups.nested(name), form) for name in groups.values]
    return CompressedSettings(tuple(dict.fromkeys(schemes)))


def _refusal(where: object, what: str, expected: str, got: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        what,
        where=where,
        expected=expected,
        got=got,
        next_step="Use another quantization of the model, or the unquantized one.",
    )


def _scheme(group: Fields, form: str) -> Scheme:
    form = group.text("format", form)
    weights = group.nested("weights")
    where, kind, bits = weights.where, weights.text("type", "int"), weights.integer("num_bits")
    allowed = {"int": (PACKED, "mixed-precision"), "float": (*FLOAT_FORMATS, "mixed-precision")}
    known = sorted({name for names in allowed.values() for name in names})
    if form not in known or kind not in allowed or form not in allowed[kind]:
        what = f"compressed-tensors in the format {form!r} with weights of type {kind!r}"
        raise _refusal(where, f"{what} cannot be read", ", ".join(known), f"{form}, {kind}")
    widths = WIDTHS if kind == "int" else (8,)
    if bits not in widths:
        expected = " or ".join(f"{width} bits" for width in widths)
        raise _refusal(where, f"{kind} weights of this width cannot be read", expected, bits)
    group_size = weights.integer("group_size", -1, low=-1)
    strategy = weights.text("strategy", "group" if group_size > 0 else "channel")
    if strategy not in STRATEGIES[kind]:
        expected = ", ".join(STRATEGIES[kind])
        raise _refusal(
            where, f"{kind} weights with these scales cannot be read", expected, strategy
        )
    if kind == "float":
        block = _block(weights) if strategy == "block" else None
        return Scheme(True, bits, block=block)
    if strategy == "group" and group_size < 1:
        raise ConfigError("'group_size' has no usable value", where=where, got=group_size)
    return Scheme(False, bits, group_size if strategy == "group" else None)


def _block(weights: Fields) -> tuple[int, int]:
    value = weights.values.get("block_structure")
    if isinstance(value, str):
        value = [int(part) if part.isdecimal() else part for part in value.split("x")]
    if isinstance(value, list) and len(value) == 2:
        rows, columns = value
        if isinstance(rows, int) and isinstance(columns, int) and rows > 0 and columns > 0:
            return rows, columns
    raise ConfigError(
        "'block_structure' has no usable value",
        where=weights.where,
        expected="two positive integers",
        got=value,
    )


@dataclass(frozen=True, slots=True, eq=False)
class CompressedLinear:
    """Tensors of one layer, as validated by `check`."""

    bits: int
    group_rows: int
    weight_packed: Tensor  # int32 [N, words]
    scales: Tensor  # [N, G]
    zeros: Tensor | None  # uint8 [N, G]; None: 2^(bits - 1)
    g_idx: Tensor | None  # int32 [K]; None if feature k is in group k // group_rows
    in_features: int

    @property
    def out_features(self) -> int:
        return self.weight_packed.shape[0]


def scheme_of(
    settings: CompressedSettings, in_features: int, words: int, groups: int, where: object
) -> tuple[int, int]:
    """Bits and rows per group of a matrix with `words` words and `groups` scales per row."""
    for scheme in settings.schemes:
        rows = scheme.group_size or in_features
        fits = -(-in_features * scheme.bits // 32) == words and -(-in_features // rows) == groups
        if fits and not scheme.is_float:
            return scheme.bits, rows
    known = [
        f"{scheme.bits} bits in groups of {scheme.group_size or in_features}"
        for scheme in settings.schemes
        if not scheme.is_float
    ]
    raise WeightShapeError(
        "tensors 'weight_packed' and 'weight_scale' have shapes of no scheme of the configuration",
        where=where,
        expected=" or ".join(known) or "no packed integers",
        got=f"{words} words and {groups} scales for {in_features} input features",
    )


def check(
    parts: Mapping[str, Tensor], settings: CompressedSettings, in_features: int, where: object
) -> CompressedLinear:
    """Validates the tensors of a layer. Errors name the tensor at fault."""
    packed = bitstream.take(parts, "weight_packed", 2, (torch.int32,), where)
    shape = bitstream.take(parts, "weight_shape", 1, INTEGERS, where)
    bitstream.require_shape(shape, "weight_shape", (2,), "it holds two sizes", where)
    columns = packed.shape[0]
    if shape.tolist() != [columns, in_features]:
        raise WeightShapeError(
            "tensor 'weight_shape' contradicts the matrix",
            where=where,
            expected=[columns, in_features],
            got=shape.tolist(),
        )
    stored = parts.get("weight_scale")
    rank = 2 if stored is None else max(1, stored.dim())  # one number may have no dimensions
    scales = bitstream.take(
        parts if stored is None else {**parts, "weight_scale": stored.view(stored.shape or (1,))},
        "weight_scale",
        rank,
        FLOATS,
        where,
    )
    scales = scales.expand(columns, 1) if scales.numel() == 1 else scales.view(scales.shape[0], -1)
    groups = scales.shape[1]
    reason = f"'weight_packed' has {columns} rows"
    bitstream.require_shape(scales, "weight_scale", (columns, groups), reason, where)
    check_scales(scales, "weight_scale", where)
    bits, group_rows = scheme_of(settings, in_features, packed.shape[1], groups, where)
    zeros = _zeros(parts, bits, columns, groups, where)
    g_idx = _g_idx(parts, in_features, group_rows, groups, where)
    return CompressedLinear(bits, group_rows, packed, scales, zeros, g_idx, in_features)


def _zeros(
    parts: Mapping[str, Tensor], bits: int, columns: int, groups: int, where: object
) -> Tensor | None:
    name = "weight_zero_point"
    if parts.get(name) is None:
        return None
    zeros = bitstream.take(parts, name, 2, (torch.int32, torch.int8), where)
    reason = f"{columns} columns of {bits} bits in {groups} groups"
    if zeros.dtype is torch.int8:
        bitstream.require_shape(zeros, name, (columns, groups), reason, where)
        low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
        if int(zeros.min()) < low or int(zeros.max()) > high:
            raise WeightFileError(
                f"tensor {name!r} holds a number beyond its width",
                where=where,
                expected=f"{low} to {high}",
                got=[int(zeros.min()), int(zeros.max())],
            )
        return (zeros.short() - low).to(torch.uint8)
    words = -(-columns * bits // 32)
    bitstream.require_shape(zeros, name, (words, groups), reason, where)
    return bitstream.unpack(zeros, bits)[:columns]


def _g_idx(
    parts: Mapping[str, Tensor], in_features: int, group_rows: int, groups: int, where: object
) -> Tensor | None:
    """Group of each feature; None if it is the default order, or all of them are -1 (unused)."""
    if parts.get("weight_g_idx") is None:
        return None
    g_idx = bitstream.take(parts, "weight_g_idx", 1, INTEGERS, where).to(torch.int32)
    reason = f"the matrix has {in_features} input features"
    bitstream.require_shape(g_idx, "weight_g_idx", (in_features,), reason, where)
    default = torch.arange(in_features, dtype=torch.int32) // group_rows
    if bool((g_idx == -1).all()) or torch.equal(g_idx, default):
        return None
    is_known = int(g_idx.min()) >= 0 and int(g_idx.max()) < groups
    counts = torch.bincount(g_idx.clamp(0), minlength=groups)
    if not is_known or not torch.equal(counts, torch.bincount(default)):
        raise WeightFileError(
            "tensor 'weight_g_idx' contradicts the size of the groups",
            where=where,
            expected=f"{groups} groups of {group_rows} features",
            got=f"groups {int(g_idx.min())} to {int(g_idx.max())}, one of {int(counts.max())}",
        )
    return g_idx


def dequantize(linear: CompressedLinear, first: int, last: int) -> Tensor:
    """Exact weights of rows first .. last - 1, float32 [rows, in_features]."""
    words = linear.weight_packed[first:last].T.contiguous()
    codes = bitstream.unpack(_whole(words, linear.bits), linear.bits)[: linear.in_features]
    codes = codes.T.contiguous()
    groups = torch.arange(linear.in_features) // linear.group_rows
    groups = groups if linear.g_idx is None else linear.g_idx.long()
    scales = linear.scales[first:last].float()[:, groups]
    if linear.zeros is None:
        return (codes.float() - (1 << (linear.bits - 1))) * scales
    return (codes.float() - linear.zeros[first:last][:, groups]) * scales


def _whole(words: Tensor, bits: int) -> Tensor:
    """Words with zeros appended, so that they are whole blocks of codes."""
    missing = -words.shape[0] % bitstream.words_per_block(bits)
    return torch.nn.functional.pad(words, (0, 0, 0, missing))
