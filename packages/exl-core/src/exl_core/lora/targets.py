"""Finds the model's matrix that a tensor of an adapter belongs to, by the tensor's name.

Names follow PEFT: an arbitrary prefix, the model's own root, the layer, the module, and the role of
the tensor in it. Shapes come from the module table. Knows no files.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from exl_core.arch.modules import Kind, LoraTarget, ModuleTable

End = Literal["embed", "head"]
_ENDS: dict[Kind, End] = {Kind.EMBEDDING: "embed", Kind.HEAD: "head"}
Role = Literal["down", "up", "bias", "whole", "other"]

_TAILS: tuple[tuple[str, Role], ...] = (
    (r"lora_A(\.default)?\.weight", "down"),
    (r"lora_B(\.default)?\.weight", "up"),
    (r"lora_embedding_A(\.default)?", "down"),
    (r"lora_embedding_B(\.default)?", "up"),
    (r"lora_B(\.default)?\.bias", "bias"),
    (r"(base_layer\.)?bias", "bias"),
    (r"(base_layer\.|modules_to_save\.)?(default\.)?weight", "whole"),
)
_ROLES = tuple((re.compile(rf"(?P<module>.+?)\.{tail}"), role) for tail, role in _TAILS)


class Named(NamedTuple):
    """A parsed tensor name. `module` is PEFT's module name without PEFT's own prefix."""

    module: str
    role: Role
    is_embedding: bool


def parse_name(name: str) -> Named:
    for pattern, role in _ROLES:
        match = pattern.fullmatch(name)
        if match is not None:
            module = match["module"].removeprefix("base_model.model.")
            return Named(module, role, "lora_embedding" in name)
    return Named(name, "other", is_embedding=False)


def find_target(table: ModuleTable, module: str) -> LoraTarget | None:
    """Matrices of an adapter's module, whose name may follow a prefix; None if the model has no
    such module."""
    parts = module.split(".")
    for first in range(len(parts)):
        target = table.lora_targets.get(".".join(parts[first:]))
        if target is not None:
            return target
    return None


def end_of(target: LoraTarget) -> End | None:
    """Whether the target is the embedding (ids to states) or the head; None for matrices of
    layers."""
    return _ENDS.get(target.rows[0].kind)
