"""Request settings by keyword: known names, their types, and conversion to `Request` fields.

`Request` checks values and assumes the right types. The checks here report a wrong name or type as
a RequestError at the call, instead of a TypeError from inside the library.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, TypedDict, Unpack, get_args

from exl_core.constrain.filter import Constraint
from exl_core.engine.request import Hook, Report, Request
from exl_core.errors import RequestError, wrong_type
from exl_core.model.adapters import Adapter, AdapterUse
from exl_core.model.embedded import EmbeddedSpan
from exl_core.sampling.params import SamplerParams

Stop = int | str
Stops = Stop | Iterable[Stop] | None


class RequestFields(TypedDict, total=False):
    """Optional settings of a request; `Request` documents each.

    A single constraint, adapter, hook or string needs no tuple. An adapter without `AdapterUse` has
    scale 1.
    """

    max_tokens: int | None
    max_time_s: float | None
    sampler: SamplerParams
    min_tokens: int
    banned_strings: str | Iterable[str]
    constraints: Constraint | Iterable[Constraint]
    prefer_eos: bool
    token_healing: bool
    adapters: Adapter | AdapterUse | Iterable[Adapter | AdapterUse]
    hooks: Hook | Iterable[Hook]
    report: Report
    show_special: bool
    allow_drafts: bool
    request_id: str


def build_request(
    prompt_ids: Iterable[int],
    *,
    stop: Stops = (),
    negative_ids: Iterable[int] | None = None,
    embeddings: Iterable[EmbeddedSpan] = (),
    **settings: Unpack[RequestFields],
) -> Request:
    """A request with converted settings. RequestError for a setting of a wrong name or type."""
    check_names(settings, build_request)
    ids, strings = split_stops(stop)
    return Request(
        prompt_ids=tuple(prompt_ids),
        negative_prompt_ids=None if negative_ids is None else tuple(negative_ids),
        stop_ids=ids,
        stop_strings=strings,
        embeddings=tuple(embeddings),
        **as_fields(settings),
    )


def as_fields(settings: Mapping[str, object]) -> dict[str, Any]:
    """Convert settings to arguments of `Request`. The names were checked before."""
    values: dict[str, Any] = dict(settings)
    for name, kind in _KINDS.items():
        if name in values and not isinstance(values[name], kind):
            raise wrong_type(name, f"a {kind.__name__}", values[name])
    for name, (is_one, what) in _LISTS.items():
        if name in values:
            values[name] = _listed(name, values[name], is_one, what)
    if "adapters" in values:
        values["adapters"] = tuple(
            one if isinstance(one, AdapterUse) else AdapterUse(one) for one in values["adapters"]
        )
    return values


def check_names(settings: Mapping[str, object], *calls: Callable[..., object]) -> None:
    """Raise RequestError for an unknown setting, with the nearest known name.

    `calls`: functions whose own parameters count as known too.
    """
    known = set(RequestFields.__annotations__)
    for call in calls:
        known |= set(inspect.signature(call).parameters) - {"settings"}
    sampling = {field.name for field in fields(SamplerParams)}
    for name in settings:
        if name in RequestFields.__annotations__:
            continue
        near = get_close_matches(name, [name] if name in sampling else [*known, *sampling], n=1)
        found = near[0] if near else None
        raise RequestError(
            f"no such setting: {name}",
            expected=", ".join(sorted(known)),
            got=name,
            next_step=None
            if found is None
            else f"Did you mean {found!r}?"
            if found in known
            else f"Settings of sampling come as sampler=SamplerParams({found}=...).",
        )


def check_argument(name: str, value: object, kind: type | UnionType, next_step: str) -> None:
    """Raise RequestError for an argument of the wrong type."""
    if not isinstance(value, kind):
        wanted = " or ".join(
            "None" if one is NoneType else one.__name__ for one in get_args(kind) or (kind,)
        )
        raise wrong_type(name, wanted, value, next_step=next_step)


def split_stops(stop: object) -> tuple[frozenset[int], tuple[str, ...]]:
    """Separate token ids and strings. A single item counts as a list of one; None is empty."""
    if isinstance(stop, str | bytes) or not isinstance(stop, Iterable):
        stop = () if stop is None else (stop,)
    ids, strings = set(), []
    for item in stop:
        if isinstance(item, str):
            strings.append(item)
        elif isinstance(item, int) and not isinstance(item, bool):
            ids.add(item)
        else:
            raise RequestError(
                "a stop condition is neither a token id nor a text", got=repr(item)[:100]
            )
    return frozenset(ids), tuple(strings)


def seeded(sampler: SamplerParams, seed: int | None, number: int) -> SamplerParams:
    """Settings of prompt `number`: with a seed, each prompt gets `seed` + `number`."""
    if not isinstance(sampler, SamplerParams):
        raise wrong_type("sampler", "a SamplerParams", sampler)
    if seed is None:
        return sampler
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise wrong_type("seed", "a whole number from 0", seed)
    return replace(sampler, seed=seed + number)


def _listed(
    name: str, value: object, is_one: Callable[[object], bool], what: str
) -> tuple[object, ...]:
    if is_one(value):
        return (value,)
    listed = tuple(value) if isinstance(value, Iterable) else (value,)
    for one in listed:
        if not is_one(one):
            raise wrong_type(name, what, one)
    return listed


_KINDS: dict[str, type] = {
    "sampler": SamplerParams,
    "report": Report,
    "prefer_eos": bool,
    "token_healing": bool,
    "show_special": bool,
    "allow_drafts": bool,
    "request_id": str,
}
_LISTS: dict[str, tuple[Callable[[object], bool], str]] = {
    "constraints": (
        lambda one: not isinstance(one, type) and callable(getattr(one, "filter", None)),
        "constraints such as JsonSchema(...)",
    ),
    "adapters": (
        lambda one: isinstance(one, AdapterUse) or hasattr(one, "deltas"),
        "adapters that load_adapter made, or AdapterUse(adapter, scale)",
    ),
    "hooks": (callable, "callables that take a SampledToken"),
    "banned_strings": (lambda one: isinstance(one, str), "strings"),
}
