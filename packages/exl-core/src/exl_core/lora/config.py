"""`adapter_config.json` of a PEFT adapter: ranks, scales, and unsupported kinds of adapters.

A setting that would change the result and is not implemented is refused by name. `fan_in_fan_out`
changes nothing: it describes how the model stores its own weights (GPT-2), and A and B have the
same shapes as for other models. Knows no tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from exl_core.errors import AdapterError
from exl_core.files import is_present, read_json_object

CONFIG_NAME = "adapter_config.json"

# Settings under which an adapter is not W + scale * B A, with their meaning for the error message.
_OTHER_KINDS = {
    "use_dora": "DoRA, which also scales every output",
    "use_qalora": "QA-LoRA, which pools its inputs",
    "use_bdlora": "block-diagonal LoRA",
    "layer_replication": "a model with repeated layers",
    "alora_invocation_tokens": "an activated LoRA, which begins in the middle of a prompt",
    "trainable_token_indices": "trained single tokens",
    "target_parameters": "parameters that are no linear layers",
    "arrow_config": "routing between adapters",
    "kasa_config": "KaSA, which changes the model's own weights",
    "monteclora_config": "sampled weights",
    "megatron_config": "Megatron layers",
}
# Initializations that subtract something from the model's own weights.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

PATTERN_LIMIT = 200  # characters
_QUANTIFIERS_LIMIT = 2  # per pattern: bounds matching to the cube of a name's length
_SIMPLE_PATTERN = re.compile(r"(?:[^()*+?{}]|\((?:\?:)?|\)(?![*+?{])|[*+?](?![*+?{]))*")

Pattern = tuple[re.Pattern[str], float]


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Numbers of an adapter. The first pattern that matches the end of a module's name applies.

    `has_tied_ends`: embedding and head were trained as one matrix, if the model ties them.
    """

    path: Path
    rank: int
    alpha: float
    is_rank_stabilized: bool
    rank_pattern: tuple[Pattern, ...]
    alpha_pattern: tuple[Pattern, ...]
    has_tied_ends: bool
    base_model: str | None

    def rank_of(self, module: str) -> int:
        return int(_matched(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) where the adapter is rank-stabilized."""
        alpha, rank = _matched(self.alpha_pattern, module, self.alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Reads the configuration. Raises AdapterError if it is not a LoRA adapter of a supported
    kind."""
    path = directory / CONFIG_NAME
    if not is_present(path, AdapterError):
        raise AdapterError(
            f"holds no {CONFIG_NAME}",
            where=directory,
            next_step="An adapter is a directory as PEFT saves it.",
        )
    fields = read_json_object(path, AdapterError)
    _check_kind(path, fields)
    base = fields.get("base_model_name_or_path")
    return AdapterConfig(
        path=path,
        rank=int(_number(path, "r", fields.get("r"), is_whole=True)),
        alpha=_number(path, "lora_alpha", fields.get("lora_alpha")),
        is_rank_stabilized=_flag(path, fields, "use_rslora"),
        rank_pattern=_patterns(path, fields, "rank_pattern", is_whole=True),
        alpha_pattern=_patterns(path, fields, "alpha_pattern", is_whole=False),
        has_tied_ends=_flag(path, fields, "ensure_weight_tying"),
        base_model=base if isinstance(base, str) else None,
    )


def _check_kind(path: Path, fields: Mapping[str, object]) -> None:
    if fields.get("peft_type") != "LORA":
        raise AdapterError(
            "is not a LoRA adapter",
            where=path,
            expected="peft_type LORA",
            got=str(fields.get("peft_type"))[:100],
        )
    for name, meaning in _OTHER_KINDS.items():
        if fields.get(name):
            raise AdapterError(f"{name} is not supported: {meaning}", where=path)
    start = fields.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise AdapterError(
            "the adapter belongs to a changed copy of its model",
            where=path,
            got=f"init_lora_weights {start}",
            next_step="Have PEFT convert it to a plain LoRA when it is saved"
            " (path_initial_model_for_weight_conversion).",
        )


def _number(path: Path, name: str, value: object, *, is_whole: bool = False) -> float:
    kinds: tuple[type, ...] = (int,) if is_whole else (int, float)
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_number or not 0 < float(value) < 1e9:  # type: ignore[arg-type]
        raise AdapterError(
            f"{name} is not a number above 0" if not is_whole else f"{name} is not a rank",
            where=path,
            got=str(value)[:100],
        )
    return float(value)  # type: ignore[arg-type]


def _flag(path: Path, fields: Mapping[str, object], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool | None):
        raise AdapterError(f"{name} is neither true nor false", where=path, got=str(value)[:100])
    return bool(value)


def _patterns(
    path: Path, fields: Mapping[str, object], name: str, *, is_whole: bool
) -> tuple[Pattern, ...]:
    entries = fields.get(name) or {}
    if not isinstance(entries, dict):
        raise AdapterError(f"{name} is no table", where=path, got=type(entries).__name__)
    return tuple(
        (_compiled(path, name, key), _number(path, f"{name} of {key!r}", value, is_whole=is_whole))
        for key, value in entries.items()
    )


def _compiled(path: Path, name: str, key: str) -> re.Pattern[str]:
    """Compiles a key, which PEFT treats as a regular expression. Patterns from untrusted files are
    limited, so that matching cannot take exponential time."""
    quantifiers = sum(key.count(char) for char in "*+?{")
    is_short = len(key) <= PATTERN_LIMIT and quantifiers <= _QUANTIFIERS_LIMIT
    if not is_short or _SIMPLE_PATTERN.fullmatch(key) is None:
        raise AdapterError(
            f"{name} has too intricate a pattern",
            where=path,
            expected=f"up to {PATTERN_LIMIT} characters, few repetitions and none of a group",
            got=repr(key[:PATTERN_LIMIT]),
        )
    try:
        return re.compile(rf"(?:.*\.)?(?:{key})$")
    except re.error as error:
        raise AdapterError(f"{name} has a broken pattern", where=path, got=repr(key)) from error


def _matched(patterns: tuple[Pattern, ...], module: str, default: float) -> float:
    return next((value for pattern, value in patterns if pattern.match(module)), default)
