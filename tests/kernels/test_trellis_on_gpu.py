"""Linears with trellis codes on the GPU, against float64: rates, codebooks, rows, joined parts.

Up to 8 rows there is the decode kernel, whose inputs are integers (mul1, up to 4 rows) or float16
numbers. Up to
`trellis_max_rows` rows there is the small-batch kernel. Beyond that, torch multiplies with decoded
matrices.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from kernel_support import assert_norm_within, normal
from kernel_support import packed as dense_packed
from torch import Tensor

from exl_core.ops.backends.cuda import trellis
from exl_core.ops.elementwise import GateKind, RmsNorm
from exl_core.ops.linear import NextRead, PackedLinear
from exl_core.ops.table import OpTable
from exl_core.ops.weights import Codebook, TrellisLayout
from support.trellis import RATES, Exl3Layer, random_exl3

BOOKS = [
    (rate, book)
    for book in ("mul1", "mcg", "3inst")
    for rate in RATES
    if book == "mul1" or rate == int(rate)
]
EPS = 1e-5

BOUND = 6e-4
"""Bound of the error relative to the result's norm. Inputs are rounded to float16: 2^-11 / sqrt(3)
of the value, or less. The codebook's own rounding to float16, 2.3e-4 of the RMS of the weights, may
be left out. Products of many rows are rounded to float16 before their transform."""

ROWS = (1, 2, 4, 5, 6, 8, 9, 16, 31, 33, 64, 70, 96, 97)


def packed(
    table: OpTable, layer: Exl3Layer, bias: Tensor | None = None, **part: Any
) -> tuple[PackedLinear, Tensor]:
    """The layer in the table, and its exact weights [in, out]. `part`: fields of the layout."""
    weights = layer.dense()
    columns, rows = weights.shape[1], weights.shape[0]
    layout = replace(layer.layout(columns, rows), has_bias=bias is not None, **part)
    w = table.new_linear(layout)
    table.fill_linear(w, 0, layer.columns(bias))
    rows_in = slice(layout.first_in, layout.first_in + layout.in_features)
    columns_out = slice(layout.first_out, layout.first_out + layout.out_features)
    return w, weights[rows_in, columns_out]


@pytest.mark.parametrize(("rate", "book"), BOOKS)
def test_each_rate_and_codebook(
    gpu_table: OpTable, rng: torch.Generator, rate: float, book: Codebook
) -> None:
    layer = random_exl3(int(16 * rate), rate, book, rows=384, columns=256)
    w, weights = packed(gpu_table, layer)
    for rows in ROWS:
        x = normal(rng, rows, 384)
        assert_norm_within(gpu_table.linear(x, w), x.double() @ weights, BOUND)


@pytest.mark.parametrize("book", ["mul1", "mcg"])
@pytest.mark.parametrize(("k", "n"), [(128, 128), (128, 1408), (2048, 128), (4096, 640)])
def test_shapes_that_divide_unequally(
    *, gpu_table: OpTable, rng: torch.Generator, book: Codebook, k: int, n: int
) -> None:
    w, weights = packed(gpu_table, random_exl3(k + n, 3, book, rows=k, columns=n))
    for rows in (1, 3, 7, 20, 130):
        x = normal(rng, rows, k)
        assert_norm_within(gpu_table.linear(x, w), x.double() @ weights, BOUND)


@pytest.mark.parametrize(("book", "rate"), [("mul1", 1.5), ("mul1", 4), ("mcg", 2)])
@pytest.mark.parametrize(("k", "n"), [(128, 57344), (384, 25600)])
def test_thread_blocks_with_several_column_groups(
    *, gpu_table: OpTable, rng: torch.Generator, book: Codebook, rate: float, k: int, n: int
) -> None:
    """Short columns: a thread block has more column groups than buffers of sums."""
    w, weights = packed(gpu_table, random_exl3(k, rate, book, rows=k, columns=n))
    for rows in (1, 6, 9):
        x = normal(rng, rows, k)
        assert_norm_within(gpu_table.linear(x, w), x.double() @ weights, BOUND)


@pytest.mark.parametrize("rows", [3, 8, 40])
def test_inputs_with_a_large_mean(gpu_table: OpTable, rng: torch.Generator, rows: int) -> None:
    """Sums of mul1 begin with an offset, the sum of the inputs times a constant."""
    w, weights = packed(gpu_table, random_exl3(8, 4, rows=2048, columns=256))
    x = normal(rng, rows, 2048) + 30
    x[0] *= -1
    assert_norm_within(gpu_table.linear(x, w), x.double() @ weights, BOUND)


@pytest.mark.parametrize("book", ["mul1", "3inst"])
def test_parts_of_a_matrix_and_biases(
    gpu_table: OpTable, rng: torch.Generator, book: Codebook
) -> None:
    layer = random_exl3(5, 4, book, rows=384, columns=512)
    bias = normal(rng, 301)
    part = {"first_in": 37, "in_features": 300, "first_out": 100, "out_features": 301}
    w, weights = packed(gpu_table, layer, bias, **part)
    for rows in (1, 6, 12, 40, 120):
        x = normal(rng, rows, 300)
        exact = x.double() @ weights + bias.double()
        assert_norm_within(gpu_table.linear(x, w), exact, BOUND)


def test_inputs_of_different_sizes_in_a_row(gpu_table: OpTable, rng: torch.Generator) -> None:
    """Integers have one scale per block of 128: a large block does not coarsen the others."""
    w, weights = packed(gpu_table, random_exl3(6, 4, rows=512, columns=256))
    x = normal(rng, 2, 512)
    x[:, :128] *= 1000
    rest = x.clone()
    rest[:, :128] = 0
    got = gpu_table.linear(x, w) - gpu_table.linear(x - rest, w)
    exact = rest.double() @ weights
    assert (got - exact).norm() <= 1e-2 * exact.norm()
    x[1, 5] = torch.nan
    y = gpu_table.linear(x, w)
    assert y[0].isfinite().all() and y[1].isnan().all()
    assert not gpu_table.linear(torch.zeros(3, 512), w).any()


@pytest.mark.parametrize("rows", [1, 8, 20, 100])
def test_joined_parts_of_other_rates_and_codebooks(
    gpu_table: OpTable, rng: torch.Generator, rows: int
) -> None:
    layers = [
        random_exl3(1, 4, "mul1", rows=256, columns=384),
        random_exl3(2, 4, "mul1", rows=256, columns=128),
        random_exl3(3, 3, "mcg", rows=256, columns=128),
        random_exl3(4, 2.5, "mul1", rows=256, columns=256),
    ]
    parts = [packed(gpu_table, layer) for layer in layers]
    weights = torch.cat([exact for _, exact in parts], 1)
    x, residual = normal(rng, rows, 256), normal(rng, rows, weights.shape[1])
    norm = RmsNorm(normal(rng, 256) + 1, EPS)
    normed = torch.nn.functional.rms_norm(x.double(), (256,), norm.weight.double(), EPS)
    w = gpu_table.join([part for part, _ in parts])
    assert_norm_within(gpu_table.linear(x, w), x.double() @ weights, BOUND)
    assert_norm_within(gpu_table.norm_linear(x, norm, w), normed @ weights, BOUND)
    exact = residual.double() + x.double() @ weights
    assert_norm_within(gpu_table.linear_add_(x, w, residual), exact, BOUND)
    halves = torch.empty(rows, weights.shape[1], dtype=torch.float16)
    got = gpu_table.norm_linear(x, norm, w, halves)
    assert_norm_within(got, normed @ weights, 2 * BOUND)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [1, 4, 8, 9, 32, 70, 97, 300, 1500])
@pytest.mark.parametrize("book", ["mul1", "mcg"])
def test_an_mlp(
    *, gpu_table: OpTable, rng: torch.Generator, rows: int, kind: GateKind, book: Codebook
) -> None:
    """Gated products store prepared inputs of the next matrix."""
    gate, up = (packed(gpu_table, random_exl3(i, 4, book, rows=256, columns=640)) for i in (1, 2))
    down, narrow = packed(gpu_table, random_exl3(3, 3, book, rows=640, columns=256))
    x, residual = normal(rng, rows, 256), normal(rng, rows, 256)
    norm = RmsNorm(normal(rng, 256) * 0.02, EPS)
    normed = torch.nn.functional.rms_norm(x.double(), (256,), norm.weight.double(), EPS)
    a, b = normed @ gate[1], normed @ up[1]
    act = torch.nn.functional.silu if kind == "silu" else _gelu
    h = act(a) * b
    w = gpu_table.join([gate[0], up[0]])
    plain = torch.empty(rows, 640, dtype=torch.float16)
    got = cast(Tensor, gpu_table.norm_gated_linear(x, norm, w, kind, plain))
    assert_norm_within(got, h, 4 * BOUND)
    inputs = gpu_table.inputs_for(down, plain)
    assert not isinstance(inputs, Tensor)
    result = gpu_table.norm_gated_linear(x, norm, w, kind, inputs)
    y = gpu_table.linear_add_(result, down, residual.clone())
    assert_norm_within(y - residual, h @ narrow, 6 * BOUND)


def _gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize("rows", [2, 11, 33, 150])
def test_matrices_of_other_kinds_are_joined(
    gpu_table: OpTable, rng: torch.Generator, rows: int
) -> None:
    own, weights = packed(gpu_table, random_exl3(9, 4, rows=256, columns=256))
    plain = normal(rng, 64, 256)
    w = gpu_table.join([own, dense_packed(gpu_table, plain)])
    x = normal(rng, rows, 256)
    exact = torch.cat([x.double() @ weights, x.double() @ plain.double().T], 1)
    assert_norm_within(gpu_table.linear(x, w), exact, BOUND)


@pytest.mark.parametrize(
    ("k", "columns", "rows"),
    [
        (256, (512, 1024, 384), 5000),
        (384, (384, 512), 150),  # a warp would have columns of both
        (4096, (512, 512, 256), 700),
        (8192, (256,), 300),
        (8320, (512, 256), 120),  # more values than threads of a block take
    ],
)
def test_prompts_whose_thread_blocks_take_several_rows(
    gpu_table: OpTable, rng: torch.Generator, k: int, columns: tuple[int, ...], rows: int
) -> None:
    biases = [normal(rng, n) for n in columns]
    parts = [
        packed(gpu_table, random_exl3(i, 4, rows=k, columns=n), bias)
        for i, (n, bias) in enumerate(zip(columns, biases, strict=True))
    ]
    w = gpu_table.join([part for part, _ in parts])
    weights, bias = torch.cat([exact for _, exact in parts], 1), torch.cat(biases).double()
    x = normal(rng, rows, k)
    norm = RmsNorm(normal(rng, k) + 1, EPS)
    normed = torch.nn.functional.rms_norm(x.double(), (k,), norm.weight.double(), EPS)
    assert_norm_within(gpu_table.norm_linear(x, norm, w), normed @ weights + bias, BOUND)
    halves = torch.empty(rows, sum(columns), dtype=torch.float16)
    got = gpu_table.norm_linear(x, norm, w, halves)
    assert_norm_within(got, normed @ weights + bias, 2 * BOUND)
    assert_norm_within(gpu_table.linear(x, w), x.double() @ weights + bias, BOUND)
    assert_norm_within(gpu_table.linear(x.half(), w), x.half().double() @ weights + bias, BOUND)


@pytest.mark.parametrize("columns", [640, 768])
def test_prompts_with_matrices_that_are_decoded_in_slices(
    gpu_table: OpTable, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr(trellis, "SCRATCH_HALVES", 384 * 200)
    w, weights = packed(gpu_table, random_exl3(4, 4, rows=384, columns=columns))
    x = normal(rng, 131, 384)
    assert_norm_within(gpu_table.linear(x, w), x.double() @ weights, BOUND)


@pytest.mark.parametrize(
    ("k", "n", "first"),
    [(256, 384, 0), (384, 128, 0), (512, 4096, 0), (128, 8320, 0), (256, 640, 24), (256, 1152, 2)],
)
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 9, 32, 33, 97])
@pytest.mark.parametrize("book", ["mul1", "mcg"])
def test_inputs_are_prepared_when_a_sum_is_written(
    *,
    gpu_table: OpTable,
    rng: torch.Generator,
    k: int,
    n: int,
    first: int,
    rows: int,
    book: Codebook,
) -> None:
    """Both ways write the same sum. `first`: features of the sum begin within a block of 128."""
    features = n - 2 * first
    w, _ = packed(
        gpu_table,
        random_exl3(1, 4, book, rows=k, columns=n),
        normal(rng, features),
        out_features=features,
        first_out=first,
    )
    part: dict[str, Any] = {"in_features": features, "first_in": first}
    parts = [
        packed(gpu_table, random_exl3(i, 3, book, rows=n, columns=m), **part)[0]
        for i, m in ((2, 256), (3, 256), (4, 128))
    ]
    table = cast(Any, gpu_table).on_device
    three, two = table.join(parts), table.join(parts[:2])
    norm = RmsNorm((normal(rng, features) + 1).to(table.device), EPS)
    x, old = (normal(rng, rows, size).to(table.device) for size in (k, features))
    for reader in (three, two, parts[2]):
        table._linears.begin_pass()
        inputs = table.inputs_for(w, x.half())
        if isinstance(inputs, Tensor):
            inputs.copy_(x)
        else:
            table._linears.prepare_for(inputs, x)
        plain = table.linear_add_(inputs, w, old.clone())
        expected = table.norm_linear(plain, norm, reader)
        joint = table.before(NextRead(norm, reader)).linear_add_(inputs, w, old.clone())
        assert torch.equal(joint, plain)
        got = table.norm_linear(joint, norm, reader).cpu()
        assert_norm_within(got, expected.double().cpu(), 2e-4)


def test_prepared_inputs_are_for_one_reader(gpu_table: OpTable, rng: torch.Generator) -> None:
    """Another tensor, norm or matrix, or a second read, gets inputs of its own."""
    w, other, third = (
        packed(gpu_table, random_exl3(i, 4, rows=256, columns=256))[0] for i in (1, 2, 3)
    )
    table = cast(Any, gpu_table).on_device
    x, old = (normal(rng, 3, 256).to(table.device) for _ in range(2))
    norm, wide = (RmsNorm(normal(rng, 256).to(table.device), EPS) for _ in range(2))
    inputs = table.inputs_for(w, x.half())
    table._linears.prepare_for(inputs, x)

    def written() -> Tensor:
        y: Tensor = table.before(NextRead(norm, other)).linear_add_(inputs, w, old.clone())
        return y

    y = written()
    table._linears.begin_pass()
    expected = {
        "norm": table.norm_linear(y, wide, other),
        "matrix": table.norm_linear(y, norm, third),
        "states": table.norm_linear(old, norm, other),
    }
    assert torch.equal(table.norm_linear(written(), wide, other), expected["norm"])
    assert torch.equal(table.norm_linear(written(), norm, third), expected["matrix"])
    written()
    assert torch.equal(table.norm_linear(old, norm, other), expected["states"])
    y = written()
    table.norm_linear(y, norm, other)
    y.mul_(2)
    table._linears.begin_pass()
    expected_again = table.norm_linear(y.clone(), norm, other)
    assert torch.equal(table.norm_linear(y, norm, other), expected_again)


@pytest.mark.parametrize("rows", [1, 5, 9, 64, 97])
def test_a_captured_graph_gives_the_same_bits(gpu_table: OpTable, rows: int) -> None:
    table = cast(Any, gpu_table).on_device
    gate, up = (packed(gpu_table, random_exl3(i, 4, rows=256, columns=512))[0] for i in (1, 2))
    down, _ = packed(gpu_table, random_exl3(3, 3, rows=512, columns=256))
    w = table.join([gate, up])
    x = torch.randn(rows, 256, device=table.device)
    norm = RmsNorm(torch.full((256,), 0.02, device=table.device), EPS)
    plain = torch.empty(rows, 512, dtype=torch.float16, device=table.device)

    def run() -> Tensor:
        h = table.norm_gated_linear(x, norm, w, "silu", table.inputs_for(down, plain))
        y: Tensor = table.linear_add_(h, down, x.clone())
        return y

    table._linears.begin_pass()
    first = run()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        with torch.cuda.graph(graph, stream=stream):
            captured = run()
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(3):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, first)


@pytest.mark.parametrize("book", ["mul1", "mcg"])
def test_rows_do_not_depend_on_the_batch(
    invariant_table: OpTable, rng: torch.Generator, book: Codebook
) -> None:
    if not invariant_table.name.startswith("cuda"):
        pytest.skip("a test of the GPU")
    w, weights = packed(invariant_table, random_exl3(7, 4, book, rows=512, columns=384))
    x = normal(rng, 230, 512)
    all_rows = invariant_table.linear(x, w)
    assert_norm_within(all_rows, x.double() @ weights, BOUND)
    for first, last in ((0, 1), (0, 8), (3, 20), (100, 196), (5, 200)):
        assert torch.equal(invariant_table.linear(x[first:last], w), all_rows[first:last])


def test_an_embedding_is_refused(gpu_table: OpTable) -> None:
    with pytest.raises(ValueError, match="trellis"):
        gpu_table.new_linear(TrellisLayout(128, 128, 64, "mul1"), on_host=True)
