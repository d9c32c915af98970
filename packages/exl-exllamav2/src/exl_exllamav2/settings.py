"""ExLlamaV2Sampler.Settings: mutable sampler settings with the old names and defaults.

`sampler_params` translates them into exl's settings. Generators read them before every token.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from operator import is_
from typing import Any

import torch
from torch import Tensor

from exl_core.engine.engine import Engine
from exl_core.errors import RequestError
from exl_core.sampling.params import SamplerParams
from exl_exllamav2.errors import OldValueError
from exl_exllamav2.tokenizer import ExLlamaV2Tokenizer

_BREAKERS = '.,!?<>[](){}\n\t"'


@dataclass
class Settings:
    """Sampler settings. The defaults are those of exllamav2; other attributes may be added."""

    token_repetition_penalty: float = 1.025
    token_repetition_range: int = -1
    token_repetition_decay: int = 0
    token_frequency_penalty: float = 0.0
    token_presence_penalty: float = 0.0
    temperature: float = 0.8
    smoothing_factor: float = 0.0
    min_temp: float = 0
    max_temp: float = 0.0
    temp_exponent: float = 1.0
    top_k: int = 50
    top_p: float = 0.8
    top_a: float = 0.0
    min_p: float = 0
    tfs: float = 0
    typical: float = 0
    skew: float = 0
    temperature_last: bool = False
    mirostat: bool = False
    mirostat_tau: float = 1.5
    mirostat_eta: float = 0.1
    mirostat_mu: float | list[float] | None = None
    token_bias: Tensor | None = None
    cfg_scale: float | None = None
    post_sampling_hooks: list[Callable[[Any], None]] = field(default_factory=list)
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_sequence_breakers: set[int] | None = None
    dry_max_ngram: int = 20
    dry_allowed_length: int = 2
    dry_range: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_ignore_tokens: frozenset[int] | None = None
    ngram_trie: Any = None
    ngram_index: int = 0
    ngram_history: deque[int] = field(default_factory=deque)

    @staticmethod
    def greedy(**kwargs: Any) -> Settings:
        """Settings that take the likeliest token; keyword arguments replace fields."""
        fields = {
            "temperature": 1.0,
            "token_repetition_penalty": 1.0,
            "top_p": 0.0,
            "top_k": 1,
            **kwargs,
        }
        return Settings(**fields)

    def clone(self) -> Settings:
        return copy.copy(self)

    def greedy_clone(self) -> Settings:
        """Greedy settings with the penalties, DRY and XTC of these."""
        other = Settings.greedy()
        for name in (
            *("token_repetition_penalty", "token_repetition_range", "token_repetition_decay"),
            *("token_frequency_penalty", "token_presence_penalty"),
            *("dry_multiplier", "dry_base", "dry_sequence_breakers", "dry_max_ngram"),
            *("dry_allowed_length", "dry_range"),
            *("xtc_probability", "xtc_threshold", "xtc_ignore_tokens"),
        ):
            setattr(other, name, getattr(self, name))
        return other

    def disallow_tokens(self, tokenizer: ExLlamaV2Tokenizer, tokens: Iterable[int]) -> None:
        """Never sample these tokens."""
        if self.token_bias is None:
            self.token_bias = torch.zeros(_padded_vocab(tokenizer), dtype=torch.float)
        self.token_bias[list(tokens)] = -torch.inf

    def allow_tokens(self, tokenizer: ExLlamaV2Tokenizer, tokens: Iterable[int | str]) -> None:
        """Sample only these tokens, given as ids or as the texts of single tokens."""
        if self.token_bias is None:
            self.token_bias = torch.full((_padded_vocab(tokenizer),), -torch.inf)
        for token in tokens:
            token_id = tokenizer.single_id(token) if isinstance(token, str) else token
            if not isinstance(token_id, int):
                raise OldValueError("not a token id or the text of a token", got=repr(token)[:100])
            self.token_bias[token_id] = 0.0


class SettingsReader:
    """Exl's settings for one request, translated anew when the program has changed the object."""

    def __init__(self, settings: Settings, tokenizer: ExLlamaV2Tokenizer, seed: int | None) -> None:
        self.settings = settings
        self._tokenizer = tokenizer
        self._seed = seed
        self._seen = self._snapshot()
        self.params = sampler_params(settings, tokenizer, seed)

    def changed(self) -> SamplerParams | None:
        """New settings, or None if nothing has changed since the last call."""
        names, seen, bias = self._seen
        values = self.settings.__dict__
        same_bias = self.settings.token_bias is None or self.settings.token_bias._version == bias
        # For every token of every job: a comparison in C, and one in Python where that differs.
        if same_bias and len(values) == len(seen):
            if all(map(is_, values.values(), seen)):
                return None
            old = dict(zip(names, seen, strict=True))
            if all(old.get(k) is v for k, v in values.items() if k != "mirostat_mu"):
                return None
        self._seen = self._snapshot()
        params = sampler_params(self.settings, self._tokenizer, self._seed)
        if params == self.params:
            return None
        self.params = params
        return params

    def store_cut(self, engine: Engine, request_id: str) -> None:
        """Write mirostat's cut of a live request to the program's object, as a list of one."""
        if self.settings.mirostat and request_id in engine.live_requests:
            cut = engine.mirostat_cut(request_id)
            self.settings.mirostat_mu = None if cut is None else [cut]

    def _snapshot(self) -> tuple[tuple[str, ...], tuple[Any, ...], int]:
        """Names and values of all settings, and the version of the bias."""
        bias, values = self.settings.token_bias, self.settings.__dict__
        return tuple(values), tuple(values.values()), 0 if bias is None else bias._version


def sampler_params(
    settings: Settings, tokenizer: ExLlamaV2Tokenizer, seed: int | None
) -> SamplerParams:
    """Exl's settings. A value outside exl's range raises ValueError with the old name."""
    s = settings
    breakers, ignored = s.dry_sequence_breakers, s.xtc_ignore_tokens
    if s.dry_multiplier > 0 and breakers is None:
        breakers = s.dry_sequence_breakers = dry_breakers(tokenizer)
    if s.xtc_probability > 0 and ignored is None:
        ignored = s.xtc_ignore_tokens = xtc_ignored(tokenizer)
    reach = s.token_repetition_range
    try:
        return SamplerParams(
            temperature=float(s.temperature),
            top_k=max(0, int(s.top_k)),
            top_p=_share(s.top_p),
            top_a=min(1.0, max(0.0, float(s.top_a))),
            min_p=float(s.min_p) if 0 < s.min_p < 1 else 0.0,
            tfs=_share(s.tfs),
            typical=_share(s.typical),
            skew=float(s.skew),
            temperature_last=bool(s.temperature_last),
            min_temp=float(s.min_temp),
            max_temp=float(s.max_temp),
            temp_exponent=float(s.temp_exponent),
            smoothing_factor=float(s.smoothing_factor),
            repetition_penalty=float(s.token_repetition_penalty),
            frequency_penalty=float(s.token_frequency_penalty),
            presence_penalty=float(s.token_presence_penalty),
            penalty_range=None if reach is None or reach < 0 else int(reach),
            penalty_decay=max(0, int(s.token_repetition_decay or 0)),
            mirostat_tau=float(s.mirostat_tau) if s.mirostat else None,
            mirostat_eta=float(s.mirostat_eta),
            dry_multiplier=max(0.0, float(s.dry_multiplier)),
            dry_base=float(s.dry_base),
            dry_allowed_length=max(1, int(s.dry_allowed_length)),
            dry_range=int(s.dry_range),
            dry_max_ngram=int(s.dry_max_ngram),
            dry_breakers=frozenset(breakers or ()),
            xtc_probability=float(s.xtc_probability),
            xtc_threshold=float(s.xtc_threshold),
            xtc_protected=frozenset(ignored or ()),
            cfg_scale=None if s.cfg_scale is None else float(s.cfg_scale),
            seed=seed,
            **_bias(s.token_bias, min(tokenizer.actual_vocab_size, tokenizer.config.vocab_size)),
        )
    except RequestError as error:
        raise OldValueError(
            _OLD_NAMES.get(error.what.split(" ", maxsplit=1)[0], error.what),
            where="ExLlamaV2Sampler.Settings",
            expected=error.expected,
            got=error.got,
        ) from error


_OLD_NAMES = {
    "repetition_penalty": "token_repetition_penalty is out of range",
    "frequency_penalty": "token_frequency_penalty is out of range",
    "presence_penalty": "token_presence_penalty is out of range",
    "penalty_range": "token_repetition_range is out of range",
    "penalty_decay": "token_repetition_decay is out of range",
}


def _share(value: float) -> float:
    """Probability mass to keep; 0, negative values and 1 or more are off."""
    return float(value) if value is not None and 0 < value < 1 else 1.0


def _bias(bias: Tensor | None, vocab_size: int) -> dict[str, Any]:
    """Fields for a bias [padded vocabulary]: bans, or the tokens that it leaves, and biases."""
    if bias is None:
        return {}
    values = bias.detach().float().cpu().view(-1)[:vocab_size]
    if bool((values.isnan() | (values == math.inf)).any()):
        raise OldValueError("token_bias holds NaN or infinity", expected="numbers, or -inf to ban")
    is_banned = values == -math.inf
    other = ((values != 0) & ~is_banned).nonzero().flatten().tolist()
    fields: dict[str, Any] = {"token_bias": {i: float(values[i]) for i in other}}
    if int(is_banned.sum()) * 2 > vocab_size:
        fields["allowed_tokens"] = frozenset((~is_banned).nonzero().flatten().tolist())
    else:
        fields["banned_tokens"] = frozenset(is_banned.nonzero().flatten().tolist())
    return fields


def _padded_vocab(tokenizer: ExLlamaV2Tokenizer) -> int:
    return tokenizer.config.padded_vocab_size


@lru_cache(10)
def dry_breakers(tokenizer: ExLlamaV2Tokenizer) -> set[int]:
    """Tokens that end a repetition for DRY: punctuation, line breaks and special tokens."""
    return set(tokenizer.exl.tokens_with(_BREAKERS)) | set(tokenizer.extended_id_to_piece)


@lru_cache(10)
def xtc_ignored(tokenizer: ExLlamaV2Tokenizer) -> frozenset[int]:
    """Tokens that XTC never excludes: line breaks and special tokens."""
    return tokenizer.exl.tokens_with("\n") | frozenset(tokenizer.extended_id_to_piece)
