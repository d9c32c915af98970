"""`exl eval perplexity`: the command around the figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

TEXT = "The quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture
def perplexity(exl, tiny_llama_dir: Path, tmp_path: Path):
    """`perplexity(*args)` of a short text with the tiny model."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    return lambda *args: exl("eval", "perplexity", tiny_llama_dir, "--text", text, *args)


def test_json(perplexity) -> None:
    done = perplexity("--ctx", 64, "--windows", 2, "--json")
    assert (done.code, done.err) == (0, "")
    result = json.loads(done.out)
    wanted = {
        *("schema_version", "perplexity", "stderr", "nll", "tokens", "windows", "ctx", "style"),
        *("bos", "text_sha256", "tokenizer_sha256", "model"),
    }
    assert wanted <= set(result)
    assert (result["ctx"], result["windows"], result["tokens"]) == (64, 2, 126)
    assert result["style"] == "paper"
    assert result["bos"] == "none"
    assert 1 < result["perplexity"] < 10_000
    assert 0 < result["stderr"] < result["perplexity"]


def test_page_for_people_has_the_same_figure(perplexity) -> None:
    args = ("--ctx", 64, "--windows", 2)
    result = json.loads(perplexity(*args, "--json").out)
    done = perplexity(*args)
    assert (done.code, done.err) == (0, "")
    assert f"{result['perplexity']:.4f} ± {result['stderr']:.4f}" in done.out
    assert result["text_sha256"] in done.out


def test_bos_rules_differ(perplexity) -> None:
    figures = {
        rule: json.loads(perplexity("--ctx", 64, "--bos", rule, "--json").out)
        for rule in ("none", "once", "each")
    }
    assert {rule: result["bos"] for rule, result in figures.items()} == {r: r for r in figures}
    assert len({result["perplexity"] for result in figures.values()}) == 3


def test_caches_differ_and_decoding_agrees(perplexity) -> None:
    def run(*args: str) -> dict[str, object]:
        return json.loads(perplexity("--ctx", 64, "--windows", 1, "--json", *args).out)

    wide, narrow = run(), run("--cache-type", "fp8")
    assert (wide["kv_format"], narrow["kv_format"]) == ("fp16", "fp8")
    assert narrow["perplexity"] == pytest.approx(wide["perplexity"], rel=0.05)
    assert narrow["perplexity"] != wide["perplexity"]
    decoded = run("--cache-type", "fp8", "--token-by-token")
    assert decoded["perplexity"] == pytest.approx(narrow["perplexity"], rel=1e-4)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--ctx", 512), "shorter than one window"),
        (("--ctx", 513), "2 to 512"),
        (("--ctx", 64, "--windows", 100), "fewer windows"),
        (("--bos", "sometimes"), "sometimes"),
        (("--cache-type", "q5"), "fp16 or fp8 or q8 or q6 or q4"),
        (
            ("--ctx", 64, "--cache-type", "q8"),
            "multiple of 32",
        ),  # the tiny model's heads are no such
    ],
)
def test_what_cannot_be_measured(args: tuple[object, ...], expected: str, perplexity) -> None:
    assert expected in perplexity(*args, "--json").error_line(2)


def test_a_text_that_cannot_be_read(exl, tmp_path: Path) -> None:
    missing = tmp_path / "missing.txt"
    assert str(missing) in exl("eval", "perplexity", "--text", missing).error_line(2)
    latin = tmp_path / "latin.txt"
    latin.write_bytes("Grüße".encode("latin-1"))
    line = exl("eval", "perplexity", "--text", latin).error_line(2)
    assert "offset 2" in line
