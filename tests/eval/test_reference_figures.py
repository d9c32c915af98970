"""Perplexity of real models against independent implementations: transformers in float32, and what
llama.cpp itself prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from exl_core.load import LoadOptions, load_model
from exl_eval.perplexity import PerplexityOptions, measure_perplexity


@pytest.mark.timeout(900)
def test_smollm2_20_windows_without_bos(smollm2_path: Path, wikitext_path: Path) -> None:
    figures: dict[int, float] = {}
    result = measure_perplexity(
        load_model(str(smollm2_path)),
        wikitext_path.read_text(encoding="utf-8"),
        PerplexityOptions(ctx=2048, windows=20),
        lambda done, _total, perplexity: figures.update({done: perplexity}),
    )
    assert result.text.bos == "none"  # this tokenizer adds none
    assert result.tokens == 20 * 2047
    assert figures[10] == pytest.approx(14.942, rel=0.005)
    assert result.perplexity == pytest.approx(16.390, rel=0.005)
    assert 0 < result.stderr < 0.3


@pytest.mark.timeout(900)
def test_gemma3_5_windows_with_bos_before_each(gemma3_path: Path, wikitext_path: Path) -> None:
    result = measure_perplexity(
        load_model(str(gemma3_path)),
        wikitext_path.read_text(encoding="utf-8"),
        PerplexityOptions(ctx=2048, windows=5, bos="each"),
    )
    assert result.tokens == 5 * 2047
    assert result.perplexity == pytest.approx(29.918, rel=0.01)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_smollm2_20_windows_on_the_exact_path(smollm2_path: Path, wikitext_path: Path) -> None:
    result = measure_perplexity(
        load_model(str(smollm2_path), LoadOptions(exact=True)),
        wikitext_path.read_text(encoding="utf-8"),
        PerplexityOptions(windows=20),
    )
    assert result.perplexity == pytest.approx(16.390, rel=0.001)


# Printed by llama-perplexity of llama.cpp (in llama-cpp-python 0.3.36) for the same files:
# `llama-perplexity -m MODEL.gguf -f wikitext2-valid.txt -c 512 --chunks N`.
def test_smollm2_as_llama_cpp_prints_it(smollm2_path: Path, wikitext_path: Path) -> None:
    result = measure_perplexity(
        load_model(str(smollm2_path)),
        wikitext_path.read_text(encoding="utf-8"),
        PerplexityOptions("llama.cpp", windows=8),
    )
    assert (result.tokens, result.text.bos) == (8 * 255, "none")
    assert result.perplexity == pytest.approx(15.5835, rel=0.005)


@pytest.mark.slow
def test_gemma3_as_llama_cpp_prints_it(gemma3_path: Path, wikitext_path: Path) -> None:
    """This tokenizer adds BOS."""
    result = measure_perplexity(
        load_model(str(gemma3_path)),
        wikitext_path.read_text(encoding="utf-8"),
        PerplexityOptions("llama.cpp", windows=16),
    )
    assert (result.tokens, result.text.bos) == (16 * 255, "replace")
    assert result.perplexity == pytest.approx(11.7970, rel=0.005)
