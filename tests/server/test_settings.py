"""Settings of requests: names that clients send, neutral values, unknown fields, `strict`."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exl_cli.server import llama_cpp
from exl_cli.server.engine_request import Wanted, constraints_of, sampler_of, time_limit_s
from exl_cli.server.errors import ApiError
from exl_cli.server.fields import Goes
from exl_cli.server.models import Resident
from exl_cli.server.settings import CHAT, COMPLETION, Settings, read_settings
from exl_core.constrain.choice import OneOf
from exl_core.constrain.grammar import Grammar
from exl_core.constrain.json_schema import JsonSchema
from exl_core.constrain.regex import Regex
from exl_core.engine.request import Report
from exl_core.sampling.chain import dry_of
from exl_core.sampling.params import SamplerParams
from support.scripted import EOS_ID, reply_with
from support.server import LIMIT_S, Running, error_of, running, scripted_runtime

TEXT = "/v1/completions"
CHAT_PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
BODIES = Path(__file__).parent / "bodies"
RESIDENT = Resident("scripted", scripted_runtime(reply_with("x")))


def settings_of(**body: Any) -> Settings:
    settings, others = read_settings(COMPLETION, body)
    assert not others
    return settings


def sampler(**body: Any) -> SamplerParams:
    return sampler_of(RESIDENT, settings_of(**body), 0)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"temp": "0.5"}, {"temperature": 0.5}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 40.0}, {"top_k": 40}),
        ({"typical_p": 0.9, "typical": 0.9}, {"typical": 0.9}),
        ({"typical": 0}, {"typical": 1.0}),
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"repeat_last_n": 64}, {"penalty_range": 64}),
        ({"repeat_last_n": 0}, {"penalty_range": 0}),
        ({"repeat_last_n": -1}, {"penalty_range": None}),
        ({"repetition_penalty_range": 0, "repeat_last_n": 0}, {"penalty_range": None}),
        ({"nsigma": -1}, {"top_n_sigma": 0.0}),
        ({"mirostat_mode": 2, "mirostat_tau": 4}, {"mirostat_tau": 4.0}),
        ({"mirostat": 2}, {"mirostat_tau": 5.0}),
        ({"mirostat": "1"}, {"mirostat_tau": 5.0, "mirostat_version": 1}),
        ({"mirostat": 0, "mirostat_tau": 4, "mirostat_eta": 0.2}, {}),
        (
            {"min_temp": 0.5, "max_temp": 1.5, "temperature": 2},
            {"min_temp": 0.5, "max_temp": 1.5, "temperature": 2.0},
        ),
        (
            {"dynatemp_range": 0.5, "temperature": 1.2},
            {"min_temp": 0.7, "max_temp": 1.7, "temperature": 1.0},
        ),
        (
            {"dynatemp_low": 0.5, "dynatemp_high": 1.5, "temperature": 3},
            {"min_temp": 0.5, "max_temp": 1.5, "temperature": 1.0},
        ),
        ({"dynamic_temperature": False, "min_temp": 0.5, "max_temp": 1.5}, {}),
        ({"dynatemp_exponent": 2}, {"temp_exponent": 2.0}),
        ({"smoothing_factor": 0, "smoothing_curve": 0}, {}),
        (
            {"smoothing_factor": 0.2, "smoothing_curve": 2},
            {"smoothing_factor": 0.2, "smoothing_curve": 2.0},
        ),
        (
            {"dry_multiplier": 1, "dry_range": 5, "dry_sequence_breakers": ["a"]},
            {
                "dry_multiplier": 1.0,
                "dry_range": 5,
                "dry_max_ngram": 4,
                "dry_breakers": frozenset({97, 256, 257}),
            },
        ),
        ({"dry_multiplier": 1, "dry_range": 2}, {}),
        (
            {"samplers": ["top_p", "temperature"], "top_p": 0.5, "temp": 0.7, "min_p": 0.1},
            {"top_p": 0.5, "temperature": 0.7, "temperature_last": True},
        ),
        ({"sampler_order": [5, 2], "top_p": 0.5, "temp": 2}, {"top_p": 0.5, "temperature": 2.0}),
        ({"seed": -1}, {"seed": None}),
        ({"sampler_seed": "7"}, {"seed": 7}),
        ({"logit_bias": {"65": 5}}, {"token_bias": {65: 5.0}}),
        (
            {"logit_bias": [[65, -3], ["B", 1], [67, False]]},
            {"token_bias": {65: -3.0, 66: 1.0}, "banned_tokens": frozenset({67})},
        ),
        ({"banned_tokens": [65, 66]}, {"banned_tokens": frozenset({65, 66})}),
        ({"custom_token_bans": "65, 66"}, {"banned_tokens": frozenset({65, 66})}),
        ({"custom_token_bans": ""}, {}),
        ({"ignore_eos": True}, {"banned_tokens": frozenset({EOS_ID})}),
        ({"ban_eos_token": True, "ignore_eos": False}, {"banned_tokens": frozenset({EOS_ID})}),
        ({"allowed_token_ids": [65]}, {"allowed_tokens": frozenset({65})}),
        (
            {"dry_multiplier": 1, "dry_sequence_breakers": '["a", "bc"]'},
            {"dry_multiplier": 1.0, "dry_breakers": frozenset({97, 99, 256, 257})},
        ),
        ({"guidance_scale": 1, "negative_prompt": ""}, {}),
        ({"cfg_scale": 2, "negative_prompt": "no"}, {"cfg_scale": 2.0}),
        (
            {
                "temperature_last": True,
                "skew": -1,
                "top_a": 0.1,
                "xtc_probability": 0.2,
                "smoothing_factor": 0.3,
                "smoothing_curve": 1,
            },
            {
                "temperature_last": True,
                "skew": -1.0,
                "top_a": 0.1,
                "xtc_probability": 0.2,
                "smoothing_factor": 0.3,
            },
        ),
    ],
)
def test_every_name_of_a_setting_reaches_the_sampler(
    body: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert sampler(**body) == SamplerParams(**expected)


@pytest.mark.parametrize("reach", [3, 4, 7, 19, 20, 21, 22, 0])
def test_short_dry_ranges_penalize_what_lies_in_the_range(reach: int) -> None:
    rng = random.Random(reach)
    body = {"dry_multiplier": 1, "dry_allowed_length": 1, "dry_range": reach}
    params = sampler(**body, dry_sequence_breakers=[])
    for _ in range(50):
        history = rng.choices(range(3), k=rng.randint(1, 40))
        found = dry_of(params, tuple(history))(torch.zeros(8))
        exact = [0.0] * 8
        begin = max(0, len(history) - reach) if reach else 0
        longest = 0
        for end in range(begin, len(history) - 2):  # last token of an earlier occurrence
            size = 0
            while size < 19 and end - size >= begin and history[end - size] == history[-1 - size]:
                size += 1
            if size > longest:
                longest, exact = size, [0.0] * 8
            if size and size == longest:
                exact[history[end + 1]] -= 1.75 ** (size - 1)
        torch.testing.assert_close(found, torch.tensor(exact), rtol=1e-5, atol=1e-6)


def test_range_of_zero_turns_dry_off_in_llama_cpp_only() -> None:
    body = {"prompt": "Q", "dry_multiplier": 1, "dry_penalty_last_n": 0}
    assert llama_cpp.completion_body(body).settings.sampler["dry_multiplier"] == 0
    assert settings_of(dry_multiplier=1, dry_penalty_last_n=0).sampler["dry_multiplier"] == 1


@pytest.mark.parametrize(("given", "expected"), [(-1, 60), (0, 60), (1500, 1.5), (70_000, 60)])
def test_time_limit_of_a_request_is_below_that_of_the_server(given: int, expected: float) -> None:
    wanted = Wanted(param="prompt", report=Report(), max_tokens=1, max_time_s=60)
    assert time_limit_s(settings_of(t_max_predict_ms=given), wanted) == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_keep", 3),
        ("memory", "Before the prompt"),
        ("grammar_retain_state", True),
        ("post_sampling_probs", True),
    ],
)
def test_what_would_change_figures_is_refused_by_name(
    one: Running, field: str, value: object
) -> None:
    error = error_of(one.post(TEXT, {"prompt": "Q", field: value}), 400)
    assert error["param"] == field and field in error["message"]


def test_other_settings_reach_the_request() -> None:
    found = settings_of(n_predict="5", min_length=2, stop="", add_bos_token=False)
    assert (found.max_tokens, found.min_tokens, found.stop, found.add_bos) == (5, 2, (), False)
    assert settings_of(stopping_strings=["a", "", "a"]).stop == ("a",)
    assert settings_of(max_tokens=-1).max_tokens == -1
    assert settings_of(banned_tokens=["bad"]).banned_tokens == ("bad",)


WHOLE: list[tuple[str, Callable[[Any], Any]]] = [
    ("max_tokens", lambda number: number),
    ("seed", lambda number: number),
    ("stop_token_ids", lambda number: number),
    ("stop_token_ids", lambda number: [number, 66]),
    ("banned_tokens", lambda number: [number, "B"]),
    ("allowed_token_ids", lambda number: [number]),
    ("logit_bias", lambda number: [[number, 1]]),
    ("lora", lambda number: [{"id": number}]),
    ("sampler_order", lambda number: [number, 2]),
]


@pytest.mark.parametrize(("field", "with_number"), WHOLE)
def test_whole_numbers_may_be_floats(field: str, with_number: Callable[[Any], Any]) -> None:
    found, same = (settings_of(**{field: with_number(five)}) for five in (5.0, 5))
    assert repr(found) == repr(same)  # `==` takes 5.0 for 5
    for wrong in (5.5, True):
        with pytest.raises(ApiError, match=field):
            settings_of(**{field: with_number(wrong)})


def test_two_names_with_different_values_are_an_error() -> None:
    with pytest.raises(ApiError, match="send one"):
        settings_of(typical=0.5, typical_p=0.6)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"json_schema": {}}, ()),
        ({"json_schema": {"type": "object"}}, (JsonSchema({"type": "object"}),)),
        ({"guided_json": '{"type": "object"}'}, (JsonSchema({"type": "object"}),)),
        ({"response_format": {"type": "text"}}, ()),
        ({"response_format": {"type": "json_object"}}, (JsonSchema({"type": "object"}),)),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "null"}}},
            (JsonSchema({"type": "null"}, loose=["#"]),),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "null"}},
                }
            },
            (JsonSchema({"type": "null"}, loose=["#"]),),
        ),
        (
            {"response_format": {"type": "json_schema", "schema": {"type": "null"}}},
            (JsonSchema({"type": "null"}, loose=["#"]),),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": {"type": "null"}},
                }
            },
            (JsonSchema({"type": "null"}),),
        ),
        ({"guided_regex": "a+"}, (Regex("a+"),)),
        ({"guided_choice": ["a", "b"]}, (OneOf(["a", "b"]),)),
        ({"grammar": ""}, ()),
        ({"grammar": 'start: "a"'}, (Grammar('start: "a"'),)),
        ({"structured_outputs": {"regex": "b", "json": None}}, (Regex("b"),)),
        ({"structured_outputs": {"choice": ["a"]}}, (OneOf(["a"]),)),
    ],
)
def test_constraints_come_in_every_shape(body: dict[str, Any], expected: Any) -> None:
    assert constraints_of(settings_of(**body)) == expected


def test_grammar_of_llama_cpp_is_translated() -> None:
    (found,) = constraints_of(settings_of(grammar='root ::= "yes"\n  | "no"'))
    assert isinstance(found, Grammar) and "start" in found.lark
    with running(scripted_runtime(reply_with("maybe"))) as one:
        body = {"prompt": "Q", "grammar": 'root ::= "yes" | "no"', "max_tokens": 9}
        assert one.post(TEXT, body).json()["choices"][0]["text"] in ("yes", "no")
        for wrong in ("root ::= (", "root ::= missing", 'other ::= "a"'):
            error_of(one.post(TEXT, {**body, "grammar": wrong}), 400)


@pytest.mark.parametrize("table", [COMPLETION, CHAT])
def test_fields_that_change_results_are_refused_unless_neutral(table: Any) -> None:
    refused = [row for row in table.rows if row.goes is Goes.REFUSED]
    assert len(refused) > 10
    for row in refused:
        for neutral in row.kind.schema["enum"]:
            read_settings(table, {row.name: neutral})
        with pytest.raises(ApiError) as caught:
            read_settings(table, {row.name: [7]})
        assert (caught.value.param, caught.value.code) == (row.name, "unsupported_parameter")


@pytest.fixture(scope="module")
def one() -> Any:
    with running(scripted_runtime(reply_with("hello"))) as server:
        yield server


@pytest.mark.parametrize("file", sorted(path.name for path in BODIES.glob("*.json")))
def test_bodies_that_clients_send_are_served(one: Running, file: str) -> None:
    recorded = json.loads((BODIES / file).read_text(encoding="utf-8"))
    assert recorded["source"] and recorded["path"]
    answer = one.post(recorded["path"], recorded["body"])
    assert answer.status_code == 200, answer.text
    ignored = answer.headers.get("x-exl-ignored", "")
    assert ignored == recorded.get("ignored", "")


def said_of(caplog: pytest.LogCaptureFixture, start: str) -> list[str]:
    said = [record.getMessage() for record in caplog.records]
    return [one for one in said if one.startswith(start)]


def test_unknown_fields_are_named_in_a_header_and_once_in_the_log(
    one: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "exl.server")
    message = {"role": "user", "content": "hi", "mood": 1, "annotations": []}
    body = {"messages": [message, message], "colour": 1, "nothing": None, "settings": {}}
    for _ in range(2):
        answer = one.post(CHAT_PATH, body)
        assert answer.headers["x-exl-ignored"] == "colour, settings, messages[].mood"
    deadline = time.monotonic() + LIMIT_S
    while len(lines := said_of(caplog, f"POST {CHAT_PATH} 200")) < 2:  # written after the answer
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(lines) == 2 and "reply_tokens=6" in lines[0]
    for name in ("colour", "settings", "messages[].mood"):
        assert len(said_of(caplog, f"field {name} is unknown and ignored")) == 1
    assert not any("hi" in r.getMessage() for r in caplog.records if "POST" in r.getMessage())


def test_names_from_clients_do_not_break_the_header(one: Running) -> None:
    hostile = {f"\r\nx: {number} é\0💥, {'a' * 100}": 1 for number in range(50)}
    answer = one.post(TEXT, {"prompt": "Q", **hostile})
    value = answer.headers["x-exl-ignored"]
    assert answer.status_code == 200 and value.isascii() and value.isprintable()
    assert value.count(",") == 32 and value.endswith("...")
    assert "x" not in answer.headers


def test_strict_refuses_unknown_fields() -> None:
    with running(scripted_runtime(reply_with("hello")), is_strict=True) as strict:
        for path, body in ((TEXT, {"prompt": "Q"}), (CHAT_PATH, {"messages": HI})):
            assert strict.post(path, {**body, "user": "me", "temp": 1}).status_code == 200
            error = error_of(strict.post(path, {**body, "colour": 1}), 400)
            assert (error["param"], error["code"]) == ("colour", "unsupported_parameter")
        named = {"messages": [{"role": "user", "content": "hi", "mood": 1}]}
        assert error_of(strict.post(CHAT_PATH, named), 400)["param"] == "messages[].mood"
