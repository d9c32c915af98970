"""Makes `import exllamav2` find the shadow package: in this process and in its child processes.

The shadow package is a folder of real files that re-export this package's classes, with the
metadata of a distribution. It lies in `shadow/`, which no installation puts on the search path.
Activation puts it there, before the script's own folder, so that it also precedes a source checkout
of exllamav2 that the program lies in.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from exl_core.errors import ExlError
from exl_exllamav2 import environment

SHADOW = Path(__file__).resolve().parent / "shadow"


class ActivationError(ExlError):
    """The alias cannot be activated here."""

    exit_code = 2


def install() -> None:
    """Make `import exllamav2` find the alias from now on. May be called again.

    ActivationError if another exllamav2 has been imported already.
    """
    imported = sys.modules.get("exllamav2")
    if imported is not None and not hasattr(imported, "__exl__"):
        raise ActivationError(
            "another exllamav2 is imported already",
            got=getattr(imported, "__file__", None),
            next_step="Call exl_exllamav2.install() before the first import of exllamav2.",
        )
    if sys.path[:1] != [str(SHADOW)]:
        sys.path.insert(0, str(SHADOW))
    environment.put_on_python_path(SHADOW)
    importlib.invalidate_caches()
    if environment.is_cuda_noop():
        from exl_exllamav2.cuda_noop import disable_cuda_calls

        disable_cuda_calls()


def load_ipython_extension(_: object) -> None:
    """`%load_ext exl_exllamav2` in a notebook."""
    install()
