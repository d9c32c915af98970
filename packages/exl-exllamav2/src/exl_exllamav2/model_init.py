"""model_init: the model options that command lines of old programs share."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from exl_core.errors import ExlError
from exl_core.session.resolve import resolve_model
from exl_exllamav2 import environment
from exl_exllamav2.config import ExLlamaV2Config
from exl_exllamav2.errors import OldAssertionError
from exl_exllamav2.model import ExLlamaV2
from exl_exllamav2.notices import warn_once
from exl_exllamav2.tokenizer import ExLlamaV2Tokenizer

_FLAGS: tuple[tuple[str, str, type | None, str], ...] = (
    ("-m", "--model_dir", str, "Path to model directory"),
    ("-gs", "--gpu_split", str, '"auto", or VRAM allocation per GPU in GB'),
    ("-tp", "--tensor_parallel", None, "Load model in tensor-parallel mode"),
    ("-l", "--length", int, "Maximum sequence length"),
    ("-rs", "--rope_scale", float, "RoPE scaling factor"),
    ("-ra", "--rope_alpha", float, "RoPE alpha value (NTK)"),
    ("-ry", "--rope_yarn", float, "RoPE YaRN scaling factor"),
    ("-nfa", "--no_flash_attn", None, "Has no effect"),
    ("-nxf", "--no_xformers", None, "Has no effect"),
    ("-nsdpa", "--no_sdpa", None, "Has no effect"),
    ("-ng", "--no_graphs", None, "Has no effect"),
    ("-lm", "--low_mem", None, "Compute prompts in smaller chunks"),
    ("-ept", "--experts_per_token", int, "Has no effect on models without experts"),
    ("-lq4", "--load_q4", None, "Has no effect"),
    ("-fst", "--fast_safetensors", None, "Has no effect"),
    ("-ic", "--ignore_compatibility", None, "Has no effect"),
    ("-chunk", "--chunk_size", int, "Chunk size ('input length')"),
)


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the model options to a command line."""
    for short, name, kind, text in _FLAGS:
        if kind is None:
            parser.add_argument(short, name, action="store_true", help=text)
        else:
            parser.add_argument(short, name, type=kind, help=text)


def check_args(args: Any) -> None:
    """End the program with exit code 1, unless the options name a model."""
    model_dir: str = getattr(args, "model_dir", None) or ""
    if not model_dir:
        _leave("No model specified")
    known = environment.model_paths()
    try:
        resolve_model(known.get(model_dir) or known.get("*") or model_dir)
    except ExlError as error:
        _leave(str(error))


def print_options(args: Any) -> None:
    """Print the model and the options that differ from their defaults."""
    print(f" -- Model: {args.model_dir}")
    shown = []
    for _, name, kind, _ in _FLAGS[1:]:
        value = getattr(args, name[2:], None)
        if value:
            shown.append(name[2:] if kind is None else f"{name[2:]}: {value}")
    print(f" -- Options: {shown}")


def init(
    args: Any,
    quiet: bool = False,
    allow_auto_split: bool = False,
    skip_load: bool = False,
    benchmark: bool = False,
    max_batch_size: int | None = None,
    max_input_len: int | None = None,
    max_output_len: int | None = None,
    progress: bool = False,
) -> tuple[ExLlamaV2, ExLlamaV2Tokenizer]:
    """Model and tokenizer for the options. With `-gs auto` the model is not loaded yet."""
    config = ExLlamaV2Config(args.model_dir)
    _apply(config, args)
    for name, value in (
        ("max_batch_size", max_batch_size),
        ("max_input_len", max_input_len),
        ("max_output_len", max_output_len),
    ):
        if value is not None:
            setattr(config, name, value)
    config.arch_compat_overrides(warn_only=bool(getattr(args, "ignore_compatibility", False)))
    model = ExLlamaV2(config)
    if not skip_load:
        post_init_load(model, args, quiet, allow_auto_split, benchmark, progress)
    if not quiet:
        print(" -- Loading tokenizer...")
    return model, ExLlamaV2Tokenizer(config)


def post_init_load(
    model: ExLlamaV2,
    args: Any,
    quiet: bool = False,
    allow_auto_split: bool = False,
    benchmark: bool = False,
    progress: bool = False,
) -> None:
    """Load the weights as the options say; `-gs auto` leaves that to the caller."""
    split = getattr(args, "gpu_split", None)
    if getattr(args, "tensor_parallel", False):
        model.load_tp(progress=progress)
    elif split == "auto":
        if not allow_auto_split:
            raise OldAssertionError("auto split is not allowed here")
        return
    else:
        sizes = None if not split else [float(size) for size in split.split(",")]
        model.load(sizes, progress=progress)
    if benchmark and not quiet:
        print(f" -- Loaded model in {model.loaded_model.load_s:.4f} seconds")


def _apply(config: ExLlamaV2Config, args: Any) -> None:
    """Copy the options to the configuration. Programs may lack newer options."""

    def option(name: str) -> Any:
        return getattr(args, name, None)

    if option("length"):
        config.max_seq_len = option("length")
    if option("rope_scale"):
        config.scale_pos_emb = option("rope_scale")
    if option("rope_alpha"):
        config.scale_alpha_value = option("rope_alpha")
    if option("rope_yarn"):
        config.alt_rope_method = "yarn"
        config.yarn_rope_factor = option("rope_yarn")
    for name in ("no_flash_attn", "no_xformers", "no_sdpa", "no_graphs"):
        if option(name):
            setattr(config, name, True)
    if option("low_mem"):
        config.set_low_mem()
    if option("chunk_size"):
        config.max_input_len = option("chunk_size")
        config.max_attention_size = option("chunk_size") ** 2
    if option("load_q4"):
        config.load_in_q4 = True
    if option("experts_per_token"):
        if config.num_experts is None:
            warn_once("--experts_per_token", "has no effect: the model has no experts")
        else:
            config.num_experts_per_token = option("experts_per_token")


def _leave(text: str) -> None:
    print(f" ## Error: {text}", file=sys.stderr)
    sys.exit(1)
