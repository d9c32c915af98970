"""Checks before a conversion starts: all problems that would make it fail, reported together.

Reads the whole source once. A source that cannot be opened is an immediate error. Problems that are
found later are collected.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from exl_core.arch.layers import (
    MLA,
    Attention,
    GatedDeltaNet,
    KimiDeltaNet,
    Mamba2,
    MoE,
    NoMixer,
    ShortConv,
)
from exl_core.arch.modules import module_table
from exl_core.arch.quantization import Quantization
from exl_core.arch.spec import ModelConfig
from exl_core.cache.memory import available_memory_bytes
from exl_core.convert import side_files
from exl_core.convert.calibration import rows_at_once
from exl_core.convert.layers import compute_type
from exl_core.convert.measure import CPU_COLUMNS
from exl_core.convert.measurement import matrix_sets, matrix_shapes
from exl_core.convert.outputs import pair_values
from exl_core.convert.passes import matrix_groups
from exl_core.convert.plan import ConvertOptions, padded
from exl_core.convert.publish import partial_of
from exl_core.convert.sensitivity import HEAD_ROWS, PAIR_ROWS, ROWS, ROWS_AT_ONCE, has_pairs
from exl_core.convert.target import Target, target_of
from exl_core.convert.tune import fits_in_memory, scratch_bytes
from exl_core.errors import (
    DiskFullError,
    ExlError,
    OutOfMemoryError,
    RequestError,
    UnsupportedModelError,
)
from exl_core.files import encode_text, naming_disk_failures, open_regular
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.codecs.exl3.matrix import stored_size
from exl_core.formats.containers.source import Progress, TensorSource
from exl_core.formats.verify import verify
from exl_core.session.open import gguf_fields
from exl_core.settings import read_settings
from exl_core.tokenizer.check import check_vocab
from exl_core.tokenizer.detect import load_tokenizer

DISK_MARGIN = 1.05  # for group tables, scales, headers and records
MEASURED_COPIES, QUANTIZED_COPIES, TRELLIS_COPIES = 7, 13, 20
"""Copies of a matrix in float32: while its layouts are measured, and while it is quantized, to EXL2
or to EXL3."""
DEFAULT_TARGET = Target()  # EXL2
LOGIT_BYTES = 36  # per logit, while a token is sampled and its gradient computed
HASH_BYTES = 1 << 22  # bytes per read


FAMILIES_WITH_EXPERTS = (
    *("qwen3moe", "mixtral", "gemmoe", "qwen2moe", "glm4moe"),
    *("ernie4_5-moe", "hunyuan-moe", "minimax-m2", "granitemoe", "qwen3vlmoe"),
    *("gpt-oss", "gemma4", "llama4", "dbrx"),
    *("lfm2moe", "qwen35moe", "qwen3next", "granite4"),
    *("deepseek2", "deepseek3", "glm4moelite", "mistral4", "nemotron_h"),
    "kimi_linear",
)
"""Families with experts whose conversion is tested. A conversion must know all that enters an
expert's outputs."""
RECURRENT_MIXERS = (ShortConv, GatedDeltaNet, KimiDeltaNet, Mamba2)
CONVERTED_MIXERS = (Attention, MLA, *RECURRENT_MIXERS, NoMixer)
"""Mixers whose conversion is tested."""


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes that a conversion needs at most: on disk for the output and for the work files, and in
    memory at a time."""

    out: int
    work: int
    memory: int


def hash_source(path: Path, source: TensorSource, progress: Progress | None = None) -> str:
    """SHA-256 of the configuration and of every weight file, with their names and sizes."""
    files = sorted({tensor.file for tensor in source.tensors.values()})
    if path.is_dir():
        files.insert(0, path / "config.json")
    total, done = sum(file.stat().st_size for file in files), 0
    hasher = hashlib.sha256()
    for file in files:
        hasher.update(encode_text(f"{file.name} {file.stat().st_size}\n"))
        with open_regular(file, ExlError) as opened:
            while piece := opened.read(HASH_BYTES):
                hasher.update(piece)
                done += len(piece)
                if progress is not None:
                    progress(done, total)
    return hasher.hexdigest()


def model_problems(
    path: Path,
    source: TensorSource,
    config: ModelConfig,
    quantization: Quantization | None,
    progress: Progress | None = None,
    *,
    target: Target,
) -> Iterator[ExlError]:
    """Problems of the source: an unsupported kind of model, and every damaged tensor."""
    if quantization is not None and quantization.method in ("exl2", "exl3", "gptq"):
        yield UnsupportedModelError(
            f"the model is quantized already, as {quantization.method.upper()}",
            where=path,
            next_step="Convert the model that it was made from.",
        )
        return
    if config.num_positions:
        yield UnsupportedModelError(
            "models whose positions have vectors cannot be converted yet",
            where=path,
            got=config.arch.name,
            next_step="Models that are quantized already can be used.",
        )
        return
    mixers = {type(layer.mixer).__name__ for layer in config.layers}
    unknown = mixers - {one.__name__ for one in CONVERTED_MIXERS}
    if unknown:
        yield UnsupportedModelError(
            "models with layers of these kinds cannot be converted yet",
            where=path,
            got=", ".join(sorted(unknown)),
            next_step="Models that are quantized already can be used.",
        )
        return
    has_experts = any(isinstance(layer.feed_forward, MoE) for layer in config.layers)
    if has_experts and config.arch.name not in FAMILIES_WITH_EXPERTS:
        yield UnsupportedModelError(
            f"models with experts of the family {config.arch.name!r} cannot be converted yet",
            where=path,
            expected=f"one of {', '.join(FAMILIES_WITH_EXPERTS)}",
            next_step="Models that are quantized already can be used.",
        )
        return
    yield from shape_problems(path, config, target)
    yield from tokenizer_problems(path, source, config)
    # Scales and embedding of EXL2 and EXL3 are float16.
    report = verify(source, config, quantization, progress, dtype=torch.float16)
    for problem in report.problems:
        yield problem.error


def tokenizer_problems(path: Path, source: TensorSource, config: ModelConfig) -> Iterator[ExlError]:
    """Problems of the files beside the weights. The gate needs a tokenizer at the end."""
    try:
        tokenizer = load_tokenizer(path, gguf_fields(source))
        check_vocab(tokenizer, config.vocab_size, path)
        if source.format == "gguf":
            with tempfile.TemporaryDirectory() as folder:
                side_files.collect(path, source, config, {}).write(Path(folder))
                side_files.check(Path(folder), path, source, config)
    except ExlError as error:
        yield error


def shape_problems(path: Path, config: ModelConfig, target: Target) -> Iterator[ExlError]:
    """Sizes that the format cannot store, each reported once for the model."""
    widths = [("the hidden size", config.hidden_size)]
    for layer in config.layers:
        mixer, part = layer.mixer, layer.feed_forward
        if isinstance(mixer, Attention | MLA):
            widths.append(("the width of the attention", mixer.output_size))
        if isinstance(mixer, MLA) and mixer.q_rank:
            widths.append(("the rank of the queries", mixer.q_rank))
        if isinstance(mixer, RECURRENT_MIXERS):
            widths.append(("the width of the recurrent layers", mixer.output_size))
        if part.inner_size:
            widths.append(("the intermediate size", part.inner_size))
        if isinstance(part, MoE):
            widths.append(("the width of the experts", part.intermediate_size))
        if isinstance(part, MoE) and part.latent_size:
            widths.append(("the width of the experts' inputs", part.latent_size))
    for label, width in dict.fromkeys(widths):
        expected = target.width_problem(width)
        if expected is not None:
            yield UnsupportedModelError(
                f"{label} cannot be stored as {target.name.upper()}",
                where=path,
                expected=expected,
                got=width,
            )


def rate_limits(config: ModelConfig, target: Target) -> tuple[float, float]:
    """Bits per weight with the smallest and with the largest layouts."""
    sets = matrix_sets(config).values()
    costs = [
        [layout.cost_bits(columns, rows) * count for layout in target.layouts_for(columns)]
        for (rows, columns), count in sets
    ]
    numel = sum(target.num_weights(columns, rows) * count for (rows, columns), count in sets)
    least, most = (sum(map(select, costs)) / numel for select in (min, max))
    return least, most


def rate_problems(
    config: ModelConfig, bits: float, head_bits: float, target: Target
) -> Iterator[ExlError]:
    """Requested bit rates above those of the largest layouts, or below those of the smallest."""
    least, most = rate_limits(config, target)
    if not least <= bits <= most:
        yield RequestError(
            "the layouts of this model cannot have so many bits a weight",
            expected=f"--bits of {math.ceil(least * 1000) / 1000:g} to {int(most * 1000) / 1000:g}",
            got=bits,
        )
    if head_bits not in target.head_choices:
        yield RequestError(
            "the head cannot have so many bits",
            expected=f"--head-bits {', '.join(f'{one:g}' for one in target.head_choices)}",
            got=head_bits,
        )


def output_problems(out: Path, source: Path, work: Path, *, is_resumed: bool) -> Iterator[ExlError]:
    """Problems of the final path. `is_resumed`: files beside it belong to this conversion."""
    try:
        is_empty = out.is_dir() and not out.is_symlink() and not any(out.iterdir())
        is_free = is_empty or not os.path.lexists(out)
        is_inside = source.resolve() in (out.resolve(), *out.resolve().parents)
    except OSError as error:
        yield RequestError("the output cannot be looked at", where=out, got=error.strerror)
        return
    if not is_free:
        yield RequestError(
            "the output exists already",
            where=out,
            expected="a new name, or an empty directory",
            next_step="Choose another -o, or remove it.",
        )
    if out.is_mount():
        yield RequestError(
            "a file system is mounted at the output, which is made elsewhere and renamed",
            where=out,
            next_step="Choose a directory in it.",
        )
    if is_inside and source.is_dir():
        yield RequestError("the output lies in the source", where=out, next_step="Move it.")
    if work.resolve() in (out.resolve(), partial_of(out).resolve()):
        yield RequestError("the work directory is the output", where=work)
    if partial_of(out).exists() and not is_resumed:
        yield RequestError(
            "another conversion has left its output here",
            where=partial_of(out),
            next_step="Repeat that command, with its --work, or remove the directory.",
        )
    for folder in dict.fromkeys((out.parent, work.parent)):
        yield from writing_problems(folder)


def writing_problems(folder: Path) -> Iterator[ExlError]:
    """Problems with creating new directories in `folder`."""
    if not folder.is_dir():
        yield RequestError("no such directory", where=folder, next_step="Make it first.")
        return
    try:
        with naming_disk_failures(folder), tempfile.TemporaryDirectory(dir=folder):
            pass
    except ExlError as error:
        yield error


def memory_needed(
    config: ModelConfig, rows: int, length: int, threads: int, target: Target = DEFAULT_TARGET
) -> int:
    """Upper estimate of the bytes in memory at a time, which do not grow with the number of layers,
    for `rows` calibration rows of `length` tokens."""
    table, tokens = module_table(config), rows * length
    matrices = [
        [row for row in table.weights_of(layer).values() if row.is_matrix]
        for layer in range(config.num_layers)
    ]
    layer_weights = max(sum(prod(row.shape) for row in rows) for rows in matrices)
    different = {row.shape for rows in matrices for row in rows if row.is_converted}
    largest, widest = max(map(prod, different)), max(shape[1] for shape in different)
    hidden, vocab = config.hidden_size, padded(config.vocab_size)
    kinds = {layer: index for index, layer in enumerate(config.layers)}
    together = max(len(keys) for index in kinds.values() for keys in matrix_groups(config, index))
    if target.codebook is None:
        measuring = MEASURED_COPIES * threads * max(largest, CPU_COLUMNS * widest)
        quantizing = QUANTIZED_COPIES * min(threads, together) * largest
    else:
        sizes = {stored_size(rows) * stored_size(columns) for rows, columns in different}
        largest, widest = max(sizes), stored_size(widest)
        vocab, hidden = stored_size(vocab), stored_size(hidden)
        measuring = MEASURED_COPIES * min(threads, together) * largest
        quantizing = TRELLIS_COPIES * largest  # one matrix at a time
    # Seven matrices in float64, two Hessians and the cross moment in float32.
    factors = (7 * 8 + 3 * 4) * widest**2
    compute_bytes = compute_type(torch.device("cpu")).itemsize
    # Each weight as float32, as the source's and the quantized factor of products, and as codes.
    # Rows and Hessians are those of one expert at a time (`experts.py`).
    layer_bytes = (4 + 2 * compute_bytes + 1) * layer_weights
    layer_bytes += 4 * max(measuring, quantizing) + factors
    copies = QUANTIZED_COPIES if target.codebook is None else TRELLIS_COPIES
    head_bytes = 4 * copies * vocab * hidden
    logit_bytes = LOGIT_BYTES * threads * HEAD_ROWS * vocab
    states = 4 * tokens * hidden
    inputs = 2 * 2 * tokens * widest  # of one matrix, in two streams, 2 bytes per value
    if target.codebook is not None:  # for sensitivities, there are gradients instead
        layers = [[row for row in rows if has_pairs(row)] for rows in matrices]
        sums = max(sum(pair_values(row.shape[0]) for row in rows) for rows in layers)
        outputs = max(sum(row.shape[0] for row in rows) for rows in layers)
        inputs = max(inputs, 4 * (sums + min(rows, ROWS_AT_ONCE) * length * outputs))
    parts = [layer.feed_forward for layer in config.layers]
    scores = 4 * tokens * max(p.router.num_experts if isinstance(p, MoE) else 0 for p in parts)
    return 2 * states + inputs + scores + max(layer_bytes, head_bytes, logit_bytes)


def space_needed(
    config: ModelConfig,
    checkpoint: Checkpoint,
    options: ConvertOptions,
    *,
    bits: float,
    rows: int,
    length: int,
    writes_rows: bool,
) -> Space:
    """Upper estimates. `writes_rows`: the model generates the calibration rows itself."""
    shapes = matrix_shapes(config)
    numel = sum(rows * columns for rows, columns in shapes.values())
    hidden, vocab = config.hidden_size, padded(config.vocab_size)
    layout = target_of(options).head_layout(options.head_bits)
    head = 16 * vocab * hidden
    if layout is not None:
        head = layout.cost_bits(hidden, config.vocab_size)
    out = int(DISK_MARGIN * (numel * bits + head + 16 * vocab * hidden) / 8)
    tokens = rows * length
    is_on_cpu = options.device == "cpu"
    threads = read_settings().threads if is_on_cpu else 1
    memory = memory_needed(config, rows, length, threads, target_of(options))
    if writes_rows:
        memory = max(memory, checkpoint.bytes_at_once + rows_at_once(config, length, 0)[1])
    # Largest files of a stage: states before and after a layer, states for gradients, or weights
    # and states of tuning.
    states = 2 * 2 * 4 * tokens * hidden
    is_paired = options.format == "exl3"
    gradients = 2 * (PAIR_ROWS if is_paired else ROWS) * length * hidden * config.num_layers
    matrices = module_table(config).rows if is_paired else ()
    pairs = 2 * sum(pair_values(row.shape[0]) for row in matrices if has_pairs(row))
    cpu = torch.device("cpu")
    is_tuning = is_on_cpu and not options.fast and fits_in_memory(config, cpu)
    tuning = scratch_bytes(config, cpu) if is_tuning else 0
    return Space(out, out + pairs + max(states, gradients, tuning), memory)


def space_problems(space: Space, out: Path, work: Path) -> Iterator[ExlError]:
    """Problems of disk space, summed for each file system, and of memory."""
    needed: dict[int, tuple[Path, int]] = {}
    existing = sum(file.stat().st_size for file in work.rglob("*") if file.is_file())
    for folder, size in ((out.parent, space.out), (work.parent, max(0, space.work - existing))):
        if folder.is_dir():
            device = folder.stat().st_dev
            first, before = needed.get(device, (folder, 0))
            needed[device] = (first, before + size)
    for folder, size in needed.values():
        free = shutil.disk_usage(folder).free
        if size > free:
            yield DiskFullError(
                "there is not enough space for the conversion",
                where=folder,
                expected=f"about {_mib(size)}",
                got=f"{_mib(free)} free",
                next_step="Free some, or put the work files elsewhere with --work.",
            )
    free_memory = available_memory_bytes()
    if free_memory is not None and space.memory > free_memory:
        yield OutOfMemoryError(
            "there is not enough memory for the conversion",
            expected=f"about {_mib(space.memory)}",
            got=f"{_mib(free_memory)} free",
            next_step="Calibrate on fewer --rows, take fewer threads (EXL_THREADS), or free some.",
        )


def shard_problems(config: ModelConfig, shard_bytes: int) -> Iterator[ExlError]:
    """Problem of a shard size below the largest tensor, because tensors are not split.

    The largest tensor is the float16 embedding or the codes of one matrix.
    """
    largest = 2 * config.vocab_size * config.hidden_size
    largest = max(largest, *(rows * columns for rows, columns in matrix_shapes(config).values()))
    if shard_bytes < largest:
        yield RequestError(
            "a file would be smaller than the largest tensor",
            expected=f"--shard-size of at least {_mib(largest)}",
            got=_mib(shard_bytes),
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB" if size >= 2**20 else f"{size} bytes"
