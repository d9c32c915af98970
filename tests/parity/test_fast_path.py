"""Accuracy of the fast path against `--exact`, on real text.

The fast path rounds activations: to integers in decode, to bfloat16 in prefill. The mean KL
divergence from the exact path must be at most 1e-3. The likeliest token must be the same at 98 % of
the positions.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.session.load import LoadedModel, LoadOptions, load_model
from support.paged import PagedRun

pytestmark = pytest.mark.thorough

MEAN_KL_MAX = 1e-3
SAME_TOP_MIN = 0.98
CHUNK = 256


@pytest.fixture(scope="module")
def exact(smollm2_path: Path) -> LoadedModel:
    return load_model(str(smollm2_path), LoadOptions(exact=True))


@pytest.fixture(scope="module")
def token_ids(exact: LoadedModel, wikitext_path: Path) -> list[int]:
    text = wikitext_path.read_text(encoding="utf-8")[:200_000]
    return exact.tokenizer.encode(text, allow_special=True, add_bos=False)


def _divergence(exact: Tensor, fast: Tensor) -> tuple[Tensor, Tensor]:
    """KL(exact || fast) in nats, and whether the likeliest token is the same, for each row."""
    p, q = exact.double().log_softmax(-1), fast.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1), exact.argmax(-1) == fast.argmax(-1)


def _compare(
    exact: LoadedModel, fast: LoadedModel, ids: list[int], rows: int
) -> tuple[Tensor, Tensor]:
    """Divergence of both models, fed `rows` tokens per pass, each with its own cache."""
    runs = [
        PagedRun(loaded.model, num_seqs=1, max_len=len(ids), kv_format=KVFormat.FP16)
        for loaded in (exact, fast)
    ]
    kl, same = [], []
    for start in range(0, len(ids), rows):
        chunk = ids[start : start + rows]
        row_kl, row_same = _divergence(*(run.feed({0: chunk})[0] for run in runs))
        kl.append(row_kl)
        same.append(row_same)
    return torch.cat(kl), torch.cat(same)


def _assert_close(kl: Tensor, same: Tensor) -> None:
    assert float(kl.mean()) <= MEAN_KL_MAX
    assert float(same.double().mean()) >= SAME_TOP_MIN


def test_prefill_stays_close_to_exact(
    exact: LoadedModel, smollm2: LoadedModel, token_ids: list[int]
) -> None:
    _assert_close(*_compare(exact, smollm2, token_ids[:512], CHUNK))


def test_decode_stays_close_to_exact(
    exact: LoadedModel, smollm2: LoadedModel, token_ids: list[int]
) -> None:
    _assert_close(*_compare(exact, smollm2, token_ids[2048:2112], 1))


@pytest.mark.soak
def test_prefill_of_ten_windows_stays_close_to_exact(
    exact: LoadedModel, smollm2: LoadedModel, token_ids: list[int]
) -> None:
    results = [
        _compare(exact, smollm2, token_ids[start : start + 2048], CHUNK)
        for start in range(0, 10 * 2048, 2048)
    ]
    kl, same = (torch.cat(parts) for parts in zip(*results, strict=True))
    print(f"mean KL {float(kl.mean()):.2e}, same top {float(same.double().mean()):.4f}")
    _assert_close(kl, same)
