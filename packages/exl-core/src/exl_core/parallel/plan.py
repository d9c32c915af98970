"""Shares of the ranks in tensor parallelism: heads, MLP widths and vocabulary, from numbers alone.

Every rank computes the same plan from the same `ModelConfig`. Shares may differ in size. Plain data
without torch: which rows of a quantized matrix make up a share depends on its file
(`parallel/slices.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from exl_core.arch.layers import (
    MLA,
    Attention,
    Dense,
    FeedForward,
    GatedDeltaNet,
    KimiDeltaNet,
    LayerSpec,
    Mamba2,
    Mixer,
    MoE,
    NoFeedForward,
    NoMixer,
    ShortConv,
)
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
    `kv_copies`: ranks that have this rank's key-value heads.

    Of a delta net, value heads take the place of query heads, and its key heads that of key-value
    heads. Of Mamba-2, the groups take the place of key-value heads.
    """

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
    return _grouped_heads(spec.num_q_heads, spec.num_kv_heads, rank)


def delta_share(spec: GatedDeltaNet, rank: Rank) -> HeadShare:
    """The rank's value heads (`q`), numbered by key head, and key heads (`kv`) of a delta net."""
    return _grouped_heads(spec.value_heads, spec.key_heads, rank)


def scan_share(spec: Mamba2, rank: Rank) -> HeadShare:
    """The rank's heads (`q`) and groups (`kv`) of Mamba-2."""
    return _grouped_heads(spec.heads, spec.groups, rank)


def channel_share(spec: ShortConv, rank: Rank) -> range:
    """The rank's channels of a short convolution."""
    return share(spec.size, rank)


def _grouped_heads(q_heads: int, kv_heads: int, rank: Rank) -> HeadShare:
    group = q_heads // kv_heads
    if rank.count <= kv_heads:
        first, last = (kv_heads * index // rank.count for index in (rank.index, rank.index + 1))
        return HeadShare(range(first * group, last * group), range(first, last))
    heads = [kv_heads * index // rank.count for index in range(rank.count)]
    own = heads[rank.index]
    sharing = [index for index, head in enumerate(heads) if head == own]
    if len(sharing) > group:
        raise RequestError(
            "the model has too few attention heads for so many ranks",
            expected=f"at most {q_heads} ranks",
            got=f"--tensor-parallel {rank.count}",
        )
    place = sharing.index(rank.index)
    first, last = (group * index // len(sharing) for index in (place, place + 1))
    q = range(own * group + first, own * group + last)
    return HeadShare(q, range(own, own + 1), len(sharing))


def latent_heads(spec: MLA, rank: Rank) -> range:
    """The rank's heads of latent attention. Every rank has the whole latent vectors."""
    return even_heads(spec.num_q_heads, rank)


def even_heads(heads: int, rank: Rank) -> range:
    """The rank's part of heads that share nothing. RequestError if there are too few."""
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
    share(config.vocab_size, rank)
    return replace(config, layers=tuple(_layer(layer, rank) for layer in config.layers))


def _layer(layer: LayerSpec, rank: Rank) -> LayerSpec:
    mixer, feed_forward = _mixer(layer.mixer, rank), _feed_forward(layer.feed_forward, rank)
    return replace(layer, mixer=mixer, feed_forward=feed_forward)


def _mixer(mixer: Mixer, rank: Rank) -> Mixer:
    own: Mixer
    match mixer:
        case Attention():
            heads = head_share(mixer, rank)
            own = replace(mixer, num_q_heads=len(heads.q), num_kv_heads=len(heads.kv))
        case MLA():
            own = replace(mixer, num_q_heads=len(latent_heads(mixer, rank)))
        case GatedDeltaNet():
            heads = delta_share(mixer, rank)
            own = replace(mixer, value_heads=len(heads.q), key_heads=len(heads.kv))
        case KimiDeltaNet():
            own = replace(mixer, heads=len(even_heads(mixer.heads, rank)))
        case Mamba2():
            heads = scan_share(mixer, rank)
            own = replace(mixer, heads=len(heads.q), groups=len(heads.kv))
        case ShortConv():
            own = replace(mixer, size=len(channel_share(mixer, rank)))
        case NoMixer():
            own = mixer
        case _:
            raise UnsupportedModelError(
                "tensor parallelism cannot divide this mixer", got=type(mixer).__name__
            )
    return own


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
    if isinstance(part, NoFeedForward):
        return part
    raise UnsupportedModelError(
        "tensor parallelism cannot divide this feed-forward part", got=type(part).__name__
    )
