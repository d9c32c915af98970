"""The `exl` command: registers the subcommands, and maps exceptions to messages and exit codes.

Importing this module and printing help must not import torch. A command imports its heavy
dependencies when it runs. Exit codes are decided here and nowhere else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, TextIO

import typer
from typer.main import get_command

from exl_cli import options
from exl_cli.command import InspectGroup, PlainCommand, PlainGroup, joined_lines, register
from exl_cli.commands import (
    alias,
    bench,
    chat,
    config,
    convert,
    doctor,
    generate,
    inspect,
    models,
    run,
    serve_lite,
    tokens,
)
from exl_cli.commands import exec as exec_
from exl_cli.commands.eval import (
    acceptance,
    compare,
    compare_layers,
    divergence,
    humaneval,
    perplexity,
    report,
    tasks,
    throughput,
)
from exl_cli.machine import closed_stdout, machine_failure
from exl_cli.output import ClosedPipeError, write_error
from exl_cli.spellings import translate
from exl_core.errors import ExlError, ProblemsError, printable
from exl_core.settings import config_file, drop_odd_width

CODE_INTERRUPTED = 130
CODE_CLOSED_PIPE = 141

EXIT_CODES = (
    "Exit codes: 0 success; 1 failure while running; 2 invalid options or request; 3 model not "
    "found, unreadable or invalid; 4 not enough memory; 5 no usable GPU; 6 no disk space; "
    "7 converted model diverges too far from its source; 130 stopped by Ctrl-C; 141 the reader of "
    "stdout closed the pipe; 143 conversion stopped by SIGTERM."
)

app = typer.Typer(
    name="exl",
    cls=PlainGroup,
    help="Run, chat with, serve, convert, inspect and evaluate quantized language models.",
    epilog=EXIT_CODES,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
eval_app = typer.Typer(
    cls=PlainGroup, help="Measure the quality and speed of a model.", epilog=EXIT_CODES
)
inspect_app = typer.Typer(
    cls=InspectGroup, help="Show the contents of a model file without loading it."
)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            number = version("exl-cli")
        except PackageNotFoundError:
            number = "not installed, running from source"
        typer.echo(f"exl {number}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


register(app, "generate", generate.generate, generate.EXAMPLES)
register(app, "chat", chat.chat, chat.EXAMPLES)
register(app, "run", run.run, run.EXAMPLES)
register(app, "pull", models.pull, models.PULL_EXAMPLES)
register(app, "list", models.list_models, models.LIST_EXAMPLES)
register(app, "rm", models.rm, models.RM_EXAMPLES)
register(app, "show", inspect.inspect_model, inspect.SHOW_EXAMPLES)
register(app, "config", config.config, config.EXAMPLES)
register(app, "serve-lite", serve_lite.serve_lite, serve_lite.EXAMPLES)
register(app, "serve", serve_lite.serve_lite, serve_lite.EXAMPLES, is_hidden=True)
register(app, "convert", convert.convert, convert.EXAMPLES)
app.add_typer(eval_app, name="eval")
register(eval_app, "perplexity", perplexity.perplexity, perplexity.EXAMPLES)
register(eval_app, "divergence", divergence.divergence, divergence.EXAMPLES)
register(eval_app, "compare", compare.compare, compare.EXAMPLES)
register(eval_app, "compare-layers", compare_layers.compare_layers, compare_layers.EXAMPLES)
register(eval_app, "acceptance", acceptance.acceptance, acceptance.EXAMPLES)
register(eval_app, "throughput", throughput.throughput, throughput.EXAMPLES)
register(eval_app, "report", report.report, report.EXAMPLES)
register(eval_app, "tasks", tasks.tasks, tasks.EXAMPLES)
register(eval_app, "humaneval", humaneval.humaneval, humaneval.EXAMPLES)
register(app, "bench", bench.bench, bench.EXAMPLES)
app.add_typer(inspect_app, name="inspect")
register(inspect_app, "model", inspect.inspect_model, inspect.EXAMPLES)
register(inspect_app, "tokens", tokens.inspect_tokens, tokens.EXAMPLES)
app.command(
    "exec",
    cls=PlainCommand,
    help=joined_lines(exec_.exec_program.__doc__ or ""),
    epilog=options.examples(exec_.EXAMPLES),
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)(exec_.exec_program)
register(app, "alias", alias.alias, alias.EXAMPLES)
register(app, "doctor", doctor.doctor, doctor.EXAMPLES)


def main(args: Sequence[str]) -> int:
    """Run one command line and return its exit code. A bug still shows its traceback."""
    for stream in (sys.stdout, sys.stderr):
        # A character that the locale cannot encode is printed as '?'.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    drop_odd_width()  # before the first console of Rich, which reads it
    try:
        code = _run(args)
    except ExlError as error:
        return _fail(error)
    except typer.TyperException as error:
        _complain(_usage_line(error))
        return int(error.exit_code)
    except (ClosedPipeError, BrokenPipeError):
        _discard_stdout()
        return CODE_CLOSED_PIPE
    except (KeyboardInterrupt, typer.Abort):
        return CODE_INTERRUPTED
    except (MemoryError, OSError, RuntimeError) as error:
        known = machine_failure(error)
        if known is None:
            raise
        return _fail(known)
    return code if isinstance(code, int) else 0


def _run(args: Sequence[str]) -> object:
    # The shell closed stdout. Typer would discard the help text and still exit with 0.
    if sys.stdout is None:
        raise closed_stdout()
    words, notes = translate(args)
    for note in notes:
        if sys.stderr is not None:
            print(f"exl: note: {note}", file=sys.stderr, flush=True)
    return get_command(app).main(args=words or ["--help"], prog_name="exl", standalone_mode=False)


def _fail(error: ExlError) -> int:
    _discard_stdout()
    for line in error.problems if isinstance(error, ProblemsError) else (error,):
        _complain(str(line))
    return error.exit_code


def _usage_line(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "exl"
    message = " ".join(error.format_message().split()).rstrip(".")
    if _is_from_settings(context, getattr(error, "param", None)):
        message += f" (the value is from {config_file()} or from a profile)"
    end = "" if message.endswith("?") else "."
    return printable(f"{message}{end} '{command} --help' lists the options.")


def _is_from_settings(context: typer.Context | None, parameter: Any) -> bool:
    """Whether the value of a parameter comes from the user's file, and not from the command
    line."""
    if context is None or parameter is None:
        return False
    source = context.get_parameter_source(parameter.name)
    return source is not None and source.name == "DEFAULT_MAP"


def _complain(line: str) -> None:
    write_error(line)
    if sys.stderr is not None:
        _discard(sys.stderr)


def _discard_stdout() -> None:
    if sys.stdout is not None and not sys.stdout.closed:
        _discard(sys.stdout)


def _discard(stream: TextIO) -> None:
    """Discard what a stream still buffers if it cannot be written any more.

    Otherwise the interpreter would flush it again at exit, and change the exit code to 120.
    """
    try:
        stream.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
