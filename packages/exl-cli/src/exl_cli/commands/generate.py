"""`exl generate`: continue a prompt or answer it, and stream the text to stdout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from exl_cli import engine_options, options, output, prompts
from exl_cli.batch.job import PromptJob
from exl_cli.batch.options import BatchOptions
from exl_cli.interrupt import Interrupt
from exl_cli.keyboard import keys_are_held
from exl_cli.option_groups import PromptOptions, RunningOptions, spread
from exl_cli.reply_options import ReplyOptions
from exl_cli.sampling_options import SamplingOptions

if TYPE_CHECKING:
    from exl_core.engine.events import FinishEvent
    from exl_core.engine.request import Request
    from exl_core.session.runtime import Runtime

EXAMPLES = (
    ('exl generate -p "The capital of France is" -n 8 --temp 0', "continue a text"),
    ('exl generate --chat -p "Why is the sky blue?"', "ask, with the model's chat template"),
    ('cat notes.txt | exl generate --chat -p "Summarize:"', "the piped text follows the prompt"),
    ("exl generate model.gguf -f prompt.txt --json > out.json", "machine-readable output"),
    (
        'exl generate --chat -p "A person, in JSON." --json-schema person.json',
        "JSON that matches a schema",
    ),
    (
        'exl generate -p "My favorite color is" --ban green --bias " blue=3"',
        "a banned text and a token bias",
    ),
    (
        "exl generate --batch-file prompts.jsonl --output replies.jsonl",
        "answer a file of prompts; a stopped run continues",
    ),
    (
        "cat prompts.jsonl | exl generate --batch-file - > replies.jsonl",
        "the prompts from stdin",
    ),
)
SCHEMA_VERSION = 1

PromptOption = Annotated[
    str | None,
    typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt. '-' reads it from stdin."),
]
FileOption = Annotated[
    str | None, typer.Option("-f", "--file", metavar="FILE", help="Read the prompt from FILE.")
]
ChatOption = Annotated[
    bool,
    typer.Option("--chat", help="Send the prompt as a user message in the model's chat template."),
]
SpecialOption = Annotated[
    bool,
    typer.Option(
        "--parse-special",
        help="Encode text such as <|im_start|> in the prompt as special tokens.",
    ),
]
TruncateLeft = Annotated[
    bool,
    typer.Option(
        "--truncate-left",
        help="Drop the first tokens of a prompt that leaves no room for -n tokens of reply in the "
        "context, and say how many. Not with --chat.",
    ),
]


@spread
def generate(
    *,
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    prompt: PromptOption = None,
    file: FileOption = None,
    max_tokens: options.MaxTokens = 256,
    chat: ChatOption = False,
    conversation: PromptOptions,
    stop: options.Stop = None,
    parse_special: SpecialOption = False,
    truncate_left: TruncateLeft = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    batch: BatchOptions,
    replying: ReplyOptions,
    sampling: SamplingOptions,
    running: RunningOptions,
    json_schema: engine_options.JsonSchema = None,
    regex: engine_options.Regex = None,
    grammar: engine_options.Grammar = None,
) -> None:
    """Continue a prompt and stream the text to stdout.

    The prompt comes from -p, from a file or from stdin. Piped text is appended to the -p text on
    a new line. One newline at the end of a file or of piped text is dropped.
    """
    batch.check(has_prompt=prompt is not None or file is not None, is_json=json)
    job = PromptJob(
        spec=options.pick_model(model, model_option),
        limit=options.token_limit(max_tokens),
        is_chat=chat,
        parse_special=parse_special,
        truncates=truncate_left,
        stop=tuple(stop or ()),
        constraints=engine_options.constraints_of(json_schema, regex, grammar),
        conversation=conversation,
        replying=replying,
        sampling=sampling,
        running=running,
    )
    job.check()
    if batch.batch_file is not None:
        batch.run(job, is_json=json, is_quiet=quiet)
        return
    text = prompts.read_prompt(prompt, file)
    writer = job.open(is_quiet=quiet)
    from exl_cli.load import explaining_long_prompts

    with explaining_long_prompts(writer.runtime):
        request = writer.request(text)
    _run(writer.runtime, request, is_json=json, is_quiet=quiet)


def _run(runtime: Runtime, request: Request, *, is_json: bool, is_quiet: bool) -> None:
    from exl_cli.render import is_watched, print_speed
    from exl_cli.reply import note_unmet, stream_reply
    from exl_cli.wrap import TextWriter

    with TextWriter() as writer, Interrupt() as interrupt, keys_are_held():
        write = None if is_json else writer.write
        reply = stream_reply(runtime.engine, request, interrupt, write)
    if is_json:
        output.write_json(describe_reply(runtime, reply, request.sampler.seed))
    else:
        output.end_line_on_terminal()
    if not is_quiet:
        note_unmet(runtime, request, reply)
    if is_watched(is_quiet=is_quiet):
        print_speed(reply, runtime.load_s)
    if interrupt.is_set:
        raise KeyboardInterrupt


def describe_reply(runtime: Runtime, reply: FinishEvent, seed: int | None) -> dict[str, object]:
    """The object that `--json` prints. It has `drafting` only if a drafter was in use."""
    described: dict[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "model": runtime.name,
        "text": reply.text,
        "token_ids": list(reply.token_ids),
        "finish_reason": reply.reason.value,
        "stopped_by": reply.stopped_by,
        "seed": seed,
        "usage": {
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.completion_tokens,
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
            "cached_tokens": reply.cached_tokens,
        },
        "timings": {
            "load_s": round(runtime.load_s, 4),
            "prefill_s": round(reply.prefill_s, 4),
            "prefill_tok_s": round(reply.prefill_tok_s, 2),
            "decode_s": round(reply.decode_s, 4),
            "decode_tok_s": round(reply.decode_tok_s, 2),
        },
    }
    if reply.drafting is not None:
        drafting = reply.drafting
        described["drafting"] = {
            "rounds": drafting.rounds,
            "drafted": drafting.drafted,
            "accepted": drafting.accepted,
            "rejected": drafting.rejected,
            "emitted": drafting.emitted,
        }
    return described
