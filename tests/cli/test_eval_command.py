"""`exl eval perplexity`: options, sources of the text, table and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from exl_core.engine.score import TextPasses
from support.commands import Command

TEXT = "The quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture
def perplexity(exl: Command, tiny_llama_dir: Path, tmp_path: Path) -> Command:
    """`perplexity(*args)` of the tiny model on a short text."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    return lambda *args: exl("eval", "perplexity", tiny_llama_dir, "--text", text, *args)


def test_json(perplexity: Command) -> None:
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


def test_single_token_has_null_errors_and_compare_names_the_file(
    exl: Command, perplexity: Command, tmp_path: Path
) -> None:
    args = ("--ctx", 2, "--windows", 1)
    done = perplexity(*args, "--json")
    record = json.loads(done.out)
    assert (record["tokens"], record["stderr"], record["nll_stderr"]) == (1, None, None)
    assert "±" not in perplexity(*args, "--by-position").out
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(done.out, encoding="utf-8")
    assert "unknown" in exl("eval", "compare", a, a).out
    b.write_text(json.dumps({**record, "nll": None}), encoding="utf-8")
    line = exl("eval", "compare", a, b).error_line(2)
    assert line.startswith(f"{b}: nll of the record is wrong (expected a number, got null). ")


def test_table_has_the_figure_of_json(perplexity: Command) -> None:
    args = ("--ctx", 64, "--windows", 2)
    result = json.loads(perplexity(*args, "--json").out)
    done = perplexity(*args)
    assert (done.code, done.err) == (0, "")
    assert f"{result['perplexity']:.4f} ± {result['stderr']:.4f}" in done.out
    assert result["text_sha256"] in done.out


def test_windows_beyond_the_model_and_stretched_positions(perplexity: Command) -> None:
    args = ("--ctx", 64, "--windows", 2, "--json")
    plain = json.loads(perplexity(*args).out)
    for option in ("--rope-scale", "--rope-alpha", "--rope-yarn"):
        changed = json.loads(perplexity(*args, option, 4).out)
        assert changed["model"].endswith(f"({option[2:]} 4)")
        assert changed["perplexity"] != plain["perplexity"]
    longer = perplexity("--ctx", 600, "--json")
    assert "600 tokens is longer than the model's 512" in longer.err
    assert "shorter than one window" in longer.err, "the text is, not the model"


def test_by_position(perplexity: Command, tiny_llama_dir: Path) -> None:
    args = ("--ctx", 64, "--windows", 2)
    record = json.loads(perplexity(*args, "--json").out)
    buckets = record["by_position"]
    assert [(b["first"], b["last"], b["tokens"]) for b in buckets] == [
        (2**i, 2 ** (i + 1) - 1, 2 * 2**i) for i in range(6)
    ]
    assert "32 to 63" not in perplexity(*args).out
    done = perplexity(*args, "--by-position")
    assert (done.code, done.err) == (0, "")
    for bucket in buckets[1:]:
        figure = f"{bucket['nll']:.4f} ± {bucket['nll_stderr']:.4f}"
        (line,) = [line for line in done.out.splitlines() if figure in line]
        assert line.split()[:3] == [str(bucket["first"]), "to", str(bucket["last"])]
    pair = perplexity(*args, "--by-position", "--compare-to", tiny_llama_dir)
    assert pair.out.count(f"{buckets[3]['nll']:.4f} ± {buckets[3]['nll_stderr']:.4f}") == 2


def test_streamed_layers_give_the_same_figure(perplexity: Command) -> None:
    args = ("--ctx", 64, "--windows", 1, "--json")
    whole = json.loads(perplexity(*args).out)
    streamed = json.loads(perplexity(*args, "--held-memory", 0).out)
    assert streamed["perplexity"] == whole["perplexity"]
    assert "--held-memory" in perplexity(*args, "--held-memory", "much").error_line(2)


def test_bos_rules_differ(perplexity: Command) -> None:
    figures = {
        rule: json.loads(perplexity("--ctx", 64, "--bos", rule, "--json").out)
        for rule in ("none", "once", "each")
    }
    assert {rule: result["bos"] for rule, result in figures.items()} == {r: r for r in figures}
    assert len({result["perplexity"] for result in figures.values()}) == 3


@pytest.mark.parametrize("command", ["perplexity", "divergence", "report", "compare-layers"])
def test_special_tokens_of_the_text_are_read_as_text(
    command: str, exl: Command, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    """The option reaches the text of each command: "</s>" is one token, or several."""
    text, model = tmp_path / "special.txt", str(tiny_llama_dir)
    text.write_text("a</s>b</s>" * 40, encoding="utf-8")
    words: dict[str, tuple[object, ...]] = {
        "divergence": (model, "--reference", model),
        "report": (model, "--prefill", 8, "--decode", 2),
        "compare-layers": (model, model),
    }

    def tokens(*option: str) -> tuple[bool, int]:
        out = tmp_path / f"report{len(option)}"
        more = ("--out", out) if command == "report" else ()
        args = (*words.get(command, (model,)), "--text", text, "--ctx", 32, *more, *option)
        record = json.loads(exl("eval", command, *args, "--json").out)
        facts = record["models"][0]["perplexity"] if command == "report" else record
        return facts["special_text"], facts["text_tokens"]

    special, plain = tokens(), tokens("--no-special-text")
    assert (special[0], plain[0]) == (True, False)
    assert special[1] < plain[1]


def test_caches_differ_and_decoding_agrees(perplexity: Command) -> None:
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
        (("--ctx", 64, "--windows", 100), "fewer windows"),
        (("--bos", "sometimes"), "sometimes"),
        (("--style", "papers"), "paper or exl3 or hf-stride or llama.cpp or per-document"),
        (("--ctx", 64, "--stride", 8), "has no stride"),
        (("--rows", 3), "has no rows"),
        (("--split", "test"), "--split with --dataset"),
        (("--dataset", "wikitext"), "two texts are given"),
        (("--cache-type", "q5"), "fp16 or fp8 or q8 or q6 or q4"),
        (
            ("--ctx", 64, "--cache-type", "q8"),
            "multiple of 32",
        ),  # the tiny model's head size does not allow q8
    ],
)
def test_invalid_options(args: tuple[object, ...], expected: str, perplexity: Command) -> None:
    assert expected in perplexity(*args, "--json").error_line(2)


def test_unreadable_text(exl: Command, tmp_path: Path) -> None:
    missing = tmp_path / "missing.txt"
    assert str(missing) in exl("eval", "perplexity", "--text", missing).error_line(2)
    latin = tmp_path / "latin.txt"
    latin.write_bytes("Grüße".encode("latin-1"))
    line = exl("eval", "perplexity", "--text", latin).error_line(2)
    assert "offset 2" in line


def test_missing_text_option(exl: Command, tiny_llama_dir: Path) -> None:
    line = exl("eval", "divergence", tiny_llama_dir, "--reference", tiny_llama_dir).error_line(2)
    assert "--text FILE or --dataset NAME" in line


def test_a_dash_as_text_is_no_stdin(exl: Command) -> None:
    line = exl("eval", "perplexity", "--text", "-", stdin=b"one two").error_line(2)
    assert line.startswith("--text: the text of a measurement is not read from stdin")
    assert "Save the text to a file first." in line


def test_an_empty_text(exl: Command, tiny_llama_dir: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    line = exl("eval", "perplexity", tiny_llama_dir, "--text", empty, "--ctx", 64).error_line(2)
    assert "the text is empty" in line


@pytest.mark.parametrize("style", ["paper", "exl3", "hf-stride", "llama.cpp", "per-document"])
def test_output_has_everything_that_defines_the_figure(style: str, perplexity: Command) -> None:
    stride = ("--stride", 16) if style == "hf-stride" else ()
    result = json.loads(perplexity("--style", style, "--ctx", 64, *stride, "--json").out)
    page = perplexity("--style", style, "--ctx", 64, *stride).out
    assert f"style             {style}, context 64" in page
    for name in ("text_sha256", "tokenizer_sha256", "text_tokens", "tokens", "words", "bytes"):
        assert str(result[name]) in page
    assert f"{result['windows']} windows of 64" in page
    assert f"BOS {result['bos']}" in page
    assert ("stride 16" in page) == (result["stride"] == 16) == (style == "hf-stride")
    assert ("special tokens are read as text" in page) == (not result["special_text"])
    assert f"{result['bits_per_byte']:.5f}" in page
    assert result["measurement"] == "perplexity"


def test_rows_of_a_file_are_documents(exl: Command, tiny_llama_dir: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"body": text}) + "\n" for text in (TEXT, "", "short")))
    args = ("--text", rows, "--column", "body", "--style", "per-document", "--json")
    result = json.loads(exl("eval", "perplexity", tiny_llama_dir, *args).out)
    assert (result["documents"], result["tokens"]) == (2, len(TEXT) + len("short"))
    assert (result["words"], result["bytes"]) == (73, len(TEXT) + len("short"))


def test_compare_to_a_second_model(perplexity: Command, tiny_llama_dir: Path) -> None:
    args = ("--ctx", 64, "--compare-to", tiny_llama_dir)
    result = json.loads(perplexity(*args, "--json").out)
    assert (result["ln_ppl_ratio"], result["ln_ppl_ratio_stderr"]) == (0.0, 0.0)
    assert result["compared_to"]["perplexity"] == result["perplexity"]
    assert "1.00000 ± 0.00000, first to second" in perplexity(*args).out


def test_compare_to_another_tokenizer_is_refused_before_loading(
    perplexity: Command, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exl_cli.load.load_model", None)
    line = perplexity("--ctx", 64, "--compare-to", smollm2_path).error_line(2)
    assert "different tokenizers" in line


def test_stopped_run_resumes(
    perplexity: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    whole = json.loads(perplexity("--ctx", 64, "--json").out)
    with monkeypatch.context() as patch:
        patch.setattr("exl_core.engine.score.TextPasses.score", stopping_after(2))
        stopped = perplexity("--ctx", 64, "--resume", kept)
    assert (stopped.code, stopped.out) == (130, "")
    assert f"the same command resumes: {kept}" in stopped.err
    resumed = json.loads(perplexity("--ctx", 64, "--resume", kept, "--json").out)
    assert resumed["kept_windows"] == 2
    assert resumed["window_nll"] == whole["window_nll"]
    assert "bos differs" in perplexity("--bos", "each", "--ctx", 64, "--resume", kept).error_line(2)


def stopping_after(count: int) -> Callable[..., Tensor]:
    """`TextPasses.score` that raises KeyboardInterrupt after `count` calls."""
    score = TextPasses.score
    calls: list[object] = []

    def run(self: TextPasses, *args: Any) -> Tensor:
        calls.append(args)
        if len(calls) > count:
            raise KeyboardInterrupt
        return score(self, *args)

    return run


def test_perplexity_without_a_text_scores_the_packaged_one_and_says_so(exl: Command) -> None:
    done = exl("eval", "perplexity", "--windows", 1, "--json")
    assert done.code == 0
    assert done.err.startswith("exl: note: no --text, so the packaged text is scored, SHA-256 ")
    assert "compare with nothing published" in done.err
    record = json.loads(done.out)
    assert (record["ctx"], record["text"]) == (256, "declaration.txt of exl (public domain)")
