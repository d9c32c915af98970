"""`python -m exl_exllamav2 [options] SCRIPT [ARGS]`: runs a program with the alias active.

`exl exec` starts this module. The program sees the command line, the search path and `__main__`
that it would see under `python SCRIPT ARGS`. Options of the alias come before the program; all that
follows belongs to the program.
"""

from __future__ import annotations

import runpy
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from exl_exllamav2 import environment
from exl_exllamav2.activation import SHADOW, ActivationError, install
from exl_exllamav2.errors import RefusedError


@dataclass(slots=True)
class Command:
    """A parsed command line. One of `script` and `module` is set."""

    models: dict[str, str] = field(default_factory=dict)
    device: str | None = None
    threads: int | None = None
    cuda_noop: bool = False
    strict: bool = False
    script: str | None = None
    module: str | None = None
    arguments: list[str] = field(default_factory=list)


def parse(arguments: list[str]) -> Command:
    """Split the options of the alias from the program and its own arguments."""
    found, rest = Command(), deque(arguments)
    while rest and rest[0].startswith("-") and found.module is None:
        name, separator, value = rest.popleft().partition("=")
        if name == "--cuda-noop":
            found.cuda_noop = True
            continue
        if name == "--strict":
            found.strict = True
            continue
        if name not in ("-m", "--model", "--device", "--threads"):
            raise _usage("unknown option", name)
        if not separator:
            if not rest:
                raise _usage("an option lacks its value", name)
            value = rest.popleft()
        if name == "-m":
            found.module = value
        elif name == "--model":
            found.models.update([_pair(value)])
        elif name == "--device":
            found.device = value
        else:
            found.threads = _count(value)
    if found.module is None:
        if not rest:
            raise _usage("no program is named", None)
        found.script = rest.popleft()
    found.arguments = list(rest)
    return found


def run_command(command: Command) -> None:
    """Activate the alias and run the program in this process."""
    environment.store_options(
        models=command.models,
        strict=command.strict,
        device=command.device,
        threads=command.threads,
        cuda_noop=command.cuda_noop,
    )
    if command.module is not None:
        _prepare_path(str(Path.cwd()))
        sys.argv = [command.module, *command.arguments]
        runpy.run_module(command.module, run_name="__main__", alter_sys=True)
        return
    script = command.script or ""
    path = Path(script)
    if not path.is_file():
        raise ActivationError("there is no such script", where=script)
    _prepare_path(str(path.resolve().parent))
    sys.argv = [script, *command.arguments]
    runpy.run_path(script, run_name="__main__")


def _prepare_path(first: str) -> None:
    """Search path of `python SCRIPT`, with the shadow package before the script's folder."""
    here = str(Path.cwd())
    sys.path[:] = [first, *(p for p in sys.path if p not in ("", here, first, str(SHADOW)))]
    install()


def _pair(text: str) -> tuple[str, str]:
    old, separator, new = text.partition("=")
    if not old or not separator or not new:
        raise ActivationError("--model has another form", expected="OLD=NEW", got=text)
    return old, new


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ActivationError("--threads is no count", expected="a whole number from 1", got=text)
    return int(text)


def _usage(what: str, got: str | None) -> ActivationError:
    return ActivationError(
        what,
        expected="[--model OLD=NEW] [--device DEVICE] [--threads N] [--cuda-noop] [--strict] "
        "(SCRIPT | -m MODULE) [ARGS]",
        got=got,
    )


def run() -> int:
    """Entry point. Returns the exit code."""
    try:
        run_command(parse(sys.argv[1:]))
    except ActivationError as error:
        print(f"exl: error: {error}", file=sys.stderr)
        return error.exit_code
    except RefusedError as error:
        print(f"NotImplementedError: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(run())
