"""Starts the distribution that runs programs written for exllamav2. Nothing here imports it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NoReturn

from exl_core.errors import RequestError

PACKAGE = "exl_exllamav2"


def replace_process(module: str, arguments: Sequence[str]) -> NoReturn:
    """Run a module of the distribution in place of this process, which keeps its streams and id."""
    if find_spec(PACKAGE) is None:
        raise RequestError(
            "programs for exllamav2 need the distribution exl-exllamav2",
            got="it is not installed",
            next_step="Install it with 'pip install ./packages/exl-exllamav2'.",
        )
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
