"""`exl alias`: let plain `python` find exl under the name exllamav2, in this environment."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from exl_cli.old_programs import replace_process

EXAMPLES = (
    ("exl alias status", "show which exllamav2 this environment has"),
    ("exl alias on", "let every program of this environment find exl as exllamav2"),
)


class Action(Enum):
    ON = "on"
    OFF = "off"
    STATUS = "status"


def alias(
    action: Annotated[
        Action, typer.Argument(metavar="ACTION", help="on, off or status.", show_default=False)
    ],
) -> None:
    """Install, remove or show the permanent alias.

    `on` adds a package exllamav2, and its metadata, to the environment of this exl, so that
    programs and requirement checks find it. It refuses where the original is installed. `off`, or
    'pip uninstall exllamav2', removes it. `exl exec` needs neither.
    """
    replace_process("exl_exllamav2.permanent", [action.value])
