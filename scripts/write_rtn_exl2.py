"""Write an EXL2 model by rounding to nearest. Usage: write_rtn_exl2.py MODEL OUT [--bits 4] ...

Replaces a converter for measurements of the speed of EXL2 files, or of reading them. The files are
like those of a converter, but codes are the nearest ones and do not depend on activations. A text
therefore scores worse than with a calibrated file of the same size. MODEL is anything that exl
loads.

Everything that affects speed is as in files of converters: features are permuted, with one order
for all matrices that read the same input (here by the size of their weights), the head is quantized
separately from the embedding, and embedding and norms are float16. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from exl_core.arch.modules import Kind, module_table
from exl_core.arch.spec import ModelConfig
from exl_core.convert import side_files
from exl_core.convert.layers import stored_vector
from exl_core.errors import ExlError, RequestError, UnsupportedModelError
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.codecs.exl2 import layout as exl2
from exl_core.formats.codecs.exl2 import writer as exl2_writer
from exl_core.session.open import open_checkpoint
from exl_core.session.resolve import resolve_model
from exl_core.settings import read_settings

GROUP_SIZES = (32, 64, 128)
CHUNK_VALUES = 1 << 17  # values per search: half a MiB of float32, which fits a core's cache
SCALES_TRIED = 5  # of 16 scale codes: scales down to 0.56 of the largest


class Format(NamedTuple):
    """Storage format of one matrix."""

    bits: int
    group_size: int


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("--bits", type=int, default=4, choices=exl2.WIDTHS)
    parser.add_argument("--group-size", type=int, default=32, choices=GROUP_SIZES)
    parser.add_argument("--head-bits", type=int, default=4, choices=exl2.WIDTHS)
    args = parser.parse_args()
    try:
        torch.set_num_threads(1)
        body, head = Format(args.bits, args.group_size), Format(args.head_bits, args.group_size)
        summary = write_model(args.model, args.out, body, head)
    except ExlError as error:
        print(f"write_rtn_exl2: error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(summary))
    return 0


def write_model(spec: str, out: Path, body: Format, head: Format) -> dict[str, object]:
    """Writes the directory. Returns a summary with the bits per weight, head included."""
    started = time.perf_counter()
    path = resolve_model(spec)
    source, config, quantization = open_checkpoint(path)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RequestError("the output directory is in use", where=out, expected="an empty one")
    checkpoint = Checkpoint(source, config, quantization)
    files = side_files.collect(path, source, config, _settings(body, head))
    tensors: dict[str, Tensor] = {}
    bits = weights = 0
    for name, part in model_tensors(checkpoint, config, body, head):
        if isinstance(part, exl2.Exl2Linear):
            stem = name.removesuffix(".weight")
            tensors |= {f"{stem}.{piece}": getattr(part, piece) for piece in exl2.PARTS}
            bits += part.size_bytes * 8
            weights += prod(module_table(config)[name].shape)
        else:
            tensors[name] = part
        print(f"{name}: {describe(part)}")
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "output.safetensors")
    files.write(out)
    side_files.check(out, path, source, config)
    return {
        "model": str(path),
        "out": str(out),
        "bits": body.bits,
        "group_size": body.group_size,
        "head_bits": head.bits,
        "quantized_weights": weights,
        "bits_per_weight": round(bits / weights, 4),
        "seconds": round(time.perf_counter() - started, 1),
    }


def model_tensors(
    checkpoint: Checkpoint, config: ModelConfig, body: Format, head: Format
) -> Iterator[tuple[str, Tensor | exl2.Exl2Linear]]:
    """All tensors of the file by canonical name, in the order of the forward pass."""
    table = module_table(config)
    seen: set[str] = set()
    for name in checkpoint.stored:
        if name in seen:
            continue
        if table[name].kind is Kind.BIAS:
            bias = checkpoint.vector(name)
            yield name, pad(bias, (0, -len(bias) % exl2.COLUMN_STEP)).half()
        elif table[name].is_norm:
            yield name, stored_vector(table[name], checkpoint.norm(name))
        elif not table[name].is_converted:
            yield name, matrix(checkpoint, name).half()
        else:
            group = [row.name for row in table.packed_with(table[name])]
            seen.update(group)
            is_head = table[name].kind is Kind.HEAD
            yield from quantize_together(checkpoint, group, head if is_head else body)
    if table.is_tied:
        weight = matrix(checkpoint, table.embed.name).T  # [in, out]
        yield table.head.name, quantize(weight, feature_order([weight]), head)


def quantize_together(
    checkpoint: Checkpoint, names: list[str], form: Format
) -> Iterator[tuple[str, exl2.Exl2Linear]]:
    """Quantizes matrices that read the same input, with one common order of features."""
    weights = [matrix(checkpoint, name).T for name in names]  # [in, out]
    order = feature_order(weights)
    for name, weight in zip(names, weights, strict=True):
        if weight.shape[0] % exl2.ROW_STEP:
            raise UnsupportedModelError(
                f"{name!r} cannot be stored as EXL2",
                where=checkpoint.stored[name].file,
                expected=f"a multiple of {exl2.ROW_STEP} input features",
                got=weight.shape[0],
            )
        yield name, quantize(weight, order, form)


def feature_order(weights: list[Tensor]) -> Tensor:
    """Order of the features by falling energy of their weights."""
    energy = torch.stack([weight.square().sum(1) for weight in weights]).sum(0)  # [in]
    return energy.argsort(descending=True, stable=True)


def quantize(weight: Tensor, order: Tensor, form: Format) -> exl2.Exl2Linear:
    """Nearest codes of weight [in, out] at the best scale of each group and column."""
    bits, size = form
    rows = weight.shape[0]
    stored = weight[order]  # [in, out]
    split = rows // size * size
    parts = [quantize_groups(stored[:split].view(-1, size, weight.shape[1]), bits)]
    sizes = [size] * (split // size)
    if split < rows:  # the last group may be shorter
        parts.append(quantize_groups(stored[None, split:], bits))
        sizes.append(rows - split)
    return exl2_writer.pack(
        torch.cat([codes.flatten(0, 1) for codes, _, _ in parts]),
        groups=[(bits, count) for count in sizes],
        scale_codes=torch.cat([scale_codes for _, scale_codes, _ in parts]),
        scale_max=torch.cat([scale_max for _, _, scale_max in parts]),
        invperm=order.argsort(),
    )


def quantize_groups(values: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [groups, rows, n], scale codes uint8 [groups, n] and largest scales fp16 [groups]
    of values [groups, rows, n]."""
    groups, rows, columns = values.shape
    zero = 2 ** (bits - 1)
    # Smallest scale that clips no value. Codes reach one step further below zero than above it.
    unclipped = torch.maximum(values.amax(1) / (zero - 1), -values.amin(1) / zero)  # [groups, n]
    scale_max = unclipped.amax(1).half() if groups else unclipped.new_zeros(0).half()  # [groups]
    steps = (scale_max.float() / 256).half().float()  # rounded as readers round
    codes = torch.empty(values.shape, dtype=torch.uint8)
    scale_codes = torch.empty(groups, columns, dtype=torch.uint8)

    def search(span: slice) -> None:
        best, scale = best_scales(values[:, :, span], unclipped[:, span], steps, zero)
        scale_codes[:, span] = best
        codes[:, :, span] = nearest(values[:, :, span], scale, zero).add_(zero).byte()

    width = max(1, CHUNK_VALUES // max(1, groups * rows))
    spans = [slice(first, first + width) for first in range(0, columns, width)]
    # torch's own threads are not used: they synchronize after every small step and spin.
    with ThreadPoolExecutor(read_settings().threads) as pool:
        list(pool.map(search, spans))
    return codes, scale_codes, scale_max


def best_scales(
    values: Tensor, unclipped: Tensor, steps: Tensor, zero: int
) -> tuple[Tensor, Tensor]:
    """Scale code with the least squared error, and its exact scale, both [groups, n].

    Starts at the smallest scale that clips no value (`unclipped`) and tries smaller ones, because a
    little clipping reduces the error.
    """
    # A group of zeros gives 0 / 0.
    largest = (unclipped / (256 * steps)[:, None]).nan_to_num_(0.0, 1.0, 0.0)
    first = largest.sqrt_().mul_(16).ceil_().sub_(1).clamp_(0, 15)  # [groups, n]
    least_error = torch.full_like(unclipped, torch.inf)
    best, chosen = torch.zeros_like(first), torch.zeros_like(unclipped)
    for offset in range(SCALES_TRIED):
        code = (first - offset).clamp_(min=0)
        scale = ((code + 1).square_() * steps[:, None]).half().float()  # [groups, n]
        rounded = nearest(values, scale, zero).mul_(scale[:, None])
        error = rounded.sub_(values).square_().sum(1)  # [groups, n]
        is_better = error < least_error
        least_error = torch.where(is_better, error, least_error)
        best = torch.where(is_better, code, best)
        chosen = torch.where(is_better, scale, chosen)
    return best.byte(), chosen


def nearest(values: Tensor, scale: Tensor, zero: int) -> Tensor:
    """Codes minus the code of 0, as floats."""
    inverse = torch.where(scale > 0, 1 / scale, 0.0)[:, None]
    return (values * inverse).round_().clamp_(-zero, zero - 1)


def matrix(checkpoint: Checkpoint, name: str) -> Tensor:
    """A matrix as float32 [out, in]."""
    return torch.cat([chunk.values for chunk in checkpoint.chunks(name, torch.float32)])


def describe(part: Tensor | exl2.Exl2Linear) -> str:
    if isinstance(part, exl2.Exl2Linear):
        return f"{part.in_features} x {part.out_features}, {part.bits_per_weight:.3f} bits a weight"
    return f"{list(part.shape)}, float16"


def _settings(body: Format, head: Format) -> dict[str, object]:
    """Content of `quantization_config`."""
    return {
        "quant_method": "exl2",
        "version": "0.3.2",
        "bits": body.bits,
        "head_bits": head.bits,
        "calibration": {"rows": 0, "length": 0, "dataset": "(none: rounded to nearest)"},
    }


if __name__ == "__main__":
    sys.exit(main())
