"""`exl run`: a chat with a model, or one reply, by the model's name."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Annotated

import typer

from exl_cli import options
from exl_cli.commands.chat import chat
from exl_cli.commands.generate import generate
from exl_cli.option_groups import PromptOptions, RunningOptions, spread
from exl_cli.reply_options import ReplyOptions
from exl_cli.sampling_options import SamplingOptions

EXAMPLES = (
    ("exl run owner/name-GGUF:Q4_K_M", "fetch the model if needed, and talk to it"),
    ('exl run owner/name "Why is the sky blue?"', "one reply"),
    ('cat notes.txt | exl run owner/name "Summarize:"', "the piped text follows the prompt"),
)

PromptArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="PROMPT",
        help="A question. Without it, and without piped text: a chat.",
        show_default=False,
    ),
]


@spread
def run(
    *,
    model: options.ModelArgument = None,
    prompt: PromptArgument = None,
    max_tokens: options.MaxTokens = -1,
    conversation: PromptOptions,
    stop: options.Stop = None,
    quiet: options.Quiet = False,
    replying: ReplyOptions,
    sampling: SamplingOptions,
    running: RunningOptions,
) -> None:
    """Talk to a model, or ask it one question, in the model's own chat template.

    With a prompt or with piped text, `exl generate --chat` answers once. Otherwise `exl chat`
    starts. A hub name that is not on this machine is downloaded first.
    """
    groups = (conversation, replying, sampling, running)
    shared = {field.name: getattr(group, field.name) for group in groups for field in fields(group)}
    shared |= {"model": model, "stop": stop, "quiet": quiet}
    is_piped = sys.stdin is not None and not sys.stdin.isatty()
    if prompt is None and not is_piped:
        chat(max_response_tokens=max_tokens, **shared)
    else:
        generate(prompt=prompt, max_tokens=max_tokens, chat=True, **shared)
