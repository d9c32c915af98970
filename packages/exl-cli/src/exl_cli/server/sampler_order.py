"""The order of samplers in a request: honored where the engine's order allows it, else refused.

llama.cpp sends `samplers` (names, or one letter each; a sampler that is not listed is off),
KoboldCpp `sampler_order` (numbers), text-generation-webui `sampler_priority` (names). The engine
has one order (`exl_core/sampling/chain.py`) and a temperature before or after the cuts. Only
samplers that are on matter, so that the default orders of clients pass with their default settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from exl_cli.server.errors import ApiError
from exl_cli.server.fields import as_whole
from exl_core.sampling.params import GREEDY_BELOW

# Samplers in the engine's order, with their settings and the values at which they are off.
_SETTINGS: dict[str, dict[str, object]] = {
    "penalties": {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {"top_n_sigma": 0.0},
    "smoothing": {"smoothing_factor": 0.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "top_a": {"top_a": 0.0},
    "min_p": {"min_p": 0.0},
    "tfs": {"tfs": 1.0},
    "typical": {"typical": 1.0},
    "mirostat": {"mirostat_tau": None},
    "xtc": {"xtc_probability": 0.0},
}
_TEMPERATURE = "temperature"
_RANK = {name: number for number, name in enumerate(_SETTINGS)}
_BY_PROBABILITY = frozenset({"top_p", "top_a", "min_p", "tfs", "typical", "mirostat"})
"""Cuts whose result depends on the temperature before them."""
_ALSO = {
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), "penalties"),
    **dict.fromkeys(("typ_p", "typical_p", "typ-p", "typ"), "typical"),
    **dict.fromkeys(("temp", "dynamic_temperature"), _TEMPERATURE),
    **{"tfs_z": "tfs", "quadratic_sampling": "smoothing", "nucleus": "top_p"},
    **{"top-k": "top_k", "top-p": "top_p", "min-p": "min_p", "top-n-sigma": "top_n_sigma"},
}
_OFF = frozenset(  # settings of their own refuse what they would do
    {"infill", "adaptive_p", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram"}
    | {"encoder_repetition_penalty"}
)
_LETTERS = {
    **{"e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typical"},
    **{"p": "top_p", "m": "min_p", "x": "xtc", "t": _TEMPERATURE, "i": "infill", "a": "adaptive_p"},
}
_NUMBERS = ("top_k", "top_a", "top_p", "tfs", "typical", _TEMPERATURE, "penalties")
_LLAMA_CPP = ("penalties", "dry", "top_n_sigma", "top_k", "typical", "top_p", "min_p", "xtc")
_MOST = 64


@dataclass(frozen=True, slots=True)
class SamplerOrder:
    """Samplers in the order of a request. `is_complete`: a sampler that is absent is off."""

    field: str
    names: tuple[str, ...]
    is_complete: bool = False

    def applied(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings with which the engine does the same. Raises ApiError if none do."""
        values = dict(settings)
        if self.is_complete:
            for name in _LLAMA_CPP:
                if name not in self.names:
                    values |= _SETTINGS[name]
            if _TEMPERATURE not in self.names:
                values["temperature"] = 1.0
        active = [name for name in self.names if _is_on(name, values)]
        for name in ("penalties", "dry"):
            earlier = active[: active.index(name)] if name in active else []
            if set(earlier) - {"penalties", "dry"}:
                raise self._refused(f"{name} comes first")
        is_greedy = values.get("temperature", 1.0) < GREEDY_BELOW or values.get("top_k") == 1
        if is_greedy:  # cuts never drop the likeliest token
            active = [name for name in active if name in ("penalties", "dry")]
        active = [name for name in active if name != _TEMPERATURE]
        for one, other in pairwise(active):
            if _RANK[one] > _RANK[other]:
                raise self._refused(f"{one} comes after {other}")
        if _has_temperature(values) and not is_greedy and _TEMPERATURE in self.names:
            values["temperature_last"] = self._is_temperature_last(active, values)
        return values

    def _is_temperature_last(self, active: list[str], values: Mapping[str, Any]) -> bool:
        """Whether the temperature applies after the cuts. Cuts by rank or by distance in the
        logits have the same result before and after it."""
        wants_last = bool(values.get("temperature_last"))
        at = len(self.names) if wants_last else self.names.index(_TEMPERATURE)
        before = [name for name in active if self.names.index(name) < at]
        after = [name for name in active if name not in before]
        if "smoothing" in after:
            raise self._refused("smoothing comes before the temperature")
        if "xtc" in before and not wants_last:
            raise self._refused("xtc comes after the temperature")
        early, late = _BY_PROBABILITY & set(before), _BY_PROBABILITY & set(after)
        is_dynamic = values.get("max_temp", 0.0) > values.get("min_temp", 0.0)
        if late and (early or is_dynamic):
            said = (
                "the dynamic temperature comes" if is_dynamic else "the temperature comes before or"
            )
            raise self._refused(f"{said} after all of {', '.join(sorted(early | late))}")
        return bool(early) or wants_last

    def _refused(self, why: str) -> ApiError:
        message = f"{self.field}: this order is not supported: here, {why}"
        return ApiError(400, message, param=self.field, code="unsupported_parameter")


def _is_on(name: str, values: Mapping[str, Any]) -> bool:
    if name == _TEMPERATURE:
        return _has_temperature(values)
    neutral = _SETTINGS.get(name, {})
    return any(values.get(key, value) != value for key, value in neutral.items())


def _has_temperature(values: Mapping[str, Any]) -> bool:
    is_dynamic = values.get("max_temp", 0.0) > values.get("min_temp", 0.0)
    return bool(values.get("temperature", 1.0) != 1.0 or is_dynamic)


def read_samplers(given: object) -> SamplerOrder | None:
    """llama.cpp's list of names, or text of letters."""
    if isinstance(given, str):
        given = [_LETTERS.get(letter, letter) for letter in given]
    return _order("samplers", given, is_complete=True)


def read_priority(given: object) -> SamplerOrder | None:
    """text-generation-webui's list of names, or its lines."""
    return _order("sampler_priority", given.split() if isinstance(given, str) else given)


def read_numbers(given: object) -> SamplerOrder | None:
    """KoboldCpp's list of numbers."""
    listed = [as_whole(one) for one in (given if isinstance(given, list) else [given])]
    names = [_NUMBERS[one] for one in listed if type(one) is int and 0 <= one < len(_NUMBERS)]
    if len(names) < len(listed):
        raise ValueError(f"a list of numbers from 0 to {len(_NUMBERS) - 1} is expected")
    return _order("sampler_order", names)


def _order(field: str, given: object, *, is_complete: bool = False) -> SamplerOrder | None:
    if not isinstance(given, list) or len(given) > _MOST:
        raise ValueError("a list of samplers is expected")
    found: dict[str, None] = {}
    for one in given:
        name = _ALSO.get(one, one) if isinstance(one, str) else ""
        if name not in _SETTINGS and name != _TEMPERATURE and name not in _OFF:
            raise ValueError(f"{str(one)[:60]!r} is not a sampler; known: {', '.join(_SETTINGS)}")
        found[name] = None
    return SamplerOrder(field, tuple(found), is_complete) if found else None
