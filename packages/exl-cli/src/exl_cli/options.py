"""Options that several commands share, and their ranges. Declarations only; imports no torch.

`sampling_options.py` has the options of the sampler, `engine_options.py` those of the engine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from exl_core.errors import RequestError
from exl_core.session.names import HubName, parse_hub_name
from exl_core.session.resolve import resolve_model
from exl_core.settings import MAX_THREADS

_RUNNING = "Running"

_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)\s*(k|m|g|t)?b?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


MODEL_HELP = (
    "Model directory, .gguf file, hub name owner/name (:Q4_K_M, :4.0bpw or @revision selects one "
    "of several), name or unique prefix of 'exl list', or 'smollm2'. Default: EXL_MODEL, or else "
    "smollm2."
)


def complete_pulled(incomplete: str) -> list[str]:
    """Names of models in the hub's cache, for the shell's completion, as the user began them: with
    their owner or without."""
    from exl_core.session.names import unique_prefix
    from exl_core.session.pulled import pulled_models

    found = unique_prefix(incomplete, {model.name: model for model in pulled_models()})
    return [
        name if name.lower().startswith(incomplete.lower()) else name.partition("/")[2]
        for name in found
    ]


def complete_formats(incomplete: str) -> list[str]:
    """Names of prompt formats, for the shell's completion."""
    from exl_core.prompt.formats import all_formats

    names = [name for one in all_formats().values() for name in (one.name, *one.also)]
    return [name for name in names if name.startswith(incomplete)]


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help=MODEL_HELP, show_default=False, autocompletion=complete_pulled
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "-m",
        "--model",
        metavar="MODEL",
        help="The model, given as an option.",
        autocompletion=complete_pulled,
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option(
        "-n",
        "--max-tokens",
        metavar="N",
        min=-1,
        help="Maximum number of tokens to generate. -1: until the context is full.",
    ),
]
CtxSize = Annotated[
    int | None,
    typer.Option(
        "-c",
        "--ctx-size",
        metavar="N",
        min=2,
        help="Context size in tokens. Default: the model's context length, at most 8192.",
        rich_help_panel=_RUNNING,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        min=1,
        max=MAX_THREADS,
        help="Number of CPU threads. Default: all cores that this process may use. Experts on the "
        "CPU beside a GPU (--experts-on) leave one of them to the wait for the GPU.",
        rich_help_panel=_RUNNING,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="cpu, cuda or cuda:N. Default: cuda if a GPU is usable, otherwise cpu.",
        rich_help_panel=_RUNNING,
    ),
]
CacheType = Annotated[
    str,
    typer.Option(
        "--cache-type",
        metavar="TYPE",
        help="Precision of the key-value cache: fp16, q8, fp8, q6 or q4, from largest to smallest.",
        rich_help_panel=_RUNNING,
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Dequantize the weights to float16 and compute in float32: slower, for comparison.",
        rich_help_panel=_RUNNING,
    ),
]
HeldMemory = Annotated[
    str | None,
    typer.Option(
        "--held-memory",
        metavar="SIZE",
        help="Limit on the memory for weights, such as 2GB. Layers beyond it are read from the "
        "files again in every pass, one at a time: slow, for models larger than the memory. 0: "
        "keep no layer.",
        rich_help_panel=_RUNNING,
    ),
]
Split = Annotated[
    str,
    typer.Option(
        "--split",
        metavar="HOW",
        help="Devices of the layers. 'auto': one GPU if the model fits there, then more GPUs, then "
        "the CPU for the first layers. 'none': one device. '20,24': GB of weights for each GPU. "
        "'cpu=8,cuda:0=24': layers for each device.",
        rich_help_panel=_RUNNING,
    ),
]
CpuLayers = Annotated[
    int | None,
    typer.Option(
        "--cpu-layers",
        metavar="N",
        min=0,
        help="Keep the first N layers on the CPU, and the others on the GPU.",
        rich_help_panel=_RUNNING,
    ),
]
ExpertsOn = Annotated[
    str,
    typer.Option(
        "--experts-on",
        metavar="WHERE",
        help="Device of the experts. 'cpu': the host's memory holds them, and the CPU computes "
        "them. N: the same for N layers. 'device': the GPU holds and computes them. 'auto': the "
        "CPU gets the experts of the fewest layers whose absence makes the rest fit the GPU.",
        rich_help_panel=_RUNNING,
    ),
]
TensorParallel = Annotated[
    str,
    typer.Option(
        "--tensor-parallel",
        metavar="N|auto",
        help="Divide every matrix among N processes, which compute each token together, each on "
        "a GPU of its own or all on the CPU. --threads is the number of threads of all of them. "
        "auto: as many as the GPUs and their memory suggest.",
        rich_help_panel=_RUNNING,
    ),
]
Exchange = Annotated[
    str,
    typer.Option(
        "--exchange",
        metavar="auto|nccl",
        help="How the GPUs of --tensor-parallel sum their results. auto: through memory that they "
        "share, if that works; otherwise with NCCL.",
        rich_help_panel=_RUNNING,
    ),
]
BatchInvariant = Annotated[
    bool,
    typer.Option(
        "--batch-invariant",
        help="Make logits independent of other requests, of prompt chunks and of drafts, to the "
        "last bit. Slower on a GPU, and in prefill with AMX and without VNNI.",
        rich_help_panel=_RUNNING,
    ),
]
EvalBatchInvariant = Annotated[
    bool,
    typer.Option(
        "--batch-invariant/--no-batch-invariant",
        help="On the CPU, make figures independent of batches and chunks, to the last bit. Slower "
        "prefill with AMX and without VNNI.",
        rich_help_panel=_RUNNING,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        metavar="TEXT",
        help="Stop before this text. May be given several times.",
        show_default=False,
    ),
]
System = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="System prompt of a conversation.")
]
NoSystem = Annotated[
    bool, typer.Option("--no-system", help="Use no system prompt, not even the default one.")
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="NAME",
        help="Prompt format to use instead of the model's chat template. "
        "'exl chat --list-formats' lists them.",
        autocompletion=complete_formats,
    ),
]
AllowSpecial = Annotated[
    bool,
    typer.Option(
        "--allow-special",
        help="Encode text such as <|im_start|> in messages as special tokens, which lets a message "
        "imitate other roles. Without it, only the chat template writes special tokens.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Quiet = Annotated[
    bool, typer.Option("-q", "--quiet", help="Print only errors to stderr: no progress, no speed.")
]


def pick_model(argument: str | None, option: str | None) -> str | None:
    """The model, from the argument or from the option. Two different ones are an error.

    A hub name is downloaded if it is not on this machine, with a progress bar on a terminal.
    """
    if argument is not None and option is not None and argument != option:
        raise RequestError(
            "two models are given",
            got=f"{argument!r} and --model {option!r}",
            next_step="Keep one; a prompt goes with -p.",
        )
    spec = argument if option is None else option
    if spec is not None and parse_hub_name(spec) is not None:
        return str(resolve_model(spec, _download))
    return spec


def _download(name: HubName) -> Path:
    from exl_cli.render import bytes_progress
    from exl_core.session.hub import download

    with bytes_progress(f"pulling {name}", is_quiet=False) as progress:
        return download(name, progress)


def token_limit(max_tokens: int) -> int | None:
    """Token limit for the engine. None, from `-n -1`: only the context limits the reply."""
    if max_tokens == 0:
        raise RequestError(
            "the token limit is 0", expected="-n 1 or more, or -1 for no limit", got="-n 0"
        )
    return None if max_tokens < 0 else max_tokens


def parse_size(text: str, option: str, *, least: int = 1, example: str = "2GB") -> int:
    """Bytes of a size such as 2GB or 500 MB. RequestError if it is below `least`, or no size."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[(match[2] or "").lower()]) if match else -1
    if size < least:
        raise RequestError(
            f"{option} is not a size",
            expected=f"a number of bytes, such as {example}",
            got=text[:50],
        )
    return size


def held_bytes(held_memory: str | None) -> int | None:
    """Value of --held-memory for `LoadOptions`."""
    if held_memory is None:
        return None
    return parse_size(held_memory, "--held-memory", least=0)


def examples(lines: Sequence[tuple[str, str]]) -> str:
    """Last section of a help page: command lines, each below a comment on its effect."""
    shown = "\n\n".join(f"  # {what}\n  {command}" for command, what in lines)
    return "Examples:\n\n" + shown.replace("[", "\\[")
