"""Tiny models with experts of trellis codes (EXL3): logits of the GPU, and of the exact path."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.model.cuda_graphs import PASSES_BEFORE_CAPTURE
from exl_core.model.runner import Runner, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.model.transformer import Transformer
from exl_core.ops.backends.cuda import trellis_experts
from exl_core.ops.weights import Codebook
from exl_core.session.load import LoadOptions, load_model
from support.quantized_models import EXL3_SETTINGS, SIZES, exl3_pieces, quantize
from support.tiny_models import (
    VOCAB_SIZE,
    save,
    tiny_glm4_moe,
    tiny_mixtral,
    tiny_qwen2_moe,
    tiny_qwen3_moe,
)

pytestmark = pytest.mark.cuda

TOLERANCE = 6e-3
"""Relative error of the logits of a pass, as in `test_model.py`."""

# Every token uses all experts, so that rounding does not change a choice.
FAMILIES: dict[str, Callable[..., Any]] = {
    "qwen3-moe": lambda **more: tiny_qwen3_moe(
        num_experts=6, num_experts_per_tok=6, moe_intermediate_size=64, **more
    ),
    "mixtral": lambda **more: tiny_mixtral(num_local_experts=4, num_experts_per_tok=4, **more),
    "qwen2-moe": lambda **more: tiny_qwen2_moe(
        num_experts=6,
        num_experts_per_tok=6,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=96,
        **{**more, "head_dim": 16},
    ),
    "glm4-moe": lambda **more: tiny_glm4_moe(
        n_routed_experts=8, num_experts_per_tok=8, moe_intermediate_size=64, **more
    ),
}


def passes(model: Transformer, kv_format: KVFormat) -> list[Tensor]:
    """Logits of prompts and of decode passes of 1 and 3 rows, eager and captured."""
    random = torch.Generator().manual_seed(2)
    runner = Runner(model, store_for(model, kv_format, 16))
    ids = torch.randint(3, VOCAB_SIZE, (3, 100), generator=random).tolist()
    found = []
    for sequence, text in enumerate(ids):
        one = Segment(tuple(text[:90]), 0, (sequence,), LogitRows.ALL)
        found.append(runner.run([one]).float().cpu())
    for count in (1, 3):
        for i in range(90, 92 + PASSES_BEFORE_CAPTURE):
            rows = [Segment((ids[s][i],), i, (s,), LogitRows.LAST) for s in range(count)]
            found.append(runner.run(rows).float().cpu())
    return found


@pytest.mark.parametrize("book", ["mul1", "mcg"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, book: Codebook
) -> None:
    save(FAMILIES[family](**SIZES, tie_word_embeddings=False), tmp_path)
    quantize(tmp_path, {**EXL3_SETTINGS, "codebook": book}, partial(exl3_pieces, codebook=book))
    far = load_model(str(tmp_path), LoadOptions(device="cuda")).model
    calls, original = [], trellis_experts.compute

    def compute(*operands: Any, **more: Any) -> None:
        calls.append(1)
        original(*operands, **more)

    monkeypatch.setattr(trellis_experts, "compute", compute)
    near = load_model(str(tmp_path), LoadOptions(exact=True)).model
    wanted, got = passes(near, KVFormat.FP16), passes(far, KVFormat.FP16)
    assert calls
    for first, second in zip(wanted, got, strict=True):
        assert (first - second).norm() <= TOLERANCE * first.norm()
