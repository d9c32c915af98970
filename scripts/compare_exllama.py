"""Measure exl beside exllamav3 and exllamav2 in one run. Usage: compare_exllama.py MODEL...

Each MODEL is a directory, in EXL3 for exllamav3 or in EXL2 or GPTQ for exllamav2. On each of them,
exl and the peer run one after the other in separate processes, on the same GPU, with the same
prompt length, cached tokens, steps and batch sizes. Rates are medians of `--repeat` repetitions.

Prints one JSON object per line: "ratio" is how many times better exl is than the peer. The last
lines compare the formats of the models, if there are several: "ratio" of the best rate of exl to
the best of the peers. `exllamav2_speed.py` and `exllamav3_speed.py` describe what the peers do,
`packages/exl-eval/src/exl_eval/speed.py` what exl does. exl's prefill includes the logits of the
last token, exllamav3's does not.

`--ranks 2` loads tensor parallel, in exl and in exllamav3. A peer that fails is reported by a line
with "error"; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exl_core.session.load import LoadedModel

SCRIPTS = Path(__file__).resolve().parent
Figures = Mapping[str, Any]
Rates = dict[str, float]
"""Tokens per second by measurement, and `load` in seconds."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(". Usage")[0])
    parser.add_argument("models", metavar="MODEL", nargs="+", type=Path)
    parser.add_argument("--batch", default="1,8,32", help="sizes, or nothing")
    parser.add_argument("--prefill", default="2048", help="lengths, or nothing")
    parser.add_argument("--decode", type=int, default=128, help="decoded tokens per sequence")
    parser.add_argument("--depth", type=int, default=16, help="tokens in the cache before them")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of tensor parallelism")
    parser.add_argument("--backend", default="native,nccl", help="exllamav3's, with several ranks")
    parser.add_argument("--device", default="cuda", help="of exl; the peers need GPUs")
    parser.add_argument("--only", choices=("exl", "peer"), help="leave the other out")
    parser.add_argument("--own", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.own:
        return measure_own(args)
    best: dict[str, Rates] = {"exl": {}, "peers": {}}
    has_failed = False
    for model in args.models:
        own: Rates = {}
        for name, found in runs(model, args):
            has_failed |= found is None
            if found is None:
                continue
            if name == "exl":
                own = found
            report(model.name, name, found, own)
            merge(best["exl" if name == "exl" else "peers"], found)
    if len(args.models) > 1:
        report("best of each", "peers", best["peers"], best["exl"])
    return int(has_failed)


def runs(model: Path, args: argparse.Namespace) -> Iterator[tuple[str, Rates | None]]:
    """Rates of exl and of the model's peers; None for a program that failed."""
    if args.only != "peer":
        yield "exl", own_rates(model, args)
    if args.only == "exl":
        return
    depth = ("--depth", f"{args.depth}", "--decode", f"{args.decode}")
    options = ("--batch", args.batch, "--prefill", args.prefill, "--repeat", f"{args.repeat}")
    if method_of(model) != "exl3":
        yield "exllamav2", peer_rates("exllamav2_speed.py", model, *options, *depth)
        return
    ranks = ("--ranks", f"{args.ranks}")
    for backend in args.backend.split(",") if args.ranks > 1 else ["native"]:
        name = f"exllamav3 {backend}" if args.ranks > 1 else "exllamav3"
        more = (*options, *depth, *ranks, "--backend", backend)
        yield name, peer_rates("exllamav3_speed.py", model, *more)


def method_of(model: Path) -> str:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return str(config.get("quantization_config", {}).get("quant_method"))


def own_rates(model: Path, args: argparse.Namespace) -> Rates | None:
    command = [__file__, str(model), "--own", "--device", args.device, "--ranks", f"{args.ranks}"]
    command += ["--batch", args.batch, "--prefill", args.prefill, "--repeat", f"{args.repeat}"]
    found = measured(*command, "--depth", f"{args.depth}", "--decode", f"{args.decode}")
    if found is None:
        return None
    note(f"exl, {model.name}: {found['facts']}")
    rates: Rates = found["rates"]
    return rates


def measure_own(args: argparse.Namespace) -> int:
    """Measures exl in this process, as `exl bench` does, and prints one line."""
    from exl_core.engine.engine import PREFILL_CHUNK
    from exl_core.session.load import load_model
    from exl_eval.speed import SpeedOptions, measure_speed

    placed: dict[str, Any] = {"tensor_parallel": args.ranks} if args.ranks > 1 else {}
    loaded = load_model(args.models[0], device=args.device, **placed or {"split": "none"})
    batches, prompts = (
        tuple(int(n) for n in text.split(",") if n) for text in (args.batch, args.prefill)
    )
    rates: Rates = {}
    facts: dict[str, Any] = {}
    try:
        if batches:
            options = SpeedOptions((8,), args.decode, batches, args.repeat, depth=args.depth)
            runs = measure_speed(loaded, options, start_memory_bytes=0).runs
            rates |= {f"decode batch {run.batch}": run.decode.median for run in runs}
            facts["floor_share"] = {run.batch: round(run.floor_share, 3) for run in runs}
            facts["different_tokens"] = {size: different(loaded, size, args) for size in batches}
        if prompts:
            chunk = PREFILL_CHUNK["cuda"]
            options = SpeedOptions(prompts, 1, (1,), args.repeat, pass_rows=chunk)
            runs = measure_speed(loaded, options, start_memory_bytes=0).runs
            rates |= {f"prefill {run.prompt_tokens}": run.prefill.median for run in runs}
    finally:
        loaded.unload()
    print(json.dumps({"rates": {**rates, "load": loaded.load_s}, "facts": facts}), flush=True)
    return 0


def different(loaded: LoadedModel, batch: int, args: argparse.Namespace) -> int:
    """Number of different tokens after the last step. Rows with equal tokens choose equal experts,
    which makes a step cheaper."""
    from exl_core.cache.format import KVFormat
    from exl_eval.workload import Workload

    tokens = args.depth + args.decode
    work = Workload(loaded.model, KVFormat.FP16, tokens=tokens, batch=batch)
    return len(set(work.decode(work.fill(args.depth), args.depth, args.decode)))


def peer_rates(script: str, model: Path, *options: str) -> Rates | None:
    found = measured(str(SCRIPTS / script), str(model), *options)
    if found is None:
        return None
    note(f"{script}, {model.name}: {found.get('facts')}")
    decode = {f"decode batch {size}": rate for size, rate in found["decode_tok_s"].items()}
    prefill = {f"prefill {count}": rate for count, rate in found["prefill_tok_s"].items()}
    return {**decode, **prefill, "load": found["load_s"]}


def measured(*arguments: str) -> Figures | None:
    """Last line of this interpreter's output with these arguments, as JSON. A failure is reported
    and None."""
    started = time.monotonic()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    note(f"{time.monotonic() - started:.0f} s: {' '.join(arguments)}")
    if done.returncode == 0:
        figures: Figures = json.loads(done.stdout.strip().splitlines()[-1])
        return figures
    note(done.stderr[-4000:])
    lines = done.stderr.strip().splitlines() or [""]
    command = " ".join(Path(argument).name for argument in arguments[:4])
    print(json.dumps({"error": lines[-1], "status": done.returncode, "of": command}), flush=True)
    return None


def report(model: str, name: str, found: Rates, own: Rates) -> None:
    """Prints a line for each measurement of this program. `own` are exl's rates."""
    for figure, value in found.items():
        is_load = figure == "load"
        line: dict[str, Any] = {"model": model, "figure": figure, "of": name}
        line |= {"value": float(f"{value:.5g}"), "unit": "s" if is_load else "tok/s"}
        if found is not own and figure in own:
            mine = own[figure]
            ratio = value / mine if is_load else mine / value
            line |= {"exl": float(f"{mine:.5g}"), "ratio": round(ratio, 3)}
        print(json.dumps(line), flush=True)


def merge(best: Rates, found: Rates) -> None:
    for figure, value in found.items():
        choose = min if figure == "load" else max
        best[figure] = choose(value, best.get(figure, value))


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
