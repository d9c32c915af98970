"""The old converter's command line: translates its flags and runs `exl convert`.

The old working directory `-o` receives exl's intermediate results, and without `-cf` the model too.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from exl_exllamav2 import environment
from exl_exllamav2.errors import refuse
from exl_exllamav2.notices import warn_once

WORK, MODEL = "exl-work", "model"
"""Folders that a conversion uses in its working directory."""

_IGNORED = {
    "measurement_rows": "exl measures on all calibration rows",
    "measurement_length": "exl measures on all calibration rows",
    "rope_scale": "calibration uses the model's own RoPE",
    "rope_alpha": "calibration uses the model's own RoPE",
    "hidden_state_offload_layers": "exl chooses where states are held",
    "status_output": "'exl convert --json' prints its progress as JSON",
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
    if not args.out_dir or not args.in_dir:
        flags.error("-i and -o are required")
    if args.output_measurement:
        refuse(
            "--output_measurement",
            "exl measures as a part of a conversion",
            "Convert with -cf; the result has exl_measurement.json for later conversions.",
        )
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


def run() -> None:
    """Convert as the command line of this process says, and end the process with exl's code."""
    command = [sys.executable, "-m", "exl_cli", "convert", *command_of(sys.argv[1:])]
    sys.exit(subprocess.run(command, check=False).returncode)
