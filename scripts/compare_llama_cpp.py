"""Compare the speed of exl and llama.cpp on the CPU. Usage: compare_llama_cpp.py [--threads 2] ...

Two comparisons of the same work (`exl bench` and `llama_cpp_speed.py` describe the timed work):

  EXL2 / Q4_0   an EXL2 model of 4 bits (`write_rtn_exl2.py`) in exl, and llama.cpp's fastest format
                in llama.cpp; both are made from the model's GGUF file
  GGUF          that GGUF file in both programs; the only comparison with --only-file

Each measurement is a separate process. They alternate (llama.cpp, exl, llama.cpp, exl), so that a
slowdown of the machine affects both. A process reports the median of its repetitions; the figure is
the median over the rounds. The floor is the time to read the bytes of one token at the bandwidth
that `exl bench` measured. Prints a table, and JSON as the last line.

The machine must be idle. llama.cpp's threads wait for each other by spinning, so losing the core of
one thread stops all of them. Needs llama-cpp-python, in this environment or in that of
--peer-python: `llama_cpp_speed.py` says how to build it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from exl_cli.render import columns_table, format_bytes, print_answer
from exl_core.errors import ExlError, RequestError
from exl_core.formats.containers.gguf import GgufSource
from exl_core.session.resolve import resolve_model

SCRIPTS = Path(__file__).resolve().parent
INSTALL = "python -m pip install llama-cpp-python==0.3.36; llama_cpp_speed.py says how to build it"
TESTS = ("prefill", "decode")
BUSY = 0.5  # load average of the last minute above which a warning is printed
Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Work:
    """Work that both programs do."""

    prefill: int
    decode: int
    threads: int
    repeat: int

    @property
    def options(self) -> list[str]:
        """Command-line options, with the names that both programs use."""
        counts = asdict(self)
        return [text for name, count in counts.items() for text in (f"--{name}", str(count))]


@dataclass(frozen=True, slots=True)
class Case:
    """Two model files that are compared, and the figures of each round."""

    name: str
    peer_file: Path
    own_model: Path
    peer: list[Figures]
    own: list[Figures]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(". Usage")[0])
    parser.add_argument("-m", "--model", metavar="MODEL.gguf", help="default: smollm2")
    parser.add_argument("--group-size", type=int, default=32, help="group size of the EXL2 model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3, help="repetitions within a round")
    parser.add_argument("--only-file", action="store_true", help="leave the EXL2 model out")
    parser.add_argument(
        "--peer-python", default=sys.executable, help="interpreter that has llama-cpp-python"
    )
    args = parser.parse_args()
    work = Work(args.prefill, args.decode, args.threads, args.repeat)
    load_average = os.getloadavg()[0]
    if load_average > BUSY:
        note(f"the machine is busy (load average {load_average:.2f}): the ratios will be off")
    try:
        peer = Peer(args.peer_python)
        if peer.python == sys.executable and importlib.util.find_spec("llama_cpp") is None:
            raise RequestError("llama.cpp is not installed", next_step=INSTALL)
        path = resolve_model(args.model)
        if path.is_dir():
            raise RequestError("only a GGUF file can be given to both", got=path)
        with tempfile.TemporaryDirectory(prefix="exl-compare-") as folder:
            cases = [Case(path.stem, path, path, [], [])]
            if not args.only_file:
                cases.insert(0, prepare(peer, path, Path(folder), args.group_size, args.threads))
            summary = {"load_average": load_average, **compare(peer, cases, work, args.rounds)}
    except ExlError as error:
        print(f"compare_llama_cpp: error: {error}", file=sys.stderr)
        return error.exit_code
    show(summary)
    print(json.dumps(summary))
    return 0


def prepare(peer: Peer, path: Path, folder: Path, group_size: int, threads: int) -> Case:
    q4_0, own = folder / "q4_0.gguf", folder / "exl2"
    note("writing Q4_0 and EXL2")
    peer.run("requantize", str(path), str(q4_0), "--threads", str(threads))
    written = run("write_rtn_exl2.py", str(path), str(own), "--group-size", str(group_size))
    bits = last_json(written)["bits_per_weight"]
    return Case(f"EXL2 {bits:.2f} bits / Q4_0", q4_0, own, [], [])


def compare(peer: Peer, cases: list[Case], work: Work, rounds: int) -> dict[str, object]:
    for number in range(1, rounds + 1):
        for case in cases:
            note(f"round {number} of {rounds}, {case.name}: llama.cpp")
            theirs = peer.run("speed", str(case.peer_file), *work.options)
            case.peer.append(last_json(theirs))
            note(f"round {number} of {rounds}, {case.name}: exl")
            own = run("-m", "exl_cli", "bench", str(case.own_model), *work.options, "--json")
            case.own.append(last_json(own))
    every = [figures for case in cases for figures in case.own]
    bandwidth = max(figures["read_bytes_per_s"] for figures in every)
    return {
        **asdict(work),
        "rounds": rounds,
        "instruction_set": every[0]["instruction_set"],
        "llama_cpp": cases[0].peer[0]["version"],
        "llama_cpp_features": cases[0].peer[0]["features"],
        "read_bytes_per_s": bandwidth,
        "cases": [summarize(case, bandwidth) for case in cases],
    }


def summarize(case: Case, bandwidth: float) -> dict[str, object]:
    own = case.own[0]
    cache_bytes = own["bytes_per_token"] - own["decode_weight_bytes"]  # float16 there as well
    peer = side_figures(case.peer, gguf_decode_bytes(case.peer_file) + cache_bytes, bandwidth)
    exl = side_figures(case.own, own["bytes_per_token"], bandwidth)
    ratios = {test: exl[f"{test}_tok_s"] / peer[f"{test}_tok_s"] for test in TESTS}
    return {"name": case.name, "llama_cpp": peer, "exl": exl, "ratios": ratios}


def side_figures(rounds: list[Figures], read_bytes: int, bandwidth: float) -> Figures:
    """Medians over the rounds, and the decode speed as a share of the speed at the floor."""
    figures: dict[str, Any] = {"bytes_per_token": read_bytes, "floor_tok_s": bandwidth / read_bytes}
    for test in TESTS:
        rates = [found[f"{test}_tok_s"] for found in rounds]
        figures[f"{test}_tok_s"] = median(rates)
        figures[f"{test}_tok_s_rounds"] = rates
    figures["floor_share"] = figures["decode_tok_s"] / figures["floor_tok_s"]
    return figures


def gguf_decode_bytes(path: Path) -> int:
    """Bytes of tensors that a decode step reads: of experts the used ones, and all others, except
    an untied embedding, from which it reads single rows."""
    source = GgufSource(path)
    arch = source.metadata["general.architecture"]
    fields: Mapping[str, Any] = source.metadata
    every = fields.get(f"{arch}.expert_count", 1)
    used = fields.get(f"{arch}.expert_used_count", 1)
    total = 0
    for name, tensor in source.tensors.items():
        is_part = "_exps." in name
        total += tensor.size_bytes * used // every if is_part else tensor.size_bytes
    is_tied = "output.weight" not in source.tensors
    return total if is_tied else total - source.tensors["token_embd.weight"].size_bytes


@dataclass(frozen=True, slots=True)
class Peer:
    """llama.cpp in the environment of an interpreter."""

    python: str

    def run(self, *command: str) -> str:
        """Runs llama_cpp_speed.py; returns its stdout."""
        return run("llama_cpp_speed.py", *command, python=self.python)


def run(*command: str, python: str = sys.executable) -> str:
    """Runs a script of this folder, or a module (-m), with an interpreter; returns its stdout."""
    first, *rest = command
    program = [first] if first == "-m" else [str(SCRIPTS / first)]
    done = subprocess.run([python, *program, *rest], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["nothing on stderr"]
        raise ExlError(
            "a measurement failed",
            where=" ".join(command[:3]),
            got=f"exit code {done.returncode}: {lines[-1][:300]}",
        )
    return done.stdout


def last_json(text: str) -> Figures:
    figures: Figures = json.loads(text.splitlines()[-1])
    return figures


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def show(summary: Mapping[str, Any]) -> None:
    table = columns_table("", "", "prefill tok/s", "decode tok/s", "read a token", "of the floor")
    for case in summary["cases"]:
        for side in ("llama_cpp", "exl"):
            figures = case[side]
            table.add_row(
                case["name"] if side == "llama_cpp" else "",
                side.replace("_", "."),
                f"{figures['prefill_tok_s']:.1f}",
                f"{figures['decode_tok_s']:.1f}",
                format_bytes(figures["bytes_per_token"]),
                f"{figures['floor_share']:.1%}",
            )
        ratios = case["ratios"]
        table.add_row("", "ratio", f"{ratios['prefill']:.2f}", f"{ratios['decode']:.2f}", "", "")
    facts = (
        f"{summary['threads']} threads, {summary['instruction_set']}, memory read at "
        f"{format_bytes(summary['read_bytes_per_s'])}/s; prefill of {summary['prefill']} and "
        f"decode of {summary['decode']} tokens, median of {summary['rounds']} rounds"
    )
    print_answer(facts, "", table)


if __name__ == "__main__":
    sys.exit(main())
