"""Sums over the GPUs of one host through memory that all of them can access
(`exl/cuda/exchange.h`).

A sum has two halves. A product writes its partial sums into the memory of all ranks. The next op
reads the parts of all ranks: usually the one that prepares the inputs of the next product, so that
an exchange has no launch of its own. In between the sum is pending: its target is not written yet.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor

from exl_core.ops.backends.cuda.library import Gpu
from exl_core.ops.backends.cuda.matmul import CudaInputs
from exl_core.ops.backends.cuda.norms import PendingRows
from exl_core.ops.backends.cuda.peer_linears import NormedProduct, PeerLinears, SentTo
from exl_core.ops.backends.cuda.trellis import CudaTrellisInputs
from exl_core.ops.checks import OpInputError
from exl_core.ops.elementwise import ActivationKind, GateKind, Norm, XIelu
from exl_core.ops.linear import Inputs, PackedLinear
from exl_kernels import cuda, cuda_exchange
from exl_kernels.cuda_exchange import (
    PACKET_BYTES,
    PACKET_VALUES,
    STAGES,
    PartialCopies,
    PartialSums,
    SharedSums,
    Tokens,
)

_VALUE_BYTES = 4

MIN_DIVIDED_ROWS = 64
"""Fewest rows of a sum, counted once for each other rank, that the ranks divide. Then every rank
adds up some of the rows and sends their sums: one more transfer, but fewer bytes in all."""


class SharedMemory:
    """Memory of one GPU that other processes open by `handle`, and theirs that this one opens. It
    is freed by `close`, and when the object goes."""

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        """`CudaError` if the driver cannot share memory."""
        self._device = device
        self._library = cuda.load()
        self._opened: list[int] = []
        memory, handle = ctypes.c_void_p(), ctypes.create_string_buffer(cuda_exchange.HANDLE_BYTES)
        with torch.cuda.device(device):
            self._library.call("shared_new", size_bytes, ctypes.byref(memory), handle)
        self.address: int = memory.value or 0
        self.handle = handle.raw
        self.close = weakref.finalize(self, _free, device, self.address, self._opened)
        """Frees the memory, which no process may use any more. May be called again."""
        self.close.atexit = False  # the driver frees it then

    def open(self, handle: bytes) -> int:
        """The address of another process's memory. `CudaError` if it cannot be mapped."""
        memory = ctypes.c_void_p()
        with torch.cuda.device(self._device):
            self._library.call("shared_open", handle, ctypes.byref(memory))
        self._opened.append(memory.value or 0)
        return self._opened[-1]


def _free(device: torch.device, own: int, opened: Sequence[int]) -> None:
    """Frees memory of this process, and closes that of others, even if one cannot be closed."""
    library = cuda.load()
    with torch.cuda.device(device), ExitStack() as stack:
        stack.callback(library.call, "shared_free", own)
        for one in opened:
            stack.callback(library.call, "shared_close", one)


class _Pending(NamedTuple):
    """A sum whose parts have been sent. `x`: states that it is added to; None: zeros."""

    x: Tensor | None
    target: Tensor  # [m, k], receives x plus the sum
    stage: int
    is_divided: bool = False


class PeerBuffers(NamedTuple):
    """Places in the buffers of all ranks, for states of `width` values and `vocab` tokens.

    addresses  the start of each rank's buffer, in the address space of this process
    large      most values of a large sum (`LargeSums`); 0: there are none
    """

    addresses: tuple[int, ...]
    rows: int
    width: int
    vocab: int
    large: int = 0

    @property
    def area_stride(self) -> int:
        """Values from one row of logits to the next."""
        return -(-self.vocab // 4) * 4

    def sums_at(self, rank: int, stage: int, slot: int, rows: int) -> int:
        """A slot [rows, width] in the buffer of `rank`. Stage `STAGES` is that of the embedding."""
        ranks = len(self.addresses)
        slots = stage * ranks * self.rows + slot * rows
        return self.addresses[rank] + slots * self.width * _VALUE_BYTES

    def whole_at(self, rank: int, stage: int) -> int:
        """A complete sum [rows, width] in the buffer of `rank`."""
        return self.sums_at(rank, STAGES + 1, 0, 0) + stage * self.rows * self.width * _VALUE_BYTES

    def tokens_at(self, rank: int) -> int:
        return self.whole_at(rank, STAGES)

    def logits_at(self, rank: int) -> int:
        return self.tokens_at(rank) + self.rows * _VALUE_BYTES

    def large_parts_at(self, rank: int) -> int:
        """Parts of large sums that `rank` receives."""
        return self.logits_at(rank) + self.rows * self.area_stride * _VALUE_BYTES

    def large_sums_at(self, rank: int) -> int:
        """Large sums that `rank` receives."""
        return self.large_parts_at(rank) + self._large_bytes

    def flags_at(self, rank: int) -> int:
        return self.large_sums_at(rank) + self._large_bytes

    @property
    def size_bytes(self) -> int:
        """Size of a buffer."""
        flags = 4 * cuda_exchange.REDUCE_BLOCKS * (cuda_exchange.MAX_PEERS + 1) if self.large else 0
        return self.flags_at(0) - self.addresses[0] + flags

    @property
    def _large_bytes(self) -> int:
        """Size of the places for the shares of all ranks, which are whole packets."""
        packets = -(-self.large // (PACKET_VALUES * len(self.addresses))) * len(self.addresses)
        return packets * PACKET_BYTES


class LargeSums:
    """Sums of one rank with the others that have many values, as those of prompts.

    Values travel with 15 bits and the exponent of the largest of eight neighbours
    (`exl/cuda/exchange.h`). All ranks make the same calls, each on a GPU of its own.
    """

    MIN_VALUES = 1 << 18
    """NCCL takes fewer values. Chosen by the latency of two barriers, not measured."""

    def __init__(self, gpu: Gpu, rank: int, buffers: PeerBuffers) -> None:
        self._gpu = gpu
        self._most = buffers.large
        count = cuda_exchange.REDUCE_BLOCKS
        self._rounds = torch.zeros(count, dtype=torch.int32, device=gpu.device)
        self._args = cuda_exchange.AllReduce(
            rounds=self._rounds.data_ptr(), own=rank, ranks=len(buffers.addresses)
        )
        for one in range(len(buffers.addresses)):
            self._args.parts[one] = buffers.large_parts_at(one)
            self._args.sums[one] = buffers.large_sums_at(one)
            self._args.flags[one] = buffers.flags_at(one)

    def takes(self, part: Tensor) -> bool:
        """The same for all ranks: by what their parts have in common. Packets do not reach into
        the next row, so that no row depends on another."""
        is_whole = part.shape[-1] % PACKET_VALUES == 0
        is_fitting = self.MIN_VALUES <= part.numel() <= self._most and is_whole
        return is_fitting and part.dtype is torch.float32

    def add_(self, part: Tensor, ended: int, timeout_ms: int) -> Tensor:
        """Replaces the contiguous part by the rounded sum of all ranks' parts, in their order, with
        equal bits on all ranks. `ended` and `timeout_ms` as in `PartialSums`."""
        args = self._args
        args.values, args.count = part.data_ptr(), part.numel()
        args.ended, args.timeout_ms = ended, timeout_ms
        self._gpu.call("exchange_all_reduce", args)
        return part


class PeerSums:
    """Sums of one rank with the others on the same host. All ranks make the same calls."""

    def __init__(self, gpu: Gpu, linears: PeerLinears, rank: int, buffers: PeerBuffers) -> None:
        """There are at most `cuda_exchange.MAX_PEERS` other ranks. Queues work that empties this
        rank's buffer: the ranks wait for each other before the first exchange."""
        self._gpu = gpu
        self._linears = linears
        self._rank = rank
        self._buffers = buffers
        self._others = [one for one in range(len(buffers.addresses)) if one != rank]
        self._ended = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._shape: tuple[int, int] | None = None
        self._count = 0
        self._pending: _Pending | None = None
        self._num_logits = 0  # rows of logits that the pass has exchanged
        # Inputs of the latest kernel that sends. It may still read them while the kernel that reads
        # the sums writes its results, which get other memory therefore.
        self._read_by_sender: Tensor | None = None
        self._unread: int | None = None  # stage that a product has read, and nobody has emptied
        self._is_divided = [False] * STAGES  # the latest sum of each stage
        # Blocks of `prepare_shared_sums`, at least one for each row and form of the inputs, wait
        # for each other, so that all must run at once: two on a multiprocessor.
        device = torch.cuda.get_device_properties(gpu.device)
        can_divide = (device.major, device.minor) == (9, 0)
        self._most_divided = 2 * device.multi_processor_count // cuda.MAX_PARTS if can_divide else 0
        self.is_alone = False
        """Whether this GPU runs no kernels of other ranks. Then products read sums before the
        kernel that sends this rank's part has ended."""
        self.timeout_ms = 0
        """Longest wait for another rank; 0: until `abort`."""
        # The batch-invariant mode leaves them to the other exchange: packets are rounded, sums of
        # short passes are not.
        has_large = buffers.large and not gpu.is_invariant
        self._large = LargeSums(gpu, rank, buffers) if has_large else None
        self._gpu.call("exchange_empty", buffers.addresses[rank], buffers.size_bytes)

    def add(self, part: Tensor) -> Tensor | None:
        """The sum of all ranks' parts, float32 of any shape, in the memory of a contiguous part;
        None if they are not exchanged this way. The next weights are dequantized meanwhile."""
        if self._large is None or not self.is_alone or not self._large.takes(part):
            return None
        self._linears.slices.begin_exchange()
        return self._large.add_(part.contiguous(), self._ended.data_ptr(), self.timeout_ms)

    def begin(self, rows: int) -> None:
        """Starts a pass over states [rows, width]. Its first exchange is `embed`."""
        self._shape, self._count, self._pending = (rows, self._buffers.width), 0, None
        self._num_logits = 0
        self._is_divided = [False] * STAGES

    def end(self) -> None:
        """Ends the pass: `takes` is False until the next one."""
        self.settle()
        if self._unread is not None:
            rows, width = self._active
            size = len(self._buffers.addresses) * rows * width * _VALUE_BYTES
            self._gpu.call("exchange_empty", self._stage_at(self._unread), size)
            self._empty_whole(self._unread)
            self._unread = None
        self._shape = None

    def cancel(self) -> None:
        """Ends a pass that has failed. The exchanges of this rank and the others differ from then
        on."""
        self._shape = self._pending = self._unread = None

    @property
    def is_active(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self._shape is not None

    def takes(self, part: Tensor) -> bool:
        """Whether sums of such tensors, float32 [m, k], are exchanged in this pass."""
        return self._shape == part.shape and part.dtype is torch.float32

    def abort(self) -> None:
        """Ends all waits on the GPU. Their results are void. May be called on any thread."""
        self._ended.fill_(1)

    @property
    def has_ended(self) -> bool:
        """Whether a wait has ended without an answer, or `abort` was called."""
        return bool(self._ended)

    def share_tokens(
        self, token_ids: Tensor, own: range, *, spreads: bool
    ) -> tuple[Tensor, Tensor]:
        """Numbers of this rank's tokens, those of `own`, among its vectors, int64 [m], and whether
        each token is its own, int32 [m].

        With `spreads` rank 0 sends its tokens to the others, which overwrite `token_ids` by them.
        """
        rows = len(token_ids)
        ids, is_own = torch.empty_like(token_ids), self._gpu.empty(rows, dtype=torch.int32)
        args = Tokens(
            token_ids=token_ids.data_ptr(),
            m=rows,
            first=own.start,
            last=own.stop,
            own_ids=ids.data_ptr(),
            is_own=is_own.data_ptr(),
            ended=self._ended.data_ptr(),
            timeout_ms=self.timeout_ms,
        )
        if spreads and self._rank == 0:
            args.num_copies = len(self._others)
            for i, rank in enumerate(self._others):
                args.copies[i] = self._buffers.tokens_at(rank)
        elif spreads:
            args.slot = self._buffers.tokens_at(self._rank)
        self._gpu.call("exchange_tokens", args)
        return ids, is_own

    def embed(self, part: Tensor, is_own: Tensor) -> Tensor:
        """The sum of all ranks' vectors [m, width] of their own tokens."""
        own, copies = self._slots(STAGES)
        self._send(part, own, copies, is_own.data_ptr())
        target = self._gpu.empty(*self._active)
        self._pending = _Pending(None, target, STAGES)
        self.settle()
        return target

    def multiply(self, x: Inputs, w: PackedLinear, *, defers: bool) -> bool:
        """Sends x @ w. False if no kernel can: then the caller multiplies and calls `send`.
        `defers` is that of the `await_sum` that follows."""
        rows, width = self._active
        if not isinstance(x, Tensor | CudaInputs | CudaTrellisInputs):
            return False
        own_rows = x.shape[0] if isinstance(x, Tensor) else x.rows
        if (own_rows, w.out_features) != (rows, width):
            return False
        if not self._linears.can_send(x, w, rows):
            return False
        stage = self._count % STAGES
        own, copies = self._slots(stage)
        self._is_divided[stage] = defers and self._divides and self._linears.can_divide(w)
        if self._is_divided[stage]:
            own, copies = self._owners(stage)
        self._read_by_sender = self._linears.multiply_sent(x, w, SentTo(own, width, copies))
        return True

    def send(self, part: Tensor) -> None:
        """Sends a partial sum [m, k]."""
        own, copies = self._slots(self._count % STAGES)
        self._is_divided[self._count % STAGES] = False
        self._send(part, own, copies, None)
        self._read_by_sender = part

    def await_sum(self, x: Tensor | None, *, defers: bool) -> Tensor:
        """x plus the sum of what all ranks have sent last; the sum alone without x.

        With `defers` the result is written by the next op of this object, or by `settle`. Otherwise
        it may overwrite x.
        """
        in_place = x is not None and not defers and x.is_contiguous()
        target = x if in_place and x is not None else self._gpu.empty(*self._active)
        stage = self._count % STAGES
        self._pending = _Pending(x, target, stage, self._is_divided[stage])
        self._count += 1
        if not defers:
            self.settle()
        return target

    def settle(self) -> None:
        """Writes the pending sum, if there is one."""
        if self._pending is None:
            return
        if self._pending.is_divided:  # no product can read them
            self._linears.settle_divided(self._rows())
            return
        if self._pending.stage != STAGES:
            self._empty_whole((self._pending.stage - 1) % STAGES)
        x, sums = self._pending.x, self._taken()
        rows, width = self._active
        source = (None, 0) if x is None else (x.data_ptr(), x.stride(0))
        self._gpu.call("exchange_settle", sums, *source, rows, width)
        self._unread = None

    def norm_linear(
        self, x: Tensor, norm: Norm, w: PackedLinear, out: Tensor | None
    ) -> Tensor | None:
        """norm(x) @ w for a pending x, which is written too; None if x is not pending, or if this
        product cannot read it."""
        if not self._is_pending(x):
            return None
        if out is None:
            out = self._gpu.empty(x.shape[0], w.out_features)
        return out if self._multiplied(NormedProduct(w, norm, out)) else None

    def norm_gated_linear(
        self, x: Tensor, norm: Norm, w: PackedLinear, kind: GateKind, out: Inputs | None
    ) -> Inputs | None:
        """The same for gated products."""
        if not self._is_pending(x) or out is None:
            return None
        return out if self._multiplied(NormedProduct(w, norm, out, cuda.GATED, kind)) else None

    def norm_activated_linear(
        self, x: Tensor, norm: Norm, w: PackedLinear, kind: ActivationKind, out: Inputs | None
    ) -> Inputs | None:
        """The same for activated products."""
        if isinstance(kind, XIelu) or not self._is_pending(x) or out is None:
            return None
        return out if self._multiplied(NormedProduct(w, norm, out, cuda.ACTIVATED, kind)) else None

    def send_logits(self, x: Tensor, norm: Norm | None, w: PackedLinear, first: int) -> None:
        """Sends norm(x) @ w to rank 0 as the next rows of logits, from column `first` on. Not on
        rank 0."""
        if not len(x):
            return
        stride = self._buffers.area_stride
        offset = (self._num_logits * stride + first) * _VALUE_BYTES
        self._num_logits += len(x)
        own = self._buffers.logits_at(self._rank) + offset
        copies = PartialCopies(count=1)
        copies.to[0] = self._buffers.logits_at(0) + offset
        if norm is not None and self._linears.can_send(x, w, x.shape[0]):
            self._linears.multiply_sent(x, w, SentTo(own, stride, copies), norm)
            return
        part = self._gpu.empty(x.shape[0], w.out_features)
        self._linears.multiply(x, w, part, norm=norm)
        source = part.data_ptr(), part.stride(0), None, *part.shape
        self._gpu.call("exchange_send", *source, own, copies, stride)

    def gather_logits(self, logits: Tensor, first: int) -> None:
        """Fills the columns from `first` on of the next rows of logits [n, vocab], which the
        others send. On rank 0."""
        stride = self._buffers.area_stride
        area = self._buffers.logits_at(0) + self._num_logits * stride * _VALUE_BYTES
        rows, columns = logits.shape
        self._num_logits += rows
        if first == columns:  # there are no others
            return
        to = logits.data_ptr(), logits.stride(0)
        self._gpu.call("exchange_gather", area, stride, rows, first, columns, *to, self._waiting)

    @property
    def _active(self) -> tuple[int, int]:
        if self._shape is None:
            raise OpInputError("peer sums: outside of a pass")
        return self._shape

    @property
    def _waiting(self) -> PartialSums:
        """How kernels wait."""
        return PartialSums(
            ended=self._ended.data_ptr(),
            ranks=len(self._buffers.addresses),
            timeout_ms=self.timeout_ms,
            early_rank=-1,
        )

    def _send(self, part: Tensor, own: int, copies: PartialCopies, is_own: int | None) -> None:
        source = part.data_ptr(), part.stride(0), is_own, *part.shape
        self._gpu.call("exchange_send", *source, own, copies, part.shape[1])

    def _is_pending(self, x: Tensor) -> bool:
        """Whether x receives the pending sum and states."""
        pending = self._pending
        return pending is not None and pending.target is x and pending.x is not None

    def _multiplied(self, to: NormedProduct) -> bool:
        """Computes a product of the pending states, which are written too. False if it cannot
        read them."""
        assert self._pending is not None, "the callers have checked it"
        is_divided = self._pending.is_divided
        if not self._linears.can_read_pending(to, self._active[0], is_divided=is_divided):
            return False
        self._linears.multiply_pending(self._rows(), to)
        return True

    def _rows(self) -> PendingRows:
        assert self._pending is not None, "the callers have checked it"
        x, target, stage, is_divided = self._pending
        assert x is not None, "the callers have checked it, and divided sums are added to states"
        self._unread, before = stage, (stage - 1) % STAGES
        parts = self._taken()
        parts.early_rank = self._rank if self.is_alone else -1
        if not is_divided:
            self._empty_whole(before)
            return PendingRows(x, parts, target)
        sums = SharedSums(parts=parts, own=self._rank, row_shift=self._row_shift)
        for rank in range(len(self._buffers.addresses)):
            sums.wholes[rank] = self._buffers.whole_at(rank, stage)
        sums.spent_shift = self._row_shift if self._is_divided[before] else -1
        if self._is_divided[before]:
            sums.spent_whole = self._buffers.whole_at(self._rank, before)
        self._is_divided[before] = False
        return PendingRows(x, sums, target)

    @property
    def _divides(self) -> bool:
        """Whether the ranks divide the sums of this pass."""
        others, rows = len(self._others), self._active[0]
        is_large = others > 1 and rows * others >= MIN_DIVIDED_ROWS
        return self.is_alone and is_large and -(-rows // 8) * 8 <= self._most_divided

    @property
    def _row_shift(self) -> int:
        """log2 of the number of rows that a rank adds up."""
        return (-(-self._active[0] // len(self._buffers.addresses)) - 1).bit_length()

    def _owners(self, stage: int) -> tuple[int, PartialCopies]:
        """This rank's slots in the buffers of all ranks, the last one apart, of which each gets
        its rows."""
        rows, _ = self._active
        *first, last = (
            self._buffers.sums_at(rank, stage, self._rank, rows)
            for rank in range(len(self._buffers.addresses))
        )
        copies = PartialCopies(count=len(first), is_divided=1, row_shift=self._row_shift)
        for i, address in enumerate(first):
            copies.to[i] = address
        return last, copies

    def _empty_whole(self, stage: int) -> None:
        """Empties a complete sum in this rank's buffer, if there is one."""
        if self._is_divided[stage]:
            rows, width = self._active
            address = self._buffers.whole_at(self._rank, stage)
            self._gpu.call("exchange_empty", address, rows * width * _VALUE_BYTES)
            self._is_divided[stage] = False

    def _taken(self) -> PartialSums:
        """Operands that read the pending sum, which is not pending from then on."""
        assert self._pending is not None, "the callers have checked it"
        (_, target, stage, _), self._pending = self._pending, None
        sums = self._waiting
        sums.parts, sums.sum = self._stage_at(stage), target.data_ptr()
        if stage != STAGES:
            sums.spent = self._stage_at((stage - 1) % STAGES)
        return sums

    def _stage_at(self, stage: int) -> int:
        return self._buffers.sums_at(self._rank, stage, 0, self._active[0])

    def _slots(self, stage: int) -> tuple[int, PartialCopies]:
        """This rank's slots of a stage: in its own buffer, and in the others'."""
        self.settle()
        copies = PartialCopies(count=len(self._others))
        rows, _ = self._active
        for i, rank in enumerate(self._others):
            copies.to[i] = self._buffers.sums_at(rank, stage, self._rank, rows)
        return self._buffers.sums_at(self._rank, stage, self._rank, rows), copies
