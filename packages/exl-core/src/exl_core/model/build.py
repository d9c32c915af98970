"""Builds packed weights from a checkpoint: reads, checks and repacks in parallel.

Every matrix is streamed through in small pieces, so that peak memory stays near the packed size.
The largest matrices come first. The mapped file pages that they need are then smaller than the
matrices that follow, so they do not raise the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from threading import Lock
from typing import NamedTuple, overload

import torch
from torch import Tensor
from torch.nn.functional import softplus

from exl_core.arch.layers import (
    MLA,
    XIELU_BETA,
    Dense,
    GatedDeltaNet,
    HeadNorm,
    KimiDeltaNet,
    LayerSpec,
    Mamba2,
    MoE,
    NoMixer,
    NormKind,
    ShortConv,
)
from exl_core.arch.modules import ModuleRow, ModuleTable, expert_matrices, module_table
from exl_core.arch.spec import ModelConfig
from exl_core.formats.containers.source import Progress
from exl_core.formats.tensors import WeightTensors
from exl_core.model.layers.mlp import ACTIVATIONS, GATES
from exl_core.model.packer import Packer
from exl_core.model.recurrent_weights import recurrent_weights
from exl_core.model.source import WeightSource
from exl_core.model.stage import StageTable
from exl_core.model.weights import (
    AttentionWeights,
    BlockWeights,
    LatentWeights,
    MixerWeights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
    StreamedWeights,
)
from exl_core.ops.attention import NO_HEAD_NORMS, HeadNorms
from exl_core.ops.elementwise import LayerNorm, Norm, RmsNorm, XIelu
from exl_core.ops.host_experts import HostExperts
from exl_core.ops.linear import PackedLinear
from exl_core.ops.moe import ExpertMlp
from exl_core.ops.table import OpTable


def build_weights(
    config: ModelConfig,
    checkpoint: WeightTensors,
    ops: OpTable,
    *,
    threads: int,
    progress: Progress | None = None,
    embed_on_host: bool = False,
    split: Sequence[StageTable] = (),
) -> ModelWeights:
    """All weights of the model, packed for `ops`, or each layer for its table of `split`.

    `progress` gets bytes read and total bytes. `embed_on_host`: the embedding, which is not the
    head too, stays in memory of the host.
    """
    table = module_table(config)
    stages = split or (StageTable(range(config.num_layers), ops),)
    tables = [stage.ops for stage in stages]
    tables += [stage.host.cpu for stage in stages if stage.host is not None]
    count = len(tables)
    reports = [progress] * count if progress is None or count == 1 else _summed(progress, count)
    with ExitStack() as stack:
        packers = [
            stack.enter_context(Packer(checkpoint, table, threads, report))
            for table, report in zip(tables, reports, strict=True)
        ]
        hosts = _hosts(stages, packers[len(stages) :])
        packers = packers[: len(stages)]
        first, last = packers[0], packers[-1]
        first.start([table.embed], on_host=embed_on_host)
        if table.positions is not None:
            first.start([table.positions])
        head_row = table.embed if table.is_tied else table.head
        is_shared = table.is_tied and first is last
        if not is_shared:
            last.start([head_row])
        for packer, stage in zip(packers, stages, strict=True):
            for layer in stage.layers:
                start_block(table, packer, layer, hosts.get(layer))
        norm = final_norm(config, last)
        blocks = tuple(
            block_weights(config, layer, packer, hosts.get(layer))
            for packer, stage in zip(packers, stages, strict=True)
            for layer in stage.layers
        )
        embed, positions = first.packed([table.embed]), _positions(table, first)
        head = embed if is_shared else last.packed([head_row])
    return ModelWeights(embed, positions, blocks, norm, head)


class HostSource(NamedTuple):
    """Packs the experts of some layers in the host's memory, for `host`, which computes them."""

    packer: Packer
    host: HostExperts


def _hosts(stages: Sequence[StageTable], packers: Sequence[Packer]) -> dict[int, HostSource]:
    """Sources of experts in the host's memory, by layer. `packers` are those of the stages with
    such experts, in order."""
    left = iter(packers)
    found: dict[int, HostSource] = {}
    for stage in stages:
        if stage.host is not None:
            source = HostSource(next(left), stage.host)
            found |= dict.fromkeys(stage.host_layers, source)
    return found


def _summed(progress: Progress, count: int) -> list[Progress]:
    """`progress` for each of `count` packers, each of which reports what it has read itself."""
    done_bytes, lock = [0] * count, Lock()

    def report(index: int, done: int, total: int) -> None:
        with lock:
            done_bytes[index] = done
            progress(min(sum(done_bytes), total), total)

    return [partial(report, index) for index in range(count)]


def stream_weights(
    config: ModelConfig,
    checkpoint: WeightTensors,
    ops: OpTable,
    *,
    threads: int,
    held_bytes: int = 0,
    embed_on_host: bool = False,
) -> StreamedWeights:
    """The same weights, of which only some blocks stay in memory.

    The first blocks that fit into `held_bytes` are kept. Each other block is read when a pass
    reaches it, and takes the memory of one block.
    """
    table = module_table(config)
    with Packer(checkpoint, ops, threads, None) as packer:
        for row in _ends(table):
            packer.start([row], on_host=embed_on_host and row is table.embed)
        norm = final_norm(config, packer)
        embed, positions = packer.packed([table.embed]), _positions(table, packer)
        head = embed if table.is_tied else packer.packed([table.head])
    blocks = _StreamedBlocks(config, checkpoint, ops, threads, held_bytes)
    return StreamedWeights(embed, positions, blocks, norm, head, checkpoint.packed_bytes)


class _StreamedBlocks(Sequence[BlockWeights]):
    """Reads blocks on demand. Keeps the first ones that fit, and the latest one."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: WeightTensors,
        ops: OpTable,
        threads: int,
        held_bytes: int,
    ) -> None:
        self._config = config
        # One thread pool for all blocks: each new thread would leave memory behind in the
        # allocator.
        self._packer = Packer(checkpoint, ops, threads, None)
        self._free_bytes = held_bytes
        self._held: dict[int, BlockWeights] = {}
        self._last: dict[int, BlockWeights] = {}

    def __len__(self) -> int:
        return self._config.num_layers

    @overload
    def __getitem__(self, layer: int) -> BlockWeights: ...
    @overload
    def __getitem__(self, layer: slice) -> list[BlockWeights]: ...
    def __getitem__(self, layer: int | slice) -> BlockWeights | list[BlockWeights]:
        if isinstance(layer, slice):
            return [self[index] for index in range(len(self))[layer]]
        if layer in self._held:
            return self._held[layer]
        if layer not in self._last:
            self._last.clear()
            start_block(module_table(self._config), self._packer, layer)
            block = block_weights(self._config, layer, self._packer)
            is_kept = block.size_bytes <= self._free_bytes
            self._free_bytes -= block.size_bytes if is_kept else 0
            (self._held if is_kept else self._last)[layer] = block
            return block
        return self._last[layer]


UP_ROLES = ("kv_up", "k_up", "v_up")
"""Matrices from latent vectors to keys and values, of which a layer has the first or the others."""


def _norm(
    source: WeightSource, row: ModuleRow, kind: NormKind, eps: float, factor: float = 1.0
) -> Norm:
    """A norm whose outputs are multiplied by `factor`."""
    weight = source.norm(row)
    if factor != 1.0:
        weight = weight * factor
    if kind is NormKind.RMS:
        return RmsNorm(weight, eps)
    bias = source.norm_bias(row)
    return LayerNorm(weight, None if bias is None else bias * factor, eps)


def final_norm(config: ModelConfig, source: WeightSource) -> Norm:
    """The norm before the head. Its factors include the multiplier of the logits."""
    row, kind = module_table(config).final_norm, config.arch.norm_kind
    return _norm(source, row, kind, config.state_eps, config.multipliers.logits)


def _ends(table: ModuleTable) -> list[ModuleRow]:
    """Matrices outside the layers."""
    ends = [table.embed] if table.is_tied else [table.embed, table.head]
    return ends if table.positions is None else [*ends, table.positions]


def _positions(table: ModuleTable, packer: Packer) -> PackedLinear | None:
    """Vectors of the positions, which `start` has queued."""
    return None if table.positions is None else packer.packed([table.positions])


def start_block(
    table: ModuleTable, packer: Packer, layer: int, host: HostSource | None = None
) -> None:
    """Queues the matrices of a layer."""
    for rows in table.packed(layer).values():
        packer.start(rows)
    for role in ("router", "shared_router"):
        if role in table.layers[layer]:
            packer.start([table.layers[layer][role]])
    experts = packer if host is None else host.packer
    if table.experts[layer]:
        experts.start_experts(
            [list(expert_matrices(expert).values()) for expert in table.experts[layer]]
        )


def block_weights(
    config: ModelConfig, layer: int, source: WeightSource, host: HostSource | None = None
) -> BlockWeights:
    """Weights of one layer, put together by the module table. `host` has its experts, if these are
    in the host's memory."""
    table = module_table(config)
    rows, matrices = table.layers[layer], table.packed(layer)

    def norm_of(role: str) -> Norm | None:
        kind = config.layers[layer].norm_kind
        return _norm(source, rows[role], kind, config.state_eps) if role in rows else None

    mixer: MixerWeights | None
    match config.layers[layer].mixer:
        case ShortConv() | GatedDeltaNet() | KimiDeltaNet() | Mamba2():
            mixer = recurrent_weights(config, layer, source, norm_of)
        case MLA() as latent:
            mixer = _latent(config, layer, source, latent, norm_of)
        case NoMixer():
            mixer = None
        case _:
            mixer = _attention(config, layer, source, norm_of)
    mlp: MlpWeights | MoeWeights | None
    if "router" in rows:
        mlp = _moe(config, layer, source, norm_of, host)
    elif "down" not in rows:
        mlp = None
    else:
        mlp = MlpWeights(
            norm=norm_of("mlp_norm"),
            gate_up=source.packed(matrices["gate_up"]),
            down=source.packed(matrices["down"]),
            post_norm=norm_of("mlp_post_norm"),
            xielu=_xielu(config.layers[layer], rows, source),
        )
    scalar = float(source.norm(rows["scalar"])) if "scalar" in rows else None
    return BlockWeights(mixer, mlp, scalar)


def _attention(
    config: ModelConfig, layer: int, source: WeightSource, norm_of: Callable[[str], Norm | None]
) -> AttentionWeights:
    table, eps = module_table(config), config.norm_eps
    rows, matrices = table.layers[layer], table.packed(layer)
    head_norms: HeadNorms = NO_HEAD_NORMS
    whole_norms: tuple[Norm, Norm] | None = None
    if "q_norm" in rows:
        q_norm, k_norm = source.norm(rows["q_norm"]), source.norm(rows["k_norm"])
        if config.layers[layer].attention.head_norm is HeadNorm.RMS:
            head_norms = HeadNorms(q_norm, k_norm, eps)
        elif config.layers[layer].attention.head_norm is HeadNorm.LAYER:
            whole_norms = LayerNorm(q_norm, None, eps), LayerNorm(k_norm, None, eps)
        else:
            whole_norms = RmsNorm(q_norm, eps), RmsNorm(k_norm, eps)
    elif config.layers[layer].attention.head_norm is HeadNorm.PLAIN_AFTER_ROPE:
        plain = _plain_head_norm(config, layer, source)
        whole_norms = plain, plain
    return AttentionWeights(
        norm=norm_of("attention_norm"),
        qkv=source.packed(matrices["qkv"]),
        head_norms=head_norms,
        whole_norms=whole_norms,
        value_norm=_value_norm(config, layer, source),
        output=source.packed(matrices["output"]),
        post_norm=norm_of("attention_post_norm"),
        sinks=source.norm(rows["sinks"]) if "sinks" in rows else None,
    )


def _latent(
    config: ModelConfig,
    layer: int,
    source: WeightSource,
    spec: MLA,
    norm_of: Callable[[str], Norm | None],
) -> LatentWeights:
    table = module_table(config)
    rows, matrices = table.layers[layer], table.packed(layer)
    q_norm = RmsNorm(source.norm(rows["q_a_norm"]), spec.norm_eps) if spec.q_rank else None
    return LatentWeights(
        norm=norm_of("attention_norm"),
        qkv=source.packed(matrices["qkv"]),
        q_norm=q_norm,
        q_up=source.packed(matrices["q_up"]) if spec.q_rank else None,
        kv_norm=RmsNorm(source.norm(rows["kv_a_norm"]), spec.norm_eps),
        up=source.latent_up(spec, [rows[role] for role in UP_ROLES if role in rows]),
        output=source.packed(matrices["output"]),
        post_norm=norm_of("attention_post_norm"),
    )


def _moe(
    config: ModelConfig,
    layer: int,
    source: WeightSource,
    norm_of: Callable[[str], Norm | None],
    host: HostSource | None,
) -> MoeWeights:
    table = module_table(config)
    rows, matrices = table.layers[layer], table.packed(layer)

    def vector(role: str) -> Tensor | None:
        return source.norm(rows[role]) if role in rows else None

    shared = None
    if "shared_gate_up" in matrices:
        gate_up = source.packed(matrices["shared_gate_up"])
        down = source.packed(matrices["shared_down"])
        shared = MlpWeights(None, gate_up, down, norm_of("shared_post_norm"))
    router_norm = None
    if "router_norm" in rows:
        factor = config.hidden_size**-0.5
        router_norm = RmsNorm(source.norm(rows["router_norm"]) * factor, config.state_eps)
    experts = _experts(config, layer, source if host is None else host.packer)
    scores = source.packed([rows["shared_router"]]) if "shared_router" in rows else None
    joined = None
    if shared is not None and host is None:
        joined = source.join_experts(experts, shared.gate_up, shared.down, scores)
    return MoeWeights(
        norm=norm_of("mlp_norm"),
        router=source.packed([rows["router"]]),
        router_bias=vector("router_bias"),
        experts=experts,
        shared=shared,
        shared_router=scores,
        post_norm=norm_of("mlp_post_norm"),
        router_norm=router_norm,
        expert_factors=vector("expert_factors"),
        expert_norm=norm_of("expert_norm"),
        expert_post_norm=norm_of("expert_post_norm"),
        latent_down=source.packed(matrices["latent_down"]) if "latent_down" in matrices else None,
        latent_up=source.packed(matrices["latent_up"]) if "latent_up" in matrices else None,
        host=None if host is None else host.host,
        joined=joined,
    )


def _experts(config: ModelConfig, layer: int, source: WeightSource) -> ExpertMlp:
    spec = config.layers[layer].feed_forward
    assert isinstance(spec, MoE), "a layer with a router has experts"
    matrices = [expert_matrices(one) for one in module_table(config).experts[layer]]
    gate_up, down = (
        source.stack([source.packed(one[name]) for one in matrices])
        for name in ("expert_gate_up", "expert_down")
    )
    if spec.is_gated:
        return ExpertMlp(gate_up, down, GATES[spec.activation])
    return ExpertMlp(gate_up, down, ACTIVATIONS[spec.activation], is_gated=False)


def _xielu(layer: LayerSpec, rows: Mapping[str, ModuleRow], source: WeightSource) -> XIelu | None:
    """Numbers of the activation. Files store values whose softplus is added to their minimum."""
    if "alpha_p" in rows:
        stored = torch.cat([source.norm(rows[role]) for role in ("alpha_p", "alpha_n")])
    elif isinstance(layer.feed_forward, Dense) and layer.feed_forward.activation_numbers:
        stored = torch.tensor(layer.feed_forward.activation_numbers)
    else:
        return None
    positive, negative = softplus(stored).tolist()
    return XIelu(positive, XIELU_BETA + negative, XIELU_BETA)


def _value_norm(config: ModelConfig, layer: int, source: WeightSource) -> Norm | None:
    """A norm of each value head, without factors."""
    has_norm = config.layers[layer].attention.has_value_norm
    return _plain_head_norm(config, layer, source) if has_norm else None


def _plain_head_norm(config: ModelConfig, layer: int, source: WeightSource) -> Norm:
    """A norm of one head, without factors."""
    head_dim = config.layers[layer].attention.head_dim
    return RmsNorm(torch.ones(head_dim, device=source.device), config.norm_eps)
