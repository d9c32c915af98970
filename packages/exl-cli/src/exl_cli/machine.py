"""Failures that the machine causes, not exl and not the request: no memory, no threads, no disk.

Any library may raise them at any depth, as an exception of its own choice. This module converts
them into `ExlError`s with their exit code and one-line message.
"""

from __future__ import annotations

import errno

from exl_core.errors import ExlError, OutOfMemoryError

_STDOUT_FAULTS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
_NO_THREAD = "can't start new thread"  # the whole message of Python's threading
_NO_TENSOR = "DefaultCPUAllocator: can't allocate memory"  # part of torch's message


def machine_failure(error: Exception) -> ExlError | None:
    """`error` as an `ExlError`. None: not a machine failure but a bug, which shows its
    traceback."""
    match error:
        case MemoryError():
            return _out_of_memory()
        case OSError(errno=errno.ENOMEM):
            return _out_of_memory()
        case RuntimeError() if _NO_TENSOR in str(error):
            return _out_of_memory()
        case RuntimeError() if str(error) == _NO_THREAD:
            return ExlError(
                "no further thread can be started",
                next_step="Raise the limits on memory and processes, or use fewer --threads.",
            )
        # Typer itself prints help and version to stdout. An error with a file name concerns
        # another file, not stdout.
        case OSError(filename=None) if error.errno in _STDOUT_FAULTS:
            return unwritable_stdout(error)
    return None


def unwritable_stdout(error: OSError) -> ExlError:
    return ExlError(
        "the output cannot be written",
        where="stdout",
        got=error.strerror,
        next_step="Free space or choose another file.",
    )


def closed_stdout() -> ExlError:
    return ExlError("the output is closed", where="stdout", next_step="Leave stdout open.")


def _out_of_memory() -> OutOfMemoryError:
    return OutOfMemoryError(
        "there is not enough memory",
        next_step="Free some, raise its limit, or take a smaller model or context.",
    )
