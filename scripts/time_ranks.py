"""Measure a model on several GPUs, one JSON object per line. Usage: time_ranks.py MODEL

Loads the model on one GPU, then with tensor parallelism, once for each number of ranks and kind of
exchange, and with its layers split over several GPUs. Measures decode and prefill as `exl bench`
does (`packages/exl-eval/src/exl_eval/speed.py`). `ratio` is the median speed divided by that of one
GPU in the same run.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from exl_core.parallel.plan import parse_exchange
from exl_core.session.load import LoadedModel, load_model
from exl_eval.result import Spread
from exl_eval.speed import SpeedOptions, measure_speed

DEPTH = 16

Figures = dict[str, Spread]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(". Usage")[0])
    parser.add_argument("model", metavar="MODEL", type=Path)
    parser.add_argument("--ranks", default="2", help="numbers of ranks, or nothing")
    parser.add_argument("--exchange", default="nccl,auto", help="kinds of exchange")
    parser.add_argument(
        "--split", default="", help="numbers of GPUs that share the layers, or layers: 2,17+15"
    )
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--prefill", default="2048", help="lengths of prompts, or nothing")
    parser.add_argument("--decode", type=int, default=64, help="steps of decode")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of decode")
    parser.add_argument("--prompts", type=int, default=12, help="repetitions of prefill")
    parser.add_argument("--chunk", type=int, default=2048, help="rows of a pass")
    args = parser.parse_args()
    one = load_model(args.model, device="cuda", split="none")
    layers, load_s = one.config.num_layers, one.load_s
    base = figures(one, args)
    report("one GPU", base, base, load_s=load_s)
    for wanted in filter(None, args.split.split(",")):
        sizes = [int(size) for size in wanted.split("+")]
        if len(sizes) == 1:
            bounds = [round(layers * stage / sizes[0]) for stage in range(sizes[0] + 1)]
            sizes = [end - first for first, end in pairwise(bounds)]
        split = ",".join(f"cuda:{stage}={size}" for stage, size in enumerate(sizes))
        loaded = load_model(args.model, split=split)
        load_s = loaded.load_s
        report(f"layers {sizes}", figures(loaded, args), base, load_s=load_s)
    for count in map(int, filter(None, args.ranks.split(","))):
        for kind in args.exchange.split(","):
            exchange = parse_exchange(kind)
            loaded = load_model(args.model, device="cuda", tensor_parallel=count, exchange=exchange)
            link, load_s = str(loaded.link), loaded.load_s
            found = figures(loaded, args)
            report(f"{count} GPUs, {kind}", found, base, load_s=load_s, link=link)
    return 0


def figures(loaded: LoadedModel, args: argparse.Namespace) -> Figures:
    """Tokens per second by measurement. The model is unloaded afterwards."""
    found = {}
    try:
        for batch in map(int, args.batch.split(",")):
            options = SpeedOptions((8,), args.decode, (batch,), args.repeat, depth=DEPTH)
            (run,) = measure_speed(loaded, options, start_memory_bytes=0).runs
            found[f"decode batch {batch}"] = run.decode
        for rows in map(int, filter(None, args.prefill.split(","))):
            chunk = min(rows, args.chunk)
            options = SpeedOptions((rows,), 1, (1,), args.prompts, pass_rows=chunk)
            (run,) = measure_speed(loaded, options, start_memory_bytes=0).runs
            found[f"prefill {rows}"] = run.prefill
    finally:
        loaded.unload()
    return found


def report(run: str, found: Figures, one: Figures, **facts: object) -> None:
    print(json.dumps({"run": run} | facts), flush=True)
    for figure, speed in found.items():
        ratio = round(speed.median / one[figure].median, 3)
        spread = {name: round(value, 1) for name, value in asdict(speed).items()}
        print(json.dumps({"run": run, "figure": figure, **spread, "ratio": ratio}), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
