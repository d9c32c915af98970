"""A GGUF file of a model with latent attention gives the logits of its source in transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import ExpertGatingFuncType, GGMLQuantizationType
from torch import Tensor

from exl_core.errors import UnsupportedModelError
from exl_core.session.load import LoadOptions, load_model
from support.gguf_latent import with_quantized_weights, write_latent
from support.paged import PagedRun, logits_of
from support.tiny_latent import tiny_deepseek2, tiny_deepseek3, tiny_glm4_moe_lite, tiny_mistral4
from support.tiny_models import (
    VOCAB_SIZE,
)

BUILDERS: dict[str, Callable[[], Any]] = {
    "deepseek2-lite": lambda: tiny_deepseek2(n_group=1, topk_group=1),
    "deepseek2": lambda: tiny_deepseek2(q_lora_rank=24, topk_method="group_limited_greedy"),
    "deepseek3-yarn": tiny_deepseek3,
    "kimi": lambda: tiny_deepseek3(n_group=1, topk_group=1),
    "glm4.7-flash": tiny_glm4_moe_lite,
    "mistral4": tiny_mistral4,
}
LAYOUTS = pytest.mark.parametrize("is_split", [True, False], ids=["k_b-v_b", "kv_b"])


def random_ids(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(11)
    return torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()


def expected_logits(model: Any, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


@LAYOUTS
@pytest.mark.parametrize("name", BUILDERS)
def test_logits_match_transformers_in_prefill_and_decode(
    tmp_path: Path, name: str, is_split: bool
) -> None:
    model, ids = BUILDERS[name](), random_ids(120)
    arch = "mistral4" if name == "mistral4" else "deepseek2"
    path = write_latent(model, tmp_path / "tiny.gguf", arch=arch, is_split=is_split)
    expected = expected_logits(model, ids)

    run = PagedRun(load_model(str(path), LoadOptions(exact=True)).model, num_seqs=1, max_len=120)
    parts = [run.feed({0: ids[start:stop]})[0] for start, stop in ((0, 70), (70, 113))]
    parts += [run.feed({0: [ids[at]]})[0] for at in range(113, 120)]

    assert (torch.cat(parts) - expected).abs().max() <= 1e-4 * expected.abs().max()


@LAYOUTS
@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0])
def test_quantized_tensors_give_the_logits_of_their_values(
    tmp_path: Path, kind: GGMLQuantizationType, is_split: bool
) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 160, "moe_intermediate_size": 64}
    heads = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
    model, ids = tiny_deepseek3(**sizes, **heads, q_lora_rank=32), random_ids(60)
    path = write_latent(model, tmp_path / "tiny.gguf", is_split=is_split, kind=kind)
    expected = expected_logits(with_quantized_weights(model, kind, is_split=is_split), ids)

    plain = logits_of(path, ids, LoadOptions(device="reference"))
    fast = logits_of(path, ids)

    assert (plain - expected).abs().max() <= 2e-3 * expected.abs().max()  # 16-bit k_b and v_b
    assert (fast - expected).abs().max() <= 0.05 * expected.abs().max()  # bfloat16 activations


def test_the_first_files_of_glm_lack_the_kind_of_scores(tmp_path: Path) -> None:
    model, ids = tiny_glm4_moe_lite(), random_ids(40)
    path = write_latent(model, tmp_path / "tiny.gguf", gating=None)
    expected = expected_logits(model, ids)
    logits = logits_of(path, ids, LoadOptions(exact=True))
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_biases_that_the_scores_do_not_use_are_refused(tmp_path: Path) -> None:
    model = tiny_glm4_moe_lite()
    path = write_latent(model, tmp_path / "tiny.gguf", gating=ExpertGatingFuncType.SOFTMAX)
    with pytest.raises(UnsupportedModelError, match="expert_gating_func"):
        load_model(str(path))
