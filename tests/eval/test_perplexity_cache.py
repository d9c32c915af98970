"""Loss of quality with lower-precision caches: SmolLM2 on WikiText, against the fp16 cache."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.engine.score import score_tokens
from exl_core.session.load import LoadedModel, LoadOptions, load_model
from exl_eval.perplexity import PerplexityOptions, measure_perplexity

pytestmark = pytest.mark.thorough

# Allowed relative increase of the perplexity.
LIMITS = {KVFormat.Q8: 0.002, KVFormat.Q6: 0.007, KVFormat.FP8: 0.02, KVFormat.Q4: 0.03}


@pytest.fixture(scope="module")
def text(wikitext_path: Path) -> str:
    return wikitext_path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def scores(smollm2: LoadedModel, text: str) -> dict[KVFormat, Tensor]:
    """Log probabilities of the same tokens with each cache format, computed in two passes."""
    ids = smollm2.tokenizer.encode(text[:6000], add_bos=False)[:1025]
    return {
        kv_format: score_tokens(smollm2.model, ids, kv_format=kv_format)
        for kv_format in (KVFormat.FP16, *LIMITS)
    }


@pytest.mark.parametrize("kv_format", list(LIMITS))
def test_quantized_caches_stay_within_their_limits_on_1024_tokens(
    scores: dict[KVFormat, Tensor], kv_format: KVFormat
) -> None:
    """Compares differences per token, because log probabilities vary far more between tokens than
    between caches."""
    loss = scores[KVFormat.FP16] - scores[kv_format]
    stderr = float(loss.std()) / math.sqrt(len(loss))
    print(f"{kv_format.value}: nll {float(loss.mean()):+.5f} +- {stderr:.5f}")
    assert 0 < stderr < 0.03
    assert float(loss.mean()) <= math.log1p(LIMITS[kv_format]) + 3 * stderr


def test_more_bits_are_closer_to_fp16(scores: dict[KVFormat, Tensor]) -> None:
    order = (KVFormat.Q8, KVFormat.Q6, KVFormat.Q4)
    away = [float((scores[KVFormat.FP16] - scores[kind]).abs().mean()) for kind in order]
    assert 0 < away[0] < away[1] < away[2]


def test_decode_and_prefill_have_similar_quantization_error(smollm2_path: Path, text: str) -> None:
    """Runs the exact path. Results are not identical: differences in fp32 rounding move values that
    are near a rounding boundary to another code, and later layers amplify this. The fp16 cache
    shows the same effect."""
    exact = load_model(str(smollm2_path), LoadOptions(exact=True))
    ids = exact.tokenizer.encode(text[:600], add_bos=False)[:33]

    def run(kv_format: KVFormat, chunk_rows: int) -> Tensor:
        return score_tokens(exact.model, ids, kv_format=kv_format, chunk_rows=chunk_rows)

    base = run(KVFormat.FP32, 512)
    assert float((run(KVFormat.FP32, 1) - base).abs().mean()) < 1e-4
    for kv_format in LIMITS:
        decoded, chunked = (float((run(kv_format, n) - base).abs().mean()) for n in (1, 512))
        assert 0.5 < decoded / chunked < 2, kv_format


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("ctx", "token_by_token"), [(512, True), (2048, False)], ids=["decoded", "chunks"]
)
def test_ten_windows_stay_within_the_limits(
    smollm2: LoadedModel, text: str, ctx: int, token_by_token: bool
) -> None:
    def perplexity(kv_format: KVFormat) -> float:
        options = PerplexityOptions(
            ctx=ctx, windows=10, kv_format=kv_format, token_by_token=token_by_token
        )
        return measure_perplexity(smollm2, text, options).perplexity

    base = perplexity(KVFormat.FP16)
    print(f"fp16: {base:.4f}")
    rises = {kv_format: perplexity(kv_format) / base - 1 for kv_format in LIMITS}
    for kv_format, rise in rises.items():
        print(f"{kv_format.value}: {rise:+.3%}")
    assert {kind for kind, rise in rises.items() if rise > LIMITS[kind]} == set()
