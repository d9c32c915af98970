"""Adapters of every linear of every family, compared with transformers after merging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.lora.adapter import load_adapter
from exl_core.model.adapters import AdapterUse
from exl_core.model.context import Context
from exl_core.session.load import load_model
from support.adapters import LINEARS, merged, random_pairs, stored, write_adapter
from support.families import FAMILIES, save_family
from support.profiles import first_by_default
from support.renamed_models import INTERNLM2_NAMES
from support.tiny_models import (
    VOCAB_SIZE,
    tiny_dbrx,
    tiny_gemma4_moe,
    tiny_glm4_moe,
    tiny_gpt_oss,
    tiny_llama4,
    tiny_mixtral,
    tiny_qwen3_moe,
)

IDS = torch.randint(3, VOCAB_SIZE, (1, 80), generator=torch.Generator().manual_seed(7))
OTHERS = ("vision_tower", "visual", "multi_modal_projector", "lm_head")
"""Parts of models that are not in the layers."""


def targets(model: Any) -> set[str]:
    """Names of the modules of the layers' linears, without their paths."""
    return {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not any(part in name for part in OTHERS)
    }


def renamed(family: str, name: str) -> str:
    """Name of a module in the family's adapters."""
    names = INTERNLM2_NAMES if family == "internlm2" else {}
    for old, new in names.items():
        name = name.replace(old, new)
    return name


EXPERTS = {
    "qwen3-moe": tiny_qwen3_moe,
    "mixtral": tiny_mixtral,
    "glm4-moe": tiny_glm4_moe,
    "gemma4-moe": tiny_gemma4_moe,
    "dbrx": tiny_dbrx,
    "llama4": tiny_llama4,
    "gpt-oss": tiny_gpt_oss,
}
"""Builders of models with experts."""


@pytest.mark.parametrize("family", first_by_default(FAMILIES, 6))
def test_adapters_of_every_linear_match(tmp_path: Path, family: str) -> None:
    model: Any = FAMILIES[family]()
    pairs = {
        name: pair
        for name, pair in random_pairs(model, targets(model)).items()
        if not any(part in name for part in OTHERS)
    }
    check_adapter(tmp_path, family, model, pairs)


@pytest.mark.parametrize("family", EXPERTS)
def test_adapters_of_models_with_experts_match(tmp_path: Path, family: str) -> None:
    model: Any = EXPERTS[family]()
    linears = (*LINEARS, "Wqkv", "out_proj")  # attention, dense and shared MLPs
    pairs = random_pairs(model, linears)
    assert not any("router" in name for name in pairs)
    check_adapter(tmp_path, family, model, pairs)


def check_adapter(
    tmp_path: Path, family: str, model: Any, pairs: dict[str, tuple[Tensor, Tensor]]
) -> None:
    """Compares a model that has the adapter with one into which it is merged."""
    with torch.inference_mode():
        plain, expected = model(IDS).logits[0], merged(model, (pairs, 1.5))(IDS).logits[0]
    ours = load_model(str(save_family(family, model, tmp_path / "model"))).model
    tensors = stored({renamed(family, name): pair for name, pair in pairs.items()})
    adapter = load_adapter(write_adapter(tmp_path / "adapter", tensors, lora_alpha=6), ours)
    context = Context(ours, 96, batch_size=1, kv_format=KVFormat.FP32)

    parts = [context.forward(IDS[:, :70], adapters=[AdapterUse(adapter)])]
    parts += [
        context.forward(IDS[:, i : i + 1], adapters=[AdapterUse(adapter)]) for i in range(70, 80)
    ]

    assert (torch.cat(parts, 1)[0] - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (expected - plain).abs().max() > 0.1 * plain.abs().max()  # the adapter has an effect
