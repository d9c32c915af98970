"""`exl eval throughput`: latencies and rates of one engine under a stream of requests.

`exl_eval/throughput.py` measures. This module reads the options and prints the result.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl_cli import eval_options, options, output
from exl_cli.engine_options import DEFAULT_CACHE_TOKENS
from exl_cli.interrupt import exits_at_once
from exl_cli.model_options import ModelOptions
from exl_cli.option_groups import spread
from exl_core.cache.format import parse_cache_type

if TYPE_CHECKING:
    from exl_eval.throughput import ThroughputResult

EXAMPLES = (
    ("exl eval throughput", "the default model with a small built-in workload"),
    ("exl eval throughput requests.jsonl -m model", "your own requests"),
    ("exl eval throughput requests.jsonl -m model --max-batch 4 --json", "machine-readable output"),
)

Workload = Annotated[
    Path | None,
    typer.Argument(
        metavar="WORKLOAD",
        help="JSON lines with arrival_s, prompt or prompt_tokens, max_tokens and temperature. "
        "Default: a small example.",
        show_default=False,
    ),
]
Model = Annotated[
    str | None, typer.Option("-m", "--model", metavar="MODEL", help=options.MODEL_HELP)
]
MaxBatch = Annotated[
    int,
    typer.Option(
        "--max-batch",
        metavar="N",
        min=1,
        help="Maximum number of requests in one pass. Further requests wait.",
        rich_help_panel="Running",
    ),
]
CacheTokens = Annotated[
    int | None,
    typer.Option(
        "--cache-tokens",
        metavar="N",
        min=256,
        help="Size in tokens of the key-value cache that all requests share. Default: the model's "
        "context, at most 32768.",
        rich_help_panel="Running",
    ),
]


@spread
def throughput(
    *,
    workload: Workload = None,
    model: Model = None,
    seed: eval_options.Seed = 1,
    json: options.Json = False,
    quiet: options.Quiet = False,
    changes: ModelOptions,
    device: options.Device = "auto",
    threads: options.Threads = None,
    exact: options.Exact = False,
    cache_type: options.CacheType = "fp16",
    max_batch: MaxBatch = 16,
    cache_tokens: CacheTokens = None,
) -> None:
    """Measure latencies and rates under a workload of requests that arrive over time.

    Each request is submitted at its arrival time, whether or not the engine keeps up. Every reply
    has exactly max_tokens tokens: no stop token ends it earlier. The time to the first token and
    the end-to-end time start at the arrival of the request and include waiting.
    """
    kv_format = parse_cache_type(cache_type)
    from exl_eval.requests_file import read_workload

    requests = read_workload(workload)
    with exits_at_once():
        from exl_cli.load import load_quietly
        from exl_cli.render import repeats_progress
        from exl_eval.throughput import ThroughputOptions, measure_throughput
    how = replace(
        changes.load_options(),
        cache_tokens=cache_tokens or DEFAULT_CACHE_TOKENS,
        kv_format=kv_format,
        max_batch=max_batch,
    )
    loaded = load_quietly(
        model,
        device=device,
        threads=threads,
        is_quiet=quiet,
        exact=exact,
        options=how,
    )
    choices = ThroughputOptions(max_batch, cache_tokens, kv_format, seed)
    with repeats_progress(is_quiet=quiet) as on_tokens:
        result = measure_throughput(loaded, requests, choices, on_tokens)
    if json:
        output.write_json(result.as_dict())
    else:
        _show(result)


def _show(result: ThroughputResult) -> None:
    from exl_cli.render import columns_table, facts_table, print_answer

    offered = "all at once" if result.offered_per_s is None else f"{result.offered_per_s:.2f}/s"
    facts = facts_table(
        {
            "model": eval_options.running_text(result),
            "requests": f"{result.requests}, offered {offered}, done {result.requests_per_s:.2f}/s "
            f"in {result.seconds:.2f} s; at most {result.most_running} at once "
            f"(limit {result.max_batch})",
            "prompts": f"{result.prompt_tokens} tokens, {result.cached_tokens} of them cached",
            "generated": f"{result.generated_tokens} tokens in {result.passes} passes, "
            f"{result.generated_tok_s:.1f} tok/s; with prompts {result.total_tok_s:.1f} tok/s",
        }
    )
    table = columns_table("ms", "mean", "50 %", "90 %", "95 %", "99 %", "largest")
    tails = {
        "first token": result.first_token,
        "inter-token": result.inter_token,
        "end to end": result.end_to_end,
    }
    for name, tail in tails.items():
        if tail is not None:
            seconds = (tail.mean, tail.p50, tail.p90, tail.p95, tail.p99, tail.max)
            table.add_row(name, *(f"{value * 1e3:.1f}" for value in seconds))
    print_answer(facts, "", table)
