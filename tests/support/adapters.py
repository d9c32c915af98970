"""LoRA adapters in PEFT's file layout, and reference models with W + scale * B A merged."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

LINEARS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("c_fc", "c_proj"),
)
PREFIX = "base_model.model."


def random_pairs(
    model: Any, linears: Collection[str] = LINEARS, rank: int = 4, seed: int = 1
) -> dict[str, tuple[Tensor, Tensor]]:
    """Random A [rank, in] and B [out, rank] for every linear of these kinds, by module name.

    B A is about half as large as weights whose rows have norm 1, so that its effect is visible.
    """
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in linears:
            rows, columns = module.weight.shape
            a = torch.randn(rank, columns, generator=generator) / columns**0.5
            b = torch.randn(rows, rank, generator=generator) * (0.5 / rank**0.5)
            pairs[name] = a, b
    assert pairs
    return pairs


def stored(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The pairs under their names in PEFT files."""
    tensors = {}
    for module, (a, b) in pairs.items():
        kind = "lora_embedding_{}" if module.endswith("embed_tokens") else "lora_{}.weight"
        tensors[f"{PREFIX}{module}.{kind.format('A')}"] = a
        tensors[f"{PREFIX}{module}.{kind.format('B')}"] = b
    return tensors


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    """Writes an adapter directory. r and lora_alpha are 4 by default."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: t.clone().contiguous() for name, t in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": [], **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def merged(model: Any, *changes: tuple[Mapping[str, tuple[Tensor, Tensor]], float]) -> Any:
    """A copy of the model with scale * B A added for every (pairs, scale)."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for pairs, scale in changes:
            for name, (a, b) in pairs.items():
                weight = model.get_submodule(name).weight
                product = scale * (b.double() @ a.double())
                weight += product.T if name.endswith("embed_tokens") else product
    return model


def untie(model: Any) -> Any:
    """A copy whose head has its own weights, so that adapters can change it separately."""
    model = copy.deepcopy(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model
