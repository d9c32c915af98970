"""Checks the types of the figures in a record that `--json` printed, before it is compared.

A record is a file that a user names. It may be cut off, edited or written by another program.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from exl_core.errors import RequestError

Record = Mapping[str, Any]
_MOST = 1e300
"""Figures are below this in magnitude. JSON has integers that no float can hold."""


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -_MOST < value < _MOST  # NaN fails too


def _is_figure(value: object) -> bool:
    return value is None or _is_number(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST


def _are_numbers(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_number, value))


def _are_counts(value: object) -> bool:
    if not isinstance(value, list | tuple):
        return False
    return len(value) > 0 and all(_is_count(one) and one > 0 for one in value)


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping)


Check = tuple[Callable[[object], bool], str]
_NUMBER: Check = (_is_number, "a number")
_FIGURE: Check = (_is_figure, "a number or null")
_COUNT: Check = (_is_count, "a count")
_NUMBERS: Check = (_are_numbers, "a list of numbers")
_COUNTS: Check = (_are_counts, "a list of counts of 1 or more")
_OBJECT: Check = (_is_object, "an object")

_KEYS: Mapping[str, Mapping[str, Check]] = {
    "perplexity": {
        **dict.fromkeys(("perplexity", "nll"), _NUMBER),
        **dict.fromkeys(("stderr", "nll_stderr"), _FIGURE),
        **dict.fromkeys(("bits_per_byte", "bits_per_byte_stderr"), _FIGURE),
        "bytes": _COUNT,
        "window_tokens": _COUNTS,
        "window_nll": _NUMBERS,
    },
    "divergence": {
        "kld": _OBJECT,
        "kld.mean": _NUMBER,
        "kld.stderr": _FIGURE,
        **dict.fromkeys(("same_top", "same_top_stderr", "ln_ppl_ratio"), _NUMBER),
        "ln_ppl_ratio_stderr": _FIGURE,
        "window_tokens": _COUNTS,
        "window_kld": _NUMBERS,
    },
}
"""Keys that a comparison reads, by measurement. A dot leads into an object."""


def check_record(record: Record, where: str) -> None:
    """Raises RequestError that names the first key whose value is missing or has another type."""
    for key, (is_right, expected) in _KEYS[record["measurement"]].items():
        outer, _, inner = key.partition(".")
        table = record[outer] if inner else record
        if (inner or outer) not in table:
            raise _refusal(key, where, expected, "nothing")
        value = table[inner or outer]
        if not is_right(value):
            raise _refusal(key, where, expected, _shown(value))
    sums = next(key for key in ("window_nll", "window_kld") if key in record)
    _check_lengths(record[sums], record["window_tokens"], sums, where)


def _check_lengths(sums: Sequence[float], tokens: Sequence[int], key: str, where: str) -> None:
    if len(sums) != len(tokens):
        raise _refusal(
            key, where, f"{len(tokens)} numbers, one for each of window_tokens", f"{len(sums)}"
        )


def _shown(value: object) -> str:
    return json.dumps(value, default=str)[:80]


def _refusal(key: str, where: str, expected: str, got: str) -> RequestError:
    return RequestError(
        f"{key} of the record is wrong",
        where=where,
        expected=expected,
        got=got,
        next_step="The file must be what --json printed, unchanged and whole.",
    )
