"""Loads a model on the processes of torchrun: layers divided among the hosts, and the matrices of a
host's layers among its processes.

Every process reads its own part of its own host's copy of the model. Rank 0 has the engine; the
others run its messages (`session/follower.py`). The GPUs of each host are a group of their own:
they exchange as the GPUs of `tensor_parallel` do.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from exl_core.arch.spec import ModelConfig
from exl_core.errors import RequestError
from exl_core.formats.containers.source import Progress
from exl_core.formats.tensors import WeightTensors
from exl_core.lora.adapter import contents_digest
from exl_core.model.weights import ModelWeights
from exl_core.ops.open import get_table
from exl_core.ops.table import OpTable
from exl_core.parallel.exchange import Exchange
from exl_core.parallel.followers import Group
from exl_core.parallel.hosts import Hops, HostTransformer, WholeModel, layer_part
from exl_core.parallel.leader import LeadingTransformer
from exl_core.parallel.liveness import Watchdog
from exl_core.parallel.nccl import Connecting
from exl_core.parallel.plan import Rank, check_alternatives
from exl_core.parallel.rendezvous import Meeting
from exl_core.parallel.shares import Shares
from exl_core.session.load import (
    LoadedModel,
    LoadOptions,
    changes_of,
    checkpoint_of,
    config_on,
    fields_of,
    resolve_device,
    with_options,
)
from exl_core.session.open import ModelFiles, open_model
from exl_core.session.planning import need_of
from exl_core.session.ranks import (
    RankRoom,
    check_ranks,
    device_of,
    digest_of,
    met,
    sharded,
    with_shared_memory,
)
from exl_core.session.reserve import Reserve
from exl_core.session.weights import Loading
from exl_core.settings import Launched, read_settings

_OWN_FIELDS = (
    "device",
    "isa",
    "tensor_parallel",
    "cache_tokens",
    "kv_format",
    "max_batch",
    "has_drafts",
    "reserve",
    "reserved_bytes",
    "job",
)
"""Fields of `LoadOptions` that each process chooses, or that rank 0 alone knows."""
_LOG = logging.getLogger("exl.load")
_SAMPLES = 16
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a model, or of a host's layers of it."""

    config: ModelConfig
    """The numbers of the whole host."""
    weights: ModelWeights
    ops: OpTable
    shares: Shares
    whole: WholeModel | None

    def model(
        self, exchange: Exchange, sample_ids: tuple[int, ...], hops: Hops | None = None
    ) -> HostTransformer:
        return HostTransformer(
            self.config,
            self.weights,
            self.ops,
            exchange,
            shares=self.shares,
            sample_ids=sample_ids,
            hops=hops,
            whole=self.whole,
        )

    def leading_model(
        self,
        exchange: Exchange,
        sample_ids: tuple[int, ...],
        followers: Group,
        hops: Hops | None,
    ) -> LeadingTransformer:
        return LeadingTransformer(
            self.config,
            self.weights,
            self.ops,
            exchange,
            shares=self.shares,
            sample_ids=sample_ids,
            followers=followers,
            hops=hops,
            whole=self.whole,
            digest_of=lambda adapter: contents_digest(adapter.path),
        )


def open_table(options: LoadOptions, rank: Rank, threads: int) -> OpTable:
    """Opens a rank's device, which becomes torch's current one."""
    device = device_of(resolve_device(options.device, is_exact=options.exact), rank)
    isa = options.isa or (read_settings().isa if device == "cpu" else None)
    ops = get_table(device, isa=isa, threads=threads, batch_invariant=options.batch_invariant)
    if ops.device.type == "cuda":
        torch.cuda.set_device(ops.device)
    _LOG.debug("%s is open", ops.device)
    return ops


def load_part(
    files: ModelFiles,
    options: LoadOptions,
    rank: Rank,
    ops: OpTable,
    *,
    layers: range | None = None,
    progress: Progress | None = None,
) -> Part:
    """Reads a rank's part of a model; of these layers, if they are given."""
    config, rows = with_options(files.config, options), None
    whole_model = None
    if layers is not None:
        whole_model = WholeModel(config, layers)
        config, rows = layer_part(config, layers)
    whole = checkpoint_of(files, config, options, rows)
    tensors: WeightTensors = whole
    own, shares = config, Shares(config, rank)
    if rank.count > 1:
        divided, own = sharded(whole, config, rank)
        tensors, shares = divided, divided.shares
    torch.set_num_threads(1 if ops.device.type == "cuda" else ops.threads)
    kind = ops.device.type
    if kind == "cuda" or rank.index == 0:  # on a CPU one rank checks for all of its host
        room = RankRoom(need_of(options, config), Reserve.of(options.reserve, kind))
        needed = tensors.packed_bytes if kind == "cuda" else whole.packed_bytes
        room.check(config, needed, rank, ops.device)
    on_host = options.embeddings_on == "cpu"
    loading = Loading(own, tensors, files.path, ops.threads, progress, on_host)
    weights = loading.whole(ops, None)
    return Part(config, weights, ops, shares, whole_model)


def load_on_hosts(
    model: str | Path | ModelFiles | None,
    options: LoadOptions,
    progress: Progress | None = None,
) -> LoadedModel:
    """Loads a model on all processes of `options.job`, on rank 0 of them.

    Raises what `load_model` does, and RankError if another process fails or does not come.
    """
    started = time.perf_counter()
    job = options.job
    assert job is not None, "the caller has checked it"
    assert job.rank == 0, "the others call `follow_job`"
    check_job(options, job)
    files = model if isinstance(model, ModelFiles) else open_model(model)
    config = config_on(resolve_device(options.device, is_exact=options.exact), files, options)
    weights_bytes = checkpoint_of(files, config, options).packed_bytes
    meeting = Meeting(job)
    group = meeting.lead(Watchdog() if options.is_command else None)

    def report(done_bytes: int, total_bytes: int) -> None:
        group.check()  # a rank that has failed ends the load
        if progress is not None:
            progress(done_bytes, total_bytes)

    try:
        rank = meeting.grid.rank_in_host(0)
        ops = open_table(options, rank, threads_of_job(options, job))
        connecting = connecting_in(meeting, ops)
        if connecting is not None:
            group.on_failure = group.on_close = connecting.abort
        part = part_of(meeting, files, options, ops, report)
        exchange = met(group, job_digest(files, options), files.sample_ids, connecting)
        exchange, link = with_shared_memory(exchange, group, ops, part.config, options.exchange)
        transformer = part.leading_model(exchange, files.sample_ids, group, meeting.hops)
    except BaseException:
        group.close()
        raise
    transformer.weights_bytes = weights_bytes  # of all ranks
    return LoadedModel(
        name=files.name,
        path=files.path,
        config=config,
        model=transformer,
        tokenizer=files.tokenizer,
        template=files.template,
        weights_bytes=weights_bytes,
        load_s=time.perf_counter() - started,
        exact=options.exact,
        changes=changes_of(options),
        link=link,
    )


def check_job(options: LoadOptions, job: Launched) -> None:
    """RequestError for options that contradict the processes of a job."""
    if options.tensor_parallel not in (1, job.local_size):
        raise RequestError(
            "torchrun decides about the processes of a host",
            expected=f"--tensor-parallel {job.local_size}",
            got=options.tensor_parallel,
        )
    if options.mtp:
        raise RequestError(
            "multi-token prediction runs in one process only",
            expected="--mtp or torchrun",
            got="both",
        )
    has_limit = options.held_bytes is not None
    check_alternatives(options.split, options.cpu_layers, options.experts_on, has_limit=has_limit)
    device = resolve_device(options.device, is_exact=options.exact)
    check_ranks(replace(options, tensor_parallel=job.local_size), device)


def connecting_in(meeting: Meeting, ops: OpTable) -> Connecting | None:
    """Begins to connect this process's GPU with the others of its host, while weights are read.
    None on the CPU, and for the only process of a host."""
    rank = meeting.grid.rank_in_host(meeting.job.rank)
    if ops.device.type != "cuda" or rank.count == 1:
        return None
    return Connecting(meeting.nccl_id, rank, ops.device, in_order=ops.is_batch_invariant)


def job_digest(files: ModelFiles, options: LoadOptions) -> str:
    """Digest of a model's headers, of samples of its files and of the options that change results.
    Copies of a model on several hosts have the same one."""
    default = LoadOptions()
    own = {name: getattr(default, name) for name in _OWN_FIELDS}
    fields = fields_of(replace(options, **own), threads=0)
    digest = hashlib.sha256(digest_of(files, has_times=False).encode())
    digest.update(repr(sorted(fields.items())).encode())
    for file in sorted({one.file for one in files.source.tensors.values()}):
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            for index in range(_SAMPLES):
                opened.seek(max(0, size - _SAMPLE_BYTES) * index // max(1, _SAMPLES - 1))
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def threads_of_job(options: LoadOptions, job: Launched) -> int:
    """Threads of each process of a host: together they use as many as one would."""
    return max(1, (options.threads or read_settings().threads) // job.local_size)


def part_of(
    meeting: Meeting,
    files: ModelFiles,
    options: LoadOptions,
    ops: OpTable,
    progress: Progress | None = None,
) -> Part:
    """This process's part of the model, on the device of `ops`."""
    grid, rank = meeting.grid, meeting.job.rank
    config = config_on(str(ops.device), files, options)
    layers = None if grid.hosts == 1 else grid.layers(config, rank)
    own = grid.rank_in_host(rank)
    return load_part(files, options, own, ops, layers=layers, progress=progress)
