"""Types of the options of a load, checked where a caller gives them.

A value of the wrong type would fail later, in code that the caller does not know.
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from exl_core.errors import RequestError, wrong_type

_TEXTS = ("device", "isa", "split", "experts_on", "embeddings_on", "exchange", "reserve")
_WHOLE = (
    *("threads", "max_seq_len", "experts_per_token", "held_bytes", "cpu_layers", "cache_tokens"),
    *("max_batch",),
)
_NUMBERS = ("rope_factor", "rope_alpha", "yarn_factor")
_KINDS: tuple[tuple[tuple[str, ...], type, str], ...] = (
    (_TEXTS, str, "a text"),
    (_WHOLE, Integral, "a whole number or None"),
    (_NUMBERS, Real, "a number or None"),
)


def check_option_types(options: Any) -> None:
    """Raise RequestError for a field of `LoadOptions` with the wrong type, or for no threads."""
    for names, kind, expected in _KINDS:
        for name in names:
            value = getattr(options, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
                raise wrong_type(name, expected, value)
    if options.threads is not None and options.threads < 1:
        raise RequestError(
            "not a thread count", expected="at least 1, or None", got=options.threads
        )
