"""`exl bench`: prefill and decode speed, and how near they come to the memory's floor.

What is measured, and how, lives in `exl_eval/speed.py`; this module takes the lists apart and shows
the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from exl_cli import options, output
from exl_cli.interrupt import exits_at_once
from exl_core.errors import RequestError

if TYPE_CHECKING:
    from exl_eval.result import SpeedResult, Spread

EXAMPLES = (
    ("exl bench", "the default model: 512 tokens of prompt, 128 decoded"),
    ("exl bench -m model --prefill 128,512,2048 --batch 1,4,16", "a grid"),
    ("exl bench -m model --threads 2 --repeat 5 --json", "for a program to read"),
)
_MAX_DIGITS = 9  # a longer number is no count of tokens, and Python would take its time over it


def bench(
    *,
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    prefill: Annotated[
        str,
        typer.Option("--prefill", metavar="N[,N...]", help="Tokens of a prompt; one or several."),
    ] = "512",
    decode: Annotated[
        int, typer.Option("--decode", metavar="N", min=1, help="Tokens to decode.")
    ] = 128,
    batch: Annotated[
        str,
        typer.Option(
            "--batch", metavar="N[,N...]", help="Sequences that run together; one or several."
        ),
    ] = "1",
    repeat: Annotated[
        int,
        typer.Option(
            "--repeat", metavar="N", min=1, help="Repetitions of each, after one unmeasured."
        ),
    ] = 3,
    json: options.Json = False,
    quiet: options.Quiet = False,
    device: options.Device = "auto",
    threads: options.Threads = None,
    exact: options.Exact = False,
) -> None:
    """Prefill and decode speed by prompt length and batch size, and the share of the floor.

    Prefill: from an empty cache to the logits of each prompt's last token. Decode: one token at a
    time after a prompt of one, with the logits of each. Rates are of all sequences together, the
    median of the repetitions with the lowest and the highest. The floor is what reading the weights
    and the cache would take at the memory bandwidth that is measured along with it.
    """
    spec = options.pick_model(model, model_option)
    prompts, batches = _counts("--prefill", prefill), _counts("--batch", batch)
    with exits_at_once():
        from exl_cli.load import load_quietly
        from exl_cli.render import repeats_progress
        from exl_core.load import open_checkpoint
        from exl_core.resolve import resolve_model
        from exl_eval.machine import peak_memory_bytes
        from exl_eval.speed import SpeedOptions, check_options, measure_speed
    before = peak_memory_bytes()  # the libraries; from here on it is the model
    path = resolve_model(spec)
    choices = SpeedOptions(prefill=prompts, decode=decode, batch=batches, repeat=repeat)
    check_options(choices, open_checkpoint(path)[1])  # the headers tell; loading takes a while
    loaded = load_quietly(str(path), device=device, threads=threads, exact=exact, is_quiet=quiet)
    with repeats_progress(is_quiet=quiet) as on_measured:
        result = measure_speed(loaded, choices, start_memory_bytes=before, on_measured=on_measured)
    if json:
        output.write_json(result.as_dict())
    else:
        _show(result)


def _counts(option: str, text: str) -> tuple[int, ...]:
    """The numbers of a list such as `1,4,16`, in its order, each once."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdecimal() and len(part) <= _MAX_DIGITS and int(part)):
            raise RequestError(
                f"{option} is not a list of counts",
                expected="whole numbers of at least 1 with commas between them",
                got=text[:100] or "nothing",
            )
    return tuple(dict.fromkeys(int(part) for part in parts))


def _show(result: SpeedResult) -> None:
    from exl_cli.render import columns_table, facts_table, format_bytes, print_answer

    beyond = result.peak_memory_bytes - result.start_memory_bytes
    facts = facts_table(
        {
            "model": f"{result.model}, {format_bytes(result.weights_bytes)} in memory, "
            f"{result.kv_format} cache{', exact' * result.exact}, loaded in {result.load_s:.2f} s",
            "machine": f"{result.instruction_set}, {result.threads} threads, "
            f"reads {format_bytes(result.read_bytes_per_s)}/s",
            "memory": f"{format_bytes(result.peak_memory_bytes)} at most, "
            f"{format_bytes(beyond)} of it since the libraries were loaded",
            "repeated": f"{result.repeat} times; the median (lowest-highest)",
        }
    )
    table = columns_table(
        "prompt", "batch", "prefill tok/s", "decode tok/s", "each", "read/token", "of floor"
    )
    for run in result.runs:
        table.add_row(
            f"{run.prompt_tokens}",
            f"{run.batch}",
            _spread(run.prefill, 0),
            _spread(run.decode, 1),
            f"{run.decode.median / run.batch:.1f}",
            format_bytes(run.bytes_per_token),
            f"{run.floor_share:.1%}",
        )
    print_answer(facts, "", table)


def _spread(rate: Spread, digits: int) -> str:
    return f"{rate.median:.{digits}f} ({rate.lowest:.{digits}f}-{rate.highest:.{digits}f})"
