"""Loads a model: from a path and options to a model that is ready to run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import torch

from exl_core.arch.checks import check_config
from exl_core.arch.experts import with_experts_per_token
from exl_core.arch.layers import GatedDeltaNet, KimiDeltaNet, LayerSpec, Mamba2, ShortConv
from exl_core.arch.modules import ModuleRow
from exl_core.arch.spec import ModelConfig, RopeMethod
from exl_core.cache.format import KVFormat
from exl_core.errors import RequestError
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.containers.source import Progress
from exl_core.model.mtp import MtpLayer
from exl_core.model.transformer import Transformer
from exl_core.ops.backends.cuda.device import check_head_dims, check_states, parse_device
from exl_core.ops.open import get_table, has_factors, has_transposes, min_group_rows
from exl_core.ops.table import OpTable
from exl_core.option_types import check_options
from exl_core.parallel.leader import LeadingTransformer
from exl_core.parallel.peers import Link
from exl_core.parallel.plan import AUTO, ExchangeKind, RankCount
from exl_core.prompt.template import ChatTemplate
from exl_core.session.mtp import MtpFiles, open_mtp
from exl_core.session.open import ModelFiles, open_model
from exl_core.session.parameters import NO_PARAMETERS, Parameters, count_parameters
from exl_core.session.planning import need_of, plan_of, sizes_of
from exl_core.session.ranks import (
    RankChoice,
    RankRoom,
    check_ranks,
    choose_ranks,
    load_leader,
    start_followers,
    started_followers,
    threads_of_rank,
)
from exl_core.session.request_fields import check_argument
from exl_core.session.reserve import NO_RESERVE, Reserve
from exl_core.session.resolve import resolve_model
from exl_core.session.split import Split, StagePlan, parse_experts_on, parse_split
from exl_core.session.weights import Loading
from exl_core.settings import Launched, Settings, available_cpus, read_settings
from exl_core.tokenizer.base import Tokenizer

_LOG = logging.getLogger("exl.load")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of a run. None leaves the choice to the model, the settings or the machine."""

    device: str = "auto"
    """`auto` (a GPU where there is one and kernels for it, else the CPU), `cpu`, `cuda`, `cuda:1`,
    or `reference` (plain torch on the CPU, slow, to check the others). A `torch.device` too."""
    isa: str | None = None
    threads: int | None = None
    max_seq_len: int | None = None
    """Context size. It chooses between the RoPE tables of models that have one for short and one
    for long contexts (`longrope`)."""
    rope_factor: float | None = None
    rope_alpha: float | None = None
    yarn_factor: float | None = None
    """Stretch the model's own context by this factor with YaRN. Replaces `rope_factor`."""
    exact: bool = False
    """Compute in float32, with weights dequantized to float16 as their format defines."""
    batch_invariant: bool = False
    """Logits do not depend on which other sequences a pass computes, on the chunks of a prompt, or
    on drafts: the same bits. Costs time on a GPU, and on the CPU with instruction sets that are not
    so anyway (`ops/table.py`)."""
    experts_per_token: int | None = None
    """Experts that each token uses, instead of the model's own number."""
    load_in_4bit: bool = False
    """Round matrices of the layers that are stored as floats to 4 bits while they are read, in
    groups of 64 (4.5 bits per weight). Memory beyond the result is bounded by a part of one
    matrix."""
    embeddings_on: Literal["device", "cpu"] = "device"
    """`cpu`: on a GPU, the embedding stays in page-locked memory of the host, and the GPU reads its
    rows over the bus. For models whose head is another matrix."""
    held_bytes: int | None = None
    """Limit on the memory for weights, in bytes. Blocks beyond it are read anew in every pass, one
    at a time. None keeps all weights in memory."""
    split: str = "auto"
    """Devices of the layers: `auto` (one GPU if the model fits there, then more of them, then the
    CPU for the first layers), `none` (one device), GB of weights for each GPU (`20,24`), or layers
    for each device (`cpu=8,cuda:0=24`)."""
    cpu_layers: int | None = None
    """Layers on the CPU, from the first one on; None: as many as the GPUs cannot hold."""
    experts_on: str = "auto"
    """Place of the experts of layers that are on a GPU: `cpu` (the host's memory, where the CPU
    computes them), the number of layers whose experts are there, from the first one on, `device`
    (with their layers), or `auto` (of as few layers as let the GPUs hold the rest)."""
    tensor_parallel: RankCount = 1
    """Processes that the model is divided among, each with a part of every matrix, on a GPU of its
    own or all on the CPU. `auto` chooses by the GPUs, their memory and their access to each
    other."""
    exchange: ExchangeKind = "auto"
    """How GPUs exchange sums of tensor parallelism: `auto` (through memory that the processes
    share, in passes of up to 64 rows, if that works; otherwise with NCCL), or `nccl`."""
    cache_tokens: int | None = None
    """Tokens of cache that a split leaves memory for; None: one default context."""
    kv_format: KVFormat = KVFormat.FP16
    """Precision of that cache."""
    max_batch: int = 1
    """Sequences of one pass, for whose recurrent states a split leaves memory."""
    has_drafts: bool = False
    """The split leaves memory for the states of sequences with drafts, which are kept twice."""
    reserve: str = NO_RESERVE
    """GB that stay free on each GPU, as in `1.5`, or one number for each GPU, as in `1.5,0.5`."""
    reserved_bytes: int = 0
    """Memory that a split leaves free on `device`, for a draft model."""
    job: Launched | None = None
    """The processes of torchrun that the model is divided among (`session/hosts.py`)."""
    is_command: bool = False
    """This process does nothing but what the model is loaded for. If it hangs, it is killed, and
    not only the other processes that the model is divided among."""
    mtp: bool = False
    """Load the layer for multi-token prediction too, for a drafter (`MtpDrafter`)."""

    def __post_init__(self) -> None:
        given: object = self.device
        if isinstance(given, torch.device):
            name = "cpu" if given == torch.device("cpu", 0) else str(given)
            object.__setattr__(self, "device", name)
        check_options(self, threads=1, held_bytes=0, cache_tokens=1, max_batch=1, reserved_bytes=0)


class LoadFields(TypedDict, total=False):
    """Fields of `LoadOptions` by keyword, for `load_model`."""

    device: str
    isa: str | None
    threads: int | None
    max_seq_len: int | None
    rope_factor: float | None
    rope_alpha: float | None
    yarn_factor: float | None
    exact: bool
    batch_invariant: bool
    experts_per_token: int | None
    load_in_4bit: bool
    embeddings_on: Literal["device", "cpu"]
    held_bytes: int | None
    split: str
    cpu_layers: int | None
    experts_on: str
    tensor_parallel: RankCount
    exchange: ExchangeKind
    cache_tokens: int | None
    kv_format: KVFormat
    max_batch: int
    has_drafts: bool
    reserve: str
    reserved_bytes: int
    job: Launched | None
    is_command: bool
    mtp: bool


def fields_of(options: LoadOptions, threads: int) -> dict[str, object]:
    """The options as JSON for another process, which computes with `threads` threads."""
    return {**asdict(options), "threads": threads, "kv_format": options.kv_format.value}


def options_of(fields: Mapping[str, Any]) -> LoadOptions:
    """Inverse of `fields_of`."""
    return LoadOptions(**{**fields, "kv_format": KVFormat(fields["kv_format"])})


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, with its tokenizer and chat template (None for base models)."""

    name: str
    path: Path
    config: ModelConfig
    model: Transformer
    tokenizer: Tokenizer
    template: ChatTemplate | None
    weights_bytes: int
    load_s: float
    exact: bool = False
    changes: str = ""
    """Options that change the model's results, for records of measurements."""
    plan: tuple[StagePlan, ...] = ()
    """Stages of a model that is split over several devices."""
    parameters: Parameters = NO_PARAMETERS
    ranks: RankChoice | None = None
    """The choice for `tensor_parallel="auto"`."""
    link: Link | None = None
    """How the GPUs of `tensor_parallel` exchange, and why; None without them."""
    mtp: MtpLayer | None = None
    """The layer for multi-token prediction, with `LoadOptions.mtp`; otherwise None."""

    @property
    def label(self) -> str:
        """The name, and in brackets what the options changed."""
        return f"{self.name} ({self.changes})" if self.changes else self.name

    def unload(self) -> None:
        """Frees the weights (`Transformer.unload`), and ends the other ranks' processes."""
        if self.mtp is not None:
            self.mtp.unload()
        self.model.unload()


def load_model(
    model: str | Path | ModelFiles | None = None,
    options: LoadOptions | None = None,
    progress: Progress | None = None,
    **changes: Unpack[LoadFields],
) -> LoadedModel:
    """Loads a model: opened files (`open_model`), a path, or a name (`resolve_model`).

    `changes` are fields of `LoadOptions`, as in `device="cuda:1"`. `progress` gets bytes read and
    total bytes. Raises `ModelError` for any fault of the model, before large allocations if the
    headers show it, and `OutOfMemoryError` if the weights cannot fit.
    """
    started = time.perf_counter()
    options = _checked_options(options, changes)
    settings = read_settings()
    split, device, reserve = placement_of(options)
    threads = threads_of_rank(options, settings)
    path = None if isinstance(model, ModelFiles) else resolve_model(model)
    make_table = partial(_make_table, options, settings, threads)
    opening = _start_device(partial(make_table, device)) if device.startswith("cuda") else None
    files = model if isinstance(model, ModelFiles) else open_model(path)
    config, others = config_on(device, files, options), fields_of(options, threads)
    with started_followers(files.path, config, device, others) as followers:
        checkpoint = checkpoint_of(files, config, options)
        ops = make_table(device) if opening is None else _started(opening, checkpoint)
        divided, ranks = _with_ranks(options, device, config, checkpoint)
        mtp = mtp_of(files, config, divided, checkpoint) if options.mtp else None
        sizes = partial(sizes_of, divided, config, checkpoint, mtp)
        plan = plan_of(divided, split, config, sizes, ops, device=device, reserve=reserve)
        on_host, kind = options.embeddings_on == "cpu", options.exchange
        loading = Loading(config, checkpoint, files.path, threads, progress, on_host)
        if divided.tensor_parallel == 1:
            tables = _tables(plan, device, ops, make_table)
            weights, stages, last = loading.read(plan, tables, ops, options.held_bytes)
            transformer = Transformer(config, weights, last, files.sample_ids, split=stages)
        else:
            rest = followers or start_followers(files.path, device, fields_of(divided, threads))
            room = RankRoom(need_of(options, config), reserve)
            transformer = load_leader(loading, checkpoint, ops, files, rest, kind=kind, room=room)
        return LoadedModel(
            name=files.name,
            path=files.path,
            config=config,
            model=transformer,
            tokenizer=files.tokenizer,
            template=files.template,
            weights_bytes=transformer.weights_bytes,
            load_s=time.perf_counter() - started,
            exact=options.exact,
            changes=changes_of(options),
            plan=plan,
            ranks=ranks,
            link=transformer.link if isinstance(transformer, LeadingTransformer) else None,
            parameters=count_parameters(checkpoint, config),
            mtp=None if mtp is None else mtp.read(transformer, threads),
        )


def _make_table(
    options: LoadOptions, settings: Settings, threads: int, name: str, *, host_experts: bool = False
) -> OpTable:
    """Opens a table. `host_experts`: it computes experts while this process waits for a GPU.

    The driver waits in a busy loop, which takes one core. With a thread for each core, one thread
    would share its core with that loop, and all others would wait for it: of 16 cores, 16 threads
    decoded 251 tokens per second and 15 threads 518.
    """
    isa = options.isa or (settings.isa if name == "cpu" else None)
    if host_experts and options.threads is None:
        threads = max(1, min(threads, available_cpus() - 1))
    table = get_table(name, isa=isa, threads=threads, batch_invariant=options.batch_invariant)
    _LOG.debug("%s is open", table.device)
    return table


def _tables(
    plan: Sequence[StagePlan], device: str, ops: OpTable, make_table: Callable[..., OpTable]
) -> dict[str, OpTable]:
    """The table of each device that the plan names, with `ops` for `device`."""
    own = str(ops.device) if device.startswith("cuda") else device
    names = dict.fromkeys(stage.device for stage in plan)
    has_host = any(stage.host_layers for stage in plan)
    names |= {"cpu": None} if has_host else {}
    return {
        name: ops if name == own else make_table(name, host_experts=has_host and name == "cpu")
        for name in names
    }


def mtp_of(
    files: ModelFiles, config: ModelConfig, options: LoadOptions, checkpoint: Checkpoint
) -> MtpFiles:
    """The layer for multi-token prediction. RequestError for options that exclude it."""
    if options.tensor_parallel != 1:
        raise RequestError(
            "multi-token prediction runs in one process only",
            expected="--mtp or --tensor-parallel",
            got="both",
        )

    def make(own: ModelConfig, rows: Sequence[ModuleRow]) -> Checkpoint:
        return checkpoint_of(files, own, options, rows)

    return open_mtp(files.source, checkpoint, config, files.path, make)


def _with_ranks(
    options: LoadOptions, device: str, config: ModelConfig, checkpoint: Checkpoint
) -> tuple[LoadOptions, RankChoice | None]:
    """The options with a number of ranks, and the choice of that number if it was left open."""
    if options.tensor_parallel != AUTO:
        return options, None
    sizes = partial(sizes_of, options, config, checkpoint, None)
    choice = choose_ranks(options, device, sizes, config, need_of(options, config))
    return replace(options, tensor_parallel=choice.count), choice


def config_on(device: str, files: ModelFiles, options: LoadOptions) -> ModelConfig:
    """The model's numbers with `options`. DeviceError for heads that a GPU cannot run."""
    config = with_options(files.config, options)
    if device.startswith("cuda"):
        shapes = [shape for shape in config.kv_shapes if shape is not None]
        for is_shared in (False, True):
            heads = (shape.head_dim for shape in shapes if shape.is_shared is is_shared)
            check_head_dims(heads, files.path, is_shared=is_shared)
        check_states(chain.from_iterable(map(_state_sizes, config.layers)), files.path)
    return config


def _state_sizes(layer: LayerSpec) -> Iterator[tuple[str, int]]:
    """Sizes of a recurrent layer that the kernels of a GPU limit."""
    match layer.mixer:
        case ShortConv(taps=taps):
            yield "taps", taps
        case (
            GatedDeltaNet(taps=taps, key_dim=depth)
            | KimiDeltaNet(taps=taps, head_dim=depth)
            | Mamba2(taps=taps, state_size=depth)
        ):
            yield "taps", taps
            yield "depth", depth


def checkpoint_of(
    files: ModelFiles,
    config: ModelConfig,
    options: LoadOptions,
    rows: Sequence[ModuleRow] | None = None,
) -> Checkpoint:
    """The tensors of opened files, as `options` load them; only `rows`, if they are given. Reads
    headers only.

    RequestError for options that this model contradicts.
    """
    if options.load_in_4bit and options.exact:
        raise RequestError(
            "--exact computes with the weights as they are stored",
            expected="--exact or --load-in-4bit",
            got="both",
        )
    devices = [name for name, _ in parse_split(options.split).stages] or [
        resolve_device(options.device, is_exact=options.exact)
    ]
    checkpoint = Checkpoint(
        files.source,
        config,
        files.quantization,
        is_exact=options.exact,
        in_4bit=options.load_in_4bit,
        min_group_rows=max(map(min_group_rows, devices)),
        rows=rows,
        has_factors=all(map(has_factors, devices)),
        has_transposes=any(
            has_transposes(device, batch_invariant=options.batch_invariant) for device in devices
        ),
    )
    if options.load_in_4bit and not any(map(checkpoint.is_rounded, checkpoint.stored)):
        raise RequestError(
            "the weights are quantized already",
            where=files.path,
            expected="float weights with --load-in-4bit",
            next_step="Leave the option out.",
        )
    return checkpoint


def _checked_options(options: LoadOptions | None, changes: LoadFields) -> LoadOptions:
    known = [field.name for field in fields(LoadOptions)]
    for name in changes:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise RequestError(
                f"no such option: {name}",
                where="load_model",
                expected=", ".join(known),
                got=name,
                next_step=f"Did you mean {near[0]!r}?" if near else None,
            )
    example = "For example load_model('smollm2', device='cpu')."
    check_argument("options", options, LoadOptions | None, example)
    return replace(options or LoadOptions(), **changes)


class Placement(NamedTuple):
    """Where the options of a load put the model. `device`: that of the last stage."""

    split: Split
    device: str
    reserve: Reserve


def placement_of(options: LoadOptions) -> Placement:
    """Raises RequestError for a wrong choice of devices, or choices that exclude each other."""
    split = parse_split(options.split)
    parse_experts_on(options.experts_on)
    found = resolve_device(options.device, is_exact=options.exact)
    device = split.stages[-1][0] if split.stages else found
    check_ranks(options, device)
    return Placement(split, device, Reserve.of(options.reserve, device))


def resolve_device(name: str, *, is_exact: bool = False) -> str:
    """The device that `name` means on this machine: `cpu`, `cuda`, `cuda:N` or `reference`.

    RequestError for an unknown name, and for a GPU together with `is_exact`.
    """
    if name == "reference":
        return name
    if not is_exact:
        return parse_device(name)
    if name not in ("auto", "cpu"):
        raise RequestError(
            "--exact computes in float32, on the CPU", expected="--device cpu", got=name
        )
    return "cpu"


def _start_device(make: Callable[[], OpTable]) -> Future[OpTable]:
    """Starts the GPU on a thread. This takes a third of a second, mostly outside the interpreter,
    and overlaps with reading headers, the tokenizer and other work that needs no GPU."""
    opener = ThreadPoolExecutor(1, thread_name_prefix="exl-device")
    table = opener.submit(make)
    opener.shutdown(wait=False)
    return table


def changes_of(options: LoadOptions) -> str:
    """The options that change a model's results, in words; empty if there are none."""
    given = {
        "rope-scale": options.rope_factor,
        "rope-alpha": options.rope_alpha,
        "rope-yarn": options.yarn_factor,
        "experts-per-token": options.experts_per_token,
    }
    said = [f"{name} {value:g}" for name, value in given.items() if value is not None]
    return ", ".join([*said, *["rounded to 4 bits"] * options.load_in_4bit])


def _started(opening: Future[OpTable], checkpoint: Checkpoint) -> OpTable:
    """The table of a device that starts. Until then, matrices of the checkpoint are opened."""
    checkpoint.open_ahead(until=opening.done)
    return opening.result()


def _check_positions(config: ModelConfig, options: LoadOptions, length: int) -> None:
    """Raises RequestError if a model with a vector for each position is to have others."""
    rope_options = (options.rope_factor, options.rope_alpha, options.yarn_factor)
    has_rope = any(option is not None for option in rope_options)
    if config.num_positions and (length > config.num_positions or has_rope):
        raise RequestError(
            "the model has vectors for the positions of its own context only",
            expected=f"a context of at most {config.num_positions} tokens, and no options of RoPE",
            got="options of RoPE" if has_rope else f"{length} tokens",
        )


def with_options(config: ModelConfig, options: LoadOptions) -> ModelConfig:
    """The model's numbers as `options` change them: context size, RoPE of the first table, and
    experts per token."""
    rope = config.ropes[0]
    stretched = options.rope_factor is not None or options.yarn_factor is not None
    if stretched and rope.method is RopeMethod.PROPORTIONAL:
        raise RequestError(
            "this model rotates only a part of each pair of a head, which cannot be stretched",
            expected="no --rope-scale and no --rope-yarn, or --rope-alpha",
        )
    for name, value in (
        ("RoPE factor", options.rope_factor),
        ("RoPE alpha", options.rope_alpha),
        ("YaRN factor", options.yarn_factor),
    ):
        if value is not None and not 0.0 < value < float("inf"):
            raise RequestError(f"{name} must be a finite number above 0", got=value)
    if options.rope_factor is not None:
        rope = replace(rope, method=RopeMethod.LINEAR, factor=options.rope_factor)
    if options.yarn_factor is not None:
        native = rope.original_max_seq_len or config.max_seq_len
        rope = replace(
            rope,
            method=RopeMethod.YARN,
            factor=options.yarn_factor,
            original_max_seq_len=native,
        )
    if options.rope_alpha is not None:
        rope = replace(rope, alpha=options.rope_alpha)
    length = config.max_seq_len if options.max_seq_len is None else options.max_seq_len
    if length < 1:
        raise RequestError("the context size must be at least 1 token", got=length)
    _check_positions(config, options, length)
    ropes = tuple(one.fitted(length) for one in (rope, *config.ropes[1:]))
    layers = config.layers
    if options.experts_per_token is not None:
        layers = with_experts_per_token(layers, options.experts_per_token)
    config = replace(config, ropes=ropes, max_seq_len=length, layers=layers)
    check_config(config, "load options")
    return config
