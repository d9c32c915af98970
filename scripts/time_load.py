"""Time how long a model takes to load, in new processes. Usage: time_load.py MODEL [--ranks 1,2]

Prints the phases of a load with each number of ranks, in seconds since its process began, and then
one JSON object for each number: medians of `load_s` (time within `load_model`), `wall_s` (from the
start of the process until the model is loaded, with the imports) and `unload_s`. `--ahead` lets the
other ranks start before torch is imported, as the commands do. The last line has the ratios to the
first number.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

CHILD = """
import json, logging, sys, time
began = float(sys.argv[1])
ranks, device, is_ahead, has_log = int(sys.argv[3]), sys.argv[4], sys.argv[5] == "1", sys.argv[6]
logging.basicConfig(format="%(created).3f rank 0: %(message)s")
if has_log == "1":
    logging.getLogger("exl.load").setLevel(logging.DEBUG)
if is_ahead and ranks > 1:
    from exl_core.parallel.processes import start_ahead
    start_ahead(ranks, may_use_gpu=device != "cpu")
import torch
torch.set_num_threads(1)
from exl_core.session.load import load_model
print(f"{time.time():.3f} rank 0: torch and others are imported", file=sys.stderr)
loaded = load_model(sys.argv[2], device=device, tensor_parallel=ranks, split="none")
wall_s = time.time() - began
unloading = time.time()
loaded.unload()
times = {"load_s": loaded.load_s, "wall_s": wall_s, "unload_s": time.time() - unloading}
print(json.dumps(times))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(". Usage")[0])
    parser.add_argument("model", metavar="MODEL", type=Path)
    parser.add_argument(
        "--ranks", default="1,2", help="numbers of ranks; the first is the baseline"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ahead", action="store_true")
    args = parser.parse_args()
    counts = [int(text) for text in args.ranks.split(",")]
    found: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    for repeat in range(args.repeats + 1):  # the first round brings the files into memory
        for count in counts:
            one = load(args, count, has_log=repeat == 1)
            found[count] += [one] if repeat else []
    medians = {
        count: {key: round(median(one[key] for one in runs), 3) for key in runs[0]}
        for count, runs in found.items()
    }
    for count, values in medians.items():
        print(json.dumps({"ranks": count, "ahead": args.ahead, **values}))
    base = medians[counts[0]]
    ratios = {
        str(count): {key: round(values[key] / base[key], 3) for key in ("load_s", "wall_s")}
        for count, values in medians.items()
    }
    print(json.dumps({"ratios": ratios, "of": f"{counts[0]} ranks"}))
    return 0


def load(args: argparse.Namespace, count: int, *, has_log: bool) -> dict[str, float]:
    """One load in a new process. With `has_log` the phases of all ranks are printed."""
    began = time.time()
    options = (str(began), str(args.model), str(count), args.device)
    flags = ("1" if args.ahead else "0", "1" if has_log else "0")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *options, *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    if has_log:
        print(f"{count} ranks{', started ahead' if args.ahead else ''}:")
        for line in sorted(done.stderr.splitlines()):
            clock, _, what = line.partition(" ")
            if clock.replace(".", "").isdigit():
                print(f"  {float(clock) - began:7.3f} s  {what}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    sys.exit(main())
