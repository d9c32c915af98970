"""A layer for multi-token prediction as a model, whose passes propose tokens.

Row i of a sequence is token i + 1 of the text, as the layer reads the states after token i beside
it (`arch/mtp.py`). These come from the cache of the model that has the layer, by slot. A row with
logits leaves its own states, after the layer's norm, in the slot after its own: a row for a
proposed token reads them there in place of the states that the model has not computed yet. The
model's next pass overwrites them.

Dimension: R rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from exl_core.arch.modules import module_table
from exl_core.arch.mtp import OPTIONAL
from exl_core.arch.spec import ModelConfig
from exl_core.cache.store import KVStore
from exl_core.errors import RequestError
from exl_core.formats.checkpoint import Checkpoint
from exl_core.model.adapters import AdapterUse
from exl_core.model.batch import Batch
from exl_core.model.build import block_weights, start_block
from exl_core.model.layers.residual import normed
from exl_core.model.layers.steps import steps_of
from exl_core.model.packer import Packer
from exl_core.model.segment import Segment
from exl_core.model.stage import Stage
from exl_core.model.transformer import Transformer
from exl_core.model.weights import MtpWeights
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.table import OpTable


def read_mtp(config: ModelConfig, checkpoint: Checkpoint, ops: OpTable, threads: int) -> MtpWeights:
    """Weights of the layer of `config`, one of `mtp_config`. Of the optional tensors, those among
    the rows of `checkpoint`."""
    table = module_table(config)
    rows = table.layers[0]

    def is_read(role: str) -> bool:
        return role not in OPTIONAL or rows[role].name in checkpoint.rows

    with Packer(checkpoint, ops, threads, None) as packer:
        ends = [rows[role] for role in ("mtp_join", "mtp_embed", "mtp_head") if is_read(role)]
        for row in ends:
            packer.start([row])
        start_block(table, packer, 0)
        packed = {row.role: packer.packed([row]) for row in ends}
        norms = {
            role: RmsNorm(packer.norm(rows[role]), config.state_eps)
            for role in ("mtp_embed_norm", "mtp_state_norm", "mtp_norm")
            if is_read(role)
        }
        return MtpWeights(
            join=packed["mtp_join"],
            embed_norm=norms["mtp_embed_norm"],
            state_norm=norms["mtp_state_norm"],
            block=block_weights(config, 0, packer),
            norm=norms.get("mtp_norm"),
            embed=packed.get("mtp_embed"),
            head=packed.get("mtp_head"),
        )


class MtpLayer:
    """The layer as it is loaded, beside the model that has its embedding and head, `target`."""

    def __init__(self, config: ModelConfig, weights: MtpWeights, target: Transformer) -> None:
        self.config = config
        self.target = target
        self.weights_bytes = weights.size_bytes
        self._held: MtpWeights | None = weights

    @property
    def weights(self) -> MtpWeights:
        self.check_loaded()
        assert self._held is not None
        return self._held

    def check_loaded(self) -> None:
        """Raises RequestError after `unload`, of the model too."""
        self.target.check_loaded()
        if self._held is None:
            raise RequestError("the model has been unloaded", next_step="Load it again.")

    def unload(self) -> None:
        """Frees the weights."""
        self._held = None


class MtpModel:
    """The layer with the states of one cache, ready to run."""

    def __init__(self, layer: MtpLayer, store: KVStore) -> None:
        """`store`: cache of the model, which keeps the states after the final norm."""
        if store.final_states is None:
            raise RequestError(
                "the cache does not keep the states that multi-token prediction reads",
                expected="a cache that the engine made, or store_for(..., keeps_final=True)",
            )
        target = layer.target
        self.config = layer.config
        self.ops = target.ops
        self.stages = (Stage(layer.config, range(1), self.ops),)
        self.num_ranks = 1
        self.has_head = True
        # A capture does not span devices.
        self.can_capture = target.can_capture and target.embedding_ops.device == self.ops.device
        self._layer = layer
        self._target = target
        self._states = store.final_states
        self._steps = steps_of(layer.config.layers)

    def forward(self, batch: Batch, store: KVStore) -> Tensor:
        return self.run_stage(0, batch, store)

    @torch.inference_mode()
    def run_stage(
        self,
        index: int,  # noqa: ARG002
        batch: Batch,
        store: KVStore,
        x: Tensor | None = None,
    ) -> Tensor:
        """Logits, float32 [len(logit_rows), vocab_size]. There is one stage, which takes no `x`."""
        weights, (stage,) = self._layer.weights, self.stages
        x = self._joined(batch)  # [R, hidden]
        state = stage.bind(batch, store, (None,))
        x = stage.run(x, self._steps, (weights.block,), state)
        if batch.logit_rows.shape[0] < x.shape[0]:
            x = x.index_select(0, batch.logit_rows.to(x.device))  # [n, hidden]
        x = normed(self.ops, x, weights.norm or self._target.final_norm)
        self._states.index_copy_(0, self._next_slots(batch, store), x.to(self._states.dtype))
        if weights.head is None:
            return self._target.read_head(x)
        return self.ops.linear(x, weights.head)

    def replaying(
        self,
        store: KVStore,  # noqa: ARG002
        segments: Sequence[Segment],  # noqa: ARG002
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def replayed(self, found: Tensor, segments: Sequence[Segment]) -> Tensor:  # noqa: ARG002
        return found

    def check_loaded(self) -> None:
        """Raises RequestError if the weights have been freed."""
        self._layer.check_loaded()

    def check_adapters(self, uses: Iterable[AdapterUse]) -> None:
        """Those of the model: the layer itself has none."""
        self._layer.target.check_adapters(uses)

    def reserve_positions(self, end: int) -> None:
        """Computes the RoPE tables for positions below `end`."""
        self.stages[0].reserve_positions(end)

    def _joined(self, batch: Batch) -> Tensor:
        """Inputs of the layer [R, hidden]."""
        weights, ops = self._layer.weights, self.ops
        if weights.embed is None:
            embedded = self._target.embed(batch.token_ids).to(ops.device)
        else:
            embedded = ops.embedding(batch.token_ids.to(ops.device), weights.embed)
        before = self._states.index_select(0, batch.slots.to(ops.device)).float()
        both = normed(ops, embedded, weights.embed_norm), normed(ops, before, weights.state_norm)
        return ops.linear(torch.cat(both, dim=1), weights.join)

    def _next_slots(self, batch: Batch, store: KVStore) -> Tensor:
        """Slot after that of each row with logits: int64 [n]. Rows that pad a batch get one of the
        page that belongs to no sequence."""
        device, size = self.ops.device, store.page_size
        rows, starts = batch.logit_rows.to(device), batch.row_starts.to(device).long()
        sequence = torch.searchsorted(starts[1:], rows, right=True)
        sequence = sequence.clamp(max=len(starts) - 2)
        position = batch.positions.to(device).index_select(0, rows) + 1
        table = batch.page_table.to(device).long()
        page = (position // size).clamp(max=table.shape[1] - 1)
        slots = table[sequence, page] * size + position % size
        is_last = rows + 1 == starts[sequence + 1]
        return torch.where(is_last, slots, store.num_pages * size)
