"""Latent attention over quantized caches: the logits of transformers with the same rows rounded.

The cache object of the reference encodes each latent vector with its rotated key as one row, and
returns what the row decodes to. All layers have dense MLPs: experts would be chosen anew where two
sides round a row's last code differently.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from exl_core.cache.format import KVFormat
from exl_core.ops.cache_rows import decode_rows, encode_rows
from exl_core.session.load import LoadOptions, load_model
from support.kv_caches import FORMATS
from support.paged import PagedRun
from support.tiny_latent import tiny_deepseek2, tiny_deepseek3, tiny_glm4_moe_lite, tiny_mistral4
from support.tiny_models import (
    VOCAB_SIZE,
    save,
)

ROW = {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 16}
DENSE = {**ROW, "first_k_dense_replace": 3}
BUILDERS: dict[str, Callable[[], Any]] = {
    "deepseek2": lambda: tiny_deepseek2(**DENSE),
    "deepseek3": lambda: tiny_deepseek3(**DENSE),
    "glm4-moe-lite": lambda: tiny_glm4_moe_lite(**ROW, mlp_layer_types=["dense"] * 3),
    "mistral4": lambda: tiny_mistral4(**DENSE),
}


class RoundedCache(DynamicCache):
    """A cache whose rows are rounded to a format before attention reads them."""

    def __init__(self, config: Any, row_type: torch.dtype) -> None:
        super().__init__(config=config)
        self.row_type = row_type
        self.has_pairs = config.model_type == "deepseek_v2"  # of which rotated keys still consist

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Latent attention passes latent vectors as keys, and rotated keys as values."""
        latent, key = key_states, value_states
        if self.has_pairs:
            key = torch.cat([key[..., ::2], key[..., 1::2]], -1)
        row = encode_rows(torch.cat([key, latent], -1), self.row_type)
        key, latent = decode_rows(row).float().split([key.shape[-1], latent.shape[-1]], -1)
        if self.has_pairs:
            key = torch.stack(key.chunk(2, -1), -1).flatten(-2)
        return super().update(latent, key, *args, **options)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kv_format", [KVFormat.FP8, KVFormat.Q8, KVFormat.Q4])
@pytest.mark.parametrize("name", BUILDERS)
def test_logits_are_those_of_the_rounded_rows(
    tmp_path: Path, name: str, kv_format: KVFormat, backend: str
) -> None:
    model = BUILDERS[name]()
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, VOCAB_SIZE, (120,), generator=generator)
    row_type = FORMATS[kv_format.value][0]
    with torch.inference_mode():
        cache = RoundedCache(model.config, row_type)
        expected = model(ids[None], past_key_values=cache).logits[0]
        plain = model(ids[None]).logits[0]
    ours = load_model(str(save(model, tmp_path)), LoadOptions(device=backend, exact=True)).model

    run = PagedRun(ours, num_seqs=1, max_len=120, kv_format=kv_format)
    tokens = ids.tolist()
    parts = [run.feed({0: tokens[first:last]})[0] for first, last in ((0, 70), (70, 113))]
    parts += [run.feed({0: [tokens[at]]})[0] for at in range(113, 120)]

    errors = (torch.cat(parts) - expected).abs().amax(-1)  # by token
    rounding = (plain - expected).abs().amax(-1)
    # Sums in another order change the last bit of a few codes, which later tokens read.
    assert errors.max() <= 1e-2 * expected.abs().max()
    assert errors.median() <= 0.1 * rounding.median()
