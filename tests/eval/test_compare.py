"""Comparison of two records: comparable figures, obstacles, and standard errors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from exl_core.errors import RequestError
from exl_eval.compare import compare_records
from exl_eval.divergence import DivergenceOptions, measure_divergence
from exl_eval.estimates import mean_and_error
from exl_eval.perplexity import PerplexityOptions, compare_scored, measure_perplexity, score_text
from support.tables import loaded_with, random_table

TEXT = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen jugs. " * 6


def record(seed: int = 5, text: str = TEXT, style: str = "paper", **options: Any) -> dict[str, Any]:
    """Record of a perplexity, as parsed from its JSON."""
    options = {"ctx": 16, **options}
    result = measure_perplexity(
        loaded_with(random_table(seed)), text, PerplexityOptions(style, **options)
    )
    return json.loads(json.dumps(result.as_dict()))


def divergence_record(seed: int, reference: int = 5, **options: Any) -> dict[str, Any]:
    models = loaded_with(random_table(seed)), loaded_with(random_table(reference))
    result = measure_divergence(*models, TEXT, DivergenceOptions(**{"ctx": 16, **options}))
    return json.loads(json.dumps(result.as_dict()))


def test_two_models_on_one_text_give_a_paired_difference() -> None:
    a, b = record(5), record(6)
    found = compare_records(a, b)
    assert (found.is_comparable, found.obstacles) == (True, ())
    nll, perplexity, bits = found.differences
    assert (nll.figure, nll.is_paired) == ("nll", True)
    assert nll.difference == pytest.approx(a["nll"] - b["nll"])
    by_window = [
        (x - y) / t
        for x, y, t in zip(a["window_nll"], b["window_nll"], a["window_tokens"], strict=True)
    ]
    spread = torch.tensor(by_window, dtype=torch.float64).std()
    assert nll.stderr == pytest.approx(float(spread) / math.sqrt(len(by_window)))
    assert perplexity.stderr == pytest.approx(math.hypot(a["stderr"], b["stderr"]))
    assert (bits.figure, bits.is_paired) == ("bits_per_byte", False)


def test_paired_error_is_smaller_than_separate_errors() -> None:
    table = random_table(5)
    near = table + 0.05 * random_table(6)
    records: list[dict[str, Any]] = [
        measure_perplexity(loaded_with(one), TEXT, PerplexityOptions(ctx=16)).as_dict()
        for one in (table, near)
    ]
    nll = compare_records(records[0], records[1]).differences[0]
    assert nll.stderr is not None
    assert nll.stderr < 0.2 * math.hypot(*(float(one["nll_stderr"]) for one in records))


def test_paired_perplexities_follow_the_formula() -> None:
    models = [loaded_with(random_table(seed)) for seed in (5, 6)]
    first, second = (score_text(one, TEXT, PerplexityOptions(ctx=16)) for one in models)
    pair = compare_scored(first, second)
    difference = first.nll - second.nll
    assert pair.ln_ppl_ratio == pytest.approx(float(difference.mean()))
    assert pair.ln_ppl_ratio_stderr == pytest.approx(mean_and_error(difference)[1])
    assert math.exp(pair.ln_ppl_ratio) == pytest.approx(
        first.result.perplexity / second.result.perplexity
    )
    found: dict[str, Any] = pair.as_dict()
    assert found["compared_to"]["perplexity"] == second.result.perplexity


@pytest.mark.parametrize(
    ("other", "fields"),
    [
        ({"text": TEXT + "."}, {"text_sha256"}),
        ({"ctx": 32}, {"ctx", "tokens", "windows"}),
        ({"bos": "each"}, {"bos", "bos_id"}),
        ({"style": "llama.cpp"}, {"style", "special_text", "tokens"}),
        ({"windows": 3}, {"tokens", "windows"}),
    ],
    ids=["text", "context", "BOS", "style", "windows"],
)
def test_defining_settings_must_agree(other: dict[str, Any], fields: set[str]) -> None:
    found = compare_records(record(), record(6, **other))
    assert not found.is_comparable
    assert fields <= {obstacle.field for obstacle in found.obstacles}
    assert all(obstacle.why for obstacle in found.obstacles)
    figures = {one.figure for one in found.differences}
    assert figures == ({"bits_per_byte"} if "ctx" in other or "bos" in other else set())


def test_another_tokenizer_allows_only_bits_per_byte() -> None:
    a = record()
    b = {**record(6), "tokenizer_sha256": "0" * 64}
    found = compare_records(a, b)
    assert [obstacle.field for obstacle in found.obstacles] == ["tokenizer_sha256"]
    (bits,) = found.differences
    assert bits.difference == pytest.approx(a["bits_per_byte"] - b["bits_per_byte"])


def test_differing_model_fields_are_listed() -> None:
    found = compare_records(record(), {**record(6), "model": "other", "kv_format": "q4"})
    assert found.differing == {"model": ("table", "other"), "kv_format": ("fp16", "q4")}
    assert found.is_comparable


def test_divergences_need_the_same_reference() -> None:
    a, b = divergence_record(6), divergence_record(7)
    found = compare_records(a, b)
    assert found.is_comparable
    kld = found.differences[0]
    assert kld.difference == pytest.approx(a["kld"]["mean"] - b["kld"]["mean"])
    assert kld.is_paired
    assert kld.stderr is not None
    assert kld.stderr > 0
    other = compare_records(a, {**b, "reference": "another"})
    assert (other.is_comparable, other.differences) == (False, ())
    assert other.obstacles[0].field == "reference"


def test_a_single_window_gives_an_unpaired_difference() -> None:
    nll = compare_records(record(windows=1), record(6, windows=1)).differences[0]
    assert not nll.is_paired
    assert nll.stderr is not None
    assert nll.stderr > 0


@pytest.mark.parametrize(
    ("b", "message"),
    [
        ({"schema_version": 1, "decode_tok_s": 5}, "record B: no record that can be compared"),
        ({}, "record B: no record"),
        (divergence_record(6), "different measurements"),
        ({**record(), "schema_version": 99}, "record B: the record is of another version"),
        (
            {key: value for key, value in record().items() if key != "nll"},
            r"record B: nll of the record is wrong \(expected a number, got nothing\)",
        ),
        ({**record(), "nll": None}, r"nll of .* \(expected a number, got null\)"),
        ({**record(), "stderr": "0.1"}, r'stderr of .* \(expected a number or null, got "0.1"\)'),
        ({**record(), "perplexity": math.nan}, r"perplexity of .* got NaN"),
        ({**record(), "nll": 10**400}, r"nll of .*expected a number, got 1000"),
        ({**record(), "bytes": 1.5}, r"bytes of .*expected a count, got 1.5"),
        ({**record(), "window_nll": None}, "window_nll of .*expected a list of numbers, got null"),
        ({**record(), "window_nll": [1, [2]]}, "window_nll of"),
        ({**record(), "window_tokens": []}, "window_tokens of .*expected a list of counts"),
        ({**record(), "window_tokens": [1]}, "expected 1 numbers, one for each of window_tokens"),
    ],
)
def test_an_unsuitable_record_is_refused(b: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        compare_records(record(), b)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kld": None}, r"first.json: kld of the record is wrong \(expected an object, got null\)"),
        ({"kld": {"mean": "x"}}, "kld.mean of .*expected a number"),
        ({"kld": {"mean": 1.0}}, "kld.stderr of .* got nothing"),
        ({"same_top": True}, "same_top of .*expected a number, got true"),
        ({"measurement": []}, "first.json: no record that can be compared"),
    ],
)
def test_types_of_a_divergence_are_checked(changed: dict[str, Any], message: str) -> None:
    b = divergence_record(6)
    with pytest.raises(RequestError, match=message):
        compare_records({**b, **changed}, b, ("first.json", "second.json"))


@pytest.mark.parametrize("measured", [record, partial(divergence_record, 6)])
def test_records_of_a_single_token_have_no_errors(measured: Callable[..., dict[str, Any]]) -> None:
    one = measured(ctx=2, windows=1)
    json.dumps(one, allow_nan=False)
    main, *_ = compare_records(one, one).differences
    assert (main.difference, main.stderr) == (0.0, None)
