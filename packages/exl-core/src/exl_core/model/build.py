"""From a checkpoint to packed weights: reads, checks and repacks in parallel.

Every matrix is streamed through in small pieces, so that the peak stays near the packed size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from torch import Tensor

from exl_core.arch.key_map import EMBED, FINAL_NORM, HEAD, layer_prefix, packed_together
from exl_core.arch.spec import HeadNorm, ModelConfig, Residual
from exl_core.errors import BackendError
from exl_core.model.weights import (
    AttentionWeights,
    BlockWeights,
    MlpWeights,
    ModelWeights,
)
from exl_core.ops.table import OpTable, PackedLinear
from exl_core.weights.checkpoint import Checkpoint

Progress = Callable[[int, int], None]


def build_weights(
    config: ModelConfig,
    checkpoint: Checkpoint,
    ops: OpTable,
    *,
    threads: int,
    progress: Progress | None = None,
) -> ModelWeights:
    """All weights of the model, packed for `ops`. `progress` gets (bytes read, bytes in all)."""
    with _Packer(checkpoint, ops, threads, progress) as packer:
        embed = packer.pack([EMBED])
        blocks = tuple(_block(config, packer, layer) for layer in range(config.num_layers))
        head = embed if config.has_tied_embeddings else packer.pack([HEAD])
        final_norm = packer.norm(FINAL_NORM)
        packer.finish()
    return ModelWeights(embed, blocks, final_norm, head)


def _block(config: ModelConfig, packer: _Packer, layer: int) -> BlockWeights:
    prefix = layer_prefix(layer)
    is_sandwich = config.arch.residual is Residual.SANDWICH
    has_head_norm = config.arch.head_norm is not HeadNorm.NONE
    norm = packer.norm
    attention = AttentionWeights(
        qkv=packer.pack(packed_together(f"{prefix}self_attn.q_proj.weight")),
        output=packer.pack([f"{prefix}self_attn.o_proj.weight"]),
        q_norm=norm(f"{prefix}self_attn.q_norm.weight") if has_head_norm else None,
        k_norm=norm(f"{prefix}self_attn.k_norm.weight") if has_head_norm else None,
    )
    mlp = MlpWeights(
        gate_up=packer.pack(packed_together(f"{prefix}mlp.gate_proj.weight")),
        down=packer.pack([f"{prefix}mlp.down_proj.weight"]),
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


class _Packer:
    """Hands out matrices at once and fills them in the background, until `finish`."""

    def __init__(
        self, checkpoint: Checkpoint, ops: OpTable, threads: int, progress: Progress | None
    ) -> None:
        self.checkpoint = checkpoint
        self._ops = ops
        self._progress = progress
        self._pool = ThreadPoolExecutor(threads)
        self._pending: list[Future[None]] = []
        self._done_bytes = 0
        self._lock = Lock()

    def __enter__(self) -> _Packer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)

    def pack(self, names: Sequence[str]) -> PackedLinear:
        """One matrix from the rows of several tensors; its biases too, where there are any."""
        stored = [self.checkpoint.stored[name] for name in names]
        biases = [name.removesuffix("weight") + "bias" for name in names]
        has_bias = biases[0] in self.checkpoint.stored
        packed = self._ops.new_linear(
            sum(tensor.shape[0] for tensor in stored),
            stored[0].shape[1],
            self.checkpoint.dtype(*names),
            has_bias=has_bias,
        )
        try:
            job = self._pool.submit(self._fill, packed, names, biases if has_bias else [])
        except RuntimeError as error:  # the pool starts its threads when they are first needed
            raise BackendError(
                "no thread can be started to read the weights",
                got=error,
                next_step="Raise the limits on processes and memory, or use fewer threads.",
            ) from error
        self._pending.append(job)
        return packed

    def norm(self, name: str) -> Tensor:
        """A norm's factors, read at once."""
        weight = self.checkpoint.norm(name)
        self._report(self.checkpoint.stored[name].size_bytes)
        return weight

    def finish(self) -> None:
        """Waits for all matrices; the first failure is raised and the rest are dropped."""
        for job in self._pending:
            job.result()

    def _fill(self, packed: PackedLinear, names: Sequence[str], biases: Sequence[str]) -> None:
        first_row = 0
        for index, name in enumerate(names):
            bias = None
            if biases:
                bias = self.checkpoint.vector(biases[index])
                self._report(self.checkpoint.stored[biases[index]].size_bytes)
            for chunk in self.checkpoint.chunks(name, packed.dtype):
                rows = slice(chunk.first_row, chunk.first_row + chunk.values.shape[0])
                part = None if bias is None else bias[rows]
                self._ops.fill_linear(packed, first_row + chunk.first_row, chunk.values, part)
                self._report(chunk.size_bytes)
            first_row += self.checkpoint.stored[name].shape[0]

    def _report(self, size_bytes: int) -> None:
        if self._progress is None:
            return
        with self._lock:
            self._done_bytes += size_bytes
            self._progress(self._done_bytes, self.checkpoint.size_bytes)
