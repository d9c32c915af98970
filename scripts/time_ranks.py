"""Measure tensor parallelism on GPUs, one JSON object per line. Usage: time_ranks.py MODEL

Loads the model on one GPU and then on several, once for each kind of exchange, and measures decode
and prefill as `exl bench` does (`packages/exl-eval/src/exl_eval/speed.py`). `ratio` is the speed
divided by that of one GPU in the same run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from exl_core.parallel.plan import parse_exchange
from exl_core.session.load import LoadedModel, load_model
from exl_eval.speed import SpeedOptions, measure_speed

DEPTH = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(". Usage")[0])
    parser.add_argument("model", metavar="MODEL", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--exchange", default="nccl,auto", help="kinds of exchange, or nothing")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--prefill", default="2048", help="lengths of prompts, or nothing")
    parser.add_argument("--decode", type=int, default=64, help="steps of decode")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    one = figures(load_model(args.model, device="cuda", split="none"), args)
    report("one GPU", one, one)
    for kind in filter(None, args.exchange.split(",")):
        loaded = load_model(
            args.model,
            device="cuda",
            tensor_parallel=args.ranks,
            exchange=parse_exchange(kind),
        )
        name = f"{args.ranks} GPUs, {kind}"
        print(json.dumps({"run": name, "link": str(loaded.link), "load_s": loaded.load_s}))
        report(name, figures(loaded, args), one)
    return 0


def figures(loaded: LoadedModel, args: argparse.Namespace) -> dict[str, float]:
    """Tokens per second by measurement. The model is unloaded afterwards."""
    found = {}
    try:
        for batch in map(int, args.batch.split(",")):
            options = SpeedOptions((8,), args.decode, (batch,), args.repeat, depth=DEPTH)
            (run,) = measure_speed(loaded, options, start_memory_bytes=0).runs
            found[f"decode batch {batch}"] = run.decode.median
        for rows in map(int, filter(None, args.prefill.split(","))):
            options = SpeedOptions((rows,), 1, (1,), args.repeat, pass_rows=rows)
            (run,) = measure_speed(loaded, options, start_memory_bytes=0).runs
            found[f"prefill {rows}"] = run.prefill.median
    finally:
        loaded.unload()
    return found


def report(name: str, found: dict[str, float], one: dict[str, float]) -> None:
    for figure, value in found.items():
        ratio = round(value / one[figure], 3)
        line = {"run": name, "figure": figure, "tok_s": round(value, 1), "ratio": ratio}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
