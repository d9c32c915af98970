"""Host code of the GPU's op table, with stand-ins for the library and for packed matrices."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from exl_core.ops.backends.cuda import matmul
from exl_core.ops.backends.cuda.experts import CudaExperts, Places
from exl_core.ops.backends.cuda.library import Gpu, Slab
from exl_core.ops.backends.cuda.quantized import CudaQuantLinear, plan_tiles
from exl_core.ops.backends.cuda.recurrent import CudaRecurrentOps
from exl_core.ops.backends.cuda.trellis import DECODE_ROWS, Trellis
from exl_core.ops.recurrent import StateRows, StateScan
from exl_core.ops.weights import Codebook, Formula, GroupedLayout, GroupRun, TrellisLayout
from exl_core.parallel.slices import slice_rows

SLOT_BYTES = 3 << 20


class Library:
    """Writes down the calls. A pass needs a slot of the workspace for each 64 rows and sequence."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def call(self, name: str, *operands: Any) -> None:
        self.calls.append((name, operands))

    def size(self, name: str, *operands: int) -> int:
        rows, seqs = operands[:2]
        return SLOT_BYTES * (rows // 64 + seqs) if name == "recurrence_workspace" else 64


class GpuOnCpu(Gpu):
    """A Gpu whose memory is the CPU's, and whose calls do nothing."""

    def __init__(self, *, is_invariant: bool = False) -> None:
        self.device, self.is_invariant = torch.device("cpu"), is_invariant
        self.library = Library()
        self._library = cast(Any, self.library)
        self._least_rows, self._least_other_rows = 9, 2  # of compute capability 9.0
        self._workspaces, self._retired = {}, []

    def call(self, name: str, *operands: object) -> None:
        self.library.call(name, *operands)

    @property
    def held_bytes(self) -> int:
        return sum(one.numel() for one in (*self._workspaces.values(), *self._retired))


def matrix_of(formula: Formula) -> CudaQuantLinear:
    """A matrix [128, 64] without codes."""
    matrix = object.__new__(CudaQuantLinear)
    matrix.layout = GroupedLayout(64, 128, (GroupRun(4, 1, 128),), None, torch.float16, formula)
    matrix.permutation, matrix.num_blocks = torch.arange(128, dtype=torch.int32), 4
    return matrix


class Products(matmul.Linears):
    """Writes down the least rows of each product's inputs, and those that its kernel needs."""

    def __init__(self, gpu: GpuOnCpu) -> None:
        self._gpu, self.found = gpu, list[tuple[int, int]]()

    def _new_arguments(self, *_: Any, **__: Any) -> Any:
        return None

    def _launch_codes(self, args: Any, parts: Any, inputs: Any) -> None:
        prepared = [operands[0] for name, operands in self.gpu.calls if name == "prepare"]
        kinds = all(part.has_integers for part in parts)
        self.found.append((prepared[-1].least_rows, self._gpu.least_rows(has_integers=kinds)))

    def _multiply_dense(self, *_: Any) -> None:
        pass

    @property
    def gpu(self) -> Library:
        return cast(GpuOnCpu, self._gpu).library


@pytest.mark.parametrize("formulas", [("middle", "iq4_nl"), ("iq4_nl", "middle")])
def test_inputs_have_the_layout_of_each_kernel(formulas: tuple[Formula, Formula]) -> None:
    """Batch-invariant mode: joined matrices that no kernel multiplies together."""
    first, last = map(matrix_of, formulas)
    dense = matmul.CudaLinear(torch.zeros(64, 128), None)
    products, x = Products(GpuOnCpu(is_invariant=True)), torch.ones(3, 128)
    products._multiply_mixed(x, (first, dense, last), torch.empty(3, 192), None, False)
    assert len(products.found) == 2
    assert all(got == needed for got, needed in products.found)


@pytest.mark.parametrize("max_rows", [DECODE_ROWS, 96])
@pytest.mark.parametrize("codebook", ["mul1", "mcg"])
def test_trellis_inputs_have_one_form_in_the_batch_invariant_mode(
    codebook: Codebook, max_rows: int
) -> None:
    """`max_rows`: of a device without the small-batch kernel, and of one with it."""
    gpu = GpuOnCpu(is_invariant=True)
    gpu.trellis_max_rows = max_rows
    trellis = Trellis(gpu)
    w = trellis.new(TrellisLayout(128, 128, 64, codebook))
    found = [trellis.inputs_for(w, rows) for rows in range(1, max_rows + 1)]
    assert len({one.form for one in found}) == 1
    assert len({one.form_rows > DECODE_ROWS for one in found}) == 1


INLINE_RUNS = 12  # of a matrix whose runs are kernel parameters (quant_work.cuh)


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("ranks", [2, 4])
def test_heads_of_a_rank_have_few_runs_of_k_tiles(ranks: int, rank: int) -> None:
    """With act-order a rank's heads have some rows of every group. The runs, from which kernels
    compute places of k-tiles, agree with the table of k-tiles."""
    rows, mix = 8192, (GroupRun(5, 3, 128), GroupRun(4, 55, 128), GroupRun(3, 6, 128))
    features = torch.randperm(rows, generator=torch.Generator().manual_seed(ranks)).int()
    whole = GroupedLayout(64, rows, mix, features, torch.float16, "middle")
    count = rows // ranks
    layout = slice_rows(whole, torch.arange(rank * count, (rank + 1) * count)).layout
    assert isinstance(layout, GroupedLayout)
    assert len(layout.runs) > INLINE_RUNS
    plan = plan_tiles(layout.runs, 2, 0)
    assert len(plan.runs) <= INLINE_RUNS
    ends = [*plan.runs["first_k_tile"].tolist()[1:], len(plan.k_tiles)]
    found = []
    for run, end in zip(plan.runs, ends, strict=True):
        group_blocks = 4 * (int(run["group_k_tiles"]) - 1) + int(run["last_blocks"])
        for at in range(end - int(run["first_k_tile"])):
            group, in_group = divmod(at, int(run["group_k_tiles"]))
            block, bits = group * group_blocks + 4 * in_group, int(run["bits"])
            is_last = in_group + 1 == run["group_k_tiles"]
            offset = int(run["offset"]) + 64 * at + 128 * bits * block
            blocks = int(run["last_blocks"]) if is_last else 4
            found.append((offset, int(run["first_block"]) + block, bits, blocks))
    assert found == plan.k_tiles[["offset", "first_block", "bits", "blocks"]].tolist()


class Recurrent(CudaRecurrentOps):
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def _bound(self, rows: StateRows) -> StateRows:
        return rows


def test_more_sequences_do_not_add_up_workspaces() -> None:
    """A prompt beside 1, 2, 3, ... other sequences."""
    gpu = GpuOnCpu()
    ops, heads = Recurrent(gpu), torch.zeros(2)
    scan = StateScan(2, 4, 8, 1, heads, heads, heads, (0.0, 1.0))
    needed = 0
    for seqs in range(1, 40):
        ids = torch.zeros(seqs + 1, dtype=torch.int32)
        rows = StateRows(ids, ids[1:], ids[1:])
        xbc, states = torch.zeros(256 + seqs, 24), torch.zeros(1, 2, 4, 8)
        ops.state_scan(xbc, torch.zeros(len(xbc), 2), scan, states, rows)
        needed = SLOT_BYTES * (len(xbc) // 64 + seqs)
    assert gpu.held_bytes <= 4 * needed


def experts_of(rows: int, order: tuple[int, ...], group: int = 128) -> CudaExperts:
    """Gate and up [rows, 64] of four experts, in one allocation in this order."""
    gpu = GpuOnCpu()
    layout = GroupedLayout(
        64, rows, (GroupRun(4, rows // group, group),), None, torch.float16, "middle"
    )
    alone = CudaQuantLinear(layout, gpu)
    memory = Slab(gpu, [alone.size_bytes] * 8)
    placed = dict(
        zip(order, (CudaQuantLinear(layout, gpu, memory=memory) for _ in order), strict=True)
    )
    return CudaExperts.of([(placed[2 * i], placed[2 * i + 1]) for i in range(4)], gpu)


def test_experts_at_equal_distances_have_places() -> None:
    experts = experts_of(256, (0, 1, 2, 3, 4, 5, 6, 7))
    first, second = (w.matrix for w in cast(Any, experts.matrices[0]))
    size = second.tiles - first.tiles
    assert experts.places == (Places(first.tiles, 2 * size, size, first.panel_bytes), None)
    by_part = experts_of(256, (0, 2, 4, 6, 1, 3, 5, 7)).places[0]
    assert by_part is not None
    assert by_part[1:3] == (size, 4 * size)


@pytest.mark.parametrize("order", [(0, 1, 3, 2, 4, 5, 6, 7), (0, 1, 2, 3, 6, 7, 4, 5)])
def test_experts_in_disorder_have_no_places(order: tuple[int, ...]) -> None:
    assert experts_of(256, order).places == (None, None)


@pytest.mark.parametrize(
    ("group", "is_regular"), [(128, True), (32, True), (64, True), (96, False), (192, False)]
)
def test_loads_of_one_kind_have_four_blocks_each(group: int, *, is_regular: bool) -> None:
    """Kernels compute the place of such a load."""
    experts = experts_of(384, (0, 1, 2, 3, 4, 5, 6, 7), group)
    assert (experts.only != 0) == is_regular
    assert not is_regular or experts.num_loads == 3
