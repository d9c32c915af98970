"""Errors with the exception type that exllamav2 raised, and the text and fields of exl's errors.

A program that catches the old type (`AssertionError`, `ValueError`, ...) and code that catches
`ExlError` both see them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import index
from typing import NoReturn

from exl_core.errors import (
    ConfigError,
    ExlError,
    ModelError,
    ModelNotFoundError,
    OutOfMemoryError,
    RequestError,
)


class OldAssertionError(RequestError, AssertionError):
    """A condition that exllamav2 asserted does not hold."""


class OldValueError(RequestError, ValueError):
    """A value that exllamav2 refused with ValueError."""


class OldRuntimeError(ExlError, RuntimeError):
    """A failure that exllamav2 reported as RuntimeError."""


class OldModelPathError(ModelNotFoundError, AssertionError):
    """The model's directory does not exist."""


class OldModelError(ModelError, ValueError):
    """The files of the model or adapter are damaged, incomplete or unsupported."""


class OldConfigError(ConfigError, AssertionError):
    """The model's configuration is missing or inconsistent."""


class OldMemoryError(OutOfMemoryError, RuntimeError):
    """The weights or the cache do not fit into memory."""


class RefusedError(ExlError, NotImplementedError):
    """A part of exllamav2 that the alias does not offer. The text names a substitute."""

    exit_code = 2


def refuse(name: str, reason: str, instead: str) -> NoReturn:
    """Raise a RefusedError for the old name `name`."""
    raise RefusedError(f"{name} is not available: {reason}", next_step=instead)


def whole_number(name: str, value: object) -> int:
    """The argument `name` as an int. exllamav2 needed a number here too, and raised TypeError."""
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise OldValueError(
            f"{name} is no whole number", expected="a number of tokens", got=repr(value)[:100]
        ) from None


def no_ids(found: object) -> OldValueError:
    """Error for `input_ids` that are no rows of ids."""
    shape = getattr(found, "shape", None)
    return OldValueError(
        "input_ids is no tensor of rows",
        expected="a tensor [rows, n]",
        got=type(found).__name__ if shape is None else f"shape {list(shape)}",
        next_step="tokenizer.encode returns one; torch.tensor([ids]) makes one of a list.",
    )


@contextmanager
def old_types() -> Iterator[None]:
    """Raise errors of exl inside the block again as the old types, with all their fields."""
    try:
        yield
    except (AssertionError, ValueError, RuntimeError):
        raise  # an old type already
    except ModelNotFoundError as error:
        raise _as(OldModelPathError, error) from error
    except OutOfMemoryError as error:
        raise _as(OldMemoryError, error) from error
    except ConfigError as error:
        raise _as(OldConfigError, error) from error
    except ModelError as error:
        raise _as(OldModelError, error) from error
    except RequestError as error:
        raise _as(OldValueError, error) from error


@contextmanager
def asserted() -> Iterator[None]:
    """Like `old_types`, for checks that exllamav2 asserted: bad requests raise AssertionError."""
    try:
        with old_types():
            yield
    except OldValueError as error:
        if isinstance(error.__cause__, RequestError):
            raise _as(OldAssertionError, error) from error.__cause__
        raise


def _as(kind: type[ExlError], error: ExlError) -> ExlError:
    return kind(
        error.what,
        where=error.where,
        expected=error.expected,
        got=error.got,
        next_step=error.next_step,
    )
