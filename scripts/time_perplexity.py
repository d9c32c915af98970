"""Measure the cost of scoring a text beyond its prefill. Usage: time_perplexity.py [-m MODEL]

Each round runs the same window three times: forward passes without logits, forward passes with
the logits of every position, and the scoring of `exl eval perplexity`. The ratios are medians over
the rounds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from statistics import median

import torch

from exl_core.cache.format import KVFormat, pages_for
from exl_core.engine.score import CHUNK_ROWS, TextPasses
from exl_core.model.runner import Runner, store_for
from exl_core.model.sample_text import SAMPLE_TEXT
from exl_core.model.segment import LogitRows, Segment
from exl_core.session.load import LoadOptions, load_model


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(". Usage")[0])
    parser.add_argument("-m", "--model", help="default: smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)  # as the `exl` command does
    loaded = load_model(args.model, LoadOptions(device=args.device))
    ids = tuple(loaded.tokenizer.encode(SAMPLE_TEXT * 20))[: args.ctx]
    passes = TextPasses(loaded.model, len(ids))
    store = store_for(loaded.model, KVFormat.FP16, pages_for(len(ids)))
    runner = Runner(loaded.model, store)

    def read(rows: LogitRows) -> None:
        for start in range(0, len(ids) - 1, CHUNK_ROWS):
            end = min(start + CHUNK_ROWS, len(ids) - 1)
            chunk = Segment(ids[start:end], start, tuple(range(pages_for(end))), rows)
            runner.run((chunk,))

    def walk() -> None:
        for _ in passes.logits(ids):
            pass

    works: dict[str, Callable[[], object]] = {
        "passes": lambda: read(LogitRows.NONE),
        "passes_with_logits": walk,
        "scoring": lambda: passes.score(ids),
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(args.rounds + 1):
        for name, work in works.items():
            spent = timed(work, loaded.model.ops.device)
            if number > 0:
                seconds[name].append(spent)
    summary: dict[str, object] = {name: median(found) for name, found in seconds.items()}
    for name in ("passes", "passes_with_logits"):
        ratios = [a / b for a, b in zip(seconds["scoring"], seconds[name], strict=True)]
        summary[f"scoring_to_{name}"] = median(ratios)
    print(json.dumps({"model": loaded.name, "ctx": len(ids), "rounds": args.rounds, **summary}))
    return 0


def timed(work: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
