"""Presets: model, system prompt and settings of a chat, saved under a name.

A preset is a TOML file whose keys are options, like a profile in the user's file of settings, and
`--profile NAME` reads both. `/save NAME` writes one, `/load NAME` applies one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exl_cli.config import toml_value
from exl_cli.prompts import check_encodable
from exl_core.errors import RequestError
from exl_core.files import write_atomically
from exl_core.settings import preset_file

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def is_preset_name(text: str) -> bool:
    """A word without a dot or a slash. Anything else is the path of a file."""
    return _NAME.fullmatch(text) is not None


def save_preset(name: str, values: Mapping[str, Any]) -> Path:
    """Writes a preset, over one of the same name, and returns its file."""
    path = preset_file(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError("cannot be created", where=path.parent, got=error.strerror) from error
    for key, value in values.items():
        for one in value if isinstance(value, list) else [value]:
            check_encodable(str(one), f"{key} of the preset")
    lines = [f"{key} = {toml_value(value)}\n" for key, value in values.items()]
    write_atomically(path, ["".join(lines).encode()])
    return path
