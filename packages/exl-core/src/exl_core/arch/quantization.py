"""Quantization method of a checkpoint, from its configuration.

Knows `quantization_config` in `config.json`, `compression_config` there (early compressed-tensors),
and the older `quantize_config.json`. The meaning of a method's settings belongs to its codec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from exl_core.arch.fields import Fields
from exl_core.errors import ConfigError, UnsupportedModelError
from exl_core.files import is_present, read_json_object

SUPPORTED = ("exl2", "exl3", "gptq", "awq", "compressed-tensors", "fp8", "mxfp4")
ADVICE = {
    "bitsandbytes": "bitsandbytes weights are meant for its own kernels: use the unquantized "
    "checkpoint, or a GPTQ or GGUF file of the model.",
    "auto-round": "Use the model's export in GPTQ, AWQ or GGUF form, which AutoRound writes too.",
    "fbgemm_fp8": "Use the FP8 checkpoint in compressed-tensors form, or the unquantized one.",
    "torchao": "Use the unquantized checkpoint: --load-in-4bit or 'exl convert' quantizes it.",
    "quanto": "Use the unquantized checkpoint: --load-in-4bit or 'exl convert' quantizes it.",
    "gguf": "Name the .gguf file itself instead of the folder.",
}
_BITSANDBYTES_KEYS = ("load_in_4bit", "load_in_8bit")
"""Early files of bitsandbytes name no method."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """`method` is one of SUPPORTED. `settings` are the other keys of its section in file
    `where`."""

    method: str
    settings: Mapping[str, object]
    where: Path


def read_quantization(directory: Path) -> Quantization | None:
    """Quantization of the checkpoint in `directory`; None if it is not quantized.

    Raises `UnsupportedModelError` for methods other than SUPPORTED.
    """
    config = directory / "config.json"
    fields = Fields(read_json_object(config, ConfigError), config)
    older = directory / "quantize_config.json"
    keys = [key for key in ("quantization_config", "compression_config") if fields.has(key)]
    if keys:
        block = fields.nested(keys[0])
        is_early = any(block.has(key) for key in _BITSANDBYTES_KEYS)
        where = config
        method = block.text("quant_method", "bitsandbytes" if is_early else "unknown")
    elif is_present(older, ConfigError):
        block = Fields(read_json_object(older, ConfigError), older)
        where, method = older, block.text("quant_method", "gptq")
    else:
        return None
    if method not in SUPPORTED:
        raise UnsupportedModelError(
            f"weights quantized with {method!r} cannot be read",
            where=where,
            expected=" or ".join(SUPPORTED),
            next_step=ADVICE.get(
                method, "Use the unquantized checkpoint, or a GGUF file of the model."
            ),
        )
    return Quantization(method, dict(block.values), where)
