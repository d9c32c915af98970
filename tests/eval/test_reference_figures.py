"""Perplexity of real models against independent implementations: transformers in float32, and the
output of llama.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest

from exl_core.session.load import LoadedModel, LoadOptions, load_model
from exl_eval.perplexity import PerplexityOptions, measure_perplexity

# Computed by transformers in float32 from the dequantized weights. Key: number of windows of 2048
# tokens.
SMOLLM2 = {2: 13.775, 4: 14.497, 10: 14.942, 20: 16.390}  # without BOS
GEMMA3 = {2: 22.172, 5: 29.918}  # with BOS before each window


def test_smollm2_one_window_of_512_tokens(smollm2: LoadedModel, wikitext_path: Path) -> None:
    text = wikitext_path.read_text(encoding="utf-8")
    result = measure_perplexity(smollm2, text[:20_000], PerplexityOptions(ctx=512, windows=1))
    assert (result.tokens, result.text.bos) == (511, "none")
    assert result.perplexity == pytest.approx(15.6596, rel=0.005)  # also from transformers


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("windows", "stderr_max"), [(4, 0.6), pytest.param(20, 0.3, marks=pytest.mark.soak)]
)
def test_smollm2_without_bos(
    smollm2: LoadedModel, wikitext_path: Path, windows: int, stderr_max: float
) -> None:
    figures: dict[int, float] = {}
    result = measure_perplexity(
        smollm2,
        wikitext_path.read_text(encoding="utf-8"),
        PerplexityOptions(ctx=2048, windows=windows),
        lambda done, _total, perplexity: figures.update({done: perplexity}),
    )
    assert result.text.bos == "none"  # the tokenizer of SmolLM2 adds no BOS
    assert result.tokens == windows * 2047
    assert figures[windows // 2] == pytest.approx(SMOLLM2[windows // 2], rel=0.005)
    assert result.perplexity == pytest.approx(SMOLLM2[windows], rel=0.005)
    assert result.stderr is not None
    assert 0 < result.stderr < stderr_max


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("windows", [2, pytest.param(5, marks=pytest.mark.soak)])
def test_gemma3_with_bos_before_each_window(
    gemma3_path: Path, wikitext_path: Path, windows: int
) -> None:
    result = measure_perplexity(
        load_model(str(gemma3_path)),
        wikitext_path.read_text(encoding="utf-8"),
        PerplexityOptions(ctx=2048, windows=windows, bos="each"),
    )
    assert result.tokens == windows * 2047
    assert result.perplexity == pytest.approx(GEMMA3[windows], rel=0.01)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_smollm2_20_windows_on_the_exact_path(smollm2_path: Path, wikitext_path: Path) -> None:
    result = measure_perplexity(
        load_model(str(smollm2_path), LoadOptions(exact=True)),
        wikitext_path.read_text(encoding="utf-8"),
        PerplexityOptions(windows=20),
    )
    assert result.perplexity == pytest.approx(SMOLLM2[20], rel=0.001)


# Printed by llama-perplexity of llama.cpp (in llama-cpp-python 0.3.36) for the same files:
# `llama-perplexity -m MODEL.gguf -f wikitext2-valid.txt -c 512 --chunks N`.
@pytest.mark.thorough
def test_smollm2_matches_llama_cpp(smollm2: LoadedModel, wikitext_path: Path) -> None:
    result = measure_perplexity(
        smollm2,
        wikitext_path.read_text(encoding="utf-8"),
        PerplexityOptions("llama.cpp", windows=8),
    )
    assert (result.tokens, result.text.bos) == (8 * 255, "none")
    assert result.perplexity == pytest.approx(15.5835, rel=0.005)


@pytest.mark.thorough
def test_gemma3_with_bos_matches_llama_cpp(gemma3_path: Path, wikitext_path: Path) -> None:
    """The tokenizer of Gemma 3 adds BOS."""
    result = measure_perplexity(
        load_model(str(gemma3_path)),
        wikitext_path.read_text(encoding="utf-8"),
        PerplexityOptions("llama.cpp", windows=16),
    )
    assert (result.tokens, result.text.bos) == (16 * 255, "replace")
    assert result.perplexity == pytest.approx(11.7970, rel=0.005)
