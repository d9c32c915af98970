"""Models divided among ranks whose sums go through shared memory: `PeerOps` without a GPU.

The ranks are threads, and `ThreadSums` takes the place of the kernels.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from exl_core.session.load import LoadOptions
from exl_core.session.open import open_model
from support.families import FAMILIES
from support.quantized_models import METHODS, quantized_llama
from support.thread_ranks import ThreadExchange, logits_of, logits_on_ranks, on_ranks
from support.thread_sums import peer_model
from test_rank_models import OTHERS, save_model

EXACT = LoadOptions(device="cpu", exact=True)
DEFERRING = ("llama", "gpt2")
"""Families whose sums are read by a product after a norm."""


def logits_through_memory(
    path: Path, count: int, options: LoadOptions
) -> tuple[tuple[Tensor, Tensor], int]:
    """Logits as `logits_on_ranks` has them, and the number of sums that a later op completes."""
    width = open_model(path).config.hidden_size

    def work(exchange: ThreadExchange) -> tuple[tuple[Tensor, Tensor], int]:
        model, sums = peer_model(path, exchange, options, width)
        return logits_of(model), sums.num_deferred

    return on_ranks(count, work)[0]


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_every_family_has_the_logits_of_sums_that_are_not_shared(name: str, tmp_path: Path) -> None:
    path = save_model(name, tmp_path / "model")
    for count in (2, 3):
        expected = logits_on_ranks(path, count, EXACT)
        found, num_deferred = logits_through_memory(path, count, EXACT)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, atol=2e-4, rtol=1e-4)
        assert num_deferred > 0 or name not in DEFERRING


@pytest.mark.parametrize("method", METHODS)
def test_every_quantized_checkpoint(method: str, tmp_path: Path) -> None:
    path = quantized_llama(method, tmp_path / "model")
    expected = logits_on_ranks(path, 2, EXACT)
    found, num_deferred = logits_through_memory(path, 2, EXACT)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, atol=2e-4, rtol=1e-4)
    assert num_deferred > 0
