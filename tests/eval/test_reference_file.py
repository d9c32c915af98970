"""Reference file: its size, and divergences from it against those from the reference model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from exl_core.errors import RequestError
from exl_eval.distributions import CompactRows, compact_rows, compare_compact, compare_logits
from exl_eval.divergence import DivergenceOptions, lay_out_for_both, measure_against
from exl_eval.divergence import measure_divergence as measure_live
from exl_eval.reference_file import KeptReference, keep_reference, reference_header
from exl_eval.result import DivergenceResult, ReferenceFacts
from exl_eval.texts import as_text
from exl_eval.window_file import WindowFile
from support.tables import VOCAB_SIZE, ByteTokenizer, loaded_with, random_table

TEXT = "The quick brown fox jumps over the lazy dog. " * 4
OPTIONS = DivergenceOptions(ctx=16)
FACTS = ReferenceFacts("table", reference_exact=False)
WIDE = 3000


def logits_of_a_pair(rows: int = 600) -> tuple[Tensor, Tensor, Tensor]:
    """Reference logits with long tails (peaked and flat rows), similar candidate logits, and true
    tokens."""
    generator = torch.Generator().manual_seed(11)
    scales = torch.rand(rows, 1, generator=generator) * 3 + 0.2
    p = torch.randn(rows, WIDE, generator=generator) * scales
    q = p + 0.3 * torch.randn(rows, WIDE, generator=generator)
    return p, q, torch.randint(WIDE, (rows,), generator=generator)


def compacted(p: Tensor, targets: Tensor, *, seed: int = 3) -> CompactRows:
    generator = torch.Generator().manual_seed(seed)
    return compact_rows(p, targets, WIDE, generator, top=64, samples=32)


def test_the_estimate_is_within_its_standard_error() -> None:
    p, q, targets = logits_of_a_pair()
    exact = compare_logits(p, q, targets, WIDE)
    rows = compacted(p, targets)
    assert float((rows.tail > 0.05).double().mean()) > 0.5  # most rows have a considerable tail
    got = compare_compact(rows, q, targets, WIDE)
    stderr = got.kld_variance.sqrt()
    off = (got.kld - exact.kld) / stderr
    assert float(off.abs().median()) < 1.5
    assert float(off.square().mean()) < 3
    whole = float(stderr.square().sum().sqrt()) / len(p)
    assert abs(float((got.kld - exact.kld).mean())) < 4 * whole
    assert whole < 0.01 * float(exact.kld.mean())
    for name in ("reference_nll", "nll", "confidence"):
        assert torch.allclose(getattr(got, name), getattr(exact, name), rtol=1e-6, atol=1e-6)
    assert torch.equal(got.same_top, exact.same_top)


def test_without_a_tail_the_divergence_is_exact() -> None:
    p, q, targets = logits_of_a_pair(50)
    targets %= 64
    rows = compact_rows(p, targets, 64, torch.Generator().manual_seed(0), top=64, samples=8)
    got = compare_compact(rows, q, targets, 64)
    exact = compare_logits(p, q, targets, 64)
    assert torch.allclose(got.kld, exact.kld, rtol=0, atol=1e-6)
    assert float(got.kld_variance.max()) < 1e-12


def test_a_reference_does_not_diverge_from_itself() -> None:
    p, _, targets = logits_of_a_pair()
    got = compare_compact(compacted(p, targets), p, targets, WIDE)
    assert 0 <= float(got.kld.max()) <= 2e-6


def kept(path: Path, candidate: Tensor, windows: int | None = None) -> DivergenceResult:
    """Like `measure_divergence`, with the reference's predictions stored in a file first."""
    reference, options = loaded_with(random_table(5)), DivergenceOptions(ctx=16, windows=windows)
    tokenizer = ByteTokenizer()
    layout = lay_out_for_both(tokenizer, tokenizer, as_text(TEXT), options, 512)
    header = reference_header(layout, FACTS, VOCAB_SIZE, 1000)
    with WindowFile(path, header) as file:
        keep_reference(reference, layout, VOCAB_SIZE, file)
        against = KeptReference(file, layout, FACTS, VOCAB_SIZE)
        return measure_against(against, loaded_with(candidate), layout)


def test_figures_from_a_file_match_those_of_two_models(tmp_path: Path) -> None:
    candidate = random_table(5) + 0.2 * random_table(6)
    live = measure_live(loaded_with(candidate), loaded_with(random_table(5)), TEXT, OPTIONS)
    got = kept(tmp_path / "reference", candidate)
    assert got.kld["mean"] == pytest.approx(live.kld["mean"], rel=1e-3)
    assert got.kld["p99"] == pytest.approx(live.kld["p99"], rel=1e-2)
    assert (got.same_top, got.tokens) == (live.same_top, live.tokens)
    assert got.ln_ppl_ratio == pytest.approx(live.ln_ppl_ratio, rel=1e-5)
    assert got.delta_p == pytest.approx(live.delta_p, rel=1e-4, abs=1e-7)
    assert live.reference.cache_stderr is None
    assert got.reference.cache_stderr is not None
    assert 0 < got.reference.cache_stderr < 1e-3 * got.mean_kld


def test_a_file_is_small_and_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "reference"
    first = kept(path, random_table(6), windows=4)
    size = path.stat().st_size
    assert size < 4 * 15 * 3000
    monkeypatch.setattr("exl_eval.reference_file.compact_rows", None)  # not called again
    assert kept(path, random_table(6), windows=4).kld == first.kld
    assert path.stat().st_size == size
    with pytest.raises(TypeError):
        kept(path, random_table(6), windows=5)


def test_a_file_of_another_reference_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "reference"
    kept(path, random_table(6), windows=2)
    layout = lay_out_for_both(
        ByteTokenizer(), ByteTokenizer(), as_text(TEXT), DivergenceOptions(ctx=16), 512
    )
    for header, field in (
        (reference_header(layout, ReferenceFacts("other", False), VOCAB_SIZE, 1000), "reference"),
        (reference_header(layout, FACTS, VOCAB_SIZE, 1001), "reference_bytes"),
    ):
        with pytest.raises(RequestError, match=f"{field} differs"):
            WindowFile(path, header)


def test_a_candidate_with_a_smaller_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="vocabulary is smaller"):
        kept(tmp_path / "reference", random_table(5)[:, : VOCAB_SIZE - 1])


def test_the_sample_depends_only_on_the_seed_and_skips_the_top_tokens() -> None:
    p, _, targets = logits_of_a_pair(20)
    first, again = compacted(p, targets), compacted(p, targets)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.tail_ids, compacted(p, targets, seed=4).tail_ids)
    mean = first.tail_log_probs.exp().mean()
    assert math.isfinite(float(mean))
    is_top = (first.tail_ids[:, :, None] == first.top_ids[:, None, :]).any()
    assert not bool(is_top)
