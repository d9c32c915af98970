"""Packing on a GPU: tiles have the documented layout, and unpacked matrices equal the reference."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from cuda_support import WIDTHS, pieces
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from exl_core.formats.codecs.exl2 import layout as exl2
from exl_core.formats.codecs.exl2.matrix import Exl2Matrix
from exl_core.formats.codecs.ggml.matrix import columns_of
from exl_core.formats.codecs.gptq import layout as gptq
from exl_core.formats.codecs.gptq.matrix import GptqMatrix
from exl_core.formats.codecs.runtime import Move, RuntimeMatrix, stay
from exl_core.ops.backends.cuda.library import Gpu
from exl_core.ops.backends.cuda.quantized import CudaQuantLinear, plan_tiles
from exl_core.ops.backends.cuda.upload import BUFFER_BYTES, upload
from exl_core.ops.backends.reference.quantized import (
    BLOCKS,
    PlainQuantized,
    fill_grouped,
    new_grouped,
)
from exl_core.ops.checks import OpInputError
from exl_core.ops.weights import Formula, GroupedColumns, GroupedLayout, GroupRun, Packing

pytestmark = pytest.mark.cuda


@dataclass(frozen=True)
class Case:
    runs: tuple[tuple[int, int, int], ...]  # bits, groups, rows
    n: int
    packing: Packing
    formula: Formula = "middle"
    scale_dtype: torch.dtype = torch.float16
    permuted: bool = False
    shuffled: bool = False  # rows of codes are stored in random order
    has_bias: bool = False

    def __str__(self) -> str:
        runs = "+".join(f"{bits}b{groups}x{rows}" for bits, groups, rows in self.runs)
        extras = "-permuted" * self.permuted + "-shuffled" * self.shuffled
        scales = str(self.scale_dtype).removeprefix("torch.float")
        return f"{runs}-n{self.n}-{self.packing}-{self.formula}{scales}{extras}"


MIXED = ((8, 1, 32), (6, 2, 64), (5, 3, 128), (4, 2, 256), (3, 1, 96), (2, 2, 128), (2, 1, 32))
CASES = [
    *(Case(((bits, 3, 128),), 96, "words") for bits in WIDTHS),
    *(Case(((bits, 2, 160), (bits, 1, 64)), 8, "words", "zeros") for bits in WIDTHS),
    *(Case(((bits, 3, 128),), 100, "bytes", "zeros") for bits in WIDTHS),
    Case(MIXED, 320, "words", permuted=True),
    Case(((4, 1, 1056), (3, 1, 480)), 160, "words", permuted=True),
    Case(((4, 18, 32),), 33, "words", "zeros"),
    Case(((4, 3, 50), (4, 1, 42)), 64, "words"),  # words are cut, and blocks padded
    Case(((3, 4, 32), (3, 1, 7)), 40, "words", "zeros", has_bias=True),
    *(
        Case(((bits, 8, 72),), 136, "words", "zeros", permuted=True, shuffled=True)
        for bits in WIDTHS
    ),
    Case(((4, 5, 128), (4, 1, 20)), 70, "bytes", shuffled=True),
    Case(((4, 43, 256),), 32, "bytes", "minimums", torch.float32),
    Case(((5, 18, 32),), 130, "bytes", "minimums", torch.float32, permuted=True),
    Case(((5, 18, 32),), 49152, "bytes", "minimums"),
    Case(((6, 4, 96),), 65, "bytes", "zeros", torch.float32),
    Case(((8, 4, 96),), 1, "words", "middle", torch.float32),
    Case(((4, 18, 32),), 100, "q4_0"),
    Case(((4, 1, 32),), 32, "q4_1", "minimums"),
    Case(((5, 48, 32),), 224, "q5_0"),
    Case(((5, 18, 32),), 49, "q5_1", "minimums"),
    Case(((8, 18, 32),), 1000, "q8_0"),
]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(list(request.node.nodeid.encode()))


@dataclass(frozen=True, eq=False)
class Made:
    layout: GroupedLayout
    whole: GroupedColumns

    def columns(self, first: int, last: int) -> GroupedColumns:
        """Views with gaps between rows, as in a file."""

        def part(grid: Tensor | None) -> Tensor | None:
            return None if grid is None else grid[:, first:last].contiguous()

        whole = self.whole
        in_blocks = whole.packing in BLOCKS
        return GroupedColumns(
            whole.packing,
            whole.codes[first:last] if in_blocks else whole.codes[:, first:last],
            whole.source_rows,
            part(whole.scales),
            part(whole.offsets),
            None if whole.bias is None else whole.bias[first:last].clone(),
        )


def make(rng: np.random.Generator, case: Case) -> Made:
    runs = tuple(GroupRun(*run) for run in case.runs)
    k, n = sum(run.groups * run.rows for run in runs), case.n
    features = torch.from_numpy(rng.permutation(k).astype(np.int32)) if case.permuted else None
    layout = GroupedLayout(n, k, runs, features, case.scale_dtype, case.formula, case.has_bias)
    if case.packing in BLOCKS:
        return Made(
            layout, GroupedColumns(case.packing, ggml_blocks(rng, case.packing, n, k // 32))
        )
    row_bits = np.concatenate([np.full(run.groups * run.rows, run.bits) for run in runs])
    codes = rng.integers(0, 1 << row_bits[:, None], (k, n)).astype(np.uint8)
    source_rows = None
    if case.shuffled:
        source = rng.permutation(k)
        codes[source] = codes.copy()
        source_rows = torch.from_numpy(source.astype(np.int32))
    group_bits = np.concatenate([np.full(run.groups, run.bits) for run in runs])
    scales = rng.normal(size=(len(group_bits), n)) / 2.0 ** group_bits[:, None]
    offsets = None
    if case.formula == "zeros":
        offsets = torch.from_numpy(
            rng.integers(0, 1 << group_bits[:, None], scales.shape).astype(np.uint8)
        )
    elif case.formula == "minimums":
        offsets = torch.from_numpy(rng.normal(size=scales.shape)).to(case.scale_dtype)
    packed = torch.from_numpy(codes if case.packing == "bytes" else words_of(codes, row_bits))
    bias = torch.from_numpy(rng.normal(size=n)).float() if case.has_bias else None
    scale = torch.from_numpy(scales).to(case.scale_dtype)
    return Made(layout, GroupedColumns(case.packing, packed, source_rows, scale, offsets, bias))


def words_of(codes: NDArray[np.uint8], bits: NDArray[np.int64]) -> NDArray[np.int32]:
    """Bit stream of each column, int32 [words, n]."""
    planes = [(codes[row][None] >> np.arange(width)[:, None]) & 1 for row, width in enumerate(bits)]
    stream = np.concatenate(planes).astype(np.uint8)
    stream = np.pad(stream, ((0, -len(stream) % 32), (0, 0)))
    packed = np.packbits(stream, axis=0, bitorder="little")
    return np.ascontiguousarray(packed.T).view("<i4").T.copy()


def ggml_blocks(rng: np.random.Generator, packing: Packing, n: int, count: int) -> Tensor:
    form = BLOCKS[packing]
    blocks = rng.integers(0, 256, (n, count, form.bytes), dtype=np.uint8)
    heads = 2 if form.has_minimum else 1
    factors = rng.normal(size=(n, count, heads)).astype(np.float16)
    blocks[..., : 2 * heads] = factors.view(np.uint8)
    return torch.from_numpy(blocks.reshape(n, -1))


def reference_of(made: Made) -> PlainQuantized:
    plain = new_grouped(made.layout)
    fill_grouped(plain, 0, made.columns(0, made.layout.out_features))
    return plain


def packed_on(gpu: Gpu, made: Made, cuts: list[int]) -> CudaQuantLinear:
    matrix = CudaQuantLinear(made.layout, gpu)
    matrix._tiles.fill_(0xA5)
    ends = [*cuts, made.layout.out_features]
    for first, last in zip([0, *cuts], ends, strict=True):
        matrix.fill(first, made.columns(first, last))
    return matrix


def unpacked(gpu: Gpu, matrix: CudaQuantLinear, first: int, columns: int, stride: int) -> Tensor:
    """Dequantized columns, float16 [k, columns]. Checks that gaps between rows are not written."""
    out = torch.full(
        (matrix.in_features, stride), torch.nan, dtype=torch.float16, device=gpu.device
    )
    matrix.unpack(first, columns, out)
    assert out[:, columns:].isnan().all()
    return out[:, :columns].cpu()


def expected_tiles(plain: PlainQuantized) -> NDArray[np.uint8]:
    """Tiles as `exl/cuda/linear.h` documents them: [panels, panel bytes]."""
    layout = plain.layout
    panels = -(-layout.out_features // 32)
    width = ((0, 0), (0, 32 * panels - layout.out_features))
    codes, scales = np.pad(plain.codes.numpy(), width), np.pad(plain.scales.numpy(), width)
    offsets = None if plain.offsets is None else np.pad(plain.offsets.numpy(), width)
    place = [0] * 32  # place of each column among the scales of a k-tile
    for c in range(32):
        place[4 * (c % 8) + c // 8] = c
    largest = np.abs(scales.astype(np.float32)).reshape(-1, panels, 32).max((0, 2))
    if offsets is not None and layout.formula == "minimums":
        of_minimums = np.abs(offsets.astype(np.float32)).reshape(-1, panels, 32).max((0, 2))
        largest = np.maximum(largest, of_minimums / 2**20)
    heads = np.zeros((panels, 8), np.float32)
    heads[:, 0] = 2.0 ** (-10 - np.floor(np.log2(largest.clip(2.0**-100, 2.0**100))))
    parts = [heads.view(np.uint8)]
    row = group = 0
    for run in layout.runs:
        for _ in range(run.groups):
            rows = np.zeros((-(-run.rows // 32) * 32, 32 * panels), np.uint8)
            rows[: run.rows] = codes[row : row + run.rows]
            for first in range(0, len(rows), 128):
                for grid in (scales, offsets):
                    if grid is not None:
                        ordered = np.ascontiguousarray(grid[group].reshape(panels, 32)[:, place])
                        parts.append(ordered.view(np.uint8))
                for block in range(first, min(first + 128, len(rows)), 32):
                    parts.append(words_of_block(rows[block : block + 32], run.bits))
            row += run.rows
            group += 1
    return np.concatenate(parts, axis=1)


def words_of_block(rows: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    panels = rows.shape[1] // 32
    columns = rows.reshape(32, panels, 32).transpose(1, 0, 2).astype(np.uint32)
    words = np.zeros((panels, 32, bits), np.uint32)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for pair, first, count, word, bit in pieces(bits):
            q, j = divmod(pair, 4)
            for h in range(2):
                field = columns[:, 8 * t + 2 * j + h, 8 * q + g] >> first & (1 << count) - 1
                words[:, lane, word] |= field << (16 * h + bit)
    most = 2 if bits < 4 else 4
    in_order = [words[:, :, :most].reshape(panels, -1), words[:, :, most:].reshape(panels, -1)]
    return np.concatenate(in_order, 1).view(np.uint8)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_unpacked_matrices_are_the_reference_rounded_once(
    gpu: Gpu, rng: np.random.Generator, case: Case
) -> None:
    made = make(rng, case)
    exact = reference_of(made).matrix().T.half()  # [k, n]
    matrix = packed_on(gpu, made, [])
    n = case.n
    assert torch.equal(unpacked(gpu, matrix, 0, n, -(-n // 8) * 8), exact)
    assert torch.equal(unpacked(gpu, matrix, 0, n, n + 3), exact)  # rows without alignment


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiles_have_the_documented_layout(gpu: Gpu, rng: np.random.Generator, case: Case) -> None:
    made = make(rng, case)
    expected = expected_tiles(reference_of(made))
    tiles = packed_on(gpu, made, [])._tiles.cpu().numpy()
    np.testing.assert_array_equal(tiles.reshape(expected.shape), expected)


@pytest.mark.parametrize("case", [CASES[6], CASES[18], CASES[20], CASES[-1]], ids=str)
def test_columns_may_be_filled_in_parts(gpu: Gpu, rng: np.random.Generator, case: Case) -> None:
    made = make(rng, case)
    n = case.n
    cuts = [cut for cut in (32, 96, 128) if cut < n]
    whole, parts = packed_on(gpu, made, []), packed_on(gpu, made, cuts)
    assert torch.equal(whole._tiles, parts._tiles)
    exact = reference_of(made).matrix().T.half()
    for first in cuts:
        some = unpacked(gpu, whole, first, n - first, n)
        assert torch.equal(some, exact[:, first:])
    assert torch.equal(unpacked(gpu, whole, 0, min(n, 5), 8), exact[:, :5])


def test_bias_and_size_are_those_of_the_matrix(gpu: Gpu, rng: np.random.Generator) -> None:
    case = next(case for case in CASES if case.has_bias)
    made = make(rng, case)
    matrix = packed_on(gpu, made, [32])
    assert matrix.bias is not None
    assert torch.equal(matrix.bias.cpu(), cast(Tensor, made.whole.bias))
    assert matrix.size_bytes == matrix._tiles.nbytes + 4 * case.n


@pytest.mark.parametrize("first, count", [(16, 16), (0, 16), (-32, 32)])
def test_ranges_that_cut_column_panels_are_refused(
    gpu: Gpu, rng: np.random.Generator, first: int, count: int
) -> None:
    made = make(rng, CASES[0])
    with pytest.raises(OpInputError, match="first_column"):
        CudaQuantLinear(made.layout, gpu).fill(first, made.columns(0, count))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("rows", [1, 17])
def test_embedding_rows_are_rounded_once(
    gpu: Gpu, rng: np.random.Generator, case: Case, rows: int
) -> None:
    made = make(rng, case)
    matrix = packed_on(gpu, made, [])
    ids = torch.from_numpy(rng.integers(0, case.n, rows)).to(gpu.device)
    y = torch.full((rows, matrix.in_features), torch.nan, device=gpu.device)
    gpu.call("quant_embedding", matrix.matrix, ids.data_ptr(), rows, y.data_ptr())
    exact = reference_of(made).matrix()[ids.cpu()]
    torch.testing.assert_close(y.cpu(), exact.float(), rtol=2.0**-23, atol=0)


def test_permutations_are_shared(gpu: Gpu) -> None:
    def layout(n: int) -> GroupedLayout:
        return GroupedLayout(n, 256, (GroupRun(4, 2, 128),), None, torch.float16, "middle")

    first, second = CudaQuantLinear(layout(32), gpu), CudaQuantLinear(layout(64), gpu)
    assert first.permutation.data_ptr() == second.permutation.data_ptr()


def test_matrices_of_other_bit_widths_share_the_permutation_of_the_same_features(gpu: Gpu) -> None:
    def matrix(features: Tensor, *runs: GroupRun) -> CudaQuantLinear:
        return CudaQuantLinear(GroupedLayout(32, 256, runs, features, torch.float16, "middle"), gpu)

    features = torch.arange(256, dtype=torch.int32).flip(0)
    one = matrix(features, GroupRun(4, 2, 128))
    other = matrix(features.clone(), GroupRun(6, 1, 128), GroupRun(3, 1, 128))
    third = matrix(features.roll(1), GroupRun(4, 2, 128))
    assert (
        one.permutation.data_ptr() == other.permutation.data_ptr() != third.permutation.data_ptr()
    )
    assert torch.equal(one.permutation.cpu(), features)
    assert torch.equal(third.permutation.cpu(), features.roll(1))
    assert third.inverse_permutation is not None
    assert torch.equal(
        third.permutation[third.inverse_permutation.long()].cpu(), torch.arange(256).int()
    )


def test_a_group_of_many_blocks_has_several_k_tiles() -> None:
    plan = plan_tiles((GroupRun(4, 1, 300), GroupRun(3, 2, 64)), 2, 1)
    assert plan.k_tiles["blocks"].tolist() == [4, 4, 2, 2, 2]
    assert plan.k_tiles["first_block"].tolist() == [0, 4, 8, 10, 12]
    assert plan.k_tiles["group"].tolist() == [0, 0, 0, 1, 2]
    assert plan.bit_offsets.tolist() == [0, 512, 1024, 1200, 1392]
    assert plan.panel_bytes == 32 + 5 * 96 + 10 * 512 + 4 * 384
    runs = [(0, 32, 0, 3, 4, 2, 0), (3, 32 + 3 * 96 + 10 * 512, 10, 1, 3, 2, 0)]
    assert plan.runs.tolist() == runs
    assert plan.stored_rows[[299, 300, 319, 320]].tolist() == [299, -1, -1, 300]


def assert_dense(gpu: Gpu, matrix: RuntimeMatrix) -> None:
    """A matrix filled in ranges from the codec's columns unpacks to the codec's float16 matrix.

    Scales are unpacked on the CPU first, then on the GPU.
    """
    n, layout = matrix.layout.out_features, matrix.layout
    assert isinstance(layout, GroupedLayout)
    exact = matrix.dense(0, n).T
    moves: tuple[Move, ...] = (stay, lambda tensor: upload(tensor, gpu.device))
    for move in moves:
        packed = CudaQuantLinear(layout, gpu)
        for first in range(0, n, 256):
            columns = matrix.columns(first, min(first + 256, n), move)
            assert isinstance(columns, GroupedColumns)
            packed.fill(first, columns)
        assert torch.equal(unpacked(gpu, packed, 0, n, n), exact)


def test_golden_exl2_matrices_unpack_exactly(gpu: Gpu, shared_dir: Path) -> None:
    tensors = load_file(shared_dir / "golden/exl2_reference.safetensors")
    stems = sorted(name.removesuffix(".dense") for name in tensors if name.endswith(".dense"))
    assert len(stems) == 4
    for stem in stems:
        parts = {part: tensors[f"{stem}.{part}"] for part in exl2.PARTS}
        matrix = Exl2Matrix(exl2.check(parts, stem), tensors[f"{stem}.dense"].shape[1])
        assert_dense(gpu, matrix)


def test_golden_gptq_matrices_unpack_exactly(gpu: Gpu, shared_dir: Path) -> None:
    tensors = load_file(shared_dir / "golden/gptq_reference.safetensors")
    variants = json.loads((shared_dir / "golden/gptq_reference.json").read_text())
    stems = sorted(name.removesuffix(".dense") for name in tensors if name.endswith(".dense"))
    assert len(stems) >= 8
    for stem in stems:
        names = (f"{stem}.{part}" for part in gptq.PARTS)
        parts = {name.removeprefix(f"{stem}."): tensors[name] for name in names if name in tensors}
        settings = gptq.parse_settings(variants[stem.split("/")[0]], "test")
        layer = gptq.check(parts, settings, stem)
        assert_dense(gpu, GptqMatrix(layer, layer.out_features))


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_K])
def test_superblocks_are_split_on_the_gpu(
    gpu: Gpu, rng: np.random.Generator, kind: GGMLQuantizationType
) -> None:
    block_bytes = GGML_QUANT_SIZES[kind][1]
    raw = torch.from_numpy(rng.integers(0, 256, (96, 3, block_bytes), dtype=np.uint8))
    raw[..., :4] = torch.from_numpy(rng.normal(size=(96, 3, 2)).astype("<f2").view(np.uint8))
    there, here = (columns_of(one.view(96, -1), kind) for one in (raw.to(gpu.device), raw))
    for part in ("codes", "scales", "offsets"):
        assert torch.equal(getattr(there, part).cpu(), getattr(here, part))


def test_uploads_keep_every_shape_and_stride(gpu: Gpu, rng: np.random.Generator) -> None:
    values = torch.from_numpy(rng.integers(0, 1 << 30, 3 * BUFFER_BYTES // 4 + 1000))
    grid = values[: len(values) // 1000 * 1000].view(-1, 1000)
    for tensor in (values, values.int(), grid, grid[:, 100:900], grid.T, grid[:3], grid.T[1:2]):
        there = upload(tensor, gpu.device)
        assert there.is_contiguous()
        assert torch.equal(there.cpu(), tensor)
    assert upload(there, gpu.device) is there
