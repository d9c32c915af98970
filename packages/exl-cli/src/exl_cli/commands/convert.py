"""`exl convert`: a model to EXL2, at any rate, with what it cost.

How a conversion runs is `exl_core/convert/job.py`'s; what it is given and what it says is
`conversion.py`'s. This module has the options.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from exl_cli import options
from exl_cli.interrupt import exits_at_once
from exl_core.errors import RequestError

EXAMPLES = (
    ("exl convert model -o model-4.0 --bits 4.0", "calibrated on what the model itself writes"),
    ("exl convert model.gguf -o out --bits 3.5 --calibration texts.jsonl", "on texts of yours"),
    ("exl convert model -o out-5 --bits 5 --measurement out/exl_measurement.json", "another rate"),
    ("exl convert model -o model-4.0 --bits 4.0 --resume", "go on after a kill or a full disk"),
    ("exl convert model -o out --bits 4 --json", "events for a program, one a line"),
)
SELF = "self"
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)\s*(k|m|g|t)?b?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}

_JOB, _EFFORT = "The job", "Calibration"

Output = Annotated[
    Path,
    typer.Option(
        "-o", "--output", metavar="DIR", help="The new model directory.", show_default=False
    ),
]
Bits = Annotated[
    float,
    typer.Option(
        "--bits", metavar="B", help="Bits a weight of the layers, scales and tables included."
    ),
]
HeadBits = Annotated[
    int, typer.Option("--head-bits", metavar="N", help="Of the output head: 2, 3, 4, 5, 6 or 8.")
]
Calibration = Annotated[
    str,
    typer.Option(
        "--calibration",
        metavar="TEXT",
        help="What errors are measured on: 'self' for text that the model writes, a text, JSONL "
        "or parquet file, or a data set of the hub.",
        rich_help_panel=_EFFORT,
    ),
]
Rows = Annotated[
    int | None,
    typer.Option(
        "--rows",
        metavar="N",
        min=1,
        help="Rows of calibration text. Without it: 64, with --fast 16.",
        rich_help_panel=_EFFORT,
    ),
]
Length = Annotated[
    int,
    typer.Option(
        "--length",
        metavar="N",
        min=32,
        help="Tokens in a row, at most what the model was made for.",
        rich_help_panel=_EFFORT,
    ),
]
Fast = Annotated[
    bool,
    typer.Option(
        "--fast",
        help="Less calibration text and fewer things tried: a few times faster, a little worse.",
        rich_help_panel=_EFFORT,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed", metavar="N", min=0, help="Of whatever is drawn.", rich_help_panel=_EFFORT
    ),
]
MeasurementFile = Annotated[
    Path | None,
    typer.Option(
        "--measurement",
        metavar="FILE",
        help="The exl_measurement.json of another conversion of this model: nothing is measured.",
        rich_help_panel=_JOB,
    ),
]
Work = Annotated[
    Path | None,
    typer.Option(
        "--work",
        metavar="DIR",
        help="Where unfinished work is kept. Without it: DIR.work beside the output, removed at "
        "the end.",
        rich_help_panel=_JOB,
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Go on with what is in the work directory.", rich_help_panel=_JOB
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Publish a result that is too far from its source, too.",
        rich_help_panel=_JOB,
    ),
]
ShardSize = Annotated[
    str,
    typer.Option(
        "--shard-size", metavar="SIZE", help="Most bytes in a weight file, such as 500MB."
    ),
]
Events = Annotated[bool, typer.Option("--json", help="Print events as JSON, one object a line.")]


def convert(
    ctx: typer.Context,
    *,
    output: Output,
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    bits: Bits = 4.0,
    head_bits: HeadBits = 6,
    calibration: Calibration = SELF,
    rows: Rows = None,
    length: Length = 1024,
    fast: Fast = False,
    seed: Seed = 0,
    measurement: MeasurementFile = None,
    work: Work = None,
    resume: Resume = False,
    force: Force = False,
    shard_size: ShardSize = "8GB",
    json: Events = False,
    quiet: options.Quiet = False,
    device: options.Device = "auto",
) -> None:
    """Convert a model to EXL2: from safetensors in 16 or 32 bits, or GGUF.

    Measures what each layout of each matrix would cost, chooses the best within the bits, quantizes
    layer by layer, and compares the result with the source on a text of its own. It gets its name
    when it has been read back from the disk and is close enough; until then it is DIR.partial.
    Whatever ends it, --resume goes on, to the same bytes.
    """
    spec = options.pick_model(model, model_option)
    with exits_at_once():
        from exl_cli import conversion
    conversion.run(
        conversion.Wish(
            spec=spec,
            out=output,
            bits=bits,
            head_bits=head_bits,
            calibration=calibration,
            rows=rows,
            length=length,
            is_fast=fast,
            seed=seed,
            measurement=measurement,
            work=work,
            shard_bytes=_size(shard_size),
            device=device,
        ),
        command=_command(ctx),
        resume=resume,
        force=force,
        is_json=json,
        is_quiet=quiet,
    )


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[(match[2] or "").lower()]) if match else 0
    if size < 1:
        raise RequestError(
            "--shard-size is not a size", expected="a number of bytes, such as 8GB", got=text[:50]
        )
    return size


def _command(ctx: typer.Context) -> str:
    """What was asked for, as a command that goes on with it: all that is not a default."""
    words = ["exl", "convert"]
    for parameter in ctx.command.params:
        value = ctx.params.get(parameter.name or "")
        if parameter.name in ("resume", "force") or value in (None, False, parameter.default):
            continue
        option = max(parameter.opts, key=len) if parameter.param_type_name == "option" else None
        words += [option] if option else []
        words += [] if value is True else [str(value)]
    return shlex.join([*words, "--resume"])
