"""`exl bench`: prefill and decode speed, compared with the floor set by memory bandwidth.

`exl_eval/speed.py` measures whole passes and `exl_eval/kernels.py` measures single ops. This module
parses the options and prints the result.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from exl_cli import options, output
from exl_cli.interrupt import exits_at_once
from exl_cli.model_options import ModelOptions
from exl_cli.option_groups import DeviceOptions, spread
from exl_core.cache.format import parse_cache_type
from exl_core.errors import RequestError

if TYPE_CHECKING:
    from exl_eval.result import KernelPass, KernelResult, SpeedResult, Spread

EXAMPLES = (
    ("exl bench", "the default model: a prompt of 512 tokens, 128 decoded tokens"),
    ("exl bench -m model --prefill 128,512,2048 --batch 1,4,16", "all combinations"),
    ("exl bench -m model --depth 4000 --cache-type q4", "decode in a long context"),
    ("exl bench -m model --kernels --batch 1,8", "time of each op"),
    ("exl bench -m model --threads 2 --repeat 5 --json", "machine-readable output"),
)
_MAX_DIGITS = 9  # a longer number is not a token count, and `int` is slow on very long ones


Prefill = Annotated[
    str, typer.Option("--prefill", metavar="N[,N...]", help="Prompt length in tokens, or a list.")
]
Decode = Annotated[
    int, typer.Option("--decode", metavar="N", min=1, help="Tokens to decode per sequence.")
]
Depth = Annotated[
    int,
    typer.Option("--depth", metavar="N", min=1, help="Tokens in the cache before decoding starts."),
]
Batch = Annotated[
    str,
    typer.Option("--batch", metavar="N[,N...]", help="Number of sequences in a batch, or a list."),
]
Repeat = Annotated[
    int,
    typer.Option(
        "--repeat",
        metavar="N",
        min=1,
        help="Measured repetitions of each configuration, after one warm-up.",
    ),
]
Kernels = Annotated[
    bool,
    typer.Option(
        "--kernels",
        help="Time each op of a decode step for each batch size, and of the first prefill pass "
        "for each prompt length.",
    ),
]
Chunk = Annotated[
    int | None,
    typer.Option(
        "--chunk",
        metavar="N",
        min=1,
        help="Maximum number of prompt tokens in one pass. Default: as in generation.",
        rich_help_panel="Running",
    ),
]


@spread
def bench(
    *,
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    prefill: Prefill = "512",
    decode: Decode = 128,
    depth: Depth = 1,
    batch: Batch = "1",
    repeat: Repeat = 3,
    kernels: Kernels = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    changes: ModelOptions,
    running: DeviceOptions,
    cache_type: options.CacheType = "fp16",
    chunk: Chunk = None,
) -> None:
    """Measure prefill and decode speed by prompt length and batch size.

    Prefill starts with an empty cache and ends with the first token after the prompt. Decode is
    greedy, one token per step. Rates count all sequences of the batch and are the median of the
    repetitions, with the lowest and the highest. 'of floor' is the decode rate as a share of the
    rate at which memory bandwidth, measured in the same run, allows to read weights and cache.

    With --kernels: the time of each op, its bytes, and their share of the memory bandwidth.
    """
    spec = options.pick_model(model, model_option)
    prompts, batches = _counts("--prefill", prefill), _counts("--batch", batch)
    kv_format = parse_cache_type(cache_type)
    with exits_at_once():
        from exl_cli.load import loader, longer_context
        from exl_cli.render import repeats_progress
        from exl_core.session.load import with_options
        from exl_core.session.open import open_model
        from exl_eval.kernels import measure_kernels
        from exl_eval.machine import peak_memory_bytes
        from exl_eval.speed import SpeedOptions, check_options, measure_speed
    before = peak_memory_bytes()  # memory of the libraries; any growth after this is the model's
    files, rows = open_model(spec), chunk or _default_chunk(running.device, exact=running.exact)
    choices = SpeedOptions(prompts, decode, batches, repeat, kv_format, depth, rows)
    longest = max(*prompts, depth + decode)
    how = longer_context(longest, files, changes.load_options())
    check_options(choices, with_options(files.config, how))  # needs headers only; loading is slow
    how = running.applied(how, max(batches) * longest, kv_format, max(batches))
    loaded = loader(is_quiet=quiet)(files, how)
    measure = partial(measure_speed, loaded, choices, start_memory_bytes=before)
    with repeats_progress(is_quiet=quiet) as on_measured:
        if kernels:
            ops = measure_kernels(loaded, choices, on_measured=on_measured)
        else:
            passes = measure(on_measured=on_measured)
    if json:
        output.write_json(ops.as_dict() if kernels else passes.as_dict())
    else:
        _show_kernels(ops) if kernels else _show(passes)


def _default_chunk(device: str, *, exact: bool) -> int:
    """Prompt tokens per pass in generation."""
    from exl_core.engine.engine import PREFILL_CHUNK
    from exl_core.session.load import resolve_device

    is_on_gpu = resolve_device(device, is_exact=exact).startswith("cuda")
    return PREFILL_CHUNK["cuda" if is_on_gpu else "cpu"]


def _counts(option: str, text: str) -> tuple[int, ...]:
    """Numbers of a list such as `1,4,16`, in their order, without duplicates."""
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
            "machine": f"{_machine(result.device, result.instruction_set, result.threads)}, "
            f"{'reads' if result.device == 'cpu' else 'copies'} "
            f"{format_bytes(result.read_bytes_per_s)}/s",
            "memory": f"{format_bytes(result.peak_memory_bytes)} at most, "
            f"{format_bytes(beyond)} of it since the libraries were loaded",
            **_device_memory(result),
            **_experts(result),
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


def _experts(result: SpeedResult) -> dict[str, str]:
    """Parameters that a token uses, and experts in the host's memory."""
    from exl_cli.render import format_bytes, format_count

    facts = {}
    if result.active_parameters < result.parameters:
        facts["parameters"] = (
            f"{format_count(result.parameters)}, {format_count(result.active_parameters)} of them "
            f"({format_bytes(result.decode_weight_bytes)}) in each token"
        )
    if result.host_bytes_per_s is not None:
        facts["experts on the CPU"] = (
            f"{format_bytes(result.host_bytes)}, reads {format_bytes(result.host_bytes_per_s)}/s"
        )
    return facts


def _device_memory(result: SpeedResult) -> dict[str, str]:
    from exl_cli.render import format_bytes

    if result.device_peak_bytes is None or result.device_working_bytes is None:
        return {}
    launches = ", ".join(f"{run.launches} at batch {run.batch}" for run in result.runs)
    return {
        "device memory": f"{format_bytes(result.device_peak_bytes)} at most; beside weights and "
        f"cache {format_bytes(result.device_working_bytes)}",
        "launches": f"in a decode step {launches}",
    }


def _show_kernels(result: KernelResult) -> None:
    from exl_cli.render import columns_table, facts_table, format_bytes, format_count, print_answer

    does = "reads" if result.device == "cpu" else "copies"
    facts = facts_table(
        {
            "model": f"{result.model}, {result.kv_format} cache{', exact' * result.exact}",
            "machine": f"{_machine(result.device, result.instruction_set, result.threads)}, "
            f"{does} {format_bytes(result.bytes_per_s)}/s",
        }
    )
    print_answer(facts)
    for one in result.passes:
        table = columns_table(
            "op", "size", "calls", "bytes each", "us each", "of bandwidth", "op/s", "of the pass"
        )
        for run in one.kernels:
            table.add_row(
                run.op,
                run.shape,
                f"{run.calls}",
                format_bytes(run.bytes),
                f"{run.seconds * 1e6:.1f}",
                f"{run.share:.1%}",
                format_count(run.operations / run.seconds) if run.operations else "",
                f"{run.calls * run.seconds / one.seconds:.1%}",
            )
        print_answer("", _pass_title(one), table)


def _pass_title(one: KernelPass) -> str:
    name = "a decode step of " if one.past_len else "a prompt of "
    name += f"{one.rows} tokens" if one.rows > 1 else "one token"
    cached = f", {one.past_len} cached before" if one.past_len else ""
    launches = f" ({one.launches} launches)" if one.launches else ""
    return (
        f"{name}{cached}: {one.seconds * 1e3:.3f} ms, of which {one.kernel_seconds * 1e3:.3f} in "
        f"{one.calls} calls of ops{launches}"
    )


def _machine(device: str, instruction_set: str, threads: int) -> str:
    return f"{instruction_set}, {threads} threads" if device == "cpu" else device


def _spread(rate: Spread, digits: int) -> str:
    return f"{rate.median:.{digits}f} ({rate.lowest:.{digits}f}-{rate.highest:.{digits}f})"
