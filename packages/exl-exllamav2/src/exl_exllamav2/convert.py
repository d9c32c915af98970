"""The old converter's command line: translates its flags and runs `exl convert`.

The old working directory `-o` receives exl's intermediate results, and without `-cf` the model too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from exl_core.errors import ExlError
from exl_core.files import read_json_object
from exl_exllamav2 import environment
from exl_exllamav2.errors import refuse
from exl_exllamav2.notices import warn_once

WORK, MODEL = "exl-work", "model"
"""Folders that a conversion uses in its working directory."""
_MEASUREMENT = "measurement.json"
"""Name of the measurement in exl's work directory, and in a directory that `-om` names."""

_STAGES = {
    "check": "Checking",
    "calibrate": "Tokenizing (1)",
    "sensitivity": "Measuring (1)",
    "measure": "Measuring",
    "quantize": "Quantizing",
    "ends": "Embeddings",
    "tune": "Tuning",
    "write": "Compiling",
    "gate": "Comparing",
}
"""Stages of exl, and their names in status lines: those of exllamav2 where it has the stage."""
_AFTER_MEASURING = ("quantize", "ends", "tune", "write", "gate")

_IGNORED = {
    "measurement_rows": "exl measures on all calibration rows",
    "measurement_length": "exl measures on all calibration rows",
    "rope_scale": "calibration uses the model's own RoPE",
    "rope_alpha": "calibration uses the model's own RoPE",
    "hidden_state_offload_layers": "exl chooses where states are held",
}


def parser() -> argparse.ArgumentParser:
    """Flags of the old converter."""
    found = argparse.ArgumentParser(description="Convert a model to EXL2 with exl convert.")
    for short, name, kind in (
        ("-i", "--in_dir", str),
        ("-o", "--out_dir", str),
        ("-cf", "--compile_full", str),
        ("-c", "--cal_dataset", str),
        ("-b", "--bits", float),
        ("-hb", "--head_bits", int),
        ("-ss", "--shard_size", float),
        ("-rs", "--rope_scale", float),
        ("-ra", "--rope_alpha", float),
        ("-om", "--output_measurement", str),
        ("-m", "--measurement", str),
        ("-r", "--dataset_rows", int),
        ("-l", "--length", int),
        ("-mr", "--measurement_rows", int),
        ("-ml", "--measurement_length", int),
        ("-hsol", "--hidden_state_offload_layers", int),
    ):
        found.add_argument(short, name, type=kind)
    for short, name in (
        ("-res", "--resume"),
        ("-nr", "--no_resume"),
        ("-so", "--status_output"),
        ("-fst", "--fast_safetensors"),
    ):
        found.add_argument(short, name, action="store_true")
    return found


def command_of(arguments: Sequence[str]) -> list[str]:
    """Arguments of `exl convert` for the old command line. A usage error exits with code 2."""
    flags = parser()
    args = flags.parse_args(list(arguments))
    return _command(args, flags)


def _command(args: argparse.Namespace, flags: argparse.ArgumentParser) -> list[str]:
    if not args.out_dir or not args.in_dir:
        flags.error("-i and -o are required")
    if args.output_measurement and args.compile_full:
        flags.error("-om ends after the measurement, and -cf writes a model: give one of them")
    if args.measurement:
        _check_measurement(Path(args.measurement))
    for name, text in _IGNORED.items():
        if getattr(args, name):
            warn_once(f"--{name}", f"has no effect: {text}")
    folder = Path(args.out_dir)
    known = environment.model_paths()
    found = [known.get(args.in_dir.rstrip("/")) or known.get("*") or args.in_dir]
    found += ["-o", args.compile_full or str(folder / MODEL), "--work", str(folder / WORK)]
    found += ["--bits", str(4.125 if args.bits is None else args.bits)]
    found += ["--head-bits", str(args.head_bits or 6)]
    for name, option in (
        ("cal_dataset", "--calibration"),
        ("measurement", "--measurement"),
        ("dataset_rows", "--rows"),
        ("length", "--length"),
    ):
        if getattr(args, name):
            found += [option, str(getattr(args, name))]
    if args.shard_size:
        found += ["--shard-size", f"{args.shard_size:g}MB"]
    if args.no_resume and (folder / WORK).is_dir():
        shutil.rmtree(folder / WORK)
    return found


def _check_measurement(path: Path) -> None:
    """Refuse a measurement of the old converter by name. exl reports every other fault itself."""
    if path.is_file() and "last_module_idx" in read_json_object(path, ExlError):
        refuse(
            f"the measurement {path}",
            "it was written by exllamav2, which measures other layouts than exl",
            "Leave out -m: exl measures again. -om writes a measurement for later conversions.",
        )


def status_lines(write: Callable[[str], None]) -> Callable[[Mapping[str, Any]], None]:
    """A receiver of exl's events that writes the old converter's status lines."""
    stage = ""

    def line(name: str, completion: float) -> None:
        values = {"stage": _STAGES.get(name, name), "completion": round(completion, 4)}
        write(f"[STATUS]{json.dumps(values)}[/STATUS]")

    def receive(event: Mapping[str, Any]) -> None:
        nonlocal stage
        found = event.get("stage", "")
        if found != stage or event["event"] == "done":
            if stage:
                line(stage, 1.0)
            stage = found
            if stage:
                line(stage, 0.0)
        elif event["event"] == "step" and event["total"]:
            line(stage, event["done"] / event["total"])

    return receive


def run() -> None:
    """Convert as the command line of this process says, and end the process with exl's code."""
    flags = parser()
    args = flags.parse_args(sys.argv[1:])
    command = [sys.executable, "-m", "exl_cli", "convert", *_command(args, flags)]
    _make_folders(args)
    if not args.status_output and not args.output_measurement:
        sys.exit(subprocess.run(command, check=False).returncode)
    target = None if args.output_measurement is None else Path(args.output_measurement)
    if target is not None and target.is_dir():
        target = target / _MEASUREMENT
    tell = status_lines(lambda text: print(text, flush=True)) if args.status_output else None
    source = Path(args.out_dir) / WORK / _MEASUREMENT
    sys.exit(_follow([*command, "--json"], tell, source, target))


def _make_folders(args: argparse.Namespace) -> None:
    """Make the working directory, and room for the result, as the old converter did."""
    Path(args.out_dir).mkdir(parents=True, exist_ok=True)
    if args.compile_full:
        result = Path(args.compile_full)
        result.parent.mkdir(parents=True, exist_ok=True)
        if result.is_dir() and not any(result.iterdir()):
            result.rmdir()  # exl makes it itself, once the result is complete


def _follow(
    command: list[str],
    tell: Callable[[Mapping[str, Any]], None] | None,
    source: Path,
    target: Path | None,
) -> int:
    """Run a conversion and pass on its events; with `target` only up to the end of the measurement.

    `source` is the measurement in the work directory, which is complete once a later stage begins.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "a pipe was asked for"
        for text in process.stdout:
            event = json.loads(text)
            if target is not None and event.get("stage") in _AFTER_MEASURING:
                process.send_signal(signal.SIGINT)
                process.communicate()
                shutil.copyfile(source, target)
                print(f" -- Measurement written to {target}", flush=True)
                return 0
            if tell is not None:
                tell(event)
    return process.returncode
