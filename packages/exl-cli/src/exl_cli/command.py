"""Registers the commands: what all of them share, in one place.

Every command that names a model takes `--offline` and `--profile`, and its defaults from the user's
file (`config.py`). Long help pages show the common options, and the others with `--help-all`. `exl
inspect FILE` means `exl inspect model FILE`. Imports no torch.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from exl_cli import config, options
from exl_cli.output import ClosedPipeError
from exl_core.settings import config_file, set_default_model, set_offline

LONG_PAGE = 40
"""Number of options above which a help page shows the common ones only."""
_ALL_OPTIONS = "exl.all_options"


def _go_offline(wanted: bool) -> None:
    if wanted:
        set_offline()


def _use_profile(context: typer.Context, name: str | None) -> None:
    if name is not None:
        settings = config.profile(name, context.find_root().command)
        _use_settings(context, settings, f"profile {name!r}", is_typed=True)


def _use_settings(
    context: Any, settings: Mapping[str, Any], where: str, *, is_typed: bool = False
) -> None:
    """Makes `settings`, which come from `where`, the defaults of the options that the command has.

    `is_typed`: the command line names them, so that their model wins over `EXL_MODEL`.
    """
    options_by_name = {
        option.lstrip("-"): parameter
        for parameter in context.command.params
        if parameter.param_type_name == "option"
        for option in parameter.opts
    }
    values = {}
    for name, value in settings.items():
        option = options_by_name.get(name)
        if option is not None:
            is_one = option.multiple and not isinstance(value, list)
            values[option.name] = [value] if is_one else value
    model = values.pop("model_option", settings.get(config.MODEL))
    if model is not None:
        set_default_model(config.check_model(model, where), replaces=is_typed)
    context.default_map = {**(context.default_map or {}), **values}


def _typed_words(context: Any) -> list[str]:
    """Words of a command as they are typed after `exl`: `eval`, `perplexity`."""
    if context.parent is None:
        return []
    return [*_typed_words(context.parent), context.info_name]


def _show_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.meta[_ALL_OPTIONS] = True
        typer.echo(context.get_help())
        raise typer.Exit


Offline = Annotated[
    bool,
    typer.Option(
        "--offline",
        callback=_go_offline,
        is_eager=True,
        help="Use no network: models are files, or in the hub's cache. Also HF_HUB_OFFLINE=1.",
    ),
]


def _profile(*names: str) -> Any:
    return Annotated[
        str | None,
        typer.Option(
            *names,
            metavar="NAME",
            callback=_use_profile,
            is_eager=True,
            help="Defaults from a preset that '/save NAME' of a chat wrote, or from the table "
            "profiles.NAME of the file that 'exl config' shows.",
        ),
    ]


Profile = _profile("--profile", "--preset")
ProfileAlone = _profile("--profile")
"""For a command whose own option is `--preset`."""
HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all", callback=_show_all, is_eager=True, help="Show all options, and exit."
    ),
]
_SHARED = {"offline": (Offline, False), "profile": (Profile, None)}
COMMON = (
    *("model", "model_option", "prompt", "file", "chat", "max_tokens", "max_response_tokens"),
    *(
        "system",
        "format",
        "stop",
        "temp",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repeat_penalty",
    ),
    *("seed", "ctx_size", "device", "cache_type", "json_schema", "json", "profile", "help_all"),
    *("ngram", "load"),
)
"""Parameters that long help pages show first."""


@contextmanager
def _own_closed_pipe() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise ClosedPipeError from error
    except SystemExit as error:
        # Rich, which formats the pages, handles a closed pipe by exiting with 1.
        if isinstance(error.__context__, BrokenPipeError):
            raise ClosedPipeError from error
        raise


class _PlainFlags:
    """Shows no type for flags on help pages. Typer shows `<bool>`, but a flag takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)  # type: ignore[misc]
        for one in parameters:
            if getattr(one, "is_flag", False) and one.metavar is None:
                one.metavar = ""
        return list(parameters)


class PlainGroup(_PlainFlags, TyperGroup):
    """A group of commands.

    Typer and rich exit with 1 if the reader of a help page has closed the pipe. `main.py` exits
    with 141, as for all other output, so the exception is changed here.
    """

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _own_closed_pipe():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _own_closed_pipe():
            return super().invoke(ctx)


class PlainCommand(_PlainFlags, TyperCommand):
    """A command without defaults from the user's file."""


class ConfiguredCommand(PlainCommand):
    """A command whose defaults come from the user's file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if config.reads_settings(self):
            settings = config.settings_for(_typed_words(ctx), ctx.find_root().command)
            _use_settings(ctx, settings, str(config_file()))
        return super().parse_args(ctx, args)


class LongCommand(ConfiguredCommand):
    """A command with many options: its help page shows the common ones."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        shown = copy.copy(self)
        if not ctx.meta.get(_ALL_OPTIONS):
            shown.params = [one for one in self.params if one.name in COMMON]
        super(LongCommand, shown).format_help(ctx, formatter)


class InspectGroup(PlainGroup):
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
    """Adds a command with its examples, and the options that all commands share."""
    shared = _with_shared_options(verb)
    is_long = "help_all" in inspect.signature(shared).parameters
    kind = LongCommand if is_long else ConfiguredCommand
    app.command(
        name,
        cls=kind,
        help=joined_lines(verb.__doc__ or ""),
        epilog=options.examples(lines),
        hidden=is_hidden,
    )(shared)


def joined_lines(text: str) -> str:
    """Paragraphs without line ends, so that the terminal's width alone breaks their lines."""
    return "\n\n".join(" ".join(one.split()) for one in text.split("\n\n"))


def _with_shared_options(verb: Callable[..., None]) -> Callable[..., None]:
    """A command that names a model gets the shared options. It never sees their values: their
    callbacks act on them."""
    parameters = inspect.signature(verb, eval_str=True).parameters
    if not {"model", "models"} & parameters.keys():
        return verb
    extra = dict(_SHARED)
    if "preset" in parameters:
        extra["profile"] = (ProfileAlone, None)
    if len(parameters) > LONG_PAGE:
        extra["help_all"] = (HelpAll, False)

    def command(**given: Any) -> None:
        verb(**{name: value for name, value in given.items() if name not in extra})

    added = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )
        for name, (annotation, default) in extra.items()
    ]
    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    command.__module__ = verb.__module__
    shown = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters.values()]
    command.__signature__ = inspect.Signature([*shown, *added])  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in (*shown, *added)}
    return command
