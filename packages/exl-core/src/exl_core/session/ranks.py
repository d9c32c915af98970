"""Tensor parallelism at load: checks of the options, start of the other ranks, and their settings.

Every rank opens the same files and reads its own part of every matrix. Nothing is sent between the
ranks while they load. The other ranks start first, because their imports take longest.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import permutations
from math import inf
from pathlib import Path
from typing import Any, Protocol

import torch

from exl_core.arch.spec import ModelConfig
from exl_core.cache.memory import free_memory_bytes
from exl_core.cache.need import CacheNeed
from exl_core.cache.state import SPARE_SLOTS
from exl_core.errors import ExlError, RankError, RequestError
from exl_core.formats.checkpoint import Checkpoint
from exl_core.ops.table import OpTable
from exl_core.parallel.background import in_background
from exl_core.parallel.checkpoint import ShardedCheckpoint
from exl_core.parallel.exchange import Exchange
from exl_core.parallel.followers import Followers, Group
from exl_core.parallel.leader import LeadingTransformer
from exl_core.parallel.nccl import Connecting
from exl_core.parallel.nccl_library import free_when_made, new_id
from exl_core.parallel.peers import Link, PeerExchange, buffers_of, with_peers
from exl_core.parallel.plan import (
    AUTO,
    MOST_RANKS,
    ExchangeKind,
    Rank,
    RankCount,
    check_alternatives,
    parse_exchange,
    share_config,
)
from exl_core.parallel.processes import MODULE, drop_ahead, take_connection
from exl_core.session.open import ModelFiles
from exl_core.session.placement import GPU_OVERHEAD, DeviceMemory, device_memory
from exl_core.session.reserve import Reserve
from exl_core.session.split import GB, LayerSizes
from exl_core.session.weights import Loading, check_memory
from exl_core.settings import Settings

_LOG = logging.getLogger("exl.load")
_RANK_OVERHEAD = 1.05
"""Memory of a rank over an equal share of the model: norms, and units that do not divide evenly."""


class RankOptions(Protocol):
    """Options of a run that concern the ranks; `LoadOptions` has them."""

    @property
    def tensor_parallel(self) -> RankCount: ...
    @property
    def device(self) -> str: ...
    @property
    def threads(self) -> int | None: ...
    @property
    def split(self) -> str: ...
    @property
    def cpu_layers(self) -> int | None: ...
    @property
    def experts_on(self) -> str: ...
    @property
    def held_bytes(self) -> int | None: ...
    @property
    def exchange(self) -> ExchangeKind: ...
    @property
    def reserve(self) -> str: ...


@dataclass(frozen=True, slots=True)
class RankChoice:
    """Number of ranks that `auto` has chosen, and the reason, a clause for the user."""

    count: int
    reason: str

    def __str__(self) -> str:
        ranks = "1 process" if self.count == 1 else f"{self.count} processes"
        return f"--tensor-parallel auto: {ranks}, because {self.reason}"


@dataclass(frozen=True, slots=True)
class RankRoom:
    """The cache that the ranks leave memory for, and the memory that stays free on their GPUs."""

    need: CacheNeed
    reserve: Reserve

    def check(
        self, config: ModelConfig, weights_bytes: int, rank: Rank, device: torch.device
    ) -> None:
        """Raises OutOfMemoryError if a rank's part does not leave the reserve of its device free.

        `config`: the numbers of the whole model. `weights_bytes`: those of the rank's weights; on a
        CPU, whose memory all ranks share, of all of them.
        """
        memory = DeviceMemory(str(device), "", free_memory_bytes(device))
        if device.type == "cuda":
            cache = rank_cache_bytes(config, self.need, rank)
            buffers = rank_buffer_bytes(config, rank.count)
            self.reserve.check(memory, weights_bytes + cache, buffer_bytes=buffers)
            return
        ranks = (Rank(index, rank.count) for index in range(rank.count))
        cache = sum(rank_cache_bytes(config, self.need, one) for one in ranks)
        self.reserve.check(memory, weights_bytes + cache)


def choose_ranks(
    options: RankOptions,
    device: str,
    sizes: Callable[[], LayerSizes],
    config: ModelConfig,
    need: CacheNeed,
) -> RankChoice:
    """The number of ranks for `auto` on this machine. `device`: the resolved one. `need`: the cache
    that `sizes` count."""
    if not device.startswith("cuda"):
        return RankChoice(1, "on the CPU one process is faster than several")
    if options.device.startswith("cuda:"):
        return RankChoice(1, f"--device {options.device} is one GPU")
    reserve = Reserve.of(options.reserve, device)
    _, *found = device_memory()
    gpus = [reserve.kept_from(gpu) for gpu in found]
    access = torch.cuda.can_device_access_peer
    choice = ranks_for(sizes(), config, need, gpus, access)
    first = gpus[: choice.count]
    if choice.count > 1 and ranks_for(sizes(), config, need, first, access) != choice:
        return RankChoice(1, f"the first {choice.count} GPUs do not hold equal shares")
    return choice


def ranks_for(
    sizes: LayerSizes,
    config: ModelConfig,
    need: CacheNeed,
    gpus: Sequence[DeviceMemory],
    has_access: Callable[[int, int], bool],
) -> RankChoice:
    """The fewest ranks whose GPUs hold the model and can access each other's memory.

    `has_access` gets the numbers of two GPUs. A model that fits one GPU stays there: the sums over
    ranks take longer than a small model's products. Plain arithmetic, before anything is read.
    """
    if len(gpus) < 2:
        return RankChoice(1, "there is no second GPU")
    free = [inf if gpu.free_bytes is None else gpu.free_bytes - GPU_OVERHEAD for gpu in gpus]
    needed = sizes.total_bytes
    largest = sorted(range(len(gpus)), key=lambda index: -free[index])
    if free[largest[0]] >= needed:
        return RankChoice(1, "the model fits one GPU")
    for count in range(2, min(len(largest), MOST_RANKS) + 1):
        if _rank_bytes(sizes, config, need, count) <= free[largest[count - 1]]:
            obstacle = _obstacle(sorted(largest[:count]), config, gpus, has_access)
            if obstacle is not None:
                return RankChoice(1, obstacle)
            return RankChoice(
                count, f"{count} GPUs hold the {needed / GB:.2f} GB of weights and cache"
            )
    return RankChoice(1, f"{len(gpus)} GPUs do not hold equal shares of {needed / GB:.2f} GB")


def _obstacle(
    used: Sequence[int],
    config: ModelConfig,
    gpus: Sequence[DeviceMemory],
    has_access: Callable[[int, int], bool],
) -> str | None:
    """Why these GPUs cannot share the model; None if they can."""
    for one, other in permutations(used, 2):
        if not has_access(one, other):
            return f"{gpus[one].device} has no access to the memory of {gpus[other].device}"
    try:
        share_config(config, Rank(0, len(used)))
    except ExlError as error:
        return str(error)
    return None


def _rank_bytes(sizes: LayerSizes, config: ModelConfig, need: CacheNeed, count: int) -> float:
    """Bytes of the largest rank: its share of the weights, its cache, and its buffers for the
    exchange."""
    whole_cache = sum(sizes.cache) + sum(sizes.states)
    weights = (sizes.total_bytes - whole_cache) / count * _RANK_OVERHEAD
    try:
        cache = max(rank_cache_bytes(config, need, Rank(i, count)) for i in range(count))
    except ExlError:  # the model cannot be divided so: `_obstacle` says why
        cache = whole_cache // count
    return weights + cache + rank_buffer_bytes(config, count)


def rank_cache_bytes(config: ModelConfig, need: CacheNeed, rank: Rank) -> int:
    """Bytes of one rank's keys, values and recurrent states of a model with the numbers `config`.
    Ranks beyond the number of key-value heads have copies of them. All ranks have as many slots for
    states as rank 0, whose engine counts them by its own part of the model."""
    own, first = share_config(config, rank), share_config(config, Rank(0, rank.count))
    slots = need.slots(first) + SPARE_SLOTS
    states = sum(shape.size_bytes for shape in own.state_shapes if shape is not None)
    return need.kv_bytes(own.kv_shapes) + states * slots


def rank_buffer_bytes(config: ModelConfig, count: int) -> int:
    """Bytes that a rank's GPU needs beside `GPU_OVERHEAD`: the buffer for sums that the ranks share
    (`PeerBuffers`), and the slices of dequantized weights that it has beside those of one GPU
    (`Slices`)."""
    from exl_core.ops.backends.cuda.matmul import SCRATCH_HALVES
    from exl_core.ops.backends.cuda.slices import EXCHANGE_BUFFERS

    slices = EXCHANGE_BUFFERS * SCRATCH_HALVES * torch.float16.itemsize
    return buffers_of(config, [0] * count).size_bytes + slices


def check_ranks(options: RankOptions, device: str) -> None:
    """RequestError for options that contradict tensor parallelism. `device`: the resolved one."""
    parse_exchange(options.exchange)
    ranks = options.tensor_parallel
    if ranks != AUTO and not 1 <= ranks <= MOST_RANKS:
        raise RequestError(
            "not a number of ranks", expected=f"1 to {MOST_RANKS}, or auto", got=ranks
        )
    if ranks in (1, AUTO):
        return
    has_limit = options.held_bytes is not None
    check_alternatives(options.split, options.cpu_layers, options.experts_on, has_limit=has_limit)
    if not device.startswith("cuda"):
        return
    if device != "cuda":
        raise RequestError(
            "every rank has a GPU of its own, rank 0 the first one",
            expected="--device cuda, and CUDA_VISIBLE_DEVICES for a choice of GPUs",
            got=f"--device {device}",
        )
    num_gpus = torch.cuda.device_count()
    if ranks > num_gpus:
        raise RequestError(
            "every rank needs a GPU of its own",
            expected=f"at most {num_gpus} ranks, or --device cpu",
            got=ranks,
        )


def device_of(device: str, rank: Rank) -> str:
    """The device of a rank, for the resolved one of the options."""
    return f"cuda:{rank.index}" if device == "cuda" and rank.count > 1 else device


def threads_of_rank(options: RankOptions, settings: Settings) -> int:
    """Threads of each rank: together they use as many as one process would."""
    ranks = 1 if options.tensor_parallel == AUTO else options.tensor_parallel
    return max(1, (options.threads or settings.threads) // ranks)


@contextmanager
def started_followers(
    path: Path, config: ModelConfig, device: str, fields: Mapping[str, Any]
) -> Iterator[Followers | None]:
    """The other ranks' processes, which start and read while rank 0 does. They end if the block
    fails. None for a single rank, or if their number is not known yet.

    `device` is the resolved one. `fields` are the options as JSON, for the other ranks.
    RequestError if the model is too small for so many ranks.
    """
    num_ranks = fields["tensor_parallel"]
    if num_ranks in (1, AUTO):
        yield None
        return
    share_config(config, Rank(0, num_ranks))
    followers = start_followers(path, device, fields)
    try:
        yield followers
    except BaseException:
        followers.close()
        raise


def start_followers(path: Path, device: str, fields: Mapping[str, Any]) -> Followers:
    """Starts the other ranks' processes (`started_followers`)."""

    is_on_gpus = device.startswith("cuda")
    has_log = _LOG.isEnabledFor(logging.DEBUG)

    def settings(rank: int) -> Mapping[str, object]:
        return {"rank": rank, "path": str(path), "options": fields, "has_log": has_log}

    followers = Followers(fields["tensor_parallel"], MODULE, settings, may_use_gpu=is_on_gpus)
    _LOG.debug("the other ranks start")
    if not is_on_gpus:
        drop_ahead()  # a connection of GPUs
        return followers
    connection = take_connection()
    if connection is None:
        send_nccl_id(followers)
    else:
        followers.connection = connection
        followers.on_close = lambda _: free_when_made(connection)  # until an exchange owns it
    return followers


def send_nccl_id(group: Group) -> None:
    """Lets the ranks' GPUs connect, once they are open. The followers read the id before any
    message."""

    def send() -> bytes:
        identity = new_id()
        group.send_bytes(identity)
        return identity

    group.nccl_id = in_background(send)


def load_leader(
    loading: Loading,
    checkpoint: Checkpoint,
    ops: OpTable,
    files: ModelFiles,
    followers: Followers,
    *,
    kind: ExchangeKind,
    room: RankRoom,
) -> LeadingTransformer:
    """Loads rank 0's part of a model, and connects the ranks. `followers` end if it fails.

    `loading` and `checkpoint` are those of the whole model. `kind`: how GPUs exchange. `room`:
    memory that must be left, which is checked before anything is read.
    """
    num_ranks = followers.num_ranks
    is_shared = ops.device.type == "cpu"  # by all ranks
    needed = checkpoint.packed_bytes // (1 if is_shared else num_ranks)

    def report(done_bytes: int, total_bytes: int) -> None:
        followers.check()  # a rank that has failed ends the load
        if followers.nccl_id is not None and followers.nccl_id.done():
            followers.nccl_id.result()  # a failure, which the others do not know about
        if followers.connection is not None and followers.connection.done():
            followers.connection.result()
        if loading.progress is not None:
            loading.progress(done_bytes, total_bytes)

    try:
        check_memory(needed, free_memory_bytes(ops.device), files.path)
        room.check(loading.config, needed, Rank(0, num_ranks), ops.device)
        tensors, config = sharded(checkpoint, loading.config, Rank(0, num_ranks))
        own = replace(loading, config=config, checkpoint=tensors, progress=report)
        connecting = connecting_leader(followers, Rank(0, num_ranks), ops)
        weights = own.whole(ops, None)
        exchange = met(followers, digest_of(files), files.sample_ids, connecting)
        exchange, link = with_shared_memory(exchange, followers, ops, loading.config, kind)
        model = LeadingTransformer(
            loading.config,
            weights,
            ops,
            exchange,
            shares=tensors.shares,
            sample_ids=files.sample_ids,
            followers=followers,
        )
        model.weights_bytes = checkpoint.packed_bytes  # of all ranks
        model.link = link
        return model
    except BaseException:
        followers.close()
        raise


def connecting_leader(group: Group, rank: Rank, ops: OpTable) -> Connecting | None:
    """Begins to connect rank 0's GPU with the others' while weights are read; None on the CPU. The
    end of the group ends what waits in the exchange, and frees it."""
    if group.nccl_id is None and group.connection is None:
        return None

    def identity() -> bytes:
        assert group.nccl_id is not None, "without a connection there is an id"
        return group.nccl_id.result()

    connecting = Connecting(
        identity, rank, ops.device, in_order=ops.is_batch_invariant, made=group.connection
    )
    group.on_failure, group.on_close = connecting.abort, connecting.abort
    return connecting


def met(
    group: Group, digest: str, sample_ids: Sequence[int], connecting: Connecting | None
) -> Exchange:
    """The exchange of rank 0's device with the others', once all ranks have loaded."""
    if group.nccl_id is not None:
        group.wait_for(group.nccl_id)  # without it the followers do not load
    exchange = group.meet(digest, sample_ids)
    _LOG.debug("all ranks are loaded and have met")
    if connecting is None:
        return exchange
    return group.wait_for(connecting.exchange)


def with_shared_memory(
    exchange: Exchange, group: Group, ops: OpTable, config: ModelConfig, kind: ExchangeKind
) -> tuple[Exchange, Link | None]:
    """Rank 0's exchange with memory that the ranks share, if they can. The end of the group ends
    what waits in it."""
    try:
        connected, link = with_peers(exchange, ops, config, kind)
    except RankError as error:
        raise group.cause(error) from error
    if isinstance(connected, PeerExchange):
        group.on_failure = group.on_close = connected.abort
    return connected, link


def sharded(
    checkpoint: Checkpoint, config: ModelConfig, rank: Rank
) -> tuple[ShardedCheckpoint, ModelConfig]:
    """The tensors and the numbers of one rank. RequestError if the model is too small for it."""
    own = share_config(config, rank)
    return ShardedCheckpoint(checkpoint, config, rank), own


def digest_of(files: ModelFiles, *, has_times: bool = True) -> str:
    """Digest of a model's headers, and of the sizes and times of its files: equal on all ranks if
    they read the same model. Copies of the files may differ in their times."""
    tensors, config = files.source.tensors, files.config
    parts = [f"{config.arch.name} {config.layers} {config.ropes} {config.vocab_size}"]
    parts += [f"{one.name} {one.shape} {one.storage}" for one in tensors.values()]
    for file in sorted({one.file for one in tensors.values()}):
        status = file.stat()
        parts.append(f"{file.name} {status.st_size} {status.st_mtime_ns if has_times else ''}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
