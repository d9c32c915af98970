"""`exl config`: the user's file of settings: where it is, what it says, and whether it is valid."""

from __future__ import annotations

import typer

from exl_cli import options, output
from exl_cli.config import (
    check_file,
    check_preset,
    presets,
    read_config,
    toml_lines,
)
from exl_core.settings import config_file, preset_file

EXAMPLES = (
    ("exl config", "the file, its settings, and whether their names are right"),
    ("exl config --json", "machine-readable output"),
    ("exl chat --profile writer", "use [profiles.writer], or the preset of '/save writer'"),
)
SCHEMA_VERSION = 1


def config(context: typer.Context, json: options.Json = False) -> None:
    """Show the file of settings, and check it.

    The file is TOML. A key is an option without the dashes in front, and `_` counts as `-`. `temp =
    0.7` at the top is the default of every command that has --temp, `[chat]` has defaults of one
    command, and `[profiles.writer]` those of `--profile writer`. A command of a group has a table
    named as the command is typed: `[eval.perplexity]` is that of 'exl eval perplexity', and
    `[eval]` is read by all commands of the group. `model` is the model of commands that name none.
    The command line wins over the file. Commands that name no model read no settings. The other
    commands refuse a name at the top or in a chosen profile that no command has. EXL_CONFIG names
    another file. `/save NAME` in a chat saves a preset, which `--profile NAME` reads too.
    """
    contents = read_config()
    root = context.find_root().command
    check_file(contents, root)
    saved = presets()
    for preset, settings in saved.items():
        check_preset(settings, root, preset_file(preset))
    if json:
        output.write_json(
            {
                "schema_version": SCHEMA_VERSION,
                "file": str(config_file()),
                "exists": config_file().exists(),
                "settings": contents,
                "presets": saved,
            }
        )
        return
    lines = [f"{config_file()}{'' if config_file().exists() else ' (does not exist)'}"]
    lines += toml_lines(contents)
    for preset, settings in saved.items():
        lines += ["", f"# preset {preset}: {preset_file(preset)}", *toml_lines(settings)]
    output.write_text("\n".join(lines) + "\n")
