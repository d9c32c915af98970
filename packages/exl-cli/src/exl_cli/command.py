"""Registers the commands: what all of them share, in one place.

Every command that names a model takes `--offline`. `exl inspect FILE` means `exl inspect model
FILE`. Imports no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from exl_cli import options
from exl_core.settings import set_offline


def _go_offline(wanted: bool) -> None:
    if wanted:
        set_offline()


Offline = Annotated[
    bool,
    typer.Option(
        "--offline",
        callback=_go_offline,
        is_eager=True,
        help="Use no network: models are files, or in the hub's cache. Also HF_HUB_OFFLINE=1.",
    ),
]
_SHARED = {"offline": Offline}


class InspectGroup(TyperGroup):
    """`exl inspect`. An argument that names no subcommand is the model of `inspect model`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "-h", "--help"):
            args = ["model", *args]
        return super().parse_args(ctx, args)


def register(
    app: typer.Typer,
    name: str,
    verb: Callable[..., None],
    lines: Sequence[tuple[str, str]],
    *,
    is_hidden: bool = False,
) -> None:
    """Adds a command with its examples, and the options that all commands share. `is_hidden`:
    another name of a command, which help pages do not list."""
    make = app.command(name, epilog=options.examples(lines), hidden=is_hidden)
    make(_with_shared_options(verb))


def _with_shared_options(verb: Callable[..., None]) -> Callable[..., None]:
    """A command that names a model gets the shared options. It never sees their values: their
    callbacks act on them."""
    parameters = inspect.signature(verb, eval_str=True).parameters
    if not {"model", "models"} & parameters.keys():
        return verb

    def command(**given: Any) -> None:
        verb(**{name: value for name, value in given.items() if name not in _SHARED})

    added = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation
        )
        for name, annotation in _SHARED.items()
    ]
    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    command.__module__ = verb.__module__
    shown = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters.values()]
    command.__signature__ = inspect.Signature([*shown, *added])  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in (*shown, *added)}
    return command
