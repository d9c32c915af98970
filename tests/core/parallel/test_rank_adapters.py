"""Adapters of models that are divided among ranks: the logits of one process.

The ranks are threads; `test_rank_processes.py` has processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.cache.format import PAGE_SIZE, KVFormat
from exl_core.lora.adapter import load_adapter
from exl_core.model.adapters import AdapterUse
from exl_core.model.runner import make_batch, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.model.transformer import Transformer
from exl_core.session.load import LoadOptions, load_model
from support import tiny_hybrids
from support import tiny_models as tiny
from support.adapters import random_pairs, stored, write_adapter
from support.quantized_models import quantized_llama
from support.thread_ranks import mean_kl, on_ranks, rank_model
from support.thread_sums import through_memory

EXACT = LoadOptions(device="cpu", exact=True)
IDS = torch.randint(3, 259, (3, 20), generator=torch.Generator().manual_seed(3)).tolist()

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": tiny.tiny_llama,
    "ernie4.5": tiny.tiny_ernie,  # interleaved RoPE rows
    "gemma4": tiny.tiny_gemma4,  # values from keys
    "cohere": tiny.tiny_cohere,  # attention and MLP in parallel
    "starcoder2": tiny.tiny_starcoder2,  # an MLP without a gate
    "olmo3": tiny.tiny_olmo3,  # norms over all heads
}


def logits(model: Transformer, folders: tuple[Path, ...]) -> Tensor:
    """Logits of three sequences of one pass: without adapters, with the first, with both."""
    found = [AdapterUse(load_adapter(folder, model), 0.7) for folder in folders]
    uses = ((), tuple(found[:1]), tuple(found))
    store = store_for(model, KVFormat.FP32, 3, num_states=3)
    slots = range(3) if model.config.state_bytes else [None] * 3
    segments = [
        Segment(tuple(ids), 0, (index,), LogitRows.ALL, own, state_slot=slots[index])
        for index, (ids, own) in enumerate(zip(IDS, uses, strict=True))
    ]
    return model.forward(make_batch(segments, PAGE_SIZE), store)


def assert_equal_on_ranks(path: Path, folders: tuple[Path, ...], bound: float) -> None:
    expected = logits(load_model(path, EXACT).model, folders)
    size = len(IDS[0])
    assert mean_kl(expected[:size], expected[size : 2 * size]) > 1e-3  # adapters have effects
    for count in (2, 3):
        found = on_ranks(count, lambda rank: logits(rank_model(path, rank, EXACT), folders))[0]
        assert mean_kl(expected, found) < bound


def adapters_of(model: Any, folder: Path, **kinds: Any) -> tuple[Path, ...]:
    return tuple(
        write_adapter(folder / str(seed), stored(random_pairs(model, seed=seed, **kinds)))
        for seed in (1, 2)
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_every_linear_of_a_layer(name: str, tmp_path: Path) -> None:
    model = FAMILIES[name]()
    path = tiny.save(model, tmp_path / "model")
    assert_equal_on_ranks(path, adapters_of(model, tmp_path), 1e-7)


HYBRIDS: dict[str, Callable[[], Any]] = {
    "qwen3.5": tiny_hybrids.tiny_qwen35,
    "granite4-hybrid": tiny_hybrids.tiny_granite_hybrid,
    "lfm2": tiny_hybrids.tiny_lfm2,
}
MIXER_LINEARS = ("in_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "q_proj")


@pytest.mark.parametrize("name", HYBRIDS)
def test_linears_of_recurrent_layers(name: str, tmp_path: Path) -> None:
    model = HYBRIDS[name]()
    path = tiny.save(model, tmp_path / "model")
    assert_equal_on_ranks(path, adapters_of(model, tmp_path, linears=MIXER_LINEARS), 1e-7)


@pytest.mark.parametrize("method", ["exl2", "exl3", "gptq", "awq"])
def test_quantized_weights_whose_features_are_dealt(method: str, tmp_path: Path) -> None:
    """With act-order a rank's inputs of `down` are scattered features."""
    path = quantized_llama(method, tmp_path / "model")
    sizes = load_model(path, EXACT).config
    dense = sizes.layers[0].dense
    heads = sizes.layers[0].attention
    model = tiny.tiny_llama(
        hidden_size=sizes.hidden_size,
        intermediate_size=dense.intermediate_size,
        num_attention_heads=heads.num_q_heads,
        num_key_value_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        num_hidden_layers=sizes.num_layers,
    )
    assert_equal_on_ranks(path, adapters_of(model, tmp_path), 1e-7)


def test_embedding_and_head(tmp_path: Path) -> None:
    model = tiny.tiny_llama()
    path = tiny.save(model, tmp_path / "model")
    low_rank = random_pairs(model, linears=("embed_tokens", "lm_head"))
    a, b = low_rank["model.embed_tokens"]
    low_rank["model.embed_tokens"] = b.T, a.T  # from ids to states
    whole = {"base_model.model.lm_head.weight": -model.lm_head.weight.detach()}
    folders = (
        write_adapter(tmp_path / "1", stored(low_rank)),
        write_adapter(tmp_path / "2", whole),
    )
    assert_equal_on_ranks(path, folders, 1e-7)


def test_an_expert_family_with_adapters_on_attention_and_shared_mlp(tmp_path: Path) -> None:
    model = tiny.tiny_glm4_moe()
    path = tiny.save(model, tmp_path / "model")
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert_equal_on_ranks(path, adapters_of(model, tmp_path, linears=names), 1e-7)


@pytest.mark.parametrize("name", FAMILIES)
def test_linears_whose_sums_are_shared(name: str, tmp_path: Path) -> None:
    """Deltas need whole states: no op completes a sum later."""
    model = FAMILIES[name]()
    path, folders = tiny.save(model, tmp_path / "model"), adapters_of(model, tmp_path)
    expected = on_ranks(2, lambda rank: logits(rank_model(path, rank, EXACT), folders))[0]
    found = through_memory(path, 2, EXACT, lambda model, _: logits(model, folders))[0]
    assert mean_kl(expected, found) < 1e-7


def test_ranges_of_logits_with_a_head_of_their_own(tmp_path: Path) -> None:
    """Three ranges: the model's head, the same with a delta, and another head, on rank 0 alone."""
    model = tiny.tiny_llama()
    path = tiny.save(model, tmp_path / "model")
    whole = {"base_model.model.lm_head.weight": -model.lm_head.weight.detach()}
    folders = (
        write_adapter(tmp_path / "1", stored(random_pairs(model, linears=("lm_head",)))),
        write_adapter(tmp_path / "2", whole),
    )
    for count in (2, 3):
        expected = on_ranks(count, lambda rank: logits(rank_model(path, rank, EXACT), folders))[0]
        found = through_memory(path, count, EXACT, lambda model, _: logits(model, folders))[0]
        assert mean_kl(expected, found) < 1e-7
