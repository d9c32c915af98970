"""The op table of one GPU: allocates outputs with torch and calls the kernels.

The ops of a forward pass do not synchronize the host with the GPU, except `sample_rows`, which
returns tokens. Operands are not checked here: the caller that builds a batch checks it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exl_core.ops.backends.cpu.table import CpuTable
from exl_core.ops.backends.cuda.attention import Attention, CudaAttentionOps
from exl_core.ops.backends.cuda.elementwise import CudaElementwiseOps
from exl_core.ops.backends.cuda.host_experts import CudaHostExperts
from exl_core.ops.backends.cuda.latent import CudaLatentOps
from exl_core.ops.backends.cuda.library import Gpu
from exl_core.ops.backends.cuda.linear import CudaLinearOps, StepOps, trellis_read
from exl_core.ops.backends.cuda.moe import CudaMoeOps
from exl_core.ops.backends.cuda.peer_linears import PeerLinears
from exl_core.ops.backends.cuda.peers import PeerBuffers, PeerSums
from exl_core.ops.backends.cuda.recurrent import CudaRecurrentOps
from exl_core.ops.backends.cuda.rings import CudaRingOps
from exl_core.ops.backends.cuda.sampling import CudaSamplingOps, RowSampler
from exl_core.ops.backends.cuda.upload import upload, upload_all
from exl_core.ops.linear import NextRead
from exl_core.ops.table import LayerOps


class CudaTable(
    CudaMoeOps,
    CudaLinearOps,
    CudaAttentionOps,
    CudaLatentOps,
    CudaElementwiseOps,
    CudaRecurrentOps,
    CudaSamplingOps,
    CudaRingOps,
):
    """OpTable of one GPU. `threads` is the number of threads that fill matrices."""

    def __init__(
        self, device: torch.device, threads: int, *, batch_invariant: bool = False
    ) -> None:
        self.device = device
        self.threads = threads
        self.is_batch_invariant = batch_invariant
        self._gpu = Gpu(device, is_invariant=batch_invariant)
        self._linears: PeerLinears = PeerLinears(self._gpu)
        self._attention = Attention(self._gpu)
        self._row_sampler = RowSampler(self._gpu)
        self._cpu = CpuTable(None, threads=1)

    @property
    def name(self) -> str:
        major, minor = torch.cuda.get_device_capability(self.device)
        return f"cuda-{major}.{minor}"

    def bring(self, tensor: Tensor) -> Tensor:
        return upload(tensor, self.device)

    def bring_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return upload_all(tensors, self.device)

    def host_experts(self, cpu: CpuTable) -> CudaHostExperts:
        """Experts in the host's memory, which `cpu` computes for layers of this table."""
        return CudaHostExperts(self._gpu, cpu)

    def peer_sums(self, rank: int, buffers: PeerBuffers) -> PeerSums:
        """Sums of this GPU, that of `rank`, with others through their buffers."""
        return PeerSums(self._gpu, self._linears, rank, buffers)

    def begin_pass(self) -> None:
        self._linears.begin_pass()

    def begin_exchange(self) -> None:
        """Precedes an exchange with other GPUs: the next weights are dequantized beside it."""
        self._linears.slices.begin_exchange()

    def before(self, read: NextRead) -> LayerOps | None:
        found = None if self.is_batch_invariant else trellis_read(read)
        return None if found is None else StepOps(self, self._linears, found)

    def activations(self, rows: int, columns: int) -> Tensor:
        return self._gpu.empty(rows, columns, dtype=torch.float16)
