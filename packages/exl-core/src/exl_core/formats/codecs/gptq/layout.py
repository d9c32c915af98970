"""GPTQ: meaning of the tensors of one quantized linear, bit by bit, and their exact values.

    qweight  int32 [K*b/32, N]   codes, packed down each column (`bits.py`)
    qzeros   int32 [G, N*b/32]   zero points, packed along each row
    scales   fp16  [G, N]        (float32 and bfloat16 are rounded to float16)
    g_idx    int32 [K]           group of each input feature; may be missing

    weight[k, n] = fp16(scales[g, n] * (code - zero)),  g = g_idx[k] or k // group_size

Knows neither files nor models; the caller handles the bias. The layout is that of AutoGPTQ and
GPTQModel. Other formats that call themselves GPTQ are refused with an error that names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from exl_core.arch.fields import Fields
from exl_core.errors import (
    ConfigError,
    MissingTensorError,
    UnsupportedModelError,
    WeightFileError,
    WeightShapeError,
    WeightValueError,
)
from exl_core.formats.codecs import bits as bitstream

PARTS = ("qweight", "qzeros", "scales", "g_idx")
WIDTHS = (2, 3, 4, 8)
ONE_GROUP = -1  # group size that stands for the whole column
LARGEST_FP16 = 65504.0
CHUNK_VALUES = 1 << 19  # values unpacked at a time: 2 MiB as float32, which a CPU cache can hold


class CheckpointFormat(Enum):
    """Convention for stored zero points."""

    GPTQ = "gptq"  # zero point minus one
    GPTQ_V2 = "gptq_v2"  # zero point


@dataclass(frozen=True, slots=True)
class GptqSettings:
    """Settings of a checkpoint that its tensors do not contain."""

    bits: int
    group_size: int  # ONE_GROUP for one group
    is_symmetric: bool
    has_act_order: bool
    checkpoint_format: CheckpointFormat

    def group_rows(self, in_features: int) -> int:
        """Input features per group; the last group may have fewer."""
        return in_features if self.group_size == ONE_GROUP else self.group_size


def parse_settings(config: Mapping[str, object], where: object) -> GptqSettings:
    """Settings from `quantize_config.json` or from `quantization_config` in `config.json`."""
    fields = Fields(config, where)
    _refuse_other_methods(fields)
    is_one_group = config.get("group_size") == ONE_GROUP
    return GptqSettings(
        bits=fields.integer("bits"),
        group_size=ONE_GROUP if is_one_group else fields.integer("group_size"),
        is_symmetric=fields.flag("sym", True),
        has_act_order=fields.flag("desc_act", False),
        checkpoint_format=_checkpoint_format(fields),
    )


def _refuse_other_methods(fields: Fields) -> None:
    def refuse(what: str, expected: str, got: object) -> UnsupportedModelError:
        return UnsupportedModelError(
            what,
            where=fields.where,
            expected=expected,
            got=got,
            next_step="Use another quantization of the model, or the unquantized one.",
        )

    method = fields.text("quant_method", "gptq")
    if method.lower() != "gptq":
        raise refuse(f"weights quantized with {method!r} are not GPTQ", "gptq", method)
    bits = fields.integer("bits")
    if bits not in WIDTHS:
        raise refuse("GPTQ of this width is not supported", "2, 3, 4 or 8 bits", f"{bits} bits")
    word = fields.text("pack_dtype", "int32")
    if word != "int32":
        raise refuse("GPTQ packed into other words is not supported", "'pack_dtype' int32", word)
    if fields.flag("is_marlin_format", False):
        raise refuse("GPTQ in the layout of Marlin is not supported", "gptq or gptq_v2", "marlin")
    if fields.has("dynamic"):
        # A rule that begins with "-:" leaves layers unquantized, which their tensors show as well.
        rules = fields.nested("dynamic").values
        exceptions = [rule for rule in rules if not rule.startswith("-:")]
        if exceptions:
            what = "GPTQ with other settings for some layers ('dynamic') is not supported"
            raise refuse(what, "the same for all", ", ".join(exceptions)[:80])


def _checkpoint_format(fields: Fields) -> CheckpointFormat:
    """Value of 'checkpoint_format' or 'format'; the older convention (GPTQ) if both are missing."""
    default = CheckpointFormat.GPTQ.value
    keys = [key for key in ("checkpoint_format", "format") if fields.has(key)]
    names = {key: fields.text(key).lower() for key in keys}
    if len(set(names.values())) > 1:
        raise ConfigError(
            "'checkpoint_format' and 'format' contradict each other",
            where=fields.where,
            got=" and ".join(map(repr, names.values())),
        )
    name = next(iter(names.values()), default)
    try:
        return CheckpointFormat(name)
    except ValueError:
        raise UnsupportedModelError(
            f"GPTQ checkpoints in the format {name!r} are not supported",
            where=fields.where,
            expected=" or ".join(known.value for known in CheckpointFormat),
            got=name,
            next_step="GPTQModel can save the model as 'gptq'.",
        ) from None


@dataclass(frozen=True, slots=True, eq=False)
class GptqLinear:
    """Tensors of one layer, as validated by `check`."""

    settings: GptqSettings
    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor | None  # None if feature k is in group k // group_rows

    @property
    def in_features(self) -> int:
        return self.qweight.shape[0] * 32 // self.settings.bits

    @property
    def out_features(self) -> int:
        return self.qweight.shape[1]

    @property
    def group_rows(self) -> int:
        return self.settings.group_rows(self.in_features)

    @property
    def size_bytes(self) -> int:
        tensors = (self.qweight, self.qzeros, self.scales, self.g_idx)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def bits_per_weight(self) -> float:
        return self.size_bytes * 8 / (self.in_features * self.out_features)


def check(parts: Mapping[str, Tensor], settings: GptqSettings, where: object) -> GptqLinear:
    """Validates the tensors of a layer. Errors name the tensor at fault."""
    bits = settings.bits
    floats = (torch.float16, torch.bfloat16, torch.float32)
    qweight = bitstream.take(parts, "qweight", 2, (torch.int32,), where)
    qzeros = bitstream.take(parts, "qzeros", 2, (torch.int32,), where)
    scales = bitstream.take(parts, "scales", 2, floats, where).to(torch.float16)
    for what, count, step in (
        ("rows", qweight.shape[0], bitstream.words_per_block(bits)),
        ("columns", qweight.shape[1], bitstream.codes_per_block(bits)),
    ):
        if count % step:
            raise WeightShapeError(
                f"tensor 'qweight' has an impossible number of {what} for {bits} bits",
                where=where,
                expected=f"a multiple of {step}",
                got=count,
            )
    linear = GptqLinear(settings, qweight, qzeros, scales, None)
    rows, columns = linear.in_features, linear.out_features
    groups = -(-rows // linear.group_rows)
    reason = f"{rows} rows of {bits} bits in groups of {settings.group_size}, {columns} columns"
    bitstream.require_shape(qzeros, "qzeros", (groups, columns * bits // 32), reason, where)
    bitstream.require_shape(scales, "scales", (groups, columns), reason, where)
    g_idx = _checked_g_idx(parts, linear, where)
    linear = GptqLinear(settings, qweight, qzeros, scales, g_idx)
    _check_zero_points(linear, where)
    _check_scales(linear, where)
    return linear


def check_alike(
    layers: Sequence[Mapping[str, Tensor]], settings: GptqSettings, where: object
) -> list[GptqLinear] | None:
    """`check` of layers whose tensors have the same names, types and shapes, with joint checks of
    their values. None if one of them needs a check by itself. `where` names the first layer."""
    first = check(layers[0], settings, where)
    scales = torch.stack([layer["scales"] for layer in layers]).to(torch.float16)
    largest = float(scales.abs().max())
    if not scales.isfinite().all() or largest * 2**settings.bits > LARGEST_FP16:
        return None
    orders: Sequence[Tensor | None] = [None] * len(layers)
    if "g_idx" in layers[0]:
        g_idx = torch.stack([layer["g_idx"] for layer in layers])
        default = row_groups(replace(first, g_idx=None)).int()
        is_default = (g_idx == default).all(1)
        # A permutation of the default has as many rows in each group.
        if not is_default.all() and not (g_idx.sort(1).values == default).all():
            return None
        orders = [
            None if plain else one for one, plain in zip(g_idx, is_default.tolist(), strict=True)
        ]
    found = [
        GptqLinear(settings, layer["qweight"], layer["qzeros"], own, order)
        for layer, own, order in zip(layers, scales, orders, strict=True)
    ]
    mistaken = _mistaken_zero_point(settings)
    zeros = joint_zero_points(found).flatten(1)
    if mistaken is not None and bool((zeros == mistaken).all(1).any()):
        return None
    return found


def joint_zero_points(linears: Sequence[GptqLinear]) -> Tensor:
    """`unpack_zero_points` of layers with equal shapes, [layers, groups, out_features]."""
    first = linears[0]
    joint = replace(first, qzeros=torch.cat([linear.qzeros for linear in linears]))
    return unpack_zero_points(joint).view(len(linears), *first.scales.shape)


def _checked_g_idx(parts: Mapping[str, Tensor], linear: GptqLinear, where: object) -> Tensor | None:
    """`g_idx`, checked for the number of rows of each group; None if it is the default order."""
    default = row_groups(linear)
    groups = linear.scales.shape[0]
    g_idx = None
    if parts.get("g_idx") is not None:
        g_idx = bitstream.take(parts, "g_idx", 1, (torch.int32,), where)
        reason = f"'qweight' has {linear.in_features} rows"
        bitstream.require_shape(g_idx, "g_idx", (linear.in_features,), reason, where)
    if g_idx is None or not g_idx.any():  # some writers store zeros instead of omitting it
        if linear.settings.has_act_order and groups > 1:
            raise MissingTensorError(
                "tensor 'g_idx' is missing or all zero",
                where=where,
                expected="the group of each row, since 'desc_act' is true",
            )
        return None
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= groups:
        raise WeightFileError(
            "tensor 'g_idx' names a group that does not exist",
            where=where,
            expected=f"0 to {groups - 1}",
            got=low if low < 0 else high,
        )
    got, expected = torch.bincount(g_idx, minlength=groups), torch.bincount(default)
    if not torch.equal(got, expected):
        group = int((got != expected).int().argmax())
        raise WeightFileError(
            f"tensor 'g_idx' gives group {group} a wrong number of rows",
            where=where,
            expected=f"{int(expected[group])}, as 'group_size' has it",
            got=int(got[group]),
        )
    return None if torch.equal(g_idx, default.to(g_idx.dtype)) else g_idx


def _check_zero_points(linear: GptqLinear, where: object) -> None:
    """Detects symmetric layers whose zero points follow the other convention.

    The zero points of symmetric codes are all 2^(bits - 1). The layer is refused only if all zero
    points equal the value that this number has under the other convention.
    """
    mistaken = _mistaken_zero_point(linear.settings)
    if mistaken is None:
        return
    middle = 1 << (linear.settings.bits - 1)
    given = linear.settings.checkpoint_format
    is_old = given is CheckpointFormat.GPTQ
    other = CheckpointFormat.GPTQ_V2 if is_old else CheckpointFormat.GPTQ
    if bool((unpack_zero_points(linear) == mistaken).all()):
        raise WeightFileError(
            "tensor 'qzeros' contradicts 'checkpoint_format'",
            where=where,
            expected=f"zero points of {middle}, as 'sym' is true",
            got=f"{mistaken} everywhere",
            next_step=f"The file seems to be {other.value!r}, but is marked {given.value!r}.",
        )


def _mistaken_zero_point(settings: GptqSettings) -> int | None:
    """The zero points of symmetric codes as the other convention has them; None if the codes are
    not symmetric."""
    if not settings.is_symmetric:
        return None
    middle = 1 << (settings.bits - 1)
    return middle + 1 if settings.checkpoint_format is CheckpointFormat.GPTQ else middle - 1


def _check_scales(linear: GptqLinear, where: object) -> None:
    finite = linear.scales.isfinite()
    if not finite.all():
        group, column = divmod(int(finite.flatten().int().argmin()), linear.out_features)
        raise WeightValueError(
            f"tensor 'scales' has no usable value for group {group}, column {column}",
            where=where,
            expected="a finite float16 number",
            got=float(linear.scales[group, column]),
        )
    largest = float(linear.scales.abs().max())
    could_overflow = largest * 2**linear.settings.bits > LARGEST_FP16
    if could_overflow and not dequantize(linear).isfinite().all():
        raise WeightValueError(
            "tensor 'scales' makes weights too large for float16",
            where=where,
            expected=f"weights up to {LARGEST_FP16:.0f}",
            got=f"a scale of {largest:g}",
        )


def row_groups(linear: GptqLinear) -> Tensor:
    """Group of each input feature, int64 [in_features]."""
    if linear.g_idx is not None:
        return linear.g_idx.long()
    return torch.arange(linear.in_features) // linear.group_rows


def unpack_codes(linear: GptqLinear) -> Tensor:
    """Codes, uint8 [in_features, out_features]."""
    return bitstream.unpack(linear.qweight, linear.settings.bits)


def unpack_zero_points(linear: GptqLinear) -> Tensor:
    """Zero points, uint8 [groups, out_features], which are subtracted from the codes."""
    bits, words = linear.settings.bits, linear.qzeros
    is_minus_one = linear.settings.checkpoint_format is CheckpointFormat.GPTQ
    if is_minus_one and 32 % bits == 0:
        # Writers subtract one from all fields of a word at once, and a field of 0 borrows from the
        # next. Only an addition with carry undoes that.
        words = words + sum(1 << shift for shift in range(0, 32, bits))
    zeros = bitstream.unpack(words.T, bits).T.contiguous()
    if is_minus_one and 32 % bits:
        zeros = (zeros + 1).bitwise_and_(2**bits - 1)
    return zeros


def dequantize(linear: GptqLinear) -> Tensor:
    """Exact weights, float16 [in_features, out_features]."""
    bits = linear.settings.bits
    rows, columns = linear.in_features, linear.out_features
    scales, zeros = linear.scales, unpack_zero_points(linear)
    groups = row_groups(linear)
    weight = torch.empty(rows, columns, dtype=torch.float16)
    step = max(CHUNK_VALUES // columns // 32, 1) * 32
    for start in range(0, rows, step):
        end = min(start + step, rows)
        words = linear.qweight[start * bits // 32 : end * bits // 32]
        # An integer times a float16 is exact in float32, so the only rounding is the last step.
        values = bitstream.unpack(words, bits, torch.float32)
        values.sub_(zeros[groups[start:end]]).mul_(scales[groups[start:end]])
        weight[start:end] = values
    return weight
