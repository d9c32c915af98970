"""The settings of generation requests, as tables of fields, and their values.

The names are those of OpenAI's API. `also` lists the names that clients of llama.cpp, vLLM,
tabbyAPI, KoboldCpp, text-generation-webui and ollama send for the same thing. A field that changes
results is either honored or refused by its name. Knows neither models nor tokenizers: texts that
become token ids are converted by `sampling.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from exl_cli.server.errors import ApiError
from exl_cli.server.fields import (
    Goes,
    Table,
    all_as_whole,
    as_whole,
    custom,
    flag,
    inert,
    number,
    one_of,
    reply,
    sampler,
    seed,
    text,
    texts,
    unsupported,
    variable,
    whole,
)
from exl_cli.server.sampler_order import (
    SamplerOrder,
    read_numbers,
    read_priority,
    read_samplers,
)

MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
MAX_LISTED = 2048
"""Maximum number of entries of `logit_bias` and of lists of tokens."""

_DECIMAL_ID = re.compile("0|[1-9][0-9]{0,9}")

Bias = tuple[tuple[int | str, float | None], ...]
"""Token ids or texts with their biases; None bans them."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one generation request.

    sampler          arguments of SamplerParams that the request sets
    template         variables of the chat template that have a field of their own
    variables        further variables of the chat template
    max_tokens       None: not set; -1: until the context is full
    logprobs         number of likeliest tokens to report with each token; None: no log
                     probabilities. `top_logprobs` is the same number in chat, where `logprobs` is
                     a flag
    order            order of the samplers; None: the engine's
    max_ms           time limit of the reply in milliseconds, if above 0
    no_eos           the reply does not end at EOS, which is never sampled
    add_bos          None: as the tokenizer does by default
    schema           JSON schema that the reply matches
    regex, choice    the same for a regular expression and for a list of texts
    grammar          the same for a grammar, in Lark or GBNF
    """

    sampler: Mapping[str, Any] = field(default_factory=dict)
    template: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    max_tokens: int | None = None
    order: SamplerOrder | None = None
    max_ms: int = -1
    min_tokens: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    logit_bias: Bias = ()
    banned_tokens: tuple[int | str, ...] = ()
    allowed_tokens: tuple[int, ...] | None = None
    banned_strings: tuple[str, ...] = ()
    dry_breakers: tuple[str, ...] | None = None
    no_eos: bool = False
    bans_eos: bool = False
    add_bos: bool | None = None
    skip_special: bool = True
    token_healing: bool = False
    negative_prompt: str = ""
    guidance_scale: float = 1.0
    lora: tuple[tuple[int | str, float], ...] | None = None
    logprobs: int | bool | None = None
    top_logprobs: int | None = None
    echo: bool = False
    schema: dict[str, Any] | bool | None = None
    format_schema: WantedSchema | None = None
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    structured: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False
    adds_turn: bool = True
    prefix: str = ""

    def check_one_reply(self) -> None:
        """Raises ApiError for several replies, in APIs that have one."""
        if self.n != 1:
            raise ApiError(400, "n: this API has one reply", param="n", code="invalid_value")

    @property
    def schemas(self) -> tuple[WantedSchema, ...]:
        """All JSON schemas that the reply has to match."""
        given = (self.schema, self.format_schema, self.structured.get("json"))
        return tuple(
            one if isinstance(one, WantedSchema) else WantedSchema(one)
            for one in given
            if one is not None
        )


@dataclass(frozen=True, slots=True)
class WantedSchema:
    """A JSON schema of a request. It is a best effort unless it is strict."""

    schema: dict[str, Any] | bool
    is_strict: bool = True


def _listed_ids(given: object) -> tuple[int | str, ...]:
    """Ids, or texts as KoboldCpp sends them; also one text with numbers between commas."""
    if isinstance(given, str):
        parts = given.replace("[", "").replace("]", "").split(",")
        given = [int(part) if part.strip().isdecimal() else part for part in parts if part.strip()]
    given = all_as_whole(given)
    if not isinstance(given, list) or len(given) > MAX_LISTED:
        raise ValueError(f"a list of at most {MAX_LISTED} token ids is expected")
    if not all(isinstance(one, int | str) and not isinstance(one, bool) for one in given):
        raise ValueError("token ids are expected")
    if any(isinstance(one, int) and not 0 <= one < 2**31 for one in given):
        raise ValueError("token ids from 0 are expected")
    return tuple(one for one in given if one != "")


def _only_ids(given: object) -> tuple[int, ...] | None:
    found = tuple(one for one in _listed_ids(given) if isinstance(one, int))
    if len(found) < len(_listed_ids(given)):
        raise ValueError("token ids are expected")
    return found or None


def _stop_ids(given: object) -> tuple[int, ...]:
    given = as_whole(given)
    return _only_ids([given] if isinstance(given, int) else given) or ()


def _bias(given: object) -> Bias:
    """OpenAI's object from ids to numbers, or llama.cpp's list of pairs, where false is a ban."""
    pairs = list(given.items()) if isinstance(given, dict) else given
    if not isinstance(pairs, list) or len(pairs) > MAX_LISTED:
        raise ValueError(f"at most {MAX_LISTED} token ids with numbers are expected")
    found: list[tuple[int | str, float | None]] = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError("pairs of a token id and a number are expected")
        token, value = pair
        if isinstance(given, dict):
            if not _DECIMAL_ID.fullmatch(token):
                raise ValueError("keys are token ids, in plain decimal digits")
            token = int(token)
        token = as_whole(token)
        is_token = isinstance(token, str) or (type(token) is int and 0 <= token < 2**31)
        if not is_token or token == "":
            raise ValueError("token ids from 0, or texts, are expected")
        if value is False:
            found.append((token, None))
        elif isinstance(value, int | float) and -100 <= value <= 100 and value is not True:
            found.append((token, float(value)))
        else:
            raise ValueError("numbers from -100 to 100 are expected")
    return tuple(found)


def _schema(given: object) -> dict[str, Any] | bool | None:
    """A JSON schema, or its text. Empty ones are none."""
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else None
        except (ValueError, RecursionError) as error:
            raise ValueError("a JSON schema is expected") from error
    if given is not None and not isinstance(given, dict | bool):
        raise ValueError("a JSON schema is expected")
    return None if given == {} or given is None else given


def _response_format(given: object) -> WantedSchema | None:
    """The schema of OpenAI's `response_format`, also in the shapes of llama.cpp and older vLLM."""
    if not isinstance(given, dict):
        raise ValueError("an object with a type is expected")
    kind = given.get("type")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise ValueError(f"type {str(kind)[:60]!r} is not one of text, json_object, json_schema")
    named = given.get("json_schema")
    found = named.get("schema") if isinstance(named, dict) else None
    found = given.get("schema") if found is None else found
    if kind == "json_schema" and not isinstance(found, dict | bool):
        raise ValueError("json_schema.schema is missing")
    strict = named.get("strict") if isinstance(named, dict) else given.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise ValueError("json_schema.strict: a boolean is expected")
    schema = _schema(found)
    if schema is None:
        return WantedSchema({"type": "object"})
    return WantedSchema(schema, is_strict=bool(strict))


_STRUCTURED = ("json", "regex", "choice", "grammar")


def _structured(given: object) -> dict[str, Any]:
    """vLLM's `structured_outputs`: an object with one of four keys."""
    if not isinstance(given, dict):
        raise ValueError("an object is expected")
    found = {key: value for key, value in given.items() if value not in (None, False)}
    for key in found:
        if key not in _STRUCTURED:
            raise ValueError(f"{key[:60]!r} is not one of {', '.join(_STRUCTURED)}")
    if "json" in found:
        found["json"] = _schema(found["json"])
    if "choice" in found:
        found["choice"] = CHOICES.read(found["choice"])
    for key in ("regex", "grammar"):
        if key in found:
            found[key] = text().read(found[key])
    return found


def _adapters(given: object) -> tuple[tuple[int | str, float], ...]:
    """llama.cpp's list of adapters, by number or name, with scales."""
    if not isinstance(given, list) or len(given) > 64:
        raise ValueError("a list of objects with id and scale is expected")
    found: list[tuple[int | str, float]] = []
    for one in given:
        fields = one if isinstance(one, dict) else {}
        named = as_whole(fields.get("id", fields.get("name")))
        if not isinstance(named, int | str) or isinstance(named, bool):
            raise ValueError("objects with id and scale are expected")
        found.append((named, number(-100, 100).read(fields.get("scale", 1.0))))
    return tuple(found)


def _breakers(given: object) -> tuple[str, ...]:
    """A list of texts, or its JSON text."""
    if isinstance(given, str) and given.lstrip().startswith("["):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ValueError("a list of texts is expected") from error
    found: tuple[str, ...] = STOPS.read(given)
    return found


def _some_tokens(given: object) -> int:
    limit: int = whole(-2).read(given)
    if limit == 0:
        raise ValueError("at least 1 token is expected, or -1 for no limit")
    return limit


def _variables(given: object) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError("an object is expected")
    for name in RESERVED:
        if name in given:
            raise ValueError(f"a request may not set {name}")
    return given


RESERVED = ("self", "messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
STOPS = texts(max_items=64, max_length=1024)
CHOICES = texts(max_items=MAX_LISTED, max_length=64 * 1024)
IDS = custom(_listed_ids, {"type": "array", "items": {"type": "integer"}})
SCHEMA = custom(_schema)
SHARE = number(0, 1)
_DRY_MAX_NGRAM = 20  # the engine's default
_NAMES = {"type": "array", "items": {"type": "string"}}

SAMPLING = (
    sampler("temperature", number(0, 100), "temp"),
    sampler("top_k", whole(0, replace={-1: 0})),
    sampler("top_p", number(1e-9, 1, replace={0: 1e-9})),
    sampler("min_p", SHARE),
    sampler("top_a", SHARE),
    sampler("typical_p", number(1e-9, 1, replace={0: 1}), "typical", "typ_p", to="typical"),
    sampler("tfs", number(1e-9, 1, replace={0: 1}), "tfs_z"),
    sampler("top_n_sigma", number(0, 100, replace={-1: 0}), "nsigma", "top_nsigma"),
    sampler("skew", number(-20, 20)),
    sampler("xtc_probability", SHARE),
    sampler("xtc_threshold", SHARE),
    sampler("repetition_penalty", number(0.01, 100), "repeat_penalty", "rep_pen"),
    sampler("frequency_penalty", number(-100, 100), "freq_pen"),
    sampler("presence_penalty", number(-100, 100), "presence_pen"),
    sampler("repeat_last_n", whole(-1)),
    sampler(
        "penalty_range", whole(-1), "repetition_penalty_range", "rep_pen_range", "repetition_range"
    ),
    sampler("penalty_decay", whole(0), "repetition_decay"),
    sampler("dry_multiplier", number(0, 100)),
    sampler("dry_base", number(0, 100)),
    sampler("dry_allowed_length", whole(0)),
    sampler("dry_range", whole(0, replace={-1: 0}), "dry_penalty_last_n"),
    reply("dry_sequence_breakers", custom(_breakers), to="dry_breakers"),
    sampler("mirostat", whole(0, 2), "mirostat_mode"),
    sampler("mirostat_tau", number(0, 100)),
    sampler("mirostat_eta", SHARE),
    sampler("smoothing_factor", number(0, 100)),
    sampler("smoothing_curve", number(0, 100)),
    sampler("min_temp", number(0, 100)),
    sampler("max_temp", number(0, 100)),
    sampler("dynamic_temperature", flag()),
    sampler("dynatemp_low", number(0, 100), "dynatemp_min"),
    sampler("dynatemp_high", number(0, 100), "dynatemp_max"),
    sampler("dynatemp_range", number(0, 100)),
    sampler("temp_exponent", number(0, 100), "dynatemp_exponent"),
    sampler("temperature_last", flag(), "temp_last"),
    reply("samplers", custom(read_samplers, _NAMES), to="order"),
    reply("sampler_priority", custom(read_priority, _NAMES), to="order"),
    reply("sampler_order", custom(read_numbers, {"type": "array"}), to="order"),
    reply("seed", seed(), "sampler_seed"),
    reply(
        "logit_bias",
        custom(
            _bias,
            {
                "type": "object",
                "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            },
        ),
    ),
    reply("banned_tokens", IDS, "custom_token_bans"),
    reply("allowed_tokens", custom(_only_ids, IDS.schema), "allowed_token_ids"),
    reply("banned_strings", STOPS),
    reply("guidance_scale", number(0, 100), "cfg_scale"),
    reply("negative_prompt", text()),
)

REPLY = (
    reply("n", whole(1, MAX_CHOICES), "n_cmpl"),
    reply("t_max_predict_ms", whole(-1), to="max_ms"),
    reply("stop", STOPS, "stopping_strings", "stop_sequence"),
    reply("stop_token_ids", custom(_stop_ids, IDS.schema), "stop_tokens", to="stop_ids"),
    reply("min_tokens", whole(0), "min_length", "min_new_tokens"),
    reply("ignore_eos", flag(), to="no_eos"),
    reply("ban_eos_token", flag(), to="bans_eos"),
    reply("skip_special_tokens", flag(), to="skip_special"),
    reply("token_healing", flag()),
    reply("lora", custom(_adapters, {"type": "array"})),
    reply("json_schema", SCHEMA, "guided_json", to="schema"),
    reply("response_format", custom(_response_format, {"type": "object"}), to="format_schema"),
    reply("regex_pattern", text(), "guided_regex", "regex", to="regex"),
    reply("guided_choice", CHOICES, to="choice"),
    reply("grammar", text(), "grammar_string", "guided_grammar"),
    reply("structured_outputs", custom(_structured), "guided_decoding", to="structured"),
)

WITHOUT_EFFECT = (
    *inert("user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
    *inert("prompt_cache_key", "prompt_cache_retention", "cache_prompt", "cache_salt"),
    *inert("truncation_length", "num_ctx", "max_context_length", "n_keep", "num_keep"),
    *inert("id_slot", "slot_id", "num_batch", "num_gpu", "num_thread", "use_mmap", "use_mlock"),
    *inert("keep_alive", "request_id", "priority", "api_type", "api_server", "cache_key"),
    *inert("spaces_between_special_tokens", "detokenize", "return_tokens", "timings_per_token"),
    *inert("guided_decoding_backend", "speculative_ngram"),
    *inert("early_stopping", "adaptive_decay", "include_reasoning", "quiet"),
    *inert("return_progress", "genkey"),
)
"""Hints for caches, hardware and accounting, and settings of features that are refused."""

NOT_SUPPORTED = (
    unsupported("best_of", 1),
    unsupported("use_beam_search"),
    unsupported("num_beams", 1),
    unsupported("length_penalty", 1),
    unsupported("penalty_alpha"),
    unsupported("do_sample", True),
    unsupported("no_repeat_ngram_size"),
    unsupported("encoder_repetition_penalty", 1),
    unsupported("epsilon_cutoff"),
    unsupported("eta_cutoff"),
    unsupported("min_keep", 1),
    unsupported("memory"),
    unsupported("grammar_retain_state"),
    unsupported("post_sampling_probs"),
    unsupported("trim_stop", True),
    unsupported("rep_pen_slope", 1),
    unsupported("adaptive_target", -0.01, -1),
    unsupported("max_tokens_second"),
    unsupported("prompt_logprobs"),
    unsupported("include_stop_str_in_output"),
    unsupported("truncate_prompt_tokens"),
    unsupported("n_indent"),
    unsupported("bad_words"),
)

TOKEN_LIMITS = ("max_completion_tokens", "max_new_tokens", "n_predict", "num_predict")

COMPLETION = Table(
    SAMPLING,
    REPLY,
    WITHOUT_EFFECT,
    NOT_SUPPORTED,
    (
        reply("max_tokens", whole(-2), *TOKEN_LIMITS),
        reply("logprobs", whole(0, MAX_TOP_LOGPROBS, replace={-1: 0}), "n_probs"),
        reply("echo", flag()),
        reply("add_special_tokens", flag(), "add_bos_token", to="add_bos"),
    ),
)

_EFFORTS = one_of("none", "minimal", "low", "medium", "high", "xhigh", "max")

CHAT = Table(
    SAMPLING,
    REPLY,
    WITHOUT_EFFECT,
    NOT_SUPPORTED,
    (
        reply("max_tokens", custom(_some_tokens, {"type": "integer"}), *TOKEN_LIMITS),
        reply("logprobs", flag()),
        reply("top_logprobs", whole(0, MAX_TOP_LOGPROBS)),
        reply("add_generation_prompt", flag(), to="adds_turn"),
        reply("continue_final_message", flag(), to="continues"),
        reply("response_prefix", text(), to="prefix"),
        reply("chat_template_kwargs", custom(_variables), "template_vars", to="variables"),
        variable("enable_thinking", flag()),
        variable("reasoning_effort", _EFFORTS),
        unsupported("echo"),
        unsupported("add_bos_token", True),
        unsupported("add_special_tokens"),
        unsupported("n_probs"),
        unsupported("functions"),
        unsupported("function_call", "auto", "none"),
        unsupported("modalities", ["text"]),
        unsupported("audio"),
        unsupported("web_search_options"),
        unsupported("documents"),
    ),
)


def read_settings(table: Table, body: Mapping[str, object]) -> tuple[Settings, dict[str, Any]]:
    """Settings of a body, and its fields that are no settings. Raises ApiError for a bad value."""
    values, others = table.split(body)
    sampling = _engine_names(values[Goes.SAMPLER])
    known = values[Goes.REPLY]
    return Settings(sampler=sampling, template=values[Goes.TEMPLATE], **known), others


def _engine_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of SamplerParams from the fields of the table that several servers define
    differently."""
    left = dict(given)
    _set_smoothing(left)
    _set_dry_range(left)
    _set_mirostat(left)
    _set_penalty_range(left)
    _set_dynamic_temperature(left)
    return left


def _set_smoothing(left: dict[str, Any]) -> None:
    """Without smoothing, a curve has no effect, and clients send 0 for it."""
    if left.get("smoothing_curve", 1.0) < 1.0 and not left.get("smoothing_factor"):
        del left["smoothing_curve"]


def _set_dry_range(left: dict[str, Any]) -> None:
    """In the latest r tokens, a repetition before the newest token has at most r - 2 tokens. The
    engine wants a smaller bound on their length (`dry_max_ngram`) than r."""
    reach = left.get("dry_range", 0)
    if 0 < reach < 3:
        left |= {"dry_range": 0, "dry_multiplier": 0.0}
    elif reach:
        left["dry_max_ngram"] = min(reach - 1, _DRY_MAX_NGRAM)


def _set_mirostat(left: dict[str, Any]) -> None:
    """`mirostat` is the version; 0 is off. Without it, a tau and an eta have no effect."""
    tau, version = left.pop("mirostat_tau", 5.0), left.pop("mirostat", 0)
    if version:
        left |= {"mirostat_tau": tau, "mirostat_version": version}
    else:
        left.pop("mirostat_eta", None)


def _set_penalty_range(left: dict[str, Any]) -> None:
    """Both names of the range count latest tokens, and -1 is all of them. llama.cpp's
    `repeat_last_n` of 0 turns the penalties off; the other's 0 is all tokens."""
    last = left.pop("repeat_last_n", None)
    wanted = left.pop("penalty_range", None)
    if wanted is not None:
        left["penalty_range"] = None if wanted <= 0 else wanted
    elif last is not None:
        left["penalty_range"] = None if last < 0 else last


def _set_dynamic_temperature(left: dict[str, Any]) -> None:
    """llama.cpp's range and text-generation-webui's limits replace the temperature. exllamav2's
    `min_temp` and `max_temp` apply in addition to it, as in the engine."""
    is_on = left.pop("dynamic_temperature", True)
    low, high = left.pop("dynatemp_low", None), left.pop("dynatemp_high", None)
    around = left.pop("dynatemp_range", 0.0)
    if not is_on:
        left.pop("min_temp", None)
        left.pop("max_temp", None)
    elif low is not None and high is not None and high > low:
        left |= {"temperature": 1.0, "min_temp": low, "max_temp": high}
    elif around > 0:
        middle = left.get("temperature", 1.0)
        limits = {"min_temp": max(middle - around, 0.0), "max_temp": middle + around}
        left |= {"temperature": 1.0, **limits}
