"""Sampler settings of one request, checked at construction. No torch, so that requests need none.

The steps run in a fixed order, independent of the order of the arguments: `chain.py` defines it,
`steps.py`, `penalties.py` and `feedback.py` have the formulas. Every default is neutral: together
they sample the model's own distribution.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, NoReturn, TypeVar

from exl_core.errors import RequestError, check_known

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Settings = TypeVar("_Settings", bound="DataclassInstance")

GREEDY_BELOW = 0.01
"""Temperatures below this are greedy: dividing by them would select the likeliest token anyway."""


LARGEST_BIAS = 1e30
"""Largest size of a finite bias: a logit plus this bias is still finite in float32."""

_DECIMAL_ID = re.compile("0|[1-9][0-9]{0,9}")


class TokenBias(Mapping[int, float]):
    """Checked, immutable mapping from token id to bias. Settings that hold it can be hashed.

    RequestError unless every key is a token id (an int from 0 to 2**31 - 1, no bool) and every
    value a number of at most `LARGEST_BIAS` in size, or minus infinity, which bans the token. The
    vocabulary is not known here: `Engine.submit` compares the ids with it.
    """

    __slots__ = ("_bias",)

    def __init__(self, bias: Mapping[int, float]) -> None:
        if not isinstance(bias, Mapping):
            _refuse("token_bias", "a mapping from token ids to numbers", bias)
        for token_id in bias:
            if not _is_id(token_id):
                _refuse("token_bias", "a mapping from token ids to numbers", token_id)
        for value in bias.values():
            # Minus infinity is a ban; plus infinity would leave no distribution.
            if not _is_number(value, -LARGEST_BIAS, LARGEST_BIAS) and value != -math.inf:
                expected = f"numbers from {-LARGEST_BIAS:g} to {LARGEST_BIAS:g}, or minus infinity"
                _refuse("token_bias", expected, value)
        self._bias = {token_id: float(bias[token_id]) for token_id in sorted(bias)}

    @classmethod
    def from_text(cls, bias: Mapping[str, float]) -> TokenBias:
        """The same with ids as JSON has them: keys in plain decimal digits, such as "17"."""
        return cls({_id_of(key): value for key, value in bias.items()})  # type: ignore[misc]  # checked by __init__

    def __getitem__(self, token_id: int) -> float:
        return self._bias[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._bias)

    def __len__(self) -> int:
        return len(self._bias)

    def __hash__(self) -> int:
        return hash(tuple(self._bias.items()))

    def __repr__(self) -> str:
        return f"TokenBias({self._bias!r})"


def _names_nearest(cls: type[_Settings]) -> type[_Settings]:
    """`cls`, which answers an unknown setting with a RequestError that has the nearest name."""
    known = [field.name for field in fields(cls)]
    init = cls.__init__

    @functools.wraps(init)
    def checked(self: _Settings, *args: object, **settings: object) -> None:
        check_known(settings, known, "setting", "sampler")
        init(self, *args, **settings)

    cls.__init__ = checked  # type: ignore[method-assign,assignment]
    return cls


@_names_nearest
@dataclass(frozen=True, slots=True)
class SamplerParams:
    """Settings of one request's sampler.

    cfg_scale            guidance scale: weight of the prompt against the negative prompt; None is
                         off, 1 ignores the negative prompt, below 0 the prompt is steered away from
    repetition_penalty   divides the positive logits of tokens that occurred, multiplies negative
                         ones
    frequency_penalty    subtracted from a logit for every occurrence of its token
    presence_penalty     subtracted once from the logit of every token that occurred
    penalty_range        number of latest tokens that count in full, prompt included; None is all
    penalty_decay        number of tokens before these over which the penalties fade to zero
    banned_tokens        tokens that are never sampled
    allowed_tokens       the only tokens that are sampled; None allows all
    token_bias           added to the logits of these tokens
    dry_multiplier       size of the DRY penalty on continuing a repetition; 0 is off
    dry_base             factor by which the penalty grows with each repeated token
    dry_allowed_length   length of the repetition at which the penalty equals the multiplier;
                         shorter ones are free; at least 1
    dry_range            number of latest tokens that are searched; 0 is all
    dry_max_ngram        repetitions count up to one token less than this
    dry_breakers         tokens that end a repetition
    temperature          divides the logits; below 0.01 sampling is greedy, 1 changes nothing
    top_n_sigma          keep tokens whose logit is within this many standard deviations of the
                         largest; 0 is off
    smoothing_factor     logits fall with the square of their distance from the largest; 0 is off
    smoothing_curve      above 1 they fall faster far from the largest, and slower close to it
    top_k                keep the k likeliest tokens; 0 is off, 1 is greedy
    top_p                keep the likeliest tokens up to this total probability; 1 is off
    top_a                keep tokens of at least this times the largest probability squared; 0 is
                         off
    min_p                keep tokens at least this many times as likely as the likeliest; 0 is off
    tfs                  tail-free sampling: cut where the probability curve is flat; 1 is off
    typical              typical sampling: keep tokens whose surprise is near the entropy; 1 is off
    mirostat_tau         mean surprise in bits that a moving cut maintains; None is off
    mirostat_eta         learning rate of that cut
    mirostat_version     2 cuts by surprise; 1 by rank, from an estimated Zipf distribution
    temperature_last     apply the temperature after the cuts instead of before
    min_temp, max_temp   dynamic temperature, by the entropy of the remaining tokens; off unless max
                         is above min. Applied in addition to `temperature`; with
                         `temperature_last`, instead of it
    temp_exponent        exponent of the interpolation from min_temp to max_temp
    xtc_probability      XTC: how often the likeliest tokens, except the last of them, are excluded
    xtc_threshold        probability from which a token counts as one of the likeliest
    xtc_protected        tokens that XTC never excludes
    skew                 above 0 the draw favors rare tokens, below 0 likely ones; 0 is off
    seed                 equal seeds give equal tokens; None chooses a random seed
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_range: int | None = None
    penalty_decay: int = 0
    seed: int | None = None
    top_a: float = 0.0
    top_n_sigma: float = 0.0
    tfs: float = 1.0
    typical: float = 1.0
    skew: float = 0.0
    temperature_last: bool = False
    min_temp: float = 0.0
    max_temp: float = 0.0
    temp_exponent: float = 1.0
    smoothing_factor: float = 0.0
    smoothing_curve: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_protected: frozenset[int] = frozenset()
    mirostat_tau: float | None = None
    mirostat_eta: float = 0.1
    mirostat_version: int = 2
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = 0
    dry_max_ngram: int = 20
    dry_breakers: frozenset[int] = frozenset()
    token_bias: Mapping[int, float] = field(default_factory=lambda: TokenBias({}))
    allowed_tokens: frozenset[int] | None = None
    banned_tokens: frozenset[int] = frozenset()
    cfg_scale: float | None = None

    def __post_init__(self) -> None:
        for name, low, high in _FLOATS:
            _check_float(name, getattr(self, name), low, high)
        for name in ("top_p", "tfs", "typical"):
            _check_float(name, getattr(self, name), 0.0, 1.0, is_low_open=True)
        for name, low in _INTS:
            _check_int(name, getattr(self, name), low)
        if not isinstance(self.temperature_last, bool):
            _refuse("temperature_last", "True or False", self.temperature_last)
        if self.penalty_range is not None:
            _check_int("penalty_range", self.penalty_range, 0)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**63 - 1)
        if self.mirostat_tau is not None:
            _check_float("mirostat_tau", self.mirostat_tau, 0.0, 100.0)
        _check_int("mirostat_version", self.mirostat_version, 1, 2)
        if self.cfg_scale is not None:
            _check_float("cfg_scale", self.cfg_scale, -100.0, 100.0)
        if 0 < self.dry_range <= self.dry_max_ngram:
            expected = f"0, or more than dry_max_ngram, which is {self.dry_max_ngram}"
            _refuse("dry_range", expected, self.dry_range)
        for name in ("xtc_protected", "dry_breakers", "banned_tokens", "allowed_tokens"):
            if name != "allowed_tokens" or self.allowed_tokens is not None:
                object.__setattr__(self, name, _ids(name, getattr(self, name)))
        if self.allowed_tokens is not None and not self.allowed_tokens - self.banned_tokens:
            expected = "at least one token that is not banned, or None"
            _refuse("allowed_tokens", expected, sorted(self.allowed_tokens))
        object.__setattr__(self, "token_bias", _bias(self.token_bias))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object]) -> SamplerParams:
        """Settings by name, as in a configuration file: sets may be lists, and the ids of
        `token_bias` strings."""
        values = dict(mapping)
        bias = values.get("token_bias")
        if isinstance(bias, Mapping):
            values["token_bias"] = TokenBias.from_text(bias)
        return cls(**values)  # type: ignore[arg-type]  # every value is checked

    @property
    def is_greedy(self) -> bool:
        """The settings leave only the likeliest token."""
        is_cold = self.temperature < GREEDY_BELOW
        return self.top_k == 1 or (
            is_cold and not (self.temperature_last and self.has_dynamic_temperature)
        )

    @property
    def has_dynamic_temperature(self) -> bool:
        return self.max_temp > self.min_temp

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )

    @property
    def named_ids(self) -> dict[str, Collection[int]]:
        """Token ids that the settings hold, by the name of the setting."""
        return {
            "xtc_protected": self.xtc_protected,
            "dry_breakers": self.dry_breakers,
            "token_bias": self.token_bias,
            "allowed_tokens": self.allowed_tokens or frozenset(),
            "banned_tokens": self.banned_tokens,
        }


_FLOATS = (
    ("temperature", 0.0, 100.0),
    ("min_temp", 0.0, 100.0),
    ("max_temp", 0.0, 100.0),
    ("temp_exponent", 0.0, 100.0),
    ("smoothing_factor", 0.0, 100.0),
    ("smoothing_curve", 1.0, 100.0),
    ("top_n_sigma", 0.0, 100.0),
    ("top_a", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("skew", -20.0, 20.0),
    ("xtc_probability", 0.0, 1.0),
    ("xtc_threshold", 0.0, 1.0),
    ("mirostat_eta", 0.0, 1.0),
    ("repetition_penalty", 0.01, 100.0),
    ("frequency_penalty", -100.0, 100.0),
    ("presence_penalty", -100.0, 100.0),
    ("dry_multiplier", 0.0, 100.0),
    ("dry_base", 0.0, 100.0),
)
_INTS = (
    ("top_k", 0),
    ("penalty_decay", 0),
    ("dry_allowed_length", 0),
    ("dry_range", 0),
    ("dry_max_ngram", 2),
)


def _refuse(name: str, expected: str, got: object) -> NoReturn:
    # Python refuses to write integers of thousands of digits.
    is_long = isinstance(got, int) and got.bit_length() > 256
    shown = "an integer of many digits" if is_long else repr(got)[:200]
    raise RequestError(f"{name} is out of range", where="sampler", expected=expected, got=shown)


def _check_float(
    name: str, value: object, low: float, high: float, *, is_low_open: bool = False
) -> None:
    if _is_number(value, low, high) and not (is_low_open and value == low):
        return
    span = f"above {low:g}, at most {high:g}" if is_low_open else f"{low:g} to {high:g}"
    _refuse(name, span, value)


def _check_int(name: str, value: object, low: int, high: int = 2**63 - 1) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return
    span = f"a whole number from {low}" + ("" if high == 2**63 - 1 and low == 0 else f" to {high}")
    _refuse(name, span, value)


def _is_number(value: object, low: float, high: float) -> bool:
    """An int or float in the range; a bool is none, nor is NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _ids(name: str, value: object) -> frozenset[int]:
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        ids = list(value)
        for token_id in ids:
            if not _is_id(token_id):
                _refuse(name, "a set of token ids", token_id)
        return frozenset(ids)
    _refuse(name, "a set of token ids", value)


def _id_of(key: object) -> object:
    """The token id that a key of JSON spells; any other key as it is, for the check to refuse."""
    return int(key) if isinstance(key, str) and _DECIMAL_ID.fullmatch(key) else key


def _bias(value: object) -> TokenBias:
    return value if isinstance(value, TokenBias) else TokenBias(value)  # type: ignore[arg-type]  # checked there
