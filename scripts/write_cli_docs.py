"""Write docs/cli.md from the declarations of the `exl` command. Usage: write_cli_docs.py [FILE].

Without FILE the page goes to stdout. Reads names, defaults and help texts of the commands, not
their printed help, so that the page depends neither on the terminal nor on the library's layout.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from exl_cli.main import EXIT_CODES, app

HEAD = """# The `exl` command

Generated from the help texts by `scripts/write_cli_docs.py`. `nox -s docs` regenerates it.

stdout receives only the answer: the generated text, the table, or with `--json` one object.
Progress, speed and errors go to stderr, progress and speed only if stderr is a terminal. exl honors
`NO_COLOR`. `--quiet` prints only errors. An error is one line: where, what, expected, got, and the
next step.

## Exit codes

| code | meaning |
|---|---|
"""


def page() -> str:
    lines = [HEAD.rstrip("\n")]
    for entry in EXIT_CODES.removeprefix("Exit codes: ").rstrip(".").split("; "):
        code, _, meaning = entry.partition(" ")
        lines.append(f"| {code} | {meaning} |")
    for name, command in leaves("exl", get_command(app)):
        lines += ["", *section(name, command)]
    return "\n".join(lines) + "\n"


def leaves(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Every command with its full name, subcommands of groups included, in help-page order."""
    children = getattr(command, "commands", None)
    if children is None:
        yield name, command
        return
    for child in children.values():
        if not child.hidden:
            yield from leaves(f"{name} {child.name}", child)


def section(name: str, command: Any) -> Iterator[str]:
    yield f"## {name}"
    yield ""
    for number, paragraph in enumerate(inspect.cleandoc(command.help).split("\n\n")):
        yield from [""][:number]
        yield textwrap.fill(paragraph, 100, break_on_hyphens=False)
    yield ""
    yield "| argument or option | default | meaning |"
    yield "|---|---|---|"
    for parameter in command.params:
        yield row(parameter)
    if command.epilog:
        yield ""
        yield "```console"
        for example in command.epilog.replace("\\[", "[").split("\n\n")[1:]:
            effect, line = example.strip().split("\n")
            yield f"$ {line.strip()}   {effect}"
        yield "```"


def row(parameter: Any) -> str:
    metavar = (parameter.metavar or "").replace("|", "\\|")
    if parameter.param_type_name == "argument":
        name = f"`{metavar}`"
    else:
        name = ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))
        name += f" `{metavar}`" if metavar else ""
    default = parameter.default
    shown = "required" if parameter.required else "" if default in (None, False) else f"{default}"
    return f"| {name} | {shown} | {escape(parameter.help or '')} |"


def escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
