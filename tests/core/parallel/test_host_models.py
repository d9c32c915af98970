"""Models divided among hosts, with the test's process as rank 0: logits, and passes as graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exl_core.cache.format import KVFormat
from exl_core.model.runner import make_batch, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.session.load import load_model
from support.host_models import logits_of_passes, on_hosts
from support.thread_ranks import mean_kl
from support.tiny_hybrids import tiny_qwen35
from support.tiny_models import save, tiny_llama

pytestmark = pytest.mark.thorough

EXACT: dict[str, Any] = {"device": "cpu", "threads": 1, "exact": True}


@pytest.mark.parametrize(
    ("make", "grid", "kv_format"),
    [
        (tiny_llama, (2, 1), KVFormat.FP16),
        (tiny_llama, (2, 2), KVFormat.FP16),
        (lambda: tiny_qwen35(head_dim=32), (4, 1), KVFormat.Q4),
    ],
    ids=["llama-2x1", "llama-2x2", "qwen3.5-4x1-q4"],
)
def test_the_logits_of_one_process(
    make: Callable[[], Any], grid: tuple[int, int], kv_format: KVFormat, tmp_path: Path
) -> None:
    """Hosts without keys take part in the pass that measures the smoothing of 4-bit keys."""
    path = save(make(), tmp_path / "model")
    expected = logits_of_passes(load_model(path, **EXACT).model, kv_format)
    with on_hosts(path, *grid, **EXACT) as divided:
        assert mean_kl(expected, logits_of_passes(divided.model, kv_format)) < 1e-7


def test_a_pass_that_rank_0_replays(tmp_path: Path) -> None:
    """Rank 0 runs its layers between the transfers, as a graph does. The other host has no graph
    and computes the same pass without one."""
    path = save(tiny_llama(), tmp_path / "model")
    ids = tuple(torch.randint(3, 259, (40,), generator=torch.Generator().manual_seed(1)).tolist())
    segments = [
        [Segment(ids[:30], 0, (0,), LogitRows.NONE)],
        [
            Segment(ids[30:36], 30, (0,), LogitRows.LAST),
            Segment(ids[:5], 0, (1,), LogitRows.ALL),
        ],
        [Segment(ids[36:37], 36, (0,), LogitRows.LAST)],
    ]
    whole = load_model(path, **EXACT).model
    with on_hosts(path, 2, 1, **EXACT) as divided:
        model = divided.model
        assert not model.has_head
        stores = [store_for(one, KVFormat.FP16, 2) for one in (whole, model)]
        for parts in segments:
            batch = make_batch(parts)
            expected = whole.forward(batch, stores[0])
            with torch.inference_mode(), model.replaying(stores[1], parts) as received:
                assert received is None
                states = model.run_stage(0, batch, stores[1])
                assert states.shape == (len(batch.token_ids), model.config.hidden_size)
                found = model.replayed(states, parts)
            torch.testing.assert_close(found, expected)
