"""`exl chat`: a conversation in the terminal, or over a pipe with one prompt per line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl_cli import options, output
from exl_cli.chat import transcript
from exl_cli.chat.conversation import Message
from exl_cli.interrupt import exits_at_once
from exl_cli.option_groups import PromptOptions, RunningOptions, spread
from exl_cli.prompts import check_texts
from exl_cli.reply_options import ReplyOptions
from exl_cli.sampling_options import SamplingOptions
from exl_core.errors import ExlError, RequestError
from exl_core.prompt.formats import all_formats
from exl_core.settings import state_folder

if TYPE_CHECKING:
    from exl_cli.chat.session import ChatSession
    from exl_cli.chat.terminal import Terminal

EXAMPLES = (
    ("exl chat", "talk to the default model"),
    ('exl chat model.gguf --system "Answer in one sentence."', "a model file and a system prompt"),
    ("exl chat base-model --format alpaca", "a model without a chat template"),
    (
        "printf 'Hi!\\nAnd in French?\\n' | exl chat --temp 0",
        "one prompt per line, replies to stdout",
    ),
)
SCHEMA_VERSION = 1
Kept = tuple[str | None, list[Message]]
"""System prompt and turns of a loaded conversation."""
HISTORY_FILE = "chat-history"

MaxResponseTokens = Annotated[
    int,
    typer.Option(
        "-n",
        "--max-response-tokens",
        "--max-tokens",
        metavar="N",
        min=-1,
        help="Limit each reply to N tokens. -1: no limit but the context.",
    ),
]
ListFormats = Annotated[
    bool, typer.Option("--list-formats", help="List the prompt formats and exit.")
]
Load = Annotated[
    Path | None,
    typer.Option("--load", metavar="FILE", help="Continue a conversation that /save wrote."),
]
Amnesia = Annotated[
    bool, typer.Option("--amnesia", help="Forget each message and its reply after the reply.")
]
Reasoning = Annotated[
    bool,
    typer.Option("--reasoning", help="Show reasoning in full, not one line with its length."),
]
Wrap = Annotated[
    bool,
    typer.Option(
        "--wrap/--no-wrap", help="Break long lines of replies between words, on a terminal."
    ),
]
Stats = Annotated[bool, typer.Option("--stats", help="Print the speed of each reply to stderr.")]
Json = Annotated[bool, typer.Option("--json", help="With --list-formats: one JSON object.")]


@spread
def chat(
    *,
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    prompt: PromptOptions,
    max_response_tokens: MaxResponseTokens = 1000,
    stop: options.Stop = None,
    load: Load = None,
    amnesia: Amnesia = False,
    stats: Stats = False,
    reasoning: Reasoning = False,
    wrap: Wrap = True,
    list_formats: ListFormats = False,
    json: Json = False,
    quiet: options.Quiet = False,
    replying: ReplyOptions,
    sampling: SamplingOptions,
    running: RunningOptions,
) -> None:
    """Talk to a model, with its own chat template or with a named prompt format.

    On a terminal, Ctrl-C stops the reply, Ctrl-D exits, and /help lists the commands. Over a pipe,
    each line is a prompt, and stdout gets the replies only. Of the commands, only /bye, /exit,
    /clear, /stats and /help act there, also by their other names such as /quit; any other line
    that begins with a slash is a prompt. When the context is full, the oldest turns are dropped;
    the system prompt stays. Terminal input is stored in exl/chat-history under XDG_STATE_HOME
    (default ~/.local/state), readable by its owner only.
    """
    if list_formats or json:
        _show_formats(is_wanted=list_formats, is_json=json)
        return
    options.pick_model(model, model_option)
    spec = model if model_option is None else model_option
    _check(prompt, sampling, replying, stop or (), limit=options.token_limit(max_response_tokens))
    choices = running.choices()
    kept = None if load is None else transcript.load(load)
    with exits_at_once():
        from exl_cli.chat.session import ChatSession, OpenedModel
        from exl_cli.chat.settings import ChatOptions, ChatSettings

    def open_model(name: str | None) -> OpenedModel:
        runtime = running.open(name, choices, is_quiet=quiet, has_guidance=replying.has_guidance)
        return (runtime, *prompt.style(runtime.loaded))

    behavior = ChatOptions(
        max_response_tokens=max_response_tokens,
        stats=stats,
        amnesia=amnesia,
        reasoning=reasoning,
        wrap=wrap,
    )
    session = ChatSession(
        open_model,
        spec,
        ChatSettings(sampling, behavior, replying),
        stop=stop or (),
        terminal=_terminal(),
        is_quiet=quiet,
    )
    _talk(session, kept, takes_system=prompt.uses_default_system)


def _check(
    prompt: PromptOptions,
    sampling: SamplingOptions,
    replying: ReplyOptions,
    stop: Sequence[str],
    *,
    limit: int | None,
) -> None:
    """Reports bad options before anything is loaded. `limit`: most tokens of a reply."""
    prompt.checked_format()
    sampling.params()
    replying.check(limit)
    check_texts(stop, "--stop")


def _talk(session: ChatSession, kept: Kept | None, *, takes_system: bool) -> None:
    """Runs the chat, from a loaded conversation on if there is one."""
    session.greet()
    if kept is not None:
        if takes_system:
            session.conversation.system = kept[0]
        session.conversation.replace(kept[1])
    unanswered = session.run()
    if unanswered:
        raise ExlError(f"{unanswered} of the prompts could not be answered; see above")


def _terminal() -> Terminal | None:
    """The terminal; None over a pipe. Raises RequestError if stdin is closed."""
    from exl_cli.chat.terminal import Terminal

    if sys.stdin is None:
        raise RequestError(
            "there is nothing to read prompts from",
            expected="a terminal, or prompts piped to stdin",
            got="a closed stdin",
            next_step="For one reply use 'exl generate -p TEXT'.",
        )
    return Terminal(state_folder() / HISTORY_FILE) if Terminal.is_there() else None


def _show_formats(*, is_wanted: bool, is_json: bool) -> None:
    if not is_wanted:
        raise RequestError("--json goes with --list-formats", next_step="Drop it.")
    formats = all_formats().values()
    if is_json:
        described = [
            {"name": one.name, "also": list(one.also), "for": one.about, "card": one.model}
            for one in formats
        ]
        output.write_json({"schema_version": SCHEMA_VERSION, "formats": described})
        return
    from exl_cli.render import columns_table, print_answer

    table = columns_table("format", "for", "card")
    for one in formats:
        table.add_row(", ".join((one.name, *one.also)), one.about, one.model or "")
    print_answer(table)
