"""Options that several verbs share, and their limits. Declarations only; no torch.

Those of the sampler are in `sampling_options.py`, those of the engine in `engine_options.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from exl_core.errors import RequestError
from exl_core.settings import MAX_THREADS

_RUNNING = "Running"


MODEL_HELP = (
    "A model directory, a .gguf file, the name 'smollm2', or a hub id owner/name@revision. "
    "Without it: smollm2."
)

ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)
]
ModelOption = Annotated[
    str | None,
    typer.Option("-m", "--model", metavar="MODEL", help="The same, as an option."),
]
MaxTokens = Annotated[
    int,
    typer.Option(
        "-n",
        "--max-tokens",
        metavar="N",
        min=-1,
        help="Stop after N tokens; -1: when the context is full.",
    ),
]
CtxSize = Annotated[
    int | None,
    typer.Option(
        "-c",
        "--ctx-size",
        metavar="N",
        min=2,
        help="Tokens of context to keep room for. Without it: what the model was made for, "
        "at most 8192.",
        rich_help_panel=_RUNNING,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        min=1,
        max=MAX_THREADS,
        help="CPU threads. Without it: all cores that this process may use.",
        rich_help_panel=_RUNNING,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="cpu, cuda or cuda:N. Without it: cuda where a GPU can be used, else cpu.",
        rich_help_panel=_RUNNING,
    ),
]
CacheType = Annotated[
    str,
    typer.Option(
        "--cache-type",
        metavar="TYPE",
        help="Precision of the key-value cache: fp16, q8, fp8, q6 or q4, from largest to smallest.",
        rich_help_panel=_RUNNING,
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Dequantize the weights to float16 and compute in float32: slower, for comparison.",
        rich_help_panel=_RUNNING,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        metavar="TEXT",
        help="Stop before this text; may be given several times.",
        show_default=False,
    ),
]
System = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="System prompt of a conversation.")
]
NoSystem = Annotated[
    bool, typer.Option("--no-system", help="No system prompt, not even the usual one.")
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="NAME",
        help="Write the conversation in this prompt format instead of the model's own template; "
        "'exl chat --list-formats' shows them.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Quiet = Annotated[
    bool, typer.Option("-q", "--quiet", help="Nothing on stderr but errors: no progress, no speed.")
]


def pick_model(argument: str | None, option: str | None) -> str | None:
    """The model may be given in either place, but not in both."""
    if argument is not None and option is not None and argument != option:
        raise RequestError(
            "two models are given",
            got=f"{argument!r} and --model {option!r}",
            next_step="Keep one; a prompt goes with -p.",
        )
    return argument if option is None else option


def token_limit(max_tokens: int) -> int | None:
    """What -n means to the engine: -1 is no limit but the context."""
    if max_tokens == 0:
        raise RequestError(
            "no token is asked for", expected="-n 1 or more, or -1 for no limit", got="-n 0"
        )
    return None if max_tokens < 0 else max_tokens


def examples(lines: Sequence[tuple[str, str]]) -> str:
    """Help page's last part: what to type, and what it does. The terminal shows one a line."""
    shown = "\n\n".join(f"  {command}   # {what}" for command, what in lines)
    return "Examples:\n\n" + shown.replace("[", "\\[")
