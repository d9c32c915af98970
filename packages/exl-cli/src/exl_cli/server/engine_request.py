"""Requests to the engine from prompts and settings: sampler, constraints, adapters, stops."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

from exl_cli.gbnf import is_gbnf, lark_of
from exl_cli.server.errors import ApiError
from exl_cli.server.models import Resident
from exl_cli.server.settings import Settings
from exl_core.constrain.choice import OneOf
from exl_core.constrain.filter import Constraint
from exl_core.constrain.grammar import Grammar
from exl_core.constrain.json_schema import JsonSchema
from exl_core.constrain.regex import Regex
from exl_core.engine.request import Report, Request
from exl_core.errors import ContextLengthError
from exl_core.model.adapters import AdapterUse
from exl_core.sampling.params import SamplerParams, TokenBias
from exl_core.session.open import stop_ids
from exl_core.tokenizer.base import Tokenizer

DRY_BREAKERS = ("\n", ":", '"', "*")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Parts of a request that do not come from its settings alone.

    param         name of the body's field that has the prompt
    negative_ids  prompt that guidance steers away from
    show_special  the text of special tokens is needed for parsing the reply
    """

    param: str
    report: Report
    max_tokens: int | None
    max_time_s: float
    negative_ids: Sequence[int] | None = None
    constraints: tuple[Constraint, ...] = ()
    stop: tuple[int | str, ...] = ()
    show_special: bool = False


def make_requests(
    resident: Resident, settings: Settings, prompts: Sequence[Sequence[int]], wanted: Wanted
) -> list[Request]:
    """`n` requests for each prompt, in order. Their token limits keep replies within the
    context."""
    runtime = resident.runtime
    limit = wanted.max_tokens
    requests: list[Request] = []
    for prompt_ids in prompts:
        if not prompt_ids:
            raise ApiError(400, "the prompt is empty", param=wanted.param, code="invalid_value")
        for _ in range(settings.n):
            with refusing_long_prompts(runtime.ctx_size, wanted.param):
                request = runtime.request(
                    prompt_ids,
                    max_tokens=None if limit is None or limit < 0 else limit,
                    max_time_s=time_limit_s(settings, wanted),
                    min_tokens=settings.min_tokens,
                    sampler=sampler_of(resident, settings, len(requests)),
                    stop=(*settings.stop, *settings.stop_ids, *wanted.stop),
                    stops_at_eos=not (settings.no_eos or settings.bans_eos),
                    banned_strings=(*settings.banned_strings, *_texts(settings)),
                    token_healing=settings.token_healing,
                    negative_ids=wanted.negative_ids,
                    constraints=wanted.constraints,
                    report=wanted.report,
                    show_special=wanted.show_special or not settings.skip_special,
                    adapters=_adapters(resident, settings),
                )
            requests.append(request)
    return requests


def time_limit_s(settings: Settings, wanted: Wanted) -> float:
    """The lower one of the server's limit and the request's."""
    own = settings.max_ms / 1000 if settings.max_ms > 0 else wanted.max_time_s
    return min(own, wanted.max_time_s)


@contextmanager
def refusing_long_prompts(ctx_size: int, param: str) -> Iterator[None]:
    """Answers 400 for a prompt that leaves no room for a reply, with the field's name."""
    try:
        yield
    except ContextLengthError as error:
        raise ApiError(
            400,
            f"the prompt has at least {error.num_tokens} tokens and the context {ctx_size}: "
            "there is no room for a reply",
            param=param,
            code="context_length_exceeded",
        ) from error


def sampler_of(resident: Resident, settings: Settings, number: int) -> SamplerParams:
    """Sampler settings of reply `number`. Its seed is the seed of the request plus `number`."""
    tokenizer = resident.runtime.loaded.tokenizer
    values = {**resident.defaults, **settings.sampler}
    if settings.order is not None:
        values = settings.order.applied(values)
    if settings.seed is not None:
        values["seed"] = (settings.seed + number) % 2**63
    if uses_guidance(settings):
        values["cfg_scale"] = settings.guidance_scale
    if values.get("dry_multiplier"):
        values["dry_breakers"] = dry_breakers(tokenizer, settings)
    bias, banned = _biased(tokenizer, settings, resident.runtime.engine.vocab_size)
    if settings.no_eos or settings.bans_eos:
        banned |= stop_ids(tokenizer, resident.runtime.loaded.config)
    if settings.allowed_tokens is not None:
        values["allowed_tokens"] = frozenset(settings.allowed_tokens)
    return SamplerParams(**values, token_bias=TokenBias(bias), banned_tokens=frozenset(banned))


def uses_guidance(settings: Settings) -> bool:
    """A scale of 1 ignores the negative prompt. Raises ApiError for another without a prompt."""
    if settings.guidance_scale == 1.0:
        return False
    if not settings.negative_prompt:
        message = "guidance_scale needs a negative_prompt"
        raise ApiError(400, message, param="guidance_scale", code="invalid_value")
    return True


def dry_breakers(tokenizer: Tokenizer, settings: Settings) -> frozenset[int]:
    """Tokens that end a repetition. The first call for a vocabulary takes a tenth of a second."""
    given = settings.dry_breakers
    return _breakers(tokenizer, DRY_BREAKERS if given is None else given)


@lru_cache(maxsize=8)
def _breakers(tokenizer: Tokenizer, breakers: tuple[str, ...]) -> frozenset[int]:
    """All tokens with a breaker of one character; of longer breakers the last token."""
    found = set(tokenizer.special_tokens.values())
    found |= tokenizer.tokens_with("".join(one for one in breakers if len(one) == 1))
    for longer in breakers:
        if len(longer) > 1:
            found |= set(tokenizer.encode(longer, allow_special=True)[-1:])
    return frozenset(found)


def constraints_of(settings: Settings) -> tuple[Constraint, ...]:
    """The constraints of the settings; the reply has to match all of them."""
    structured = settings.structured
    found: list[Constraint] = [
        JsonSchema(one.schema, loose=() if one.is_strict else ("#",)) for one in settings.schemas
    ]
    for pattern in (settings.regex, structured.get("regex")):
        if pattern:
            found.append(Regex(pattern))
    for options in (settings.choice, structured.get("choice", ())):
        if options:
            found.append(OneOf(options))
    for grammar in (settings.grammar, structured.get("grammar")):
        if grammar and grammar.strip():
            found.append(Grammar(lark_of(grammar) if is_gbnf(grammar) else grammar))
    return tuple(found)


def _texts(settings: Settings) -> list[str]:
    """Texts among the banned tokens: KoboldCpp bans strings by this field."""
    return [one for one in settings.banned_tokens if isinstance(one, str)]


def _biased(
    tokenizer: Tokenizer, settings: Settings, vocab_size: int
) -> tuple[dict[int, float], set[int]]:
    """Biases by token id, and banned ids. The bias of a text holds for each of its tokens."""
    bias: dict[int, float] = {}
    banned = {one for one in settings.banned_tokens if isinstance(one, int)}
    for token, value in settings.logit_bias:
        ids = tokenizer.encode(token) if isinstance(token, str) else [token]
        if value is None:
            banned.update(ids)
        else:
            bias.update(dict.fromkeys(ids, value))
    named: dict[str, Collection[int]] = {
        "logit_bias": bias,
        "banned_tokens": banned,
        "allowed_tokens": settings.allowed_tokens or (),
        "stop_token_ids": settings.stop_ids,
    }
    for name, named_ids in named.items():
        if max(named_ids, default=0) >= vocab_size:
            message = f"{name}: token ids go from 0 to {vocab_size - 1}"
            raise ApiError(400, message, param=name, code="invalid_value")
    return bias, banned


def _adapters(resident: Resident, settings: Settings) -> tuple[AdapterUse, ...]:
    """The adapters that the request chooses, by number or name; without a choice, all of them."""
    loaded = resident.adapters
    if settings.lora is None:
        return tuple(loaded.values())
    names = list(loaded)
    uses: list[AdapterUse] = []
    for which, scale in settings.lora:
        name = names[which] if isinstance(which, int) and 0 <= which < len(names) else which
        if not isinstance(name, str) or name not in loaded:
            known = ", ".join(f"{number} ({one})" for number, one in enumerate(names)) or "none"
            message = f"lora: no adapter {str(which)[:60]!r}; loaded with --lora: {known}"
            raise ApiError(400, message, param="lora", code="invalid_value")
        if scale:
            uses.append(AdapterUse(loaded[name].adapter, scale))
    return tuple(uses)
