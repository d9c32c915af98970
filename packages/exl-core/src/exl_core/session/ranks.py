"""Tensor parallelism at load: checks of the options, start of the other ranks, and their settings.

Every rank opens the same files and reads its own part of every matrix. Nothing is sent between the
ranks while they load.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from exl_core.arch.spec import ModelConfig
from exl_core.cache.memory import free_memory_bytes
from exl_core.errors import RequestError
from exl_core.formats.checkpoint import Checkpoint
from exl_core.ops.table import OpTable
from exl_core.parallel.checkpoint import ShardedCheckpoint
from exl_core.parallel.followers import Followers
from exl_core.parallel.leader import LeadingTransformer
from exl_core.parallel.plan import Rank, share_config
from exl_core.session.open import ModelFiles
from exl_core.session.weights import Loading, check_memory
from exl_core.settings import Settings

MODULE = "exl_core.session.follower"
MOST_RANKS = 64


class RankOptions(Protocol):
    """Options of a run that concern the ranks; `LoadOptions` has them."""

    @property
    def tensor_parallel(self) -> int: ...
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


def check_ranks(options: RankOptions, device: str) -> None:
    """RequestError for options that contradict tensor parallelism. `device`: the resolved one."""
    ranks = options.tensor_parallel
    if not 1 <= ranks <= MOST_RANKS:
        raise RequestError("not a number of ranks", expected=f"1 to {MOST_RANKS}", got=ranks)
    if ranks == 1:
        return
    for is_given, option in (
        (options.split not in ("auto", "none"), "--split"),
        (options.cpu_layers is not None, "--cpu-layers"),
        (options.experts_on not in ("auto", "device"), "--experts-on"),
        (options.held_bytes is not None, "--held-memory"),
    ):
        if is_given:
            raise RequestError(
                "every rank has a part of every layer",
                expected=f"--tensor-parallel or {option}",
                got="both",
            )
    if device.startswith("cuda"):
        raise RequestError(
            "tensor parallelism runs on the CPU only so far",
            expected="--device cpu",
            got=device,
            next_step="For several GPUs take --split.",
        )


def threads_of_rank(options: RankOptions, settings: Settings) -> int:
    """Threads of each rank: together they use as many as one process would."""
    return max(1, (options.threads or settings.threads) // options.tensor_parallel)


def load_leader(
    loading: Loading,
    checkpoint: Checkpoint,
    ops: OpTable,
    files: ModelFiles,
    fields: Mapping[str, Any],
) -> LeadingTransformer:
    """Loads rank 0's part of a model, starts the other ranks, and connects them.

    `loading` and `checkpoint` are those of the whole model. `fields` are the options as JSON, for
    the other ranks.
    """
    num_ranks = fields["tensor_parallel"]
    check_memory(checkpoint.packed_bytes, free_memory_bytes(ops.device), files.path)
    tensors, config = sharded(checkpoint, loading.config, Rank(0, num_ranks))

    def settings(rank: int) -> Mapping[str, object]:
        return {"rank": rank, "path": str(files.path), "options": fields}

    followers = Followers(num_ranks, MODULE, settings)

    def report(done_bytes: int, total_bytes: int) -> None:
        followers.check()  # a rank that has failed ends the load
        if loading.progress is not None:
            loading.progress(done_bytes, total_bytes)

    try:
        own = replace(loading, config=config, checkpoint=tensors, progress=report)
        weights = own.whole(ops, None)
        exchange = followers.meet(digest_of(files))
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
        return model
    except BaseException:
        followers.close()
        raise


def sharded(
    checkpoint: Checkpoint, config: ModelConfig, rank: Rank
) -> tuple[ShardedCheckpoint, ModelConfig]:
    """The tensors and the numbers of one rank. RequestError if the model is too small for it."""
    own = share_config(config, rank)
    return ShardedCheckpoint(checkpoint, config, rank), own


def digest_of(files: ModelFiles) -> str:
    """Digest of a model's headers, and of the sizes and times of its files: equal on all ranks if
    they read the same model."""
    tensors, config = files.source.tensors, files.config
    parts = [f"{config.arch.name} {config.layers} {config.ropes} {config.vocab_size}"]
    parts += [f"{one.name} {one.shape} {one.storage}" for one in tensors.values()]
    for file in sorted({one.file for one in tensors.values()}):
        status = file.stat()
        parts.append(f"{file.name} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
