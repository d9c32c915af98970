"""A GGUF file of a hybrid gives the logits of its source model in transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exl_core.session.load import LoadOptions
from support.gguf_hybrids import write_hybrid
from support.paged import logits_of
from support.tiny_hybrids import tiny_lfm2, tiny_qwen3_next, tiny_qwen35, tiny_qwen35_moe
from support.tiny_models import VOCAB_SIZE

BUILDERS: dict[str, Callable[[], Any]] = {
    "lfm2": tiny_lfm2,
    "qwen35": tiny_qwen35,
    "qwen35moe": tiny_qwen35_moe,
    "qwen3next": lambda: tiny_qwen3_next(mlp_only_layers=[]),
}


@pytest.mark.parametrize("arch", BUILDERS)
def test_gguf_logits_of_hybrids_match_transformers(tmp_path: Path, arch: str) -> None:
    model = BUILDERS[arch]()
    ids = torch.randint(3, VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(11)).tolist()
    path = write_hybrid(model, tmp_path / "tiny.gguf", arch)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]

    logits = logits_of(path, ids, LoadOptions(exact=True))

    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
