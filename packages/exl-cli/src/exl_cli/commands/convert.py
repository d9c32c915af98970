"""`exl convert`: convert a model to EXL2 or EXL3 at any bits per weight, and report the loss.

This module declares the options. `conversion.py` prepares the inputs and prints the events.
`exl_core/convert/job.py` runs the conversion.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from exl_cli import options
from exl_cli.interrupt import exits_at_once
from exl_core.errors import RequestError
from exl_core.settings import default_model, is_offline

EXAMPLES = (
    ("exl convert model -o model-4.0 --bits 4.0", "calibrate on text that the model generates"),
    ("exl convert model -o model-2.5 --format exl3 --bits 2.5", "trellis codes, for few bits"),
    ("exl convert model.gguf -o out --bits 3.5 --calibration texts.jsonl", "on your own texts"),
    (
        "exl convert model -o out-5 --bits 5 --measurement out/exl_measurement.json",
        "reuse a measurement at another bit rate",
    ),
    ("exl convert model -o out --bits 4 --json", "events as JSON, one per line"),
    ("exl convert model -o out --from-bin", "pickled weights as safetensors, not quantized"),
    ("exl convert model -o out --repack --shard-size 2GB", "the same tensors in smaller files"),
)
SELF = "self"

_JOB, _EFFORT, _COPY = "The job", "Calibration", "Without quantization"

Output = Annotated[
    Path,
    typer.Option(
        "-o", "--output", metavar="DIR", help="Model directory to create.", show_default=False
    ),
]
Bits = Annotated[
    float,
    typer.Option(
        "--bits",
        metavar="B",
        help="Bits per weight of the layers, including scales and group tables.",
    ),
]
HeadBits = Annotated[
    float,
    typer.Option(
        "--head-bits",
        metavar="N",
        help="Bits per weight of the output head: 2, 3, 4, 5, 6 or 8, for EXL3 also 1, 1.5, 2.5, "
        "3.5, 7, and 16 for float16.",
    ),
]
FormatOption = Annotated[
    Literal["exl2", "exl3"],
    typer.Option("--format", help="Format of the output. EXL3 loses less at few bits."),
]
CodebookOption = Annotated[
    Literal["mul1", "mcg", "3inst"] | None,
    typer.Option(
        "--codebook",
        help="Codebook of EXL3's trellis codes. Default: mul1. The others have no rates of 1.5, "
        "2.5 and 3.5.",
        show_default=False,
    ),
]
Calibration = Annotated[
    str,
    typer.Option(
        "--calibration",
        metavar="TEXT",
        help="Calibration text: 'self' for text that the model generates, a text, JSONL or parquet "
        "file, or a data set of the hub.",
        rich_help_panel=_EFFORT,
    ),
]
Rows = Annotated[
    int | None,
    typer.Option(
        "--rows",
        metavar="N",
        min=1,
        help="Number of calibration rows. Default: 64, with --fast 16; 256 for EXL3 on a GPU.",
        rich_help_panel=_EFFORT,
    ),
]
Length = Annotated[
    int,
    typer.Option(
        "--length",
        metavar="N",
        min=32,
        help="Tokens per calibration row, limited to the model's maximum context.",
        rich_help_panel=_EFFORT,
    ),
]
Fast = Annotated[
    bool,
    typer.Option(
        "--fast",
        help="Use less calibration text and try fewer layouts: a few times faster, slightly worse "
        "quality.",
        rich_help_panel=_EFFORT,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed",
        metavar="N",
        min=0,
        help="Seed of all random draws.",
        rich_help_panel=_EFFORT,
    ),
]
MeasurementFile = Annotated[
    Path | None,
    typer.Option(
        "--measurement",
        metavar="FILE",
        help="exl_measurement.json of an earlier conversion of this model. Skips the measurement.",
        rich_help_panel=_JOB,
    ),
]
Work = Annotated[
    Path | None,
    typer.Option(
        "--work",
        metavar="DIR",
        help="Directory for intermediate results. Default: DIR.work beside the output, removed at "
        "the end.",
        rich_help_panel=_JOB,
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Accepted for scripts: an unfinished conversion continues without it.",
        rich_help_panel=_JOB,
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Publish the result even if it diverges too far from its source.",
        rich_help_panel=_JOB,
    ),
]
ShardSize = Annotated[
    str,
    typer.Option(
        "--shard-size", metavar="SIZE", help="Maximum size of a weight file, such as 500MB."
    ),
]
FromBin = Annotated[
    bool,
    typer.Option(
        "--from-bin",
        help="Only write the pickled weights (.bin, .pt) of the model as safetensors. A separate "
        "process reads them and accepts tensors only.",
        rich_help_panel=_COPY,
    ),
]
Repack = Annotated[
    bool,
    typer.Option(
        "--repack",
        help="Only copy the model, to weight files of at most --shard-size.",
        rich_help_panel=_COPY,
    ),
]
Events = Annotated[bool, typer.Option("--json", help="Print events as JSON, one object per line.")]


def convert(
    ctx: typer.Context,
    *,
    output: Output,
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    target_format: FormatOption = "exl2",
    bits: Bits = 4.0,
    head_bits: HeadBits = 6,
    codebook: CodebookOption = None,
    calibration: Calibration = SELF,
    rows: Rows = None,
    length: Length = 1024,
    fast: Fast = False,
    seed: Seed = 0,
    measurement: MeasurementFile = None,
    work: Work = None,
    resume: Resume = False,  # noqa: ARG001 an unfinished conversion continues in any case
    force: Force = False,
    shard_size: ShardSize = "8GB",
    from_bin: FromBin = False,
    repack: Repack = False,
    json: Events = False,
    quiet: options.Quiet = False,
    device: options.Device = "auto",
) -> None:
    """Convert a model that is not EXL2, EXL3 or GPTQ to EXL2 or EXL3, from safetensors or GGUF.

    The conversion estimates the loss of each layout of each matrix, chooses the layouts with the
    least loss for the given bits, quantizes layer by layer, and compares the result with the
    source on held-out text. The result is DIR.partial until it has been read back and is close
    enough to the source. After an interruption, the same command continues, with the same bytes.
    """
    spec = options.pick_model(model, model_option)
    shard_bytes = options.parse_size(shard_size, "--shard-size", example="8GB")
    with exits_at_once():
        from exl_cli import conversion
    if from_bin or repack:
        _refuse_other_options(ctx)
        conversion.repack(spec, output, shard_bytes, from_bin=from_bin)
        return
    wish = conversion.Wish(
        spec=spec,
        out=output,
        bits=bits,
        head_bits=head_bits,
        target=target_format,
        codebook=codebook,
        calibration=calibration,
        rows=rows,
        length=length,
        is_fast=fast,
        seed=seed,
        measurement=measurement,
        work=work,
        shard_bytes=shard_bytes,
        device=device,
    )
    conversion.run(wish, command=_command(ctx), force=force, is_json=json, is_quiet=quiet)


def _refuse_other_options(ctx: typer.Context) -> None:
    """Raises for options of a quantization, which a copy would ignore."""
    used = ("output", "model", "model_option", "shard_size", "from_bin", "repack", "quiet")
    for parameter in ctx.command.params:
        value = ctx.params.get(parameter.name or "")
        if parameter.name not in used and value not in (None, False, parameter.default):
            raise RequestError(
                f"{max(parameter.opts, key=len)} does not go with --from-bin or --repack",
                next_step="Copy first, then convert the copy.",
            )


def _command(ctx: typer.Context) -> str:
    """Command line that runs this conversion again, wherever its options came from.

    It has every option that was typed or is not a default. Defaults that a profile or the file of
    settings set are in it as options, and so is the model that they or `EXL_MODEL` name.
    """
    words = ["exl", "convert"]
    has_model = False
    for parameter in ctx.command.params:
        name = parameter.name or ""
        value = ctx.params.get(name)
        is_typed = getattr(ctx.get_parameter_source(name), "name", None) == "COMMANDLINE"
        is_default = value == parameter.default and not is_typed
        if name == "resume" or value in (None, False) or is_default:
            continue
        if name in ("model", "model_option"):
            words += [] if has_model else _model_words(str(value))
            has_model = True
            continue
        words += [max(parameter.opts, key=len), *([] if value is True else [str(value)])]
    spec = default_model()
    if spec is not None and not has_model:
        words += _model_words(spec)
    return shlex.join([*words, "--offline"] if is_offline() else words)


def _model_words(spec: str) -> list[str]:
    """The model as an argument, or as an option where it would be read as one."""
    return [f"--model={spec}"] if spec.startswith("-") else [spec]
