"""Measure speed on a GPU, one JSON object per line. Usage: gpu_figures.py [--model DIR] [--peer]

Each line has "figure", "value", "unit", "peer", "ratio" and further fields of the figure. `ratio`
is how many times better the value is than the peer, or than the baseline that `of` describes. It is
null without a comparison. Rates are medians of three repetitions. exl and the peer (exllamav2) run
one after the other on the same model, each in a separate process.

Without `--model`, models with random weights are written first (`random_exl2.py`). `--size` selects
their shapes. `--mixes` adds other bit widths and GPTQ for the first size, `--long` decoding with
32k cached tokens, `--kernels` the time of each op and its share of the bandwidth.
`packages/exl-eval/src/exl_eval/speed.py` describes the measurements.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
BATCHES, PROMPTS = "1,2,4,8,16,32", "512,2048,4096"
SHORT, LONG = 16, 32000
MIXES = {"2-3 bits": ("--mix", "3"), "5-6 bits": ("--mix", "5"), "8 bits": ("--mix", "8")}
GPTQ = {"gptq act-order": ("--format", "gptq")}
Figures = Mapping[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(". Usage")[0])
    parser.add_argument("--model", metavar="DIR", type=Path, help="an EXL2 or GPTQ model")
    parser.add_argument("--size", default="8b", help="8b, 1b or tiny; or several: 8b,1b")
    parser.add_argument("--work", type=Path, help="folder for the written models, which are kept")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--decode", type=int, default=128, help="number of decoded tokens")
    parser.add_argument("--peer", action="store_true", help="also run exllamav2, if installed")
    parser.add_argument("--mixes", action="store_true", help="also other bit widths and GPTQ")
    parser.add_argument("--long", action="store_true", help="also decode after 32k cached tokens")
    parser.add_argument("--kernels", action="store_true", help="also time each op")
    args = parser.parse_args()
    has_peer = args.peer and importlib.util.find_spec("exllamav2") is not None
    if args.peer and not has_peer:
        note("exllamav2 is not installed: no peer")
    with tempfile.TemporaryDirectory(prefix="exl-gpu-") as folder:
        measuring = Measuring(args.device, args.decode, has_peer=has_peer)
        work = args.work or Path(folder)
        sizes = [""] if args.model else args.size.split(",")
        models = {size: args.model or random_model(work, size) for size in sizes}
        for size, model in models.items():
            name = size or model.name
            measuring.speed(name, model)
            if args.kernels:
                measuring.kernels(name, model)
            if args.long:
                measuring.long_context(name, model)
        if args.mixes and not args.model:
            base = measuring.share(models[sizes[0]])
            for mix, options in (MIXES | GPTQ).items():
                other = random_model(work, sizes[0], *options)
                measuring.width(f"{sizes[0]} {mix}", other, base)
    return 0


class Measuring:
    """Runs the measuring programs and prints their figures."""

    def __init__(self, device: str, decode: int, *, has_peer: bool) -> None:
        self._device, self._decode, self._has_peer = device, str(decode), has_peer

    def speed(self, name: str, model: Path) -> None:
        """Figures of decode by batch size, prefill by length, load time, memory and launches."""
        depth = ("--depth", str(SHORT), "--decode", self._decode)
        own = self._bench(model, "--batch", BATCHES, "--prefill", "8", *depth)
        prompts = self._bench(model, "--prefill", PROMPTS, "--decode", "1")
        peer = self._peer(model, "--batch", BATCHES, "--prefill", PROMPTS, *depth)
        emit(f"{name} bandwidth", own["read_bytes_per_s"] / 1e9, "GB/s")
        for run in own["runs"]:
            emit(
                f"{name} decode batch {run['batch']}",
                run["decode_tok_s"],
                "tok/s",
                peer.get("decode_tok_s", {}).get(f"{run['batch']}"),
                **rounded(run, "floor_share", "launches", "bytes_per_token"),
            )
        for run in prompts["runs"]:
            theirs = peer.get("prefill_tok_s", {}).get(f"{run['prompt_tokens']}")
            emit(f"{name} prefill {run['prompt_tokens']}", run["prefill_tok_s"], "tok/s", theirs)
        loads = [own["load_s"], prompts["load_s"]]
        emit(f"{name} load", median(loads), "s", peer.get("load_s"), is_less_better=True)
        for key in ("device_working_bytes", "device_peak_bytes", "weights_bytes"):
            found = [one[key] for one in (own, prompts) if one[key] is not None]
            if found:
                emit(f"{name} {key.removesuffix('_bytes')} memory", max(found) / 1e6, "MB")

    def kernels(self, name: str, model: Path) -> None:
        found = self._bench(
            model, "--kernels", "--batch", "1,8,32", "--prefill", "512", "--depth", "512"
        )
        for one in found["passes"]:
            what = f"step of {one['batch']}" if one["past_len"] else f"prompt of {one['rows']}"
            facts = rounded(one, "kernel_seconds", "launches", "calls")
            emit(f"{name} {what}", one["seconds"] * 1e6, "us", **facts)
            for run in one["kernels"]:
                facts = rounded(run, "bytes", "seconds", "calls", "launches")
                label = f"{name} {what}: {run['op']} {run['shape']}"
                emit(label, run["share"], "of the bandwidth", **facts)

    def long_context(self, name: str, model: Path) -> None:
        for kind in ("fp16", "q4"):
            rates = [
                self._bench(
                    model, "--cache-type", kind, "--depth", str(depth), "--prefill", "8",
                    "--decode", "64",
                )["decode_tok_s"]
                for depth in (SHORT, LONG)
            ]  # fmt: skip
            emit(
                f"{name} decode after {LONG}, {kind} cache",
                rates[1],
                "tok/s",
                ratio=round(rates[1] / rates[0], 3),
                of=f"{rates[0]:.1f} tok/s with {SHORT} tokens in the cache",
            )

    def share(self, model: Path) -> float:
        """Decode speed at batch 1, as a share of the speed at the bandwidth's floor."""
        depth = ("--depth", str(SHORT), "--decode", self._decode)
        share: float = self._bench(model, "--prefill", "8", *depth)["floor_share"]
        return share

    def width(self, name: str, model: Path, base: float) -> None:
        """Figure of another mix of bit widths, compared with the share `base` of the usual mix."""
        found = self.share(model)
        emit(
            f"{name} decode batch 1",
            found,
            "of the floor",
            ratio=round(found / base, 3),
            of=f"{base:.3f}, the share of the usual mix",
        )

    def _bench(self, model: Path, *options: str) -> Figures:
        command = ("-m", "exl_cli", "bench", str(model), "--device", self._device, "--json")
        return last_json(run(*command, *options))

    def _peer(self, model: Path, *options: str) -> Figures:
        if not self._has_peer:
            return {}
        return last_json(run(str(SCRIPTS / "exllamav2_speed.py"), str(model), *options))


def random_model(work: Path, size: str, *options: str) -> Path:
    folder = work / "-".join([size, *options[1:]])
    if not (folder / "config.json").is_file():
        note(f"writing {folder}")
        run(str(SCRIPTS / "random_exl2.py"), str(folder), "--size", size, *options)
    return folder


def run(*arguments: str) -> str:
    """Runs this interpreter with these arguments; returns its stdout and passes on its stderr."""
    note(" ".join(arguments))
    done = subprocess.run(
        [sys.executable, *arguments], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"gpu_figures: exit status {done.returncode} of {' '.join(arguments)}")
    return done.stdout


def last_json(text: str) -> Figures:
    figures: Figures = json.loads(text.splitlines()[-1])
    return figures


def rounded(figures: Figures, *names: str) -> dict[str, Any]:
    """Figures of these names that are not None, rounded to six digits."""
    found = {name: figures[name] for name in names if figures[name] is not None}
    return {name: float(f"{value:.6g}") for name, value in found.items()}


def emit(
    figure: str,
    value: float,
    unit: str,
    peer: float | None = None,
    *,
    is_less_better: bool = False,
    ratio: float | None = None,
    **facts: object,
) -> None:
    if peer is not None:
        ratio = round(peer / value if is_less_better else value / peer, 3)
    rate = float(f"{value:.5g}")
    line = {"figure": figure, "value": rate, "unit": unit, "peer": peer, "ratio": ratio}
    print(json.dumps({**line, **facts}), flush=True)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
