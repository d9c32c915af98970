"""The forward pass of one rank: its part of every matrix, and sums over the ranks in between.

After the last matrix of each mixer and each MLP, the ranks' partial products are summed and added
to the states, so every rank has the same whole states, to the bit. The embedding and the head are
divided by tokens: rank 0 gets whole logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from exl_core.arch.layers import Attention, HeadNorm, LayerSpec, Mamba2, NormPlacement
from exl_core.arch.modules import LoraTarget
from exl_core.arch.spec import ModelConfig
from exl_core.cache.store import KVStore
from exl_core.model.adapted import HeadRows
from exl_core.model.batch import Batch
from exl_core.model.layers.residual import read_linear
from exl_core.model.layers.steps import with_ops
from exl_core.model.observe import Observer
from exl_core.model.transformer import Transformer
from exl_core.model.weights import (
    AttentionWeights,
    BlockWeights,
    LatentWeights,
    Mamba2Weights,
    MixerWeights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
    RecurrentWeights,
)
from exl_core.ops.backends.composed import ComposedExpertOps, by_vectors
from exl_core.ops.checks import check_range
from exl_core.ops.elementwise import ActivationKind, GateKind, Gating, Norm, RmsNorm
from exl_core.ops.linear import Inputs, PackedLinear
from exl_core.ops.moe import ExpertMlp, Routed
from exl_core.ops.table import LayerOps, OpTable
from exl_core.ops.wrapped import MarkedLinear, WrappedOps, unmarked
from exl_core.parallel.exchange import Exchange
from exl_core.parallel.peers import PeerExchange
from exl_core.parallel.plan import Rank, head_share, scan_share, share, share_config
from exl_core.parallel.shares import Shares

if TYPE_CHECKING:
    from exl_core.ops.backends.cuda.peers import PeerSums


class PartialLinear(MarkedLinear):
    """A row slice of a matrix: the products of all ranks are summed."""

    __slots__ = ()


class DeferredLinear(PartialLinear):
    """One whose results are added to the states, and read next by a product after a norm. That
    product may complete the sum."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class DividedNorm(RmsNorm):
    """A norm over all heads, of which a rank has some: `weight` are the factors of these.

    size    values of all heads together
    copies  ranks that have this rank's heads
    """

    size: int
    copies: int


@dataclass(frozen=True, slots=True, eq=False)
class SharedGroupNorm(RmsNorm):
    """Norm over a group of Mamba-2 heads that several ranks share. `weight` has the factors of the
    rank's own heads.

    size    values of all heads of a group
    group   number of the rank's group
    groups  number of all groups
    """

    size: int
    group: int
    groups: int


class SummingOps(ComposedExpertOps, WrappedOps):
    """Ops of a layer, with products of `PartialLinear` and of experts, and the squares of a
    `DividedNorm` or a `SharedGroupNorm`, summed over the ranks."""

    def __init__(self, inner: LayerOps, exchange: Exchange) -> None:
        super().__init__(inner)
        self._exchange = exchange

    def linear(self, x: Tensor, w: PackedLinear) -> Tensor:
        if isinstance(w, PartialLinear):
            return self._exchange.sum(self.inner.linear(x, w.part))
        return self.inner.linear(x, w)

    def inputs_for(self, w: PackedLinear, plain: Tensor) -> Inputs:
        return self.inner.inputs_for(unmarked(w), plain)

    def linear_add_(self, x: Inputs, w: PackedLinear, residual: Tensor) -> Tensor:
        if not isinstance(w, PartialLinear):
            return self.inner.linear_add_(x, w, residual)
        if self._exchange.rank.index == 0:  # adds the residual stream, once
            return self._exchange.sum(self.inner.linear_add_(x, w.part, residual))
        return self._exchange.sum(self._part(x, w, residual))

    def _part(self, x: Inputs, w: PartialLinear, residual: Tensor) -> Tensor:
        """The rank's part of a product that is added to `residual`, without the latter.

        Rank 0 takes the op that adds, and the others that which does not. Products with dense
        matrices may have other kernels for these, and so other bits.
        """
        if self._exchange.rank.index != 0 and isinstance(x, Tensor):
            return self.inner.linear(x, w.part)
        return self.inner.linear_add_(x, w.part, torch.zeros_like(residual))

    def rms_norm(self, x: Tensor, norm: RmsNorm) -> Tensor:
        if not isinstance(norm, DividedNorm):
            return self.inner.rms_norm(x, norm)
        squares = x.square().sum(-1, keepdim=True) / norm.copies
        mean = self._exchange.sum(squares) / norm.size  # [rows, 1]
        return x * torch.rsqrt(mean + norm.eps) * norm.weight

    def gate_heads(
        self, x: Tensor, gate: Tensor, gating: Gating, to: PackedLinear | None = None
    ) -> Inputs:
        norm = gating.norm
        if not isinstance(norm, SharedGroupNorm):
            return super().gate_heads(x, gate, gating, to)
        x = x * by_vectors(torch.nn.functional.silu, gate.to(x.dtype))
        squares = x.new_zeros(len(x), norm.groups, dtype=torch.float32)
        squares[:, norm.group] = x.float().square().sum(-1)
        mean = self._exchange.sum(squares)[:, norm.group, None] / norm.size  # [rows, 1]
        return x * torch.rsqrt(mean + norm.eps).to(x.dtype) * norm.weight

    def expert_mlp(self, x: Tensor, routed: Routed, experts: ExpertMlp) -> Tensor:
        return self._exchange.sum(self.inner.expert_mlp(x, routed, experts))


class PeerOps(SummingOps):
    """`SummingOps` of a small pass, whose sums go through the ranks' own memory. A sum is completed
    by the op that reads it next."""

    def __init__(self, inner: LayerOps, exchange: PeerExchange, *, is_plain: bool) -> None:
        """`is_plain`: `inner` is the GPU's own table, and no observer reads the states."""
        super().__init__(inner, exchange)
        self._peers = exchange.peers
        self._is_plain = is_plain

    def linear(self, x: Tensor, w: PackedLinear) -> Tensor:
        self._peers.settle()
        if not isinstance(w, PartialLinear):
            return self.inner.linear(x, w)
        if self._is_plain and self._peers.multiply(x, w.part, defers=False):
            return self._peers.await_sum(None, defers=False)
        return self._sum(self.inner.linear(x, w.part))

    def linear_add_(self, x: Inputs, w: PackedLinear, residual: Tensor) -> Tensor:
        if not isinstance(w, PartialLinear) or not self._peers.takes(residual):
            self._peers.settle()
            return super().linear_add_(x, w, residual)
        defers = self._is_plain and isinstance(w, DeferredLinear)
        if not (self._is_plain and self._peers.multiply(x, w.part, defers=defers)):
            self._peers.settle()
            self._peers.send(self._part(x, w, residual))
        return self._peers.await_sum(residual, defers=defers)

    def norm_linear(
        self, x: Tensor, norm: Norm, w: PackedLinear, out: Tensor | None = None
    ) -> Tensor:
        found = self._peers.norm_linear(x, norm, w, out)
        if found is not None:
            return found
        self._peers.settle()
        return super().norm_linear(x, norm, w, out)

    def norm_gated_linear(
        self, x: Tensor, norm: Norm, w: PackedLinear, kind: GateKind, out: Inputs | None = None
    ) -> Inputs:
        found = self._peers.norm_gated_linear(x, norm, w, kind, out)
        if found is not None:
            return found
        self._peers.settle()
        return super().norm_gated_linear(x, norm, w, kind, out)

    def norm_activated_linear(
        self,
        x: Tensor,
        norm: Norm,
        w: PackedLinear,
        kind: ActivationKind,
        out: Inputs | None = None,
    ) -> Inputs:
        found = self._peers.norm_activated_linear(x, norm, w, kind, out)
        if found is not None:
            return found
        self._peers.settle()
        return super().norm_activated_linear(x, norm, w, kind, out)

    def expert_mlp(self, x: Tensor, routed: Routed, experts: ExpertMlp) -> Tensor:
        return self._sum(self.inner.expert_mlp(x, routed, experts))

    def _sum(self, part: Tensor) -> Tensor:
        if not self._peers.takes(part):
            return self._exchange.sum(part)
        self._peers.send(part)
        return self._peers.await_sum(None, defers=False)


class RankTransformer(Transformer):
    """One rank's part of a model. All ranks run the same passes at the same time."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: OpTable,
        exchange: Exchange,
        *,
        shares: Shares,
        sample_ids: tuple[int, ...] = (),
    ) -> None:
        """`config`: the numbers of the whole model; `weights`: the rank's part of them, as
        `shares` says. A single rank computes what an undivided model does, to the bit."""
        rank = exchange.rank
        self._is_divided = rank.count > 1
        divided = _divided(config, weights, rank) if self._is_divided else weights
        super().__init__(share_config(config, rank), divided, ops, sample_ids)
        self._exchange = exchange
        self._shares = shares
        self._whole_layers = config.layers
        self._peers = exchange if isinstance(exchange, PeerExchange) else None
        self._is_plain = False
        if self._is_divided:
            self._steps = with_ops(self._steps, self._summing)
        ranks = (Rank(index, rank.count) for index in range(rank.count))
        self._tokens = [share(config.vocab_size, one) for one in ranks]

    @torch.inference_mode()
    def run_stage(
        self,
        index: int,
        batch: Batch,
        store: KVStore,
        x: Tensor | None = None,
        *,
        observe: Observer | None = None,
    ) -> Tensor:
        if self._peers is None:
            return super().run_stage(index, batch, store, x, observe=observe)
        self._is_plain = observe is None and not batch.adapters
        self._smoothing_for(store)  # measured by a pass of its own, with other rows
        with self._peers.passing(len(batch.token_ids)):
            return super().run_stage(index, batch, store, x, observe=observe)

    @property
    def num_ranks(self) -> int:
        return self._exchange.rank.count

    @property
    def whole_config(self) -> ModelConfig:
        return self._shares.config

    def own_low_rank(
        self, target: LoraTarget, down: Tensor, up: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        if not self._is_divided:
            return super().own_low_rank(target, down, up)
        return self._shares.low_rank(target, down, up)

    def _whole_power(self, layer: int, power: Tensor) -> Tensor:
        """With fewer key heads than ranks, several ranks divide the queries of one. They smooth
        their copies of its keys alike."""
        spec, rank = self._whole_layers[layer].mixer, self._exchange.rank
        assert isinstance(spec, Attention), "the layer has keys"
        if rank.count <= spec.num_kv_heads:
            return power
        own = head_share(spec, rank)
        parts = power.new_zeros(spec.num_kv_heads, power.shape[1], dtype=torch.float32)
        parts[own.kv.start] = power[0] * len(own.q)
        group = spec.num_q_heads // spec.num_kv_heads
        return self._exchange.sum(parts)[own.kv.start, None].double() / group

    def _summing(self, ops: LayerOps, _: int, __: BlockWeights) -> LayerOps:
        if self._peers is None or not self._peers.peers.is_active:
            return SummingOps(ops, self._exchange)
        is_plain = self._is_plain and ops is self.ops
        return PeerOps(ops, self._peers, is_plain=is_plain)

    def _token_vectors(self, token_ids: Tensor) -> Tensor:
        if not self._is_divided:
            return super()._token_vectors(token_ids)
        is_spread = False
        if token_ids.device.type == "cpu":
            check_range("embedding", "token_ids", token_ids, self.config.vocab_size)
            token_ids, is_spread = token_ids.to(self.ops.device), True
        if self._peers is not None and self._peers.peers.is_active:
            return self._shared_vectors(self._peers.peers, token_ids, is_spread=is_spread)
        if (
            not is_spread
        ):  # inputs of a graph, which rank 0 alone has if it has sampled them on its GPU
            self._exchange.spread_(token_ids)
        own = self._own_tokens
        is_other = (token_ids < own.start) | (token_ids >= own.stop)
        ids = (token_ids - own.start).masked_fill_(is_other, 0)
        part = self.ops.embedding(ids, self._weights.embed)
        return self._exchange.sum(part.masked_fill_(is_other.unsqueeze(1), 0.0))

    def _shared_vectors(self, peers: PeerSums, token_ids: Tensor, *, is_spread: bool) -> Tensor:
        """`_token_vectors` through shared memory."""
        ids, is_own = peers.share_tokens(token_ids, self._own_tokens, spreads=not is_spread)
        return peers.embed(self.ops.embedding(ids, self._weights.embed), is_own)

    @property
    def _own_tokens(self) -> range:
        return self._tokens[self._exchange.rank.index]

    def _read_head(self, x: Tensor, norm: Norm | None, out: Tensor | None) -> Tensor:
        if not self._is_divided:
            return super()._read_head(x, norm, out)
        if self._peers is not None and self._peers.peers.is_active:
            return self._read_shared_head(self._peers.peers, x, norm, out)
        part = read_linear(self.ops, x, norm, self._weights.head)
        parts = self._exchange.gather(part, [len(tokens) for tokens in self._tokens])
        if len(parts) == 1 or out is None:
            return torch.cat(list(parts), -1)
        return torch.cat(list(parts), -1, out=out)

    def _read_shared_head(
        self, peers: PeerSums, x: Tensor, norm: Norm | None, out: Tensor | None
    ) -> Tensor:
        """`_read_head` through shared memory."""
        own, vocab = self._own_tokens, self.config.vocab_size
        if self._exchange.rank.index != 0:
            peers.send_logits(x, norm, self._weights.head, own.start)
            return x.new_empty(len(x), len(own))
        logits = x.new_empty(len(x), vocab) if out is None else out
        part = logits[:, own.start : own.stop]  # a GPU writes to columns of a wider tensor
        found = read_linear(self.ops, x, norm, self._weights.head, part)
        if found is not part:
            part.copy_(found)
        peers.gather_logits(logits, own.stop)
        return logits

    def _range_logits(self, x: Tensor, norm: Norm | None, rows: HeadRows) -> Tensor:
        """Only rank 0 has whole logits. The others compute their parts of the model's own head."""
        if self._exchange.rank.index == 0:
            return super()._range_logits(x, norm, rows)
        if rows.head is self._weights.head:
            return self._read_head(x, norm, None)
        return x.new_zeros(len(x), self._weights.head.out_features)


def _divided(config: ModelConfig, weights: ModelWeights, rank: Rank) -> ModelWeights:
    """The weights of a rank, with everything marked that is summed over the ranks."""
    blocks = []
    later = *weights.blocks[1:], None
    for layer, block, following in zip(config.layers, weights.blocks, later, strict=True):
        mlp = block.mlp
        if isinstance(mlp, MoeWeights):
            shared = mlp.shared
            mlp = replace(mlp, shared=None if shared is None else _partial_mlp(shared))
        elif mlp is not None:
            mlp = replace(mlp, down=_down(layer, block, following))
        blocks.append(replace(block, mixer=_divided_mixer(layer, block, rank), mlp=mlp))
    return replace(weights, blocks=tuple(blocks))


def _divided_mixer(layer: LayerSpec, block: BlockWeights, rank: Rank) -> MixerWeights | None:
    """The rank's weights of a mixer, marked."""
    match block.mixer:
        case LatentWeights() as latent:
            return replace(latent, output=PartialLinear(latent.output))
        case AttentionWeights() as own:
            return replace(
                own,
                output=_output(layer, block, own.output, own.post_norm),
                whole_norms=_divided_norms(layer.attention, own.whole_norms, rank),
            )
        case Mamba2Weights() as scan:
            output = _output(layer, block, scan.narrow, scan.post_norm)
            return replace(scan, narrow=output, gating=_divided_gating(layer, scan.gating, rank))
        case RecurrentWeights() as recurrent:
            output = _output(layer, block, recurrent.narrow, recurrent.post_norm)
            return replace(recurrent, narrow=output)
    return None


def _divided_gating(layer: LayerSpec, gating: Gating, rank: Rank) -> Gating:
    """The gates of Mamba-2. With fewer groups than ranks, some ranks share a group, which has one
    norm, and all of them sum its squares."""
    assert isinstance(layer.mixer, Mamba2), "the weights are those of Mamba-2"
    spec, norm = layer.mixer, gating.norm
    if rank.count <= spec.groups or norm is None:
        return gating
    size, group = spec.size // spec.groups, scan_share(spec, rank).kv.start
    own = SharedGroupNorm(norm.weight, norm.eps, size, group, spec.groups)
    return replace(gating, norm=own)


def _output(
    layer: LayerSpec, block: BlockWeights, output: PackedLinear, post_norm: Norm | None
) -> PackedLinear:
    """The last matrix of a mixer, marked."""
    mlp = block.mlp
    is_read_next = isinstance(mlp, MlpWeights) and mlp.norm is not None
    is_deferred = is_read_next and post_norm is None and layer.norms is not NormPlacement.PARALLEL
    mark = DeferredLinear if is_deferred else PartialLinear
    return cast(PackedLinear, mark(output))


def _down(layer: LayerSpec, block: BlockWeights, following: BlockWeights | None) -> PackedLinear:
    """The last matrix of an MLP, marked. `following`: the next layer."""
    mlp = cast(MlpWeights, block.mlp)
    mixer = None if following is None else following.mixer
    reads_norm = isinstance(mixer, AttentionWeights | RecurrentWeights) and mixer.norm is not None
    is_deferred = (
        reads_norm
        and mlp.post_norm is None
        and block.scalar is None
        and layer.norms is not NormPlacement.PARALLEL
    )
    mark = DeferredLinear if is_deferred else PartialLinear
    return cast(PackedLinear, mark(mlp.down))


def _divided_norms(
    spec: Attention, norms: tuple[Norm, Norm] | None, rank: Rank
) -> tuple[Norm, Norm] | None:
    """Norms over all queries and all keys; a norm of each head needs no sum."""
    if norms is None or spec.head_norm is not HeadNorm.RMS_WHOLE:
        return norms
    q_norm, k_norm = norms
    copies = head_share(spec, rank).kv_copies
    return (
        DividedNorm(q_norm.weight, q_norm.eps, spec.q_size, 1),
        DividedNorm(k_norm.weight, k_norm.eps, spec.kv_size, copies),
    )


def _partial_mlp(mlp: MlpWeights) -> MlpWeights:
    return replace(mlp, down=cast(PackedLinear, PartialLinear(mlp.down)))
