"""Quantized matrices of a checkpoint: which tensors make one up, and its exact values.

Joins what a source holds under one name (`P.q_weight`, `P.q_scale`, ...) and hands it to the codec
of the format, which is found by the tensors that are there, never by a file's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from exl_core.arch.quantization import Quantization
from exl_core.codecs import exl2, gptq
from exl_core.errors import ConfigError, WeightShapeError
from exl_core.weights.source import StoredTensor, TensorSource


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """One matrix: `stored` describes it as a whole, [out_features, in_features]."""

    stored: StoredTensor
    method: str
    parts: Mapping[str, str]


def find_quantized(
    source: TensorSource, stem: str, shape: tuple[int, ...]
) -> QuantizedMatrix | None:
    """The matrix that is stored in pieces under `stem`, or None."""
    for method, marker, names in (
        ("exl2", "q_weight", exl2.PARTS),
        ("gptq", "qweight", gptq.PARTS),
    ):
        if f"{stem}.{marker}" not in source.tensors:
            continue
        parts = {part: f"{stem}.{part}" for part in names if f"{stem}.{part}" in source.tensors}
        whole = StoredTensor(
            name=stem,
            shape=shape,
            storage=method.upper(),
            size_bytes=sum(source.tensors[name].size_bytes for name in parts.values()),
            file=source.tensors[f"{stem}.{marker}"].file,
        )
        return QuantizedMatrix(whole, method, parts)
    return None


def dequantize(
    source: TensorSource, matrix: QuantizedMatrix, quantization: Quantization | None
) -> Tensor:
    """The exact values, float16 [out_features, in_features], without padding."""
    parts = {part: source.read_raw(name) for part, name in matrix.parts.items()}
    where = f"{matrix.stored.file}: {matrix.stored.name}"
    out_features, in_features = matrix.stored.shape
    if matrix.method == "exl2":
        padded = -(-out_features // exl2.COLUMN_STEP) * exl2.COLUMN_STEP
        exl2_layer = exl2.check(parts, where)
        _check_shape(exl2_layer, in_features, padded, where)
        return exl2.dequantize(exl2_layer)[:, :out_features].T
    if quantization is None or quantization.method != "gptq":
        raise ConfigError(
            "the weights are GPTQ's, but no configuration says how they are packed",
            where=matrix.stored.file.parent,
            expected="'quantization_config' in config.json, or quantize_config.json",
        )
    settings = gptq.parse_settings(quantization.settings, quantization.where)
    gptq_layer = gptq.check(parts, settings, where)
    _check_shape(gptq_layer, in_features, out_features, where)
    return gptq.dequantize(gptq_layer).T


def _check_shape(
    layer: exl2.Exl2Linear | gptq.GptqLinear, in_features: int, out_features: int, where: str
) -> None:
    if (layer.in_features, layer.out_features) != (in_features, out_features):
        raise WeightShapeError(
            "the quantized matrix has the wrong shape",
            where=where,
            expected=[in_features, out_features],
            got=[layer.in_features, layer.out_features],
            next_step="The weights and the configuration are not of one model.",
        )
