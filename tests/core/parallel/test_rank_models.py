"""Models divided among ranks: the logits of one process, for every family and codec.

The ranks are threads; `test_rank_processes.py` has processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from exl_core.arch.layers import MLA, Attention
from exl_core.cache.format import PAGE_SIZE, KVFormat
from exl_core.errors import RequestError
from exl_core.model.observe import StateRecorder
from exl_core.model.runner import make_batch, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.parallel.model import RankTransformer
from exl_core.parallel.plan import Rank, head_share, latent_heads
from exl_core.session.load import LoadOptions
from support import tiny_hybrids, tiny_latent
from support import tiny_models as tiny
from support.families import FAMILIES, save_family
from support.gguf_latent import write_latent
from support.gguf_models import write_gguf
from support.mxfp4 import save_as_mxfp4
from support.quantized_models import METHODS, SIZES, TIED, quantize, quantized_llama
from support.thread_ranks import (
    assert_logits_of_one_process,
    logits_on_one,
    logits_on_ranks,
    mean_kl,
    on_ranks,
    rank_model,
)
from support.thread_sums import logits_through_memory, through_memory

OTHERS: dict[str, Callable[[], Any]] = {
    "qwen3-moe": tiny.tiny_qwen3_moe,
    "qwen2-moe": tiny.tiny_qwen2_moe,
    "glm4-moe": tiny.tiny_glm4_moe,
    "granite-moe": tiny.tiny_granite_moe,
    "mixtral": tiny.tiny_mixtral,
    "minimax-m2": tiny.tiny_minimax_m2,
    "gemma4-moe": tiny.tiny_gemma4_moe,
    "qwen3-vl-moe": tiny.tiny_qwen3_vl_moe,
    "dbrx": tiny.tiny_dbrx,
    "llama4": tiny.tiny_llama4,
    "gpt2": tiny.tiny_gpt2,
    "bigcode": tiny.tiny_bigcode,
    "deepseek2": tiny_latent.tiny_deepseek2,
    "deepseek3": tiny_latent.tiny_deepseek3,
    "glm4-moe-lite": tiny_latent.tiny_glm4_moe_lite,
    "mistral4": tiny_latent.tiny_mistral4,
    "lfm2": tiny_hybrids.tiny_lfm2,
    "lfm2-moe": tiny_hybrids.tiny_lfm2_moe,
    "qwen3.5": tiny_hybrids.tiny_qwen35,
    "qwen3.5-moe": tiny_hybrids.tiny_qwen35_moe,
    "qwen3-next": tiny_hybrids.tiny_qwen3_next,
    "kimi-linear": tiny_hybrids.tiny_kimi_linear,
    "granite4-hybrid": tiny_hybrids.tiny_granite_hybrid,
    "granite4-hybrid-1": lambda: tiny_hybrids.tiny_granite_hybrid(mamba_n_groups=1),
    "nemotron-h": tiny_hybrids.tiny_nemotron_h,
}
EXACT = LoadOptions(device="cpu", exact=True)
FAST = LoadOptions(device="cpu")
DEFERRING = ("llama", "gpt2")
"""Families whose sums are completed by a product after a norm."""


def save_model(name: str, folder: Path) -> Path:
    if name in OTHERS:
        return tiny.save(OTHERS[name](), folder)
    return save_family(name, FAMILIES[name](), folder)


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_every_family_has_the_logits_of_one_process(name: str, tmp_path: Path) -> None:
    """Three ranks share two key-value heads: two of them have copies of one head."""
    path = save_model(name, tmp_path / "model")
    assert_logits_of_one_process(path, EXACT)


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_every_family_has_the_logits_of_sums_that_are_not_shared(name: str, tmp_path: Path) -> None:
    path = save_model(name, tmp_path / "model")
    for count in (2, 3):
        expected = logits_on_ranks(path, count, EXACT)
        found, num_deferred = logits_through_memory(path, count, EXACT)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, atol=2e-4, rtol=1e-4)
        assert num_deferred > 0 or name not in DEFERRING


@pytest.mark.parametrize("name", ["llama", "gemma3", "cohere", "glm4-moe", "deepseek3"])
def test_rank_0_alone_may_record_states(name: str, tmp_path: Path) -> None:
    """It completes every sum at once, while the others go on completing them later."""
    path = save_model(name, tmp_path / "model")

    def states(model: RankTransformer) -> tuple[Tensor, Tensor]:
        recorder = StateRecorder((0, 1))
        is_first = model._exchange.rank.index == 0
        segment = Segment(tuple(range(3, 20)), 0, (0,), LogitRows.LAST)
        store = store_for(model, KVFormat.FP32, 1)
        batch = make_batch((segment,), PAGE_SIZE)
        logits = model.forward(batch, store, recorder if is_first else None)
        return logits, torch.cat([recorder.embedding, *recorder.layers.values()])

    expected = on_ranks(3, lambda rank: states(rank_model(path, rank, EXACT)))[0]
    found = through_memory(path, 3, EXACT, lambda model, _: states(model))[0]
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("is_mxfp4", [False, True])
def test_sinks_and_experts_with_biases(is_mxfp4: bool, tmp_path: Path) -> None:
    """Each rank has the sinks of its heads, and one of them adds the biases of `down`."""
    save = save_as_mxfp4 if is_mxfp4 else tiny.save
    path = save(tiny.tiny_gpt_oss(), tmp_path / "model")
    reference = LoadOptions(device="reference")
    expected = logits_on_one(path, reference)
    for count in (2, 3):
        found = logits_on_ranks(path, count, reference)
        for one, other in zip(expected, found, strict=True):
            assert mean_kl(one, other) < 1e-7


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_every_quantized_checkpoint(method: str, count: int, tmp_path: Path) -> None:
    path = quantized_llama(method, tmp_path / "model")
    for options, prefill_bound, decode_bound in ((EXACT, 1e-7, 1e-7), (FAST, 1e-4, 1e-5)):
        expected, found = logits_on_one(path, options), logits_on_ranks(path, count, options)
        assert mean_kl(expected[0], found[0]) < prefill_bound
        assert mean_kl(expected[1], found[1]) < decode_bound


@pytest.mark.parametrize("method", METHODS)
def test_quantized_checkpoints_whose_sums_are_shared(method: str, tmp_path: Path) -> None:
    path = quantized_llama(method, tmp_path / "model")
    expected = logits_on_ranks(path, 2, EXACT)
    found, num_deferred = logits_through_memory(path, 2, EXACT)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, atol=2e-4, rtol=1e-4)
    assert num_deferred > 0


@pytest.mark.parametrize("method", ["exl2", "exl3", "gptq"])
def test_experts_of_a_quantized_checkpoint(method: str, tmp_path: Path) -> None:
    """Every token uses all experts, so that rounding does not change a choice."""
    experts = {"num_experts": 6, "num_experts_per_tok": 6, "moe_intermediate_size": 96}
    model = tiny.tiny_qwen3_moe(**SIZES, **experts, tie_word_embeddings=method in TIED)
    path = tiny.save(model, tmp_path / "model")
    quantize(path, *METHODS[method])
    for options, prefill_bound, decode_bound in ((EXACT, 1e-7, 1e-7), (FAST, 1e-4, 1e-5)):
        expected = logits_on_one(path, options)
        for count in (2, 3):
            found = logits_on_ranks(path, count, options)
            assert mean_kl(expected[0], found[0]) < prefill_bound
            assert mean_kl(expected[1], found[1]) < decode_bound


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q6_K"])
def test_every_kind_of_blocks(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = tiny.tiny_llama(**sizes, **heads, num_hidden_layers=2)
    path = write_gguf(model, tmp_path / "model.gguf", GGMLQuantizationType[kind])
    expected = logits_on_one(path, FAST)
    for count in (2, 3):
        found = logits_on_ranks(path, count, FAST)
        assert mean_kl(expected[0], found[0]) < 1e-4
        assert mean_kl(expected[1], found[1]) < 1e-5


ROW = {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
"""Sizes of latent attention that every format of weights and of the cache can store."""


@pytest.mark.parametrize("is_split", [False, True], ids=["one-matrix", "two-matrices"])
def test_latent_attention_of_quantized_files(is_split: bool, tmp_path: Path) -> None:
    """Heads are divided, and every rank caches whole latent vectors. All layers have dense MLPs:
    with random weights one of the rows has a near tie between experts."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    model = tiny_latent.tiny_deepseek3(**ROW, **sizes, q_lora_rank=32, first_k_dense_replace=3)
    kind = GGMLQuantizationType.Q8_0
    path = write_latent(model, tmp_path / "model.gguf", is_split=is_split, kind=kind)
    for options, bound in ((EXACT, 1e-7), (FAST, 1e-4)):
        expected = logits_on_one(path, options)
        for count in (2, 4):  # 6 heads: 4 ranks have unequal shares
            found = logits_on_ranks(path, count, options)
            assert mean_kl(expected[0], found[0]) < bound
            assert mean_kl(expected[1], found[1]) < bound


@pytest.mark.parametrize("kv_format", list(KVFormat))
def test_latent_attention_in_every_format_of_the_cache(kv_format: KVFormat, tmp_path: Path) -> None:
    path = tiny.save(tiny_latent.tiny_deepseek2(**ROW, first_k_dense_replace=3), tmp_path / "model")
    expected = logits_on_one(path, EXACT, kv_format)
    found = logits_on_ranks(path, 3, EXACT, kv_format)
    assert mean_kl(expected[1], found[1]) < 1e-5


def test_more_ranks_than_heads_of_latent_attention_are_refused() -> None:
    spec = MLA(2, 0, kv_rank=64, nope_dim=32, rope_dim=32, value_dim=32, scale=1.0)
    assert [latent_heads(spec, Rank(index, 2)) for index in range(2)] == [range(1), range(1, 2)]
    with pytest.raises(RequestError, match="too few heads"):
        latent_heads(spec, Rank(0, 3))


@pytest.mark.parametrize("kv_format", [one for one in KVFormat if one is not KVFormat.Q4])
def test_every_format_of_the_cache(kv_format: KVFormat, tmp_path: Path) -> None:
    """Each rank quantizes its own heads. Key smoothing, which Q4 has, is measured under a lock that
    all models of a process share: `test_rank_processes.py` has that format."""
    path = tiny.save(tiny.tiny_llama(head_dim=32), tmp_path / "model")
    expected = logits_on_one(path, EXACT, kv_format)
    found = logits_on_ranks(path, 2, EXACT, kv_format)
    assert mean_kl(expected[1], found[1]) < 1e-5


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "ranks", "expected"),
    [
        (9, 3, 2, [(0, 3, 0, 1), (3, 9, 1, 3)]),
        (9, 3, 3, [(0, 3, 0, 1), (3, 6, 1, 2), (6, 9, 2, 3)]),
        (6, 2, 3, [(0, 1, 0, 1), (1, 3, 0, 1), (3, 6, 1, 2)]),
        (4, 1, 2, [(0, 2, 0, 1), (2, 4, 0, 1)]),
        (5, 1, 4, [(0, 1, 0, 1), (1, 2, 0, 1), (2, 3, 0, 1), (3, 5, 0, 1)]),
    ],
)
def test_query_heads_stay_with_their_key_value_head(
    q_heads: int, kv_heads: int, ranks: int, expected: list[tuple[int, ...]]
) -> None:
    spec = Attention(q_heads, kv_heads, 64, scale=1.0)
    found = [head_share(spec, Rank(index, ranks)) for index in range(ranks)]
    assert [(*_ends(one.q), *_ends(one.kv)) for one in found] == expected


def _ends(part: range) -> tuple[int, int]:
    return part.start, part.stop


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(RequestError, match="at most 9 ranks"):
        head_share(Attention(9, 3, 64, scale=1.0), Rank(0, 12))
