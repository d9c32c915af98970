"""`exl inspect model`: describe a model from its headers and EXL2 group tables, or verify all of
its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Annotated

import typer

from exl_cli import options, output
from exl_cli.interrupt import exits_at_once
from exl_cli.model_options import Reserve
from exl_core.arch.layers import MLA, Attention, FeedForward, LayerSpec, MoE, NoFeedForward
from exl_core.cache.need import CacheNeed
from exl_core.errors import RequestError
from exl_core.session.split import parse_reserve

if TYPE_CHECKING:
    from rich.table import Table

    from exl_core.arch.spec import ModelConfig
    from exl_core.session.describe import MatrixDescription, ModelDescription, TensorDescription

EXAMPLES = (
    ("exl inspect model", "the default model"),
    ("exl inspect model.gguf", "the word 'model' may be left out"),
    ("exl inspect model model.gguf --tensors", "every tensor, with shape and type"),
    ("exl inspect model path/to/model --verify", "check all weights; exit code 3 if damaged"),
    ("exl inspect model path/to/model --ctx 32768 --json", "memory at a context, as JSON"),
    ("exl inspect model path/to/model --fit", "which devices have enough memory"),
    ("exl inspect model path/to/model --fit --split 20,24", "the layers that each GPU would get"),
)
SHOW_EXAMPLES = (
    ("exl show owner/name", "a model of 'exl list', or any other model"),
    ("exl show model.gguf --tensors", "every tensor, with shape and type"),
)
Fit = Annotated[
    bool,
    typer.Option(
        "--fit",
        help="Show which devices the model fits on, the longest context by cache type, and the "
        "devices of the layers. --split 20,24 plans for GPUs that this machine lacks too.",
    ),
]
MaxBatch = Annotated[
    int,
    typer.Option(
        "--max-batch",
        metavar="N",
        min=1,
        max=1024,
        help="Sequences at the same time that the memory is shown for. A model with recurrent "
        "layers has a state of each in memory.",
    ),
]
SCHEMA_VERSION = 1
_TABLE_CTX = (2048, 4096, 8192, 32768, 131072)


def inspect_model(
    *,
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    ctx: Annotated[
        int | None,
        typer.Option(
            "--ctx", metavar="N", min=1, help="Show the memory for a context of N tokens."
        ),
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read and check all weights, and print the problems found."),
    ] = False,
    fit: Fit = False,
    split: options.Split = "auto",
    cpu_layers: options.CpuLayers = None,
    experts_on: options.ExpertsOn = "auto",
    reserve: Reserve = "0",
    max_batch: MaxBatch = 1,
    json: options.Json = False,
) -> None:
    """Show architecture, sizes, bits per weight, tokenizer, memory and backends of a model.

    Reads headers and EXL2 group tables only, so it is fast and works for a model that is too large
    to load. With --verify it reads everything: group tables, permutations, scales and weights.
    """
    spec = options.pick_model(model, model_option)
    if verify and (tensors or fit or ctx is not None):
        other = "--tensors" if tensors else "--fit" if fit else "--ctx"
        raise RequestError("--verify stands alone", got=other)
    parse_reserve(reserve)
    given = (split, cpu_layers, experts_on, reserve)
    if not fit and given != ("auto", None, "auto", "0"):
        raise RequestError(
            "a plan of the devices needs --fit",
            got="--split, --cpu-layers, --experts-on or --reserve",
        )
    with exits_at_once():
        from exl_cli import placement, verification
        from exl_core.session.describe import describe_model
    if verify:
        verification.run(spec, is_json=json)
        return
    description = describe_model(spec)
    if fit:
        choice = placement.PlanChoice(*given)
        placement.run(description, ctx, choice, max_batch=max_batch, is_json=json)
    elif json:
        output.write_json(as_dict(description, ctx, max_batch, with_tensors=tensors))
    else:
        _show(description, ctx, max_batch, with_tensors=tensors)


def as_dict(
    model: ModelDescription, ctx: int | None, max_batch: int = 1, *, with_tensors: bool
) -> dict[str, object]:
    """The object that `--json` prints. `max_batch`: sequences that run at the same time."""
    config = model.config
    need = CacheNeed(config.max_seq_len if ctx is None else ctx, max_batch=max_batch)
    value: dict[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "name": model.name,
        "path": str(model.path),
        "format": model.format,
        "architecture": config.arch.name,
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "active_bytes": model.active_bytes,
        "mtp_bytes": model.mtp_bytes,
        "file_bytes": model.file_bytes,
        "bits_per_weight": model.bits_per_weight,
        "config": {
            "num_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            **_feed_forward(config),
            **_heads(config),
            "vocab_size": config.vocab_size,
            "max_seq_len": config.max_seq_len,
            "sliding_window": _number(filter(None, map(_window, config.layers))) or None,
            "layer_windows": [_window_of(layer) for layer in config.layers],
            "recurrent_layers": sum(layer.state_shape is not None for layer in config.layers),
            "has_tied_embeddings": config.has_tied_embeddings,
        },
        "tokenizer": {
            "kind": model.tokenizer.kind,
            "vocab_size": model.tokenizer.vocab_size,
            "bos_id": model.tokenizer.bos_id,
            "eos_ids": list(model.stop_ids),
            "adds_bos": model.tokenizer.adds_bos,
            "has_chat_template": model.has_template,
        },
        "memory": _memory_as_dict(model, need),
        "backends": dict(model.backends),
        "layers": [
            {
                "name": layer.name,
                "parameters": layer.parameters,
                "bytes": layer.bytes,
                "bits_per_weight": layer.bits_per_weight,
                "dtypes": list(layer.dtypes),
            }
            for layer in model.layers
        ],
        "matrices": [_matrix_as_dict(matrix) for matrix in model.matrices],
    }
    if with_tensors:
        value["tensors"] = [_as_dict(tensor) for tensor in model.tensors]
        value["unused_tensors"] = [_as_dict(tensor) for tensor in model.unused_tensors]
    return value


def _feed_forward(config: ModelConfig) -> dict[str, object]:
    """Width of the MLPs, and numbers of the layers with experts if there are such layers."""
    parts = [layer.feed_forward for layer in config.layers]
    found = [part for part in parts if isinstance(part, MoE)]
    width = {"intermediate_size": _number(part.inner_size for part in parts)}
    if not found:
        return dict(width)
    return {
        **width,
        "num_expert_layers": len(found),
        "num_experts": _number(part.router.num_experts for part in found),
        "experts_per_token": _number(part.router.top_k for part in found),
        "expert_intermediate_size": _number(part.intermediate_size for part in found),
    }


def _number(values: Iterable[int]) -> int | list[int]:
    """The number that all layers have, or the numbers of all layers where they differ."""
    found = list(values)
    return found[0] if len(set(found)) == 1 else found


def _matrix_as_dict(matrix: MatrixDescription) -> dict[str, object]:
    return {
        "name": matrix.name,
        "shape": list(matrix.shape),
        "dtype": matrix.dtype,
        "bits_per_weight": matrix.bits_per_weight,
        "groups": [
            {"bits": run.bits, "rows": run.rows, "count": run.groups} for run in matrix.groups
        ],
        "trellis": None
        if matrix.trellis is None
        else {"bits": matrix.trellis.rate, "codebook": matrix.trellis.codebook},
    }


def _as_dict(tensor: TensorDescription) -> dict[str, object]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "bytes": tensor.bytes,
    }


def _show(model: ModelDescription, ctx: int | None, max_batch: int, *, with_tensors: bool) -> None:
    from exl_cli.render import print_answer

    parts: list[Table | str] = [
        _facts(model, max_batch),
        _layers(model),
        *(
            [_matrices(model.matrices)]
            if any(m.groups or m.trellis for m in model.matrices)
            else []
        ),
        _memory(model, ctx, max_batch),
    ]
    if with_tensors:
        parts.append(_tensors(model.tensors))
        if model.unused_tensors:
            parts += ["Not used by this architecture:", _tensors(model.unused_tensors)]
    print_answer(*parts)


def _heads(config: ModelConfig) -> dict[str, object]:
    """Heads of all layers, and the size of what they cache; a list where the layers differ."""
    attending = [layer.attending for layer in config.layers if layer.attending is not None]
    shapes = [shape for shape in config.kv_shapes if shape is not None]
    return {
        "num_q_heads": _number(one.num_q_heads for one in attending),
        "num_kv_heads": _number(one.num_kv_heads for one in shapes),
        "head_dim": _number(one.head_dim for one in shapes),
    }


def _windows(config: ModelConfig) -> dict[str, object]:
    windows = [_window(layer) for layer in config.layers]
    return {
        "sliding_window": _number(window for window in windows if window) or None,
        "layer_windows": ["local" if window else "global" for window in windows],
    }


def _window(layer: LayerSpec) -> int:
    """Tokens that the layer sees; 0 for all."""
    return layer.mixer.window if isinstance(layer.mixer, Attention) else 0


def _mixer(layer: LayerSpec) -> str:
    match layer.mixer:
        case Attention() as a:
            return f"{a.num_q_heads} query heads, {a.num_kv_heads} key-value heads of {a.head_dim}"
        case MLA() as a:
            return (
                f"{a.num_q_heads} query heads of {a.head_dim}, latent vectors of {a.kv_rank} + "
                f"{a.rope_dim}"
            )
        case other:
            return type(other).__name__


def _facts(model: ModelDescription, max_batch: int) -> Table:
    from exl_cli.render import facts_table, format_bytes, format_count

    c = model.config
    kinds = (_mixer(layer) for layer in c.layers if layer.attending is not None)
    attention = " or ".join(dict.fromkeys(kinds))
    windows = [window for layer in c.layers if (window := _window(layer))]
    if windows:
        seen = " or ".join(map(str, dict.fromkeys(windows)))
        attention += f"; {len(windows)} of {c.num_layers} layers see the last {seen} tokens"
    recurrent = sum(layer.state_shape is not None for layer in c.layers)
    if recurrent:
        longest = CacheNeed(c.max_seq_len, max_batch=max_batch)
        attention += (
            f"; {recurrent} of {c.num_layers} layers are recurrent, with a state of "
            f"{format_bytes(c.state_bytes)} a sequence and at most "
            f"{longest.snapshots_of(c)} snapshots of it"
        )
    chunks = [one.chunk for layer in c.layers if (one := layer.attending) and one.chunk]
    if chunks:
        attention += (
            f"; {len(chunks)} of {c.num_layers} layers see their chunk of {chunks[0]} tokens"
        )
    parts = (layer.feed_forward for layer in c.layers)
    widths = " or ".join(
        dict.fromkeys(_width(part) for part in parts if not isinstance(part, NoFeedForward))
    )
    active = ""
    if model.active_parameters < model.parameters:
        active = f"{format_count(model.active_parameters)} ({format_bytes(model.active_bytes)}) "
        active += "active, "
    tokenizer = model.tokenizer
    ends = ", ".join(map(str, model.stop_ids)) or "none"
    adds = "adds" if tokenizer.adds_bos else "does not add"
    return facts_table(
        {
            "model": model.name,
            "path": str(model.path),
            "format": f"{model.format}, {format_bytes(model.file_bytes)}",
            "architecture": c.arch.name,
            "parameters": f"{format_count(model.parameters)}, {active}"
            f"{model.bits_per_weight:.2f} bits per weight",
            "shape": f"{c.num_layers} layers, hidden {c.hidden_size}, feed-forward {widths}",
            "attention": attention,
            **_mtp(model),
            "context": f"{c.max_seq_len} tokens",
            "output head": "shared with the embedding" if c.has_tied_embeddings else "its own",
            "tokenizer": f"{tokenizer.kind}, {tokenizer.vocab_size} tokens, {adds} BOS "
            f"{tokenizer.bos_id}, ends at {ends}",
            "chat template": "yes" if model.has_template else "none",
            **{f"backend {name}": state for name, state in model.backends.items()},
        }
    )


def _mtp(model: ModelDescription) -> dict[str, str]:
    """The line about a layer for multi-token prediction, if there is one."""
    from exl_cli.render import format_bytes

    if not model.mtp_bytes:
        return {}
    states = 2 * model.config.hidden_size
    size = f"{format_bytes(model.mtp_bytes)} in memory with --mtp"
    return {"next tokens": f"a layer that predicts them (MTP), {size}, {states} bytes a token"}


def _width(part: FeedForward) -> str:
    if not isinstance(part, MoE):
        return str(part.inner_size)
    router = part.router
    shared = f" and {part.inner_size} shared" if part.inner_size else ""
    experts = f"{router.top_k} of {router.num_experts} experts"
    return f"{experts} of {part.intermediate_size}{shared}"


def _layers(model: ModelDescription) -> Table:
    """One row per run of consecutive layers with the same sizes and data types."""
    from exl_cli.render import columns_table, format_bytes, format_count, from_file

    table = columns_table("layer", "parameters", "size", "stored as", "bits/weight", "")
    for _, run in groupby(model.layers, lambda at: (at.parameters, at.bytes, at.dtypes)):
        layer, *others = run
        name = f"{layer.name} ... {others[-1].name}, each" if others else layer.name
        table.add_row(
            from_file(name),
            format_count(layer.parameters),
            format_bytes(layer.bytes),
            from_file(", ".join(layer.dtypes)),
            f"{layer.bits_per_weight:.2f}",
            f"[cyan]{'█' * min(16, round(layer.bits_per_weight))}[/cyan]",
        )
    return table


def _matrices(matrices: Sequence[MatrixDescription]) -> Table:
    """One row per kind of matrix, over all layers."""
    from exl_cli.render import columns_table, from_file

    table = columns_table("matrix", "count", "stored as", "widths", "groups of", "bits/weight")
    kinds: dict[str, list[MatrixDescription]] = {}
    for matrix in matrices:
        kinds.setdefault(matrix.name.rpartition(".")[2], []).append(matrix)
    for kind, alike in kinds.items():
        low = min(matrix.bits_per_weight for matrix in alike)
        high = max(matrix.bits_per_weight for matrix in alike)
        table.add_row(
            kind,
            str(len(alike)),
            from_file(", ".join(sorted({_storage(matrix) for matrix in alike}))),
            _widths(alike),
            _group_sizes(alike),
            f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}",
        )
    return table


def _storage(matrix: MatrixDescription) -> str:
    """How a matrix is stored, with the codebook of trellis codes."""
    return matrix.dtype if matrix.trellis is None else f"{matrix.dtype} {matrix.trellis.codebook}"


def _widths(matrices: Sequence[MatrixDescription]) -> str:
    """Code widths in bits, widest first, each with its share of the weights."""
    weights: Counter[float] = Counter()
    for matrix in matrices:
        if matrix.trellis is not None:
            weights[matrix.trellis.rate] += prod(matrix.shape)
        for run in matrix.groups:
            weights[run.bits] += run.groups * run.rows * matrix.shape[0]
    total = sum(weights.values())
    if len(weights) < 2:
        return "".join(f"{bits:g}" for bits in weights) or "none"
    return ", ".join(f"{bits:g} ({weights[bits] / total:.0%})" for bits in sorted(weights)[::-1])


def _group_sizes(matrices: Sequence[MatrixDescription]) -> str:
    """Group sizes: numbers of rows that share a scale."""
    sizes = {run.rows for matrix in matrices for run in matrix.groups}
    return ", ".join(map(str, sorted(sizes))) or "none"


def _memory(model: ModelDescription, ctx: int | None, max_batch: int) -> Table:
    from exl_cli.render import columns_table, format_bytes

    has_states = model.config.state_bytes > 0
    columns = ("context", "weights", "cache", *["states"] * has_states, "total")
    table = columns_table(*columns)
    longest = model.config.max_seq_len
    sizes = [ctx] if ctx is not None else sorted({*(n for n in _TABLE_CTX if n < longest), longest})
    for size in sizes:
        need = CacheNeed(size, max_batch=max_batch)
        states = model.state_bytes(need)
        table.add_row(
            str(size),
            format_bytes(model.weights_bytes_in_memory),
            format_bytes(size * model.kv_bytes_per_token()),
            *[format_bytes(states)] * has_states,
            format_bytes(model.memory_bytes(need)),
        )
    return table


def _memory_as_dict(model: ModelDescription, need: CacheNeed) -> dict[str, int]:
    return {
        "weights_bytes": model.weights_bytes_in_memory,
        "kv_bytes_per_token": model.kv_bytes_per_token(),
        "state_bytes_per_sequence": model.config.state_bytes,
        "most_snapshots": need.snapshots_of(model.config),
        "state_bytes": model.state_bytes(need),
        "ctx": need.tokens,
        "max_batch": need.max_batch,
        "total_bytes": model.memory_bytes(need),
    }


def _window_of(layer: LayerSpec) -> str:
    if layer.state_shape is not None:
        return "recurrent"
    return "local" if layer.attention.window else "global"


def _tensors(tensors: Sequence[TensorDescription]) -> Table:
    from exl_cli.render import columns_table, format_bytes, from_file

    table = columns_table("tensor", "shape", "type", "size")
    for tensor in tensors:
        shape = " x ".join(map(str, tensor.shape))
        size = format_bytes(tensor.bytes)
        table.add_row(from_file(tensor.name), shape, from_file(tensor.dtype), size)
    return table
