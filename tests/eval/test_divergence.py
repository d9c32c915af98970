"""Divergence against float64 arithmetic, on models that look up their logits in a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.errors import ExlError, RequestError
from exl_core.session.load import LoadOptions, load_model
from exl_eval.divergence import DivergenceOptions, measure_divergence
from exl_eval.estimates import mean_and_error, percentiles
from support import tiny_models
from support.tables import VOCAB_SIZE, ByteTokenizer, loaded_with, random_table

TEXT = "The quick brown fox jumps over the lazy dog. " * 4
OPTIONS = DivergenceOptions(ctx=16)


@pytest.fixture
def pair() -> tuple[Tensor, Tensor]:
    """A reference and a similar candidate. Their logits have large, different offsets, which must
    cancel."""
    reference = random_table(5) + 30
    return reference, reference + 0.2 * random_table(6) - 50


def by_hand(reference: Tensor, candidate: Tensor, ctx: int = 16) -> dict[str, Tensor]:
    """Expected value of each column per position, in float64."""
    ids = torch.tensor(list(TEXT.encode()))
    windows = ids[: len(ids) // ctx * ctx].view(-1, ctx)
    given, true = windows[:, :-1].flatten(), windows[:, 1:].flatten()
    p, q = (table[given].double().log_softmax(1) for table in (reference, candidate))
    log_p, log_q = (rows.gather(1, true[:, None]).squeeze(1) for rows in (p, q))
    return {
        "kld": (p.exp() * (p - q)).sum(1),
        "same_top": (p.argmax(1) == q.argmax(1)).double(),
        "delta_p": log_q.exp() - log_p.exp(),
        "nll": -log_q,
        "reference_nll": -log_p,
        "confidence": p.exp().amax(1),
    }


def known(found: Mapping[str, float | None]) -> dict[str, float]:
    """The same figures, all of which exist."""
    figures = {name: value for name, value in found.items() if value is not None}
    assert figures.keys() == found.keys()
    return figures


def test_every_figure_follows_its_formula(pair: tuple[Tensor, Tensor]) -> None:
    reference, candidate = pair
    got = measure_divergence(loaded_with(candidate), loaded_with(reference), TEXT, OPTIONS)
    exact = by_hand(reference, candidate)
    count = len(exact["kld"])

    assert (got.tokens, got.text.windows) == (count, count // 15)
    kld, found, changes = exact["kld"].numpy(), known(got.kld), known(got.delta_p)
    assert found["mean"] == pytest.approx(kld.mean(), rel=1e-5)
    assert found["stderr"] == pytest.approx(kld.std() / math.sqrt(count - 1), rel=1e-5)
    assert found["max"] == pytest.approx(kld.max(), rel=1e-5)
    assert 0 < found["median"] < found["p90"] < found["p95"] <= found["p99"]
    share = float(exact["same_top"].mean())
    assert 0 < share < 1
    assert got.same_top == pytest.approx(share)
    assert got.same_top_stderr == pytest.approx(math.sqrt(share * (1 - share) / count))
    delta_p = exact["delta_p"].numpy()
    assert changes["mean"] == pytest.approx(delta_p.mean(), abs=1e-7)
    assert changes["rms"] == pytest.approx(math.sqrt((delta_p**2).mean()), rel=1e-5)
    assert changes["min"] <= changes["p1"] < changes["median"] < changes["max"]
    ratio = (exact["nll"] - exact["reference_nll"]).numpy()
    assert got.ln_ppl_ratio == pytest.approx(ratio.mean(), rel=1e-4)
    assert got.ln_ppl_ratio_stderr == pytest.approx(ratio.std() / math.sqrt(count - 1), rel=1e-4)
    assert math.log(got.perplexity / got.reference_perplexity) == pytest.approx(got.ln_ppl_ratio)


def test_bands_split_positions_by_confidence_of_the_reference(pair: tuple[Tensor, Tensor]) -> None:
    reference, candidate = pair
    got = measure_divergence(loaded_with(candidate), loaded_with(reference), TEXT, OPTIONS)
    exact = by_hand(reference, candidate)
    assert sum(band.tokens for band in got.by_confidence) == got.tokens
    filled = [band for band in got.by_confidence if band.tokens]
    assert len(filled) > 1
    for band in filled:
        held = (exact["confidence"] > band.above) & (exact["confidence"] <= band.up_to)
        assert band.tokens == int(held.sum())
        assert band.kld == pytest.approx(float(exact["kld"][held].mean()), rel=1e-5)
        assert band.same_top == pytest.approx(float(exact["same_top"][held].mean()))


def test_a_model_does_not_diverge_from_itself(pair: tuple[Tensor, Tensor]) -> None:
    table = pair[0]
    got = measure_divergence(loaded_with(table), loaded_with(table.clone()), TEXT, OPTIONS)
    assert 0 <= known(got.kld)["max"] <= 1e-7
    assert (got.same_top, got.ln_ppl_ratio, got.delta_p["rms"]) == (1.0, 0.0, 0.0)
    shifted = measure_divergence(loaded_with(table - 7), loaded_with(table), TEXT, OPTIONS)
    assert 0 <= known(shifted.kld)["max"] <= 1e-6  # the subtraction of 7 rounds in float32


def test_divergence_is_from_reference_to_candidate(pair: tuple[Tensor, Tensor]) -> None:
    reference, candidate = pair
    forth = measure_divergence(loaded_with(candidate), loaded_with(reference), TEXT, OPTIONS)
    back = measure_divergence(loaded_with(reference), loaded_with(candidate), TEXT, OPTIONS)
    reverse = float(by_hand(candidate, reference)["kld"].mean())
    assert back.kld["mean"] == pytest.approx(reverse, rel=1e-5)
    assert abs(back.mean_kld / forth.mean_kld - 1) > 1e-3
    assert back.ln_ppl_ratio == pytest.approx(-forth.ln_ppl_ratio)
    assert forth.as_dict()["direction"] == "KL(reference || candidate)"


def test_vocabulary_padding_is_ignored(
    pair: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding logits would take probability from real tokens. A padded vocabulary also changes the
    number of rows per pass."""
    reference, candidate = pair
    padded = torch.cat((candidate, torch.full((VOCAB_SIZE, 60), 99.0)), 1)
    plain = measure_divergence(loaded_with(candidate), loaded_with(reference), TEXT, OPTIONS)
    monkeypatch.setattr("exl_core.engine.score._LOGIT_BYTES", 7 * 4 * (VOCAB_SIZE + 60))
    got = measure_divergence(loaded_with(padded), loaded_with(reference), TEXT, OPTIONS)
    assert got.vocab_size == VOCAB_SIZE
    assert (got.kld, got.perplexity) == (plain.kld, plain.perplexity)


class OtherByteTokenizer(ByteTokenizer):
    def _piece(self, token_id: int) -> bytes | None:
        return super()._piece({65: 66, 66: 65}.get(token_id, token_id))


class UppercaseTokenizer(ByteTokenizer):
    def _encode(self, text: str, *, allow_special: bool) -> list[int]:
        return list(text.upper().encode())


class LongerTokenizer(ByteTokenizer):
    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE + 3


def run_with(candidate: ByteTokenizer) -> Any:
    table = random_table(5)
    return measure_divergence(loaded_with(table, candidate), loaded_with(table), TEXT, OPTIONS)


def test_another_tokenizer_is_refused() -> None:
    with pytest.raises(RequestError, match=r"token 65 differs \(expected b'A', got b'B'\)"):
        run_with(OtherByteTokenizer())
    with pytest.raises(RequestError, match="from token 1 of window 1 on"):
        run_with(UppercaseTokenizer())
    assert run_with(LongerTokenizer()).kld["max"] == 0


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", OPTIONS, "the text is empty"),
        (TEXT, DivergenceOptions(ctx=256), "shorter than one window"),
        (TEXT, DivergenceOptions(ctx=513), "2 to 512"),
        (TEXT, DivergenceOptions(ctx=16, windows=1000), "fewer windows"),
    ],
    ids=["no text", "short text", "long context", "many windows"],
)
def test_unsuitable_text_or_options_are_refused(
    text: str, options: DivergenceOptions, message: str
) -> None:
    model = loaded_with(random_table(5))
    with pytest.raises(RequestError, match=message):
        measure_divergence(model, model, text, options)


def test_a_nan_prediction_is_an_error() -> None:
    damaged = random_table(5)
    damaged[ord("q"), 3] = math.nan
    with pytest.raises(ExlError, match="window 1: a prediction is not a number"):
        measure_divergence(loaded_with(damaged), loaded_with(random_table(5)), TEXT, OPTIONS)


def test_percentiles_interpolate_like_torch_quantile() -> None:
    values = torch.rand(101, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = torch.quantile(values, torch.tensor([0.0, 0.5, 0.995, 1.0], dtype=torch.float64))
    assert percentiles(values, 0, 50, 99.5, 100) == pytest.approx(expected.tolist())
    assert mean_and_error(values[:1]) == (float(values[0]), None)


def test_bfloat16_against_float16_is_near_the_published_floor(tmp_path: Path) -> None:
    """Published for Llama 3 8B: 2.5e-5 nats and 99.74 % same top. Other models should have the same
    order of magnitude."""
    loaded = []
    for dtype in (torch.bfloat16, torch.float16):
        model = tiny_models.converted(tiny_models.tiny_llama(), dtype)
        folder = tiny_models.save(model, tmp_path / str(dtype))
        loaded.append(load_model(str(folder), LoadOptions(exact=True)))
    got = measure_divergence(loaded[0], loaded[1], TEXT * 4, DivergenceOptions(ctx=256))
    print(got.kld, got.same_top)
    assert 2.5e-6 < got.mean_kld < 2.5e-4
    assert got.same_top > 0.97
