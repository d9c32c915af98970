"""Settings of a user: defaults of options, and named profiles, from one TOML file.

    model = "owner/name:Q4_K_M"      # the model of commands that name none
    temp = 0.7                       # an option of every command that has it
    [chat]                           # options of one command
    system = "Answer briefly."
    [eval]                           # options of all commands of a group
    device = "cpu"
    [eval.perplexity]                # options of a command of a group, named as it is typed
    windows = 20
    [profiles.writer]                # exl chat --profile writer
    model = "owner/other"
    cache-type = "q8"

A key is an option as it is written, without dashes in front. An option on the command line wins
over a profile, a profile over the table of a command, that over the table of its group, and that
over the top of the file. `EXL_MODEL` wins over the file's model, and a profile's model over both. A
preset that `/save NAME` of a chat wrote is a profile in a file of its own. Reads files only: the
user writes this one, and `chat/presets.py` the presets.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
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
    data = read_bytes(path, RequestError, CONFIG_LIMIT_BYTES)
    try:
        return tomllib.loads(decode_text(data, str(path)))
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
    if not isinstance(own.get(name, {}), dict):
        raise RequestError(
            "is not a table", where=f"{config_file()}, [{PROFILES}.{name}]", got=own[name]
        )
    tables = {key: value for key, value in own.items() if isinstance(value, dict)}
    profiles = {**presets(), **tables}
    if name not in profiles:
        raise RequestError(
            f"there is no profile {name!r}",
            where=config_file(),
            expected=", ".join(profiles) or "a table [profiles.NAME], or a preset of /save NAME",
            next_step=did_you_mean(near_names(name, profiles)),
        )
    return profiles[name]


def settings_for(command: Sequence[str], options: set[str]) -> dict[str, Any]:
    """Settings of the file that concern one command, given as the words that are typed after `exl`.

    They are the top of the file, then the tables of the command's groups, then its own table. That
    one may have the command's `options` only; the others are for other commands too. Raises
    RequestError if it has more.
    """
    table: object = read_config()
    assert isinstance(table, dict)
    _check_table_is_nested(table, command)
    found = _values(table)
    for count, word in enumerate(command, start=1):
        table = table.get(word)
        if not isinstance(table, dict):
            break
        if count == len(command):
            where = f"{config_file()}, [{'.'.join(command)}]"
            check_settings(table, options, where, of=f"exl {' '.join(command)}")
        found.update(_values(table))
    return found


def _values(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if not isinstance(value, dict)}


def _check_table_is_nested(contents: Mapping[str, Any], command: Sequence[str]) -> None:
    """Raises RequestError for a table `[perplexity]`, which must be `[eval.perplexity]`."""
    if len(command) > 1 and isinstance(contents.get(command[-1]), dict):
        raise RequestError(
            f"no command is 'exl {command[-1]}'",
            where=f"{config_file()}, [{command[-1]}]",
            next_step=f"The table of 'exl {' '.join(command)}' is [{'.'.join(command)}].",
        )


def check_model(model: object, where: str) -> str:
    """The setting `model`. Raises RequestError unless it is a text."""
    if not isinstance(model, str):
        raise RequestError(
            "model has a value that no model has",
            where=where,
            expected='text, such as model = "owner/name"',
            got=repr(model),
        )
    return model


def check_file(contents: Mapping[str, Any], root: Any) -> None:
    """Checks the names and values of the whole file. `root`: the group of all commands."""
    file = str(config_file())
    known = _settings_of(root)
    for name, value in contents.items():
        if name == PROFILES and isinstance(value, dict):
            for profile, settings in value.items():
                check_settings(settings, known, f"{file}, [profiles.{profile}]")
        elif isinstance(value, dict):
            for path in _commands_named(root, name):
                _check_table_is_nested(contents, path)
            _check_table(value, root, [name])
        elif name in root.commands and name not in known:
            raise RequestError(
                f"{name} is a command and no option",
                where=file,
                expected=f"a table of options under [{name}]",
                got=repr(value)[:80],
            )
        else:
            check_settings({name: value}, known, file)


def check_preset(settings: Mapping[str, Any], root: Any, file: Path) -> None:
    """Checks the names and values of a preset. `root`: the group of all commands."""
    check_settings(settings, _settings_of(root), str(file))


def _check_table(table: Mapping[str, Any], parent: Any, path: list[str]) -> None:
    """Checks the table of the command or group `path[-1]` of the group `parent`."""
    where = f"{config_file()}, [{'.'.join(path)}]"
    commands = parent.commands
    group = " ".join(["exl", *path[:-1]])
    if path[-1] not in commands:
        tables = [*commands, PROFILES] if len(path) == 1 else list(commands)
        raise RequestError(
            f"there is no command '{group} {path[-1]}'",
            where=where,
            expected=None if near_names(path[-1], tables) else ", ".join(tables),
            next_step=did_you_mean(near_names(path[-1], tables)),
        )
    command = commands[path[-1]]
    known = _settings_of(command)
    if not known:
        raise RequestError(
            f"'{group} {path[-1]}' reads no settings",
            where=where,
            next_step="Remove the table. Commands that load no model take their options from the "
            "command line only.",
        )
    inner = getattr(command, "commands", {})
    own_tables = {name: one for name, one in table.items() if isinstance(one, dict) and inner}
    values = {name: one for name, one in table.items() if name not in own_tables}
    check_settings(values, known, where, of=f"{group} {path[-1]}")
    for name, one in own_tables.items():
        _check_table(one, command, [*path, name])


def _settings_of(command: Any) -> set[str]:
    """Options that the file may set for a command, or for the commands of a group."""
    commands = getattr(command, "commands", None)
    if commands is not None:
        return set().union(*(_settings_of(one) for one in commands.values()))
    return set(option_names(command)) if reads_settings(command) else set()


def _commands_named(group: Any, name: str) -> Iterator[list[str]]:
    """Words that are typed for each command `name` in a group of the group `group`."""
    for word, inner in group.commands.items():
        if name in getattr(inner, "commands", {}):
            yield [word, name]


def check_settings(settings: object, known: set[str], where: str, of: str | None = None) -> None:
    """Raises RequestError for a setting that is not among the options `known`, and for a value that
    no option has: a date, a table, or a number that is not finite. `of`: the command."""
    if not isinstance(settings, dict):
        raise RequestError("is not a table", where=where, got=settings)
    for name, value in settings.items():
        if name not in known and name != MODEL:
            raise RequestError(
                f"there is no option --{name}" + (f" of '{of}'" if of is not None else ""),
                where=where,
                next_step=did_you_mean(near_names(name, known)),
            )
        if name == MODEL:
            check_model(value, where)
        for one in value if isinstance(value, list) else [value]:
            is_finite = isinstance(one, int | str) or (isinstance(one, float) and isfinite(one))
            if not is_finite:
                raise RequestError(
                    f"{name} has a value that no option has",
                    where=where,
                    expected="text, a number, true, false, or a list of them",
                    got=one,
                )


def reads_settings(command: Any) -> bool:
    """Whether a command takes its defaults from the file: those that name a model do."""
    return any(one.name == "profile" for one in command.params)


def option_names(command: Any) -> Iterator[str]:
    """Names of the options of a command, without the dashes."""
    for parameter in command.params:
        if parameter.param_type_name == "option":
            yield from (name.lstrip("-") for name in parameter.opts)
