"""Shares of the ranks in tensor parallelism: heads, MLP widths and vocabulary, from numbers alone.

Every rank computes the same plan from the same `ModelConfig`. Shares may differ in size. Plain data
without torch: which rows of a quantized matrix make up a share depends on its file
(`parallel/slices.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from exl_core.arch.layers import MLA, Attention, Dense, FeedForward, LayerSpec, MoE
from exl_core.arch.spec import ModelConfig
from exl_core.errors import RequestError, UnsupportedModelError

UNIT = 32
"""Widths are divided in units of a block of rows, and the vocabulary in units of a column panel,
which every backend fills and multiplies without padding."""
MOST_RANKS = 64
AUTO: Literal["auto"] = "auto"
RankCount = int | Literal["auto"]
"""Number of ranks that the user asks for."""
ExchangeKind = Literal["auto", "nccl"]
"""How the GPUs of the ranks exchange: `auto` is memory that they share, if that works."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One of `count` processes that share a model. Rank 0 leads."""

    index: int
    count: int


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks of several hosts. Each host has consecutive layers, whose matrices are divided
    among the ranks of the host. Rank h * `local` + r is rank r of host h."""

    hosts: int
    local: int

    @property
    def count(self) -> int:
        return self.hosts * self.local

    def host_of(self, rank: int) -> int:
        return rank // self.local

    def rank_in_host(self, rank: int) -> Rank:
        return Rank(rank % self.local, self.local)

    def layers(self, config: ModelConfig, rank: int) -> range:
        """Layers of the rank's host. RequestError if there are fewer layers than hosts."""
        if config.num_layers < self.hosts:
            raise RequestError(
                "the model has too few layers for so many hosts",
                expected=f"at most {config.num_layers} hosts",
                got=self.hosts,
            )
        host = self.host_of(rank)
        first, last = (config.num_layers * one // self.hosts for one in (host, host + 1))
        return range(first, last)


def parse_ranks(text: str) -> RankCount:
    """`auto` or a number of ranks. RequestError for anything else."""
    if text == AUTO:
        return AUTO
    if text.isascii() and text.isdecimal() and len(text) < 4 and 1 <= int(text) <= MOST_RANKS:
        return int(text)
    raise RequestError("not a number of ranks", expected=f"1 to {MOST_RANKS}, or auto", got=text)


def parse_exchange(text: str) -> ExchangeKind:
    """RequestError for anything but `auto` and `nccl`."""
    if text == "nccl":
        return "nccl"
    if text != AUTO:
        raise RequestError("no such exchange between GPUs", expected="auto or nccl", got=text)
    return AUTO


def check_alternatives(
    split: str, cpu_layers: int | None, experts_on: str, *, has_limit: bool
) -> None:
    """RequestError for options that contradict tensor parallelism. `has_limit`: memory for weights
    is limited."""
    for is_given, option in (
        (split not in ("auto", "none"), "--split"),
        (cpu_layers is not None, "--cpu-layers"),
        (experts_on not in ("auto", "device"), "--experts-on"),
        (has_limit, "--held-memory"),
    ):
        if is_given:
            raise RequestError(
                "every rank has a part of every layer",
                expected=f"--tensor-parallel or {option}",
                got="both",
            )


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Heads of one rank. Several ranks may have the same key-value head, but no query head.
    `kv_copies`: ranks that have this rank's key-value heads."""

    q: range
    kv: range
    kv_copies: int = 1


def share(size: int, rank: Rank, unit: int = UNIT) -> range:
    """The rank's part of `size` rows, in whole units where there are as many units as ranks.

    The parts of all ranks cover every row once, in order. RequestError if there are fewer rows than
    ranks.
    """
    if size < rank.count:
        raise RequestError(
            "the model is too narrow for so many ranks",
            expected=f"at most {size}",
            got=f"--tensor-parallel {rank.count}",
        )
    while size // unit < rank.count:
        unit //= 2
    units = -(-size // unit)
    first, last = (units * index // rank.count * unit for index in (rank.index, rank.index + 1))
    return range(first, min(last, size))


def head_share(spec: Attention, rank: Rank) -> HeadShare:
    """The rank's heads: whole groups of a key-value head and its query heads.

    With more ranks than key-value heads, several ranks have a copy of one and divide its query
    heads. RequestError if a rank would have no query head.
    """
    group = spec.num_q_heads // spec.num_kv_heads
    if rank.count <= spec.num_kv_heads:
        first, last = (
            spec.num_kv_heads * index // rank.count for index in (rank.index, rank.index + 1)
        )
        return HeadShare(range(first * group, last * group), range(first, last))
    heads = [spec.num_kv_heads * index // rank.count for index in range(rank.count)]
    own = heads[rank.index]
    sharing = [index for index, head in enumerate(heads) if head == own]
    if len(sharing) > group:
        raise RequestError(
            "the model has too few attention heads for so many ranks",
            expected=f"at most {spec.num_q_heads} ranks",
            got=f"--tensor-parallel {rank.count}",
        )
    place = sharing.index(rank.index)
    first, last = (group * index // len(sharing) for index in (place, place + 1))
    q = range(own * group + first, own * group + last)
    return HeadShare(q, range(own, own + 1), len(sharing))


def latent_heads(spec: MLA, rank: Rank) -> range:
    """The rank's heads of latent attention. Every rank has the whole latent vectors."""
    heads = spec.num_q_heads
    if rank.count > heads:
        raise RequestError(
            "the model has too few attention heads for so many ranks",
            expected=f"at most {heads} ranks",
            got=f"--tensor-parallel {rank.count}",
        )
    return range(heads * rank.index // rank.count, heads * (rank.index + 1) // rank.count)


def share_config(config: ModelConfig, rank: Rank) -> ModelConfig:
    """The numbers of the model that one rank computes: its own heads and widths in every layer.

    Hidden size and vocabulary stay: every rank has whole states, and rank 0 gets whole logits.
    RequestError if the model cannot be divided among so many ranks.
    """
    if rank.count < 2:
        return config
    if config.state_bytes:
        raise UnsupportedModelError(
            "a model with recurrent layers cannot be divided among ranks",
            expected="attention in every layer",
            next_step="Give whole layers to each GPU with --split instead.",
        )
    share(config.vocab_size, rank)
    return replace(config, layers=tuple(_layer(layer, rank) for layer in config.layers))


def _layer(layer: LayerSpec, rank: Rank) -> LayerSpec:
    mixer: Attention | MLA
    match layer.mixer:
        case Attention() as spec:
            heads = head_share(spec, rank)
            mixer = replace(spec, num_q_heads=len(heads.q), num_kv_heads=len(heads.kv))
        case MLA() as latent:
            mixer = replace(latent, num_q_heads=len(latent_heads(latent, rank)))
        case other:
            raise UnsupportedModelError(
                "tensor parallelism cannot divide this mixer", got=type(other).__name__
            )
    return replace(layer, mixer=mixer, feed_forward=_feed_forward(layer.feed_forward, rank))


def _feed_forward(part: FeedForward, rank: Rank) -> FeedForward:
    if isinstance(part, Dense):
        return replace(part, intermediate_size=len(share(part.intermediate_size, rank)))
    if isinstance(part, MoE):
        shared = part.shared
        if shared is not None:
            width = len(share(shared.intermediate_size, rank))
            shared = replace(shared, intermediate_size=width)
        width = len(share(part.intermediate_size, rank))
        return replace(part, intermediate_size=width, shared=shared)
    raise UnsupportedModelError(
        "tensor parallelism cannot divide this feed-forward part", got=type(part).__name__
    )
