"""Failures that the machine causes, not exl and not the request: no memory, no threads, no disk.

They come out of any library at any depth, as whatever that library raises. Here they get the type,
the exit code and the one line that they would have had if exl had met them itself.
"""

from __future__ import annotations

import errno

from exl_core.errors import ExlError, OutOfMemoryError

_STDOUT_FAULTS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
_NO_THREAD = "can't start new thread"  # what Python's threading says, and nothing more
_NO_TENSOR = "DefaultCPUAllocator: can't allocate memory"  # torch's words, amid a stack trace


def machine_failure(error: Exception) -> ExlError | None:
    """The typed form of `error`; None for anything else, which is a bug and stays what it is."""
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
        # Help and version are printed by typer. An error with a path in it is another file's.
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
