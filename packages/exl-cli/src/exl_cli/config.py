"""Settings of a user: defaults of options, and named profiles, from one TOML file.

    model = "owner/name:Q4_K_M"      # the model of commands that name none
    temp = 0.7                       # an option of every command that has it
    [chat]                           # options of one command
    system = "Answer briefly."
    [profiles.writer]                # exl chat --profile writer
    model = "owner/other"
    cache-type = "q8"

A key is an option as it is written, without dashes in front. An option on the command line wins
over a profile, a profile over the table of a command, and that over the top of the file. A preset
that `/save NAME` of a chat wrote is a profile in a file of its own. Reads files only: the user
writes this one, and `chat/presets.py` the presets.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from exl_core.errors import RequestError
from exl_core.files import CONFIG_LIMIT_BYTES, decode_text, is_present, read_bytes
from exl_core.session.names import did_you_mean, near_names
from exl_core.settings import config_file, preset_file

PROFILES = "profiles"
MODEL = "model"


def read_config() -> dict[str, Any]:
    """The file's contents; {} if there is none. Raises RequestError for a damaged file."""
    return _read(config_file())


def _read(path: Path) -> dict[str, Any]:
    if not is_present(path, RequestError):
        return {}
    text = decode_text(read_bytes(path, RequestError, CONFIG_LIMIT_BYTES), str(path))
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RequestError("is not valid TOML", where=path, got=error) from error


def toml_value(value: object) -> str:
    """A TOML value. JSON's numbers, strings and lists are TOML, but for the character DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_lines(settings: Mapping[str, object], table: str = "") -> Iterator[str]:
    """The settings of a table as TOML: its values, then the tables within it."""
    tables = {name: value for name, value in settings.items() if isinstance(value, dict)}
    for name, value in settings.items():
        if name not in tables:
            yield f"{name} = {toml_value(value)}"
    for name, value in tables.items():
        whole = f"{table}.{name}" if table else name
        if any(not isinstance(own, dict) for own in value.values()):
            yield from ("", f"[{whole}]")
        yield from toml_lines(value, whole)


def presets() -> dict[str, dict[str, Any]]:
    """Saved presets by name. Raises RequestError for a damaged file."""
    folder = preset_file("any").parent
    files = sorted(folder.glob("*.toml")) if folder.is_dir() else []
    return {file.stem: _read(file) for file in files}


def profile(name: str) -> Mapping[str, Any]:
    """Settings of one profile, or of one preset."""
    own = read_config().get(PROFILES, {})
    if not isinstance(own, dict):
        raise RequestError("is not a table", where=f"{config_file()}, [{PROFILES}]")
    profiles = {**presets(), **own}
    found = profiles.get(name)
    if not isinstance(found, dict):
        raise RequestError(
            f"there is no profile {name!r}",
            where=config_file(),
            expected=", ".join(profiles) or "a table [profiles.NAME], or a preset of /save NAME",
            next_step=did_you_mean(near_names(name, profiles)),
        )
    return found


def settings_for(command: str) -> dict[str, Any]:
    """Settings of the file that concern one command: the top of the file, then its own table."""
    contents = read_config()
    own = contents.get(command, {})
    top = {name: value for name, value in contents.items() if not isinstance(value, dict)}
    return {**top, **own} if isinstance(own, dict) else top


def check_settings(settings: object, known: set[str], where: str) -> None:
    """Raises RequestError for a setting that is no option of any command, and for a value that no
    option has: a date, a table, or a number that is not finite."""
    if not isinstance(settings, dict):
        raise RequestError("is not a table", where=where, got=settings)
    for name, value in settings.items():
        if name not in known and name != MODEL:
            raise RequestError(
                f"there is no option --{name}",
                where=where,
                next_step=did_you_mean(near_names(name, known)),
            )
        for one in value if isinstance(value, list) else [value]:
            is_finite = isinstance(one, int | str) or (isinstance(one, float) and isfinite(one))
            if not is_finite:
                raise RequestError(
                    f"{name} has a value that no option has",
                    where=where,
                    expected="text, a number, true, false, or a list of them",
                    got=one,
                )


def option_names(commands: Mapping[str, Any]) -> Iterator[str]:
    """Names of all options below a group of commands, without the dashes."""
    for command in commands.values():
        yield from option_names(getattr(command, "commands", {}))
        for parameter in command.params:
            yield from (name.lstrip("-") for name in getattr(parameter, "opts", ()))
