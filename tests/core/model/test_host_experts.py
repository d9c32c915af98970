"""Experts in the host's memory: the bits and logits of experts that are with their layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exl_core.errors import RequestError
from exl_core.formats.checkpoint import Checkpoint
from exl_core.model.build import build_weights
from exl_core.model.stage import StageTable
from exl_core.model.transformer import Transformer
from exl_core.model.weights import MoeWeights
from exl_core.ops.host_experts import HostExperts
from exl_core.ops.open import get_table, open_host_experts
from exl_core.session.load import LoadOptions, load_model
from exl_core.session.open import open_checkpoint
from support.families import EXPERT_FAMILIES
from support.paged import logits_of, logits_of_model
from support.profiles import first_by_default
from support.tiny_models import save, tiny_gemma4_moe, tiny_gpt_oss, tiny_llama, tiny_llama4

IDS = torch.randint(3, 259, (70,), generator=torch.Generator().manual_seed(4)).tolist()

BUILDERS: dict[str, Callable[..., Any]] = {
    "qwen2-moe": EXPERT_FAMILIES["qwen2-moe"],  # a shared expert, with a score
    "glm4-moe": EXPERT_FAMILIES["glm4-moe"],  # a shared expert without
    "llama4": tiny_llama4,  # weights on the inputs of the experts
    "gemma4": tiny_gemma4_moe,  # norms between experts and shared expert
    "gpt-oss": tiny_gpt_oss,
    "mixtral": EXPERT_FAMILIES["mixtral"],
}


@pytest.mark.parametrize("family", first_by_default(BUILDERS, 4))
def test_experts_of_some_layers_on_another_table_give_the_same_bits(
    tmp_path: Path, family: str
) -> None:
    source, config, quantization = open_checkpoint(save(BUILDERS[family](), tmp_path))
    checkpoint = Checkpoint(source, config, quantization)
    own, host = (get_table("cpu", threads=threads) for threads in (1, 2))
    layers = range(config.num_layers)
    sparse = [layer for layer in layers if checkpoint.expert_bytes[layer]]

    def model(*stages: StageTable) -> Transformer:
        weights = build_weights(config, checkpoint, own, threads=1, split=stages)
        return Transformer(config, weights, own, split=stages)

    whole = model(StageTable(layers, own))
    near = open_host_experts(own, host)
    found = model(StageTable(layers, own, near, sparse[1:]))

    assert torch.equal(logits_of_model(found, IDS), logits_of_model(whole, IDS))
    blocks = found._weights.blocks
    hosts: list[HostExperts | None] = [
        block.mlp.host for block in blocks if isinstance(block.mlp, MoeWeights)
    ]
    assert hosts == [None, *[near] * (len(sparse) - 1)]
    assert found.host_table is (host if len(sparse) > 1 else None)
    stored = sum(checkpoint.expert_bytes[layer] for layer in sparse[1:])
    assert stored <= found.host_bytes <= 1.05 * stored  # odd widths are padded
    for rows in (1, 5):
        assert found.pass_weight_bytes(rows) == pytest.approx(whole.pass_weight_bytes(rows), abs=2)
        on_device = sum(found.stage_pass_bytes(rows))
        assert on_device + found.host_pass_bytes(rows) == found.pass_weight_bytes(rows)


def test_a_loaded_model_has_the_experts_of_the_wanted_layers_on_the_cpu(tmp_path: Path) -> None:
    folder = save(EXPERT_FAMILIES["qwen3-moe"](), tmp_path)
    whole = logits_of(folder, IDS, LoadOptions(device="reference"))
    for wanted, layers in (("cpu", (0, 2, 3)), ("2", (0, 2)), ("0", ()), ("device", ())):
        loaded = load_model(folder, device="reference", experts_on=wanted)
        plan = loaded.plan
        assert [stage.host_layers for stage in plan] == ([layers] if layers else [])
        assert [stage.device for stage in plan] == ["reference"] * bool(layers)
        found = logits_of_model(loaded.model, IDS)
        assert (found - whole).norm() <= 1e-5 * whole.norm()


def test_on_the_cpu_experts_are_there_anyway(tmp_path: Path) -> None:
    folder = save(EXPERT_FAMILIES["qwen3-moe"](), tmp_path)
    for wanted in ("cpu", "1", "auto", "device"):
        loaded = load_model(folder, device="cpu", experts_on=wanted)
        assert loaded.model.host_table is None


def test_places_that_do_not_suit_the_model_are_refused(tmp_path: Path) -> None:
    folder = save(EXPERT_FAMILIES["qwen3-moe"](), tmp_path / "moe")
    dense = save(tiny_llama(), tmp_path / "dense")
    for path, wanted, message in (
        (folder, "4", "experts of so many layers on the CPU (expected 0 to 3, got 4)"),
        (folder, "gpu", "no such place for experts"),
        (dense, "cpu", "the model has no experts"),
    ):
        with pytest.raises(RequestError) as caught:
            load_model(path, device="reference", experts_on=wanted)
        assert message in str(caught.value)
    with pytest.raises(RequestError, match="experts-on"):
        load_model(folder, device="reference", experts_on="cpu", held_bytes=0)
