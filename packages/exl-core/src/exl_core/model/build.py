"""Builds packed weights from a checkpoint: reads, checks and repacks in parallel.

Every matrix is streamed through in small pieces, so that peak memory stays near the packed size.
The largest matrices come first. The mapped file pages that they need are then smaller than the
matrices that follow, so they do not raise the peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from exl_core.arch.key_map import EMBED, FINAL_NORM, HEAD, layer_prefix
from exl_core.arch.layers import HeadNorm, NormPlacement
from exl_core.arch.spec import ModelConfig
from exl_core.model.packer import Packer
from exl_core.model.weights import (
    AttentionWeights,
    BlockWeights,
    MlpWeights,
    ModelWeights,
    StreamedWeights,
)
from exl_core.ops.attention import NO_HEAD_NORMS, HeadNorms
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.table import OpTable
from exl_core.weights.checkpoint import Checkpoint
from exl_core.weights.source import Progress

# Matrices that are packed together go by the name of the first one.
_QKV, _OUTPUT = "self_attn.q_proj.weight", "self_attn.o_proj.weight"
_GATE_UP, _DOWN = "mlp.gate_proj.weight", "mlp.down_proj.weight"


def build_weights(
    config: ModelConfig,
    checkpoint: Checkpoint,
    ops: OpTable,
    *,
    threads: int,
    progress: Progress | None = None,
) -> ModelWeights:
    """All weights of the model, packed for `ops`. `progress` gets bytes read and total bytes."""
    matrices = _ends(config)
    for layer in range(config.num_layers):
        matrices += _matrices(layer)
    with Packer(checkpoint, ops, threads, progress) as packer:
        for name in matrices:
            packer.start(name)
        final_norm = RmsNorm(packer.norm(FINAL_NORM), config.norm_eps)
        blocks = tuple(_block(config, packer, layer) for layer in range(config.num_layers))
        embed = packer.packed(EMBED)
        head = embed if config.has_tied_embeddings else packer.packed(HEAD)
    return ModelWeights(embed, blocks, final_norm, head)


def stream_weights(
    config: ModelConfig,
    checkpoint: Checkpoint,
    ops: OpTable,
    *,
    threads: int,
    held_bytes: int = 0,
) -> StreamedWeights:
    """The same weights, of which only some blocks stay in memory.

    The first blocks that fit into `held_bytes` are kept. Each other block is read when a pass
    reaches it, and takes the memory of one block.
    """
    with Packer(checkpoint, ops, threads, None) as packer:
        for name in _ends(config):
            packer.start(name)
        final_norm = RmsNorm(packer.norm(FINAL_NORM), config.norm_eps)
        embed = packer.packed(EMBED)
        head = embed if config.has_tied_embeddings else packer.packed(HEAD)
    blocks = _StreamedBlocks(config, checkpoint, ops, threads, held_bytes)
    return StreamedWeights(embed, blocks, final_norm, head, checkpoint.packed_bytes)


class _StreamedBlocks(Sequence[BlockWeights]):
    """Reads blocks on demand. Keeps the first ones that fit, and the latest one, because a pass
    indexes each block twice."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
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
            for name in _matrices(layer):
                self._packer.start(name)
            block = _block(self._config, self._packer, layer)
            is_kept = block.size_bytes <= self._free_bytes
            self._free_bytes -= block.size_bytes if is_kept else 0
            (self._held if is_kept else self._last)[layer] = block
            return block
        return self._last[layer]


def _ends(config: ModelConfig) -> list[str]:
    return [EMBED] if config.has_tied_embeddings else [EMBED, HEAD]


def _matrices(layer: int) -> list[str]:
    return [layer_prefix(layer) + name for name in (_QKV, _OUTPUT, _GATE_UP, _DOWN)]


def _block(config: ModelConfig, packer: Packer, layer: int) -> BlockWeights:
    prefix = layer_prefix(layer)
    is_sandwich = config.layers[layer].norms is NormPlacement.SANDWICH
    has_head_norm = config.layers[layer].attention.head_norm is not HeadNorm.NONE

    def norm(name: str) -> RmsNorm:
        return RmsNorm(packer.norm(name), config.norm_eps)

    head_norms = NO_HEAD_NORMS
    if has_head_norm:
        q_norm = packer.norm(f"{prefix}self_attn.q_norm.weight")
        k_norm = packer.norm(f"{prefix}self_attn.k_norm.weight")
        head_norms = HeadNorms(q_norm, k_norm, config.norm_eps)
    attention = AttentionWeights(
        qkv=packer.packed(prefix + _QKV),
        output=packer.packed(prefix + _OUTPUT),
        head_norms=head_norms,
    )
    mlp = MlpWeights(
        gate_up=packer.packed(prefix + _GATE_UP),
        down=packer.packed(prefix + _DOWN),
    )
    after_attention = f"{prefix}post_attention_layernorm.weight"
    before_mlp = f"{prefix}pre_feedforward_layernorm.weight" if is_sandwich else after_attention
    return BlockWeights(
        attention_norm=norm(f"{prefix}input_layernorm.weight"),
        attention=attention,
        attention_post_norm=norm(after_attention) if is_sandwich else None,
        mlp_norm=norm(before_mlp),
        mlp=mlp,
        mlp_post_norm=norm(f"{prefix}post_feedforward_layernorm.weight") if is_sandwich else None,
    )
