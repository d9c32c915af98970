"""The forward pass: embedding, the layers in order, head.

The functions of the layers are in `model/layers/`, and the loop over them in `model/stage.py`. One
pass computes prefill chunks and decode rows of many sequences together. The rows are flattened
tokens; `Batch` assigns them to sequences, and `KVStore` holds the keys and values of earlier
passes. This module knows shapes and the choices of an architecture; it knows neither requests nor
files.

Dimension: R rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from itertools import pairwise

import torch
from torch import Tensor

from exl_core.arch.layers import Attention, LayerSpec, MoE
from exl_core.arch.modules import LoraTarget
from exl_core.arch.spec import ModelConfig
from exl_core.cache.format import KVFormat, RowFormat, pages_for
from exl_core.cache.memory import return_freed_memory
from exl_core.cache.store import KVStore
from exl_core.errors import RequestError
from exl_core.model.adapted import (
    HeadRows,
    adapt_embedding_,
    adapted,
    add_to_logits_,
    head_rows,
)
from exl_core.model.adapters import AdapterUse
from exl_core.model.batch import Batch
from exl_core.model.key_smoothing import SAMPLE_POSITION_RANGE, KeySmoothingOps
from exl_core.model.layers.residual import normed, read_linear
from exl_core.model.layers.steps import observed, steps_of, with_ops
from exl_core.model.observe import Observer, Part, checked_states
from exl_core.model.runner import make_batch, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.model.stage import Stage, StageTable, peer_copies_work
from exl_core.model.weights import (
    BlockWeights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
    StreamedWeights,
)
from exl_core.ops.attention import KeySmoothing
from exl_core.ops.elementwise import Norm
from exl_core.ops.table import LayerOps, OpTable

EMBEDDING, HEAD = Part("embedding"), Part("head")


class Transformer:
    """A model ready to run on one device, or split by layers over several."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: OpTable,
        sample_ids: tuple[int, ...] = (),
        *,
        split: Sequence[StageTable] = (),
    ) -> None:
        """`sample_ids`: text on which key smoothing is measured when keys are cached in 4 bits.
        Without it, keys are cached unsmoothed.

        `split`: the stages in order, if there is more than one. The first one has the embedding,
        the last one the final norm and the head; `ops` is the table of the last one.
        """
        self.config = config
        self.ops = ops
        self.stages = tuple(
            Stage(config, one.layers, one.ops)
            for one in split or (StageTable(range(config.num_layers), ops),)
        )
        for before, stage in pairwise((self.stages[-1], *self.stages)):
            devices = before.ops.device, stage.ops.device
            if all(device.type == "cuda" for device in devices) and devices[0] != devices[1]:
                stage.copies_through_host = not peer_copies_work(*devices)
        self.weights_bytes = weights.size_bytes
        self.is_streamed = isinstance(weights, StreamedWeights)
        self._held_weights: ModelWeights | None = weights
        self.decode_weight_bytes = self.pass_weight_bytes(1)
        self._steps = steps_of(config.layers)
        self._sample_ids = sample_ids[: config.max_seq_len]

    @torch.inference_mode()
    def forward(self, batch: Batch, store: KVStore, observe: Observer | None = None) -> Tensor:
        """Logits, float32 [len(logit_rows), vocab_size]. Keys and values of all rows are written
        to `store`."""
        x = self.run_stage(0, batch, store, observe=observe)
        for index in range(1, len(self.stages)):
            x = self.run_stage(index, batch, store, x, observe=observe)
        return x

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
        """The logits of the last stage with `has_head`, or the states [R, hidden] after the stage.

        `x`: states [R, hidden] after the stage before, on any device; its memory may be
        overwritten. The first stage takes none and reads the tokens of the batch.
        """
        stage = self.stages[index]
        steps = adapted(self._steps, batch.adapters, stage.ops)
        if observe is not None:
            steps = observed(steps, observe)
        if x is None:
            x = self._embedding(batch)  # [R, hidden]
            if observe is not None:
                x = checked_states(EMBEDDING, observe.after(EMBEDDING, x), x)
        else:
            x = stage.receive(x)
        state = stage.bind(batch, store, self._smoothing_for(store))
        x = stage.run(x, steps, self._weights.blocks, state)  # [R, hidden]
        if stage is not self.stages[-1] or not self.has_head:
            return x
        if store.final_states is not None:
            final = normed(stage.ops, x, self._weights.final_norm)
            slots = batch.slots.to(x.device)
            store.final_states.index_copy_(0, slots, final.to(store.final_states.dtype))
        if batch.logit_rows.shape[0] < x.shape[0]:  # else it lists every row
            x = x.index_select(0, batch.logit_rows.to(x.device))  # [n, hidden]
        return self._logits(x, batch, observe)  # [n, vocab]

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        """Input of the first block for token_ids int64 [n]: float32 [n, hidden_size]."""
        return self._scaled(self._token_vectors(token_ids))

    @property
    def num_ranks(self) -> int:
        """Processes that the model is divided among, each with a part of every matrix."""
        return 1

    @property
    def can_capture(self) -> bool:
        """Whether passes on a GPU can be captured as graphs. The host reads streamed weights."""
        return not self.is_streamed

    def replaying(
        self,
        store: KVStore,  # noqa: ARG002 # ranks need both
        segments: Sequence[Segment],  # noqa: ARG002
    ) -> AbstractContextManager[Tensor | None]:
        """Context of a pass over `segments` as a captured graph. Yields the states [R, hidden]
        after the layers of the host before, if there is one."""
        return nullcontext()

    def replayed(self, found: Tensor, segments: Sequence[Segment]) -> Tensor:  # noqa: ARG002
        """The logits of such a pass, from the result of the graph."""
        return found

    @property
    def has_head(self) -> bool:
        """Whether the last stage computes logits. Otherwise later hosts do."""
        return True

    @property
    def whole_config(self) -> ModelConfig:
        """The numbers of the model that all ranks make up together."""
        return self.config

    def own_layer(self, layer: int) -> int | None:
        """Number that a layer of the whole model has in this one; None if another host has it."""
        return layer

    @property
    def final_norm(self) -> Norm:
        """The norm before the head."""
        return self._weights.final_norm

    @torch.inference_mode()
    def read_head(self, x: Tensor) -> Tensor:
        """Logits, float32 [n, vocab_size], of states [n, hidden_size] after a final norm."""
        return self._read_head(x, None, None)

    def own_low_rank(
        self, target: LoraTarget, down: Tensor, up: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """The part of an adapter's pair for matrices of a layer that this rank applies: down
        [in_features, r], up [r, out_features], and the first output that it changes of the packed
        matrix."""
        return down, up, target.rows[0].first_out

    @property
    def _weights(self) -> ModelWeights:
        self.check_loaded()
        assert self._held_weights is not None
        return self._held_weights

    def check_loaded(self) -> None:
        """Raises RequestError after `unload`."""
        if self._held_weights is None:
            raise RequestError("the model has been unloaded", next_step="Load it again.")

    def unload(self) -> None:
        """Frees the weights, even if other objects refer to the model. Later passes raise
        RequestError.

        An engine keeps its cache until it goes. No pass may run meanwhile. May be called again.
        """
        self._held_weights = None
        return_freed_memory({stage.ops.device for stage in self.stages})

    @torch.inference_mode()
    def final_states(self, x: Tensor) -> Tensor:
        """The states that the head reads, [n, hidden_size], of states after the last layer."""
        return normed(self.ops, x, self._weights.final_norm)

    def pass_weight_bytes(self, rows: int) -> int:
        """Bytes of weights that a pass of some rows reads, except of an untied embedding.

        Of the experts, those that a row chooses are counted, as if rows chose independently and all
        experts equally often: a share of 1 - (1 - k / E)^rows. Streamed weights are all read.
        """
        return sum(self.stage_pass_bytes(rows)) + self.host_pass_bytes(rows)

    def stage_pass_bytes(self, rows: int) -> tuple[int, ...]:
        """`pass_weight_bytes` of each stage, without experts in the host's memory. Those of the
        head belong to the last one."""
        whole = self._weights.decode_bytes
        if self.is_streamed:
            return (whole,)
        weights = zip(self.config.layers, self._weights.blocks, strict=True)
        unread = [_unread_bytes(layer, block.mlp, rows) for layer, block in weights]
        stages = [
            sum(self._weights.blocks[i].size_bytes - unread[i] for i in stage.layers)
            for stage in self.stages[:-1]
        ]
        last = whole - sum(unread) - sum(stages)
        return tuple(int(size) for size in (*stages, last))

    def host_pass_bytes(self, rows: int) -> int:
        """Bytes of experts that a pass of some rows reads from the host's memory, in layers that
        are on another device. They are counted as in `pass_weight_bytes`."""
        return int(sum(_read_bytes(layer, part, rows) for layer, part in self._host_parts()))

    @property
    def host_bytes(self) -> int:
        """Bytes of experts in the host's memory, of layers that are on another device."""
        return sum(part.host_bytes for _, part in self._host_parts())

    @property
    def host_table(self) -> OpTable | None:
        """The table that computes these experts; None if there are none."""
        found = (part.host.cpu for _, part in self._host_parts() if part.host is not None)
        return next(found, None)

    def _host_parts(self) -> list[tuple[LayerSpec, MoeWeights]]:
        if self.is_streamed:
            return []
        parts = zip(self.config.layers, self._weights.blocks, strict=True)
        return [
            (layer, block.mlp)
            for layer, block in parts
            if isinstance(block.mlp, MoeWeights) and block.mlp.host is not None
        ]

    def reserve_positions(self, end: int) -> None:
        """Computes the RoPE tables for positions below `end`.

        Afterwards, `Batch.positions` below `end` may be a GPU tensor, whose values the host does
        not read.
        """
        for stage in self.stages:
            stage.reserve_positions(end)

    @property
    def embedding_ops(self) -> OpTable:
        """Op table of the device that has the embedding."""
        return self.stages[0].ops

    def ops_of(self, layer: int) -> OpTable:
        """Op table of the device that has a layer."""
        return next(stage.ops for stage in self.stages if layer in stage.layers)

    def check_adapters(self, uses: Iterable[AdapterUse]) -> None:
        """Raises RequestError for an adapter whose model has other dimensions than this one."""
        if not all(use.adapter.fits(self.whole_config) for use in uses):
            raise RequestError(
                "an adapter was loaded for another model", next_step="Load it for this one."
            )

    def _scaled(self, x: Tensor) -> Tensor:
        if self.config.embed_factor != 1.0:
            x *= self.config.embed_factor
        return x

    def _token_vectors(self, token_ids: Tensor) -> Tensor:
        """Rows of the embedding matrix, float32 [n, hidden]."""
        ops = self.embedding_ops
        return ops.embedding(token_ids.to(ops.device), self._weights.embed)

    def _read_head(self, x: Tensor, norm: Norm | None, out: Tensor | None) -> Tensor:
        """Logits [n, vocab] of norm(x), states [n, hidden]; in `out` if it is given."""
        return read_linear(self.ops, x, norm, self._weights.head, out)

    def _embedding(self, batch: Batch) -> Tensor:
        ops = self.embedding_ops
        x = self._token_vectors(batch.token_ids)  # [R, hidden]
        if batch.adapters:
            adapt_embedding_(x, batch, ops)
        x = self._scaled(x)
        if batch.embedded is not None:
            rows, vectors = batch.embedded
            if vectors.shape[1] != x.shape[1]:
                raise RequestError(
                    "embedded vectors are not as wide as the model's states",
                    expected=x.shape[1],
                    got=vectors.shape[1],
                )
            x.index_copy_(0, rows.to(x.device), vectors.to(x.device))  # never scaled
        positions = self._weights.positions
        if positions is None:
            return x
        return ops.add_(x, ops.embedding(batch.positions.to(ops.device), positions))

    def _logits(self, x: Tensor, batch: Batch, observe: Observer | None) -> Tensor:
        config = self.config
        norm: Norm | None = self._weights.final_norm
        if observe is not None:
            x = normed(self.ops, x, self._weights.final_norm)
            x = checked_states(HEAD, observe.before(HEAD, x), x)
            norm = None
        if batch.adapters:
            logits = self._adapted_logits(x, norm, batch)
        else:
            out = None if batch.logits is None else batch.logits[: len(x)]
            logits = self._read_head(x, norm, out)
        if config.final_softcap is not None:
            logits = torch.tanh(logits / config.final_softcap) * config.final_softcap
        if observe is not None:
            logits = checked_states(HEAD, observe.after(HEAD, logits), logits)
        return logits

    def _adapted_logits(self, x: Tensor, norm: Norm | None, batch: Batch) -> Tensor:
        """Logits of norm(x), states [n, hidden], each range by the head of its adapters."""
        ranges = head_rows(batch, self._weights.head)
        parts = [self._range_logits(x[rows.first : rows.last], norm, rows) for rows in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _range_logits(self, x: Tensor, norm: Norm | None, rows: HeadRows) -> Tensor:
        """Logits of the states x [n, hidden] of one range of rows."""
        if rows.head is self._weights.head:
            logits = self._read_head(x, norm, None)
        else:
            logits = read_linear(self.ops, x, norm, rows.head)
        if rows.deltas:
            inputs = x if norm is None else normed(self.ops, x, norm)
            add_to_logits_(self.ops, logits, inputs, rows.deltas)
        return logits

    def _smoothing_for(self, store: KVStore) -> tuple[KeySmoothing | None, ...]:
        """Key smoothing by layer; None for keys that are cached as they are."""
        has_keys = any(isinstance(layer.mixer, Attention) for layer in self.whole_config.layers)
        is_coarse = store.kv_format.key_rows is RowFormat.CODES4
        if has_keys and is_coarse and len(self._sample_ids) > 1:
            return self._key_smoothing
        return (None,) * self.config.num_layers

    @cached_property
    def _key_smoothing(self) -> tuple[KeySmoothing | None, ...]:
        """Measured by the first pass that needs it, and constant from then on. Keys that are values
        too are not smoothed."""
        config, ids = self.config, self._sample_ids
        num_pages = pages_for(len(ids))
        text = Segment(
            token_ids=ids,
            past_len=0,
            page_ids=tuple(range(num_pages)),
            logit_rows=LogitRows.LAST,
            state_slot=0,
        )
        store = store_for(self, KVFormat.FP32, num_pages)
        batch = make_batch((text,), store.page_size)
        end = min(SAMPLE_POSITION_RANGE, config.max_seq_len) - 1
        positions = torch.linspace(0, end, len(ids), dtype=torch.float64).long()
        found: dict[int, KeySmoothing] = {}

        x = self._embedding(batch)
        for stage in self.stages:
            steps = with_ops(self._steps, partial(self._smoothing_ops, stage, positions, found))
            state = stage.bind(batch, store, (None,) * config.num_layers)
            x = stage.run(stage.receive(x), steps, self._weights.blocks, state)
        self._pass_on(x)
        return tuple(found.get(layer) for layer in range(config.num_layers))

    def _pass_on(self, x: Tensor) -> None:
        """Gives the states x [R, hidden] after the last stage to the next host, if there is one."""

    def _smoothing_ops(
        self,
        stage: Stage,
        positions: Tensor,
        found: dict[int, KeySmoothing],
        ops: LayerOps,
        layer: int,
        _: BlockWeights,
    ) -> LayerOps:
        """Ops of a layer that put its key smoothing into `found`."""
        mixer = self.config.layers[layer].mixer
        if not isinstance(mixer, Attention):
            return ops
        angles = stage.angles(mixer.attend_rope, positions)
        whole_power = partial(self._whole_power, layer)
        return KeySmoothingOps(
            ops, stage.ops, angles, partial(found.__setitem__, layer), whole_power
        )

    def _whole_power(self, layer: int, power: Tensor) -> Tensor:  # noqa: ARG002 - for ranks
        """`power_of` all queries of a layer, from that of the queries computed here."""
        return power


def _unread_bytes(layer: LayerSpec, part: MlpWeights | MoeWeights | None, rows: int) -> float:
    """Bytes of the experts of a layer that its device is expected not to read in a pass of some
    rows: those that no row chooses, or all if they are in the host's memory."""
    if not isinstance(part, MoeWeights):
        return 0.0
    return part.expert_bytes - (0.0 if part.host is not None else _read_bytes(layer, part, rows))


def _read_bytes(layer: LayerSpec, part: MoeWeights, rows: int) -> float:
    """Bytes of the experts of a layer that a pass of some rows is expected to read."""
    assert isinstance(layer.feed_forward, MoE), "the layer has experts"
    router = layer.feed_forward.router
    return float(part.expert_bytes * (1.0 - (1.0 - router.top_k / router.num_experts) ** rows))
