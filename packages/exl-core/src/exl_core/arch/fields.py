"""Typed access to configuration values from untrusted files.

`config.json` and the metadata of a GGUF file are both a mapping from names to plain values. The
error for a missing or invalid value states the file, the key, the expected type and the value
found.
"""

from __future__ import annotations

from collections.abc import Mapping

from exl_core.errors import ConfigError

SMALLEST, LARGEST = 1e-30, 1e30
# Bounds on what the reader or the loader allocates or loops over before tensors are compared. Each
# is at least 16 times the largest published value.
MAX_LAYERS = 4096
MAX_HIDDEN_SIZE = 2**20
MAX_INTERMEDIATE_SIZE = 2**22
MAX_HEADS = 2**14
MAX_HEAD_DIM = 2**13
MAX_VOCAB_SIZE = 2**24
MAX_EXPERTS = 2**14
MAX_CONTROL_IDS = 4096


class Fields:
    """One mapping, and the file or section that it came from."""

    def __init__(self, values: Mapping[str, object], where: object) -> None:
        self.values = values
        self.where = where

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(
        self, key: str, default: int | None = None, *, low: int = 1, high: int = 2**31 - 1
    ) -> int:
        """An integer from `low` to `high`. The limits stop a damaged file from requesting absurd
        allocations."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._error(key, f"an integer from {low} to {high}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number within the range of float32 arithmetic."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(key, "a number", value)
        if not SMALLEST <= value <= LARGEST:
            raise self._error(key, f"a number from {SMALLEST:g} to {LARGEST:g}", value)
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self.has(key) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._error(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._error(key, "a string", value)
        return value

    def strings(self, key: str) -> list[str]:
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._error(key, "a list of strings", value)
        return list(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of at most MAX_HEAD_DIM positive numbers."""
        value = self._get(key, None)
        if not isinstance(value, list) or not 0 < len(value) <= MAX_HEAD_DIM:
            raise self._error(key, f"a list of 1 to {MAX_HEAD_DIM} numbers", value)
        return tuple(Fields({key: item}, self.where).number(key) for item in value)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of at most MAX_LAYERS integers from 0 on, which may be empty."""
        value = self._get(key, None)
        if not isinstance(value, list) or len(value) > MAX_LAYERS:
            raise self._error(key, f"a list of at most {MAX_LAYERS} integers", value)
        return tuple(Fields({key: item}, self.where).integer(key, low=0) for item in value)

    def signed_numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of `count` numbers within the range of float32, of either sign."""
        value = self._get(key, None)
        is_list = isinstance(value, list) and len(value) == count
        if not is_list or not all(isinstance(x, float) and abs(x) < LARGEST for x in value):  # type: ignore[attr-defined]
            raise self._error(key, f"a list of {count} numbers", value)
        return tuple(value)  # type: ignore[arg-type]

    def flags(self, key: str, count: int) -> list[bool]:
        """A list of `count` truth values, or numbers 0 and 1; [] if the list is empty."""
        value = self._get(key, None)
        is_list = isinstance(value, list) and all(item in (0, 1) for item in value)
        if not isinstance(value, list) or not is_list or len(value) not in (0, count):
            raise self._error(key, f"a list of {count} values 0 or 1", value)
        return [bool(item) for item in value]

    def nested(self, key: str) -> Fields:
        value = self._get(key, None)
        if not isinstance(value, dict):
            raise self._error(key, "an object", value)
        return Fields(value, f"{self.where}: {key}")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Ids from a single id, a list of ids, or a missing key (no ids). Some files write -1 for
        none."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if len(ids) > MAX_CONTROL_IDS:
            raise self._error(key, f"at most {MAX_CONTROL_IDS} token ids", f"{len(ids)} of them")
        known = [i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i >= -1]
        if len(known) < len(ids):
            raise self._error(key, "a token id or a list of them", value)
        return tuple(i for i in known if i != -1)

    def first_token_id(self, key: str) -> int | None:
        ids = self.token_ids(key)
        return ids[0] if ids else None

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise ConfigError(f"{key!r} is missing", where=self.where)
        return default

    def _error(self, key: str, expected: str, got: object) -> ConfigError:
        return ConfigError(
            f"{key!r} has no usable value", where=self.where, expected=expected, got=_shown(got)
        )


def _shown(value: object) -> str:
    # Python refuses to print integers of thousands of digits.
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)[:80]
