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

A key is an option as it is written, without dashes in front, and `_` counts as `-`. An option on
the command line wins over a profile, a profile over the table of a command, that over the table of
its group, and that over the top of the file. `EXL_MODEL` wins over the file's model, and a
profile's model over both. A preset that `/save NAME` of a chat wrote is a profile in a file of its
own. A command refuses a setting that no command has which reads the same table. Reads files only:
the user writes this one, and `chat/presets.py` the presets.
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
        return _with_dashes(tomllib.loads(decode_text(data, str(path))), path)
    except tomllib.TOMLDecodeError as error:
        raise RequestError("is not valid TOML", where=path, got=error) from error


def _with_dashes(
    table: Mapping[str, Any], path: Path, *, levels: int = 3, has_profiles: bool = False
) -> dict[str, Any]:
    """The table with `-` for `_` in its keys. `has_profiles`: they are the user's own names.

    `levels`: depth of tables whose keys are changed; `[eval.perplexity]`, at level 3, is the
    deepest that a command reads.
    """
    found: dict[str, Any] = {}
    for name, value in table.items():
        key = name if has_profiles else name.replace("_", "-")
        if key in found:
            raise RequestError(
                f"{key} is set twice, with - and with _", where=path, next_step="Keep one of them."
            )
        found[key] = value
        if isinstance(value, dict) and levels > 1:
            within = key == PROFILES and not has_profiles
            found[key] = _with_dashes(value, path, levels=levels - 1, has_profiles=within)
    return found


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


def profile(name: str, root: Any = None) -> Mapping[str, Any]:
    """Settings of one profile, or of one preset.

    `root`: the group of all commands. With it, RequestError names a setting that none of them has.
    """
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
    if root is not None:
        where = f"{config_file()}, [{PROFILES}.{name}]" if name in own else str(preset_file(name))
        check_settings(profiles[name], _settings_of(root), where)
    return profiles[name]


def settings_for(command: Sequence[str], root: Any) -> dict[str, Any]:
    """Settings of the file that concern one command, given as the words that are typed after `exl`.

    They are the top of the file, then the tables of the command's groups, then its own table.
    Raises RequestError for a setting that no command has which reads that table, and for a table
    beside these that names no command. `root`: the group of all commands.
    """
    table: Any = read_config()
    _check_top(table, root)
    found = _values(table)
    reader = root
    for count, word in enumerate(command, start=1):
        for name in _tables(table):
            if name != PROFILES or reader is not root:
                _check_is_command([*command[: count - 1], name], reader)
        table, reader = table.get(word), reader.commands[word]
        if not isinstance(table, dict):
            break
        _check_values(table, reader, command[:count])
        found.update(_values(table))
    return found


def _values(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if not isinstance(value, dict)}


def _tables(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if isinstance(value, dict)}


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
    _check_top(contents, root)
    known = _settings_of(root)
    for name, value in _tables(contents).items():
        if name == PROFILES:
            for profile, settings in value.items():
                check_settings(settings, known, f"{config_file()}, [{PROFILES}.{profile}]")
        else:
            _check_table(value, root, [name])


def _check_top(contents: Mapping[str, Any], root: Any) -> None:
    """Checks the settings at the top of the file, which are for all commands."""
    file = str(config_file())
    known = _settings_of(root)
    for name, value in _values(contents).items():
        if name == PROFILES:
            raise RequestError("is not a table", where=f"{file}, [{PROFILES}]", got=value)
        if name in root.commands and name not in known:
            raise RequestError(
                f"{name} is a command and no option",
                where=file,
                expected=f"a table of options under [{name}]",
                got=repr(value)[:80],
            )
        check_settings({name: value}, known, file)


def check_preset(settings: Mapping[str, Any], root: Any, file: Path) -> None:
    """Checks the names and values of a preset. `root`: the group of all commands."""
    check_settings(settings, _settings_of(root), str(file))


def _check_table(table: Mapping[str, Any], parent: Any, path: list[str]) -> None:
    """Checks the table of the command or group `path[-1]` of the group `parent`."""
    _check_is_command(path, parent)
    command = parent.commands[path[-1]]
    if not _settings_of(command):
        raise RequestError(
            f"'exl {' '.join(path)}' reads no settings",
            where=f"{config_file()}, [{'.'.join(path)}]",
            next_step="Remove the table. Commands that load no model take their options from the "
            "command line only.",
        )
    _check_values(table, command, path)
    if hasattr(command, "commands"):
        for name, one in _tables(table).items():
            _check_table(one, command, [*path, name])


def _check_is_command(path: Sequence[str], parent: Any) -> None:
    """Raises RequestError for a table that is named after no command of the group `parent`, such
    as `[perplexity]`, which must be `[eval.perplexity]`."""
    if path[-1] in parent.commands:
        return
    where = f"{config_file()}, [{'.'.join(path)}]"
    nested = next(_commands_named(parent, path[-1]), None)
    if nested is not None:
        raise RequestError(
            f"no command is 'exl {path[-1]}'",
            where=where,
            next_step=f"The table of 'exl {' '.join(nested)}' is [{'.'.join(nested)}].",
        )
    tables = [*parent.commands, PROFILES] if len(path) == 1 else list(parent.commands)
    raise RequestError(
        f"there is no command 'exl {' '.join(path)}'",
        where=where,
        expected=None if near_names(path[-1], tables) else ", ".join(tables),
        next_step=did_you_mean(near_names(path[-1], tables)),
    )


def _check_values(table: Mapping[str, Any], command: Any, path: Sequence[str]) -> None:
    """Checks the settings in the table of a command, or of a group without those of its
    commands."""
    settings = _values(table) if hasattr(command, "commands") else table
    where = f"{config_file()}, [{'.'.join(path)}]"
    check_settings(settings, _settings_of(command), where, of=f"exl {' '.join(path)}")


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
