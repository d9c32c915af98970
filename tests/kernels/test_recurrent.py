"""Recurrent ops: every backend against formulas in float64, in calls of any division."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from kernel_support import is_gpu, normal, strided_rows
from torch import Tensor

from exl_core.ops.backends.recurrence import (
    DeltaInputs,
    delta_chunks,
    delta_inputs,
    delta_steps,
    scan_chunks,
    scan_inputs,
    scan_steps,
)
from exl_core.ops.open import available_isas, get_table
from exl_core.ops.recurrent import DeltaRule, StateRows, StateScan, Taps
from exl_core.ops.table import OpTable

LENGTHS = (1, 70, 0, 9, 2)  # 70: more than a chunk
SLOTS = 9
Run = Callable[[OpTable, Tensor, Tensor, StateRows], Tensor]


def rows_of(lengths: tuple[int, ...], past: tuple[int, ...]) -> StateRows:
    """Sequences of these numbers of rows, in scattered slots."""
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    slots = torch.tensor([7, 2, 0, 5, 3])[: len(lengths)]
    return StateRows(starts, torch.tensor(past, dtype=torch.int32), slots)


def run_conv(taps: int, *, has_bias: bool) -> tuple[Run, tuple[int, ...], int]:
    rng = torch.Generator().manual_seed(taps)
    bias = normal(rng, 83) if has_bias else None
    filt = Taps(normal(rng, taps, 83), bias, has_silu=has_bias)
    return (
        lambda table, x, states, rows: table.causal_conv(x, filt, states, rows),
        (taps - 1, 83),
        83,
    )


def delta_rule_of(
    key_heads: int,
    value_heads: int,
    value_dim: int,
    *,
    is_tiled: bool = False,
    is_by_row: bool = False,
    key_dim: int = 16,
) -> DeltaRule:
    rng = torch.Generator().manual_seed(value_dim)
    biases = value_heads * (key_dim if is_by_row else 1)
    decay, bias = normal(rng, value_heads).exp(), normal(rng, biases)
    return DeltaRule(key_heads, value_heads, key_dim, value_dim, decay, bias, is_tiled, is_by_row)


def input_widths(rule: DeltaRule) -> tuple[int, int]:
    """Columns of the queries, keys and values, and of the numbers of the gates."""
    width = 2 * rule.key_heads * rule.key_dim + rule.value_heads * rule.value_dim
    return width, rule.value_heads + len(rule.dt_bias)


def run_delta(rule: DeltaRule) -> tuple[Run, tuple[int, ...], int]:
    width, gates = input_widths(rule)

    def run(table: OpTable, x: Tensor, states: Tensor, rows: StateRows) -> Tensor:
        return table.delta_rule(x[:, :width], x[:, width:], rule, states, rows)

    shape = (rule.value_heads, rule.key_dim, rule.value_dim)
    return run, shape, width + gates


def scan_of(heads: int, groups: int, state_size: int) -> StateScan:
    rng = torch.Generator().manual_seed(state_size)
    numbers = (normal(rng, heads).exp(), normal(rng, heads), normal(rng, heads))
    return StateScan(heads, 20, state_size, groups, *numbers, steps=(0.01, 1.5))


def run_scan(scan: StateScan) -> tuple[Run, tuple[int, ...], int]:
    width = scan.heads * scan.head_dim + 2 * scan.groups * scan.state_size

    def run(table: OpTable, x: Tensor, states: Tensor, rows: StateRows) -> Tensor:
        return table.state_scan(x[:, :width], x[:, width:], scan, states, rows)

    return run, (scan.heads, scan.head_dim, scan.state_size), width + scan.heads


CASES = {
    "conv-3": run_conv(3, has_bias=False),
    "conv-4-bias-silu": run_conv(4, has_bias=True),
    "delta": run_delta(delta_rule_of(2, 6, 20)),
    "delta-tiled": run_delta(delta_rule_of(2, 6, 128, is_tiled=True)),
    "delta-equal": run_delta(delta_rule_of(3, 3, 33)),
    "delta-by-row": run_delta(delta_rule_of(3, 3, 128, is_by_row=True)),
    "delta-by-row-odd": run_delta(
        delta_rule_of(2, 6, 33, is_tiled=True, is_by_row=True, key_dim=21)
    ),
    "scan": run_scan(scan_of(6, 1, 16)),
    "scan-groups": run_scan(scan_of(6, 2, 37)),
}


@pytest.mark.parametrize("name", CASES)
def test_results_and_states_are_those_of_the_formulas(table: OpTable, name: str) -> None:
    run, shape, width = CASES[name]
    rng = torch.Generator().manual_seed(4)
    x = strided_rows(rng, sum(LENGTHS), width)
    states = normal(rng, SLOTS, *shape)
    states[7] = torch.nan  # of an earlier sequence: the first one is new
    rows = rows_of(LENGTHS, (0, 5, 3, 1, 300))
    exact_states = states.clone()
    exact = run(get_table("reference", threads=1), x, exact_states, rows)

    y = run(table, x, states, rows)

    bound = 2e-5 if is_gpu(table) else 5e-6  # float32 sums of up to 128 products
    assert (y - exact).abs().max() <= bound * exact.abs().max()
    kept = [slot for slot in range(SLOTS) if slot not in (7, 2, 5, 3)]
    assert torch.equal(states[kept], exact_states[kept]), "other slots are not touched"
    used = exact_states[[7, 2, 5, 3]]
    assert (states[[7, 2, 5, 3]] - used).abs().max() <= bound * used.abs().max()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("isa", available_isas())
def test_rows_do_not_depend_on_others_nor_on_calls_if_invariant(isa: str, name: str) -> None:
    run, shape, width = CASES[name]
    table = get_table("cpu", isa=isa, threads=2, batch_invariant=True)
    rng = torch.Generator().manual_seed(5)
    x = strided_rows(rng, 90, width)
    together = torch.zeros(SLOTS, *shape)
    lengths = (20, 70)
    both = run(table, x, together, rows_of(lengths, (0, 0)))

    alone = torch.zeros(SLOTS, *shape)
    parts, done = [], 0
    for count in (1, 1, 64, 3, 1):  # the second sequence, in other pieces
        part = x[20 + done : 20 + done + count]
        rows = rows_of((count,), (done,))
        parts.append(run(table, part, alone, rows))
        done += count

    assert torch.equal(torch.cat(parts), both[20:])
    assert torch.equal(alone[7], together[2])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("isa", available_isas())
def test_rows_do_not_depend_on_other_sequences_nor_on_threads(isa: str, name: str) -> None:
    run, shape, width = CASES[name]
    rng = torch.Generator().manual_seed(5)
    x = strided_rows(rng, 90, width)
    together, alone = torch.zeros(SLOTS, *shape), torch.zeros(SLOTS, *shape)
    both = run(get_table("cpu", isa=isa, threads=3), x, together, rows_of((20, 70), (0, 0)))

    y = run(get_table("cpu", isa=isa, threads=1), x[20:], alone, rows_of((70,), (0,)))

    assert torch.equal(y, both[20:])
    assert torch.equal(alone[7], together[2])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("isa", available_isas())
def test_rows_do_not_depend_on_later_rows(isa: str, name: str) -> None:
    """A chunk computes rows together. NaN in its last row reaches no earlier one."""
    run, shape, width = CASES[name]
    table = get_table("cpu", isa=isa, threads=1)
    x = strided_rows(torch.Generator().manual_seed(9), 48, width)
    rows = rows_of((48,), (0,))
    expected = run(table, x, torch.zeros(SLOTS, *shape), rows)
    x[47] = torch.nan

    y = run(table, x, torch.zeros(SLOTS, *shape), rows)

    assert torch.equal(y[:47], expected[:47])
    assert y[47].isnan().all()


@pytest.mark.parametrize("is_by_row", [False, True])
@pytest.mark.parametrize("count", [1, 16, 17, 64, 150])  # blocks of 16 within chunks of 64
@pytest.mark.parametrize("speed", [0.01, 1.0, 100.0])  # 100: a state is gone after one token
def test_chunks_of_the_delta_rule_equal_steps(*, speed: float, count: int, is_by_row: bool) -> None:
    rng = torch.Generator().manual_seed(6)
    rule = delta_rule_of(2, 6, 20, is_tiled=True, is_by_row=is_by_row)
    rule = replace(rule, decay=rule.decay * speed)
    width, gates = input_widths(rule)
    qkv, ba = normal(rng, count, width).double(), normal(rng, count, gates).double()
    state = normal(rng, 6, 16, 20).double()
    inputs = delta_inputs(qkv, ba, rule)

    expected = delta_steps(inputs, state)
    got = delta_chunks(inputs, state)
    single = delta_chunks(DeltaInputs(*(x.float() for x in inputs)), state.float())

    for one, rounded, other in zip(got, single, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10)
        assert (rounded - other).abs().max() <= 1e-5 * other.abs().max()


def test_chunks_of_the_scan_equal_steps() -> None:
    rng = torch.Generator().manual_seed(6)
    scan = scan_of(6, 2, 16)
    xbc, dt = normal(rng, 150, 120 + 64).double(), normal(rng, 150, 6).double()
    held = normal(rng, 6, 20, 16).double()
    scanned = scan_inputs(xbc, dt, scan)

    got, expected = scan_chunks(scanned, held, scan.skip), scan_steps(scanned, held, scan.skip)

    for one, other in zip(got, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("slots", "starts", "what"),
    [
        ([0, 0], [0, 2, 4], "slots"),
        ([0, 9], [0, 2, 4], "slots"),
        ([0, 1], [0, 3, 2], "row_starts"),
        ([0, 1], [0, 2, 5], "row_starts"),
    ],
)
def test_rows_and_slots_that_do_not_fit_are_refused(
    cpu_table: OpTable, slots: list[int], starts: list[int], what: str
) -> None:
    run, shape, width = CASES["conv-3"]
    states, past = torch.zeros(SLOTS, *shape), torch.zeros(2, dtype=torch.int32)
    rows = StateRows(torch.tensor(starts, dtype=torch.int32), past, torch.tensor(slots))
    with pytest.raises(ValueError, match=f"causal_conv: {what}"):
        run(cpu_table, torch.zeros(4, width), states, rows)


BIG = {
    "conv-4": run_conv(4, has_bias=True),
    "delta": run_delta(delta_rule_of(2, 4, 128, is_tiled=False, key_dim=128)),
    "delta-odd": run_delta(delta_rule_of(1, 3, 33, is_tiled=True, key_dim=50)),
    "delta-by-row": run_delta(delta_rule_of(2, 4, 128, is_by_row=True, key_dim=128)),
    "delta-by-row-odd": run_delta(
        delta_rule_of(1, 3, 33, is_tiled=True, is_by_row=True, key_dim=50)
    ),
    "delta-by-row-wide": run_delta(delta_rule_of(1, 2, 40, is_by_row=True, key_dim=200)),
    "delta-wide": run_delta(delta_rule_of(1, 2, 70, is_tiled=False, key_dim=256)),
    "scan": run_scan(scan_of(4, 2, 128)),
    "delta-shared": run_delta(delta_rule_of(2, 16, 20, is_tiled=False, key_dim=100)),
    "scan-odd": run_scan(scan_of(3, 1, 161)),
    "scan-groups": run_scan(scan_of(6, 2, 37)),
}
"""Sizes of real models, and others that fill neither a block of columns nor one of rows."""

CPU_BOUND = 5e-6  # float32 sums of up to 256 products
GPU_BOUND = 2e-5


@pytest.mark.parametrize("name", BIG)
@pytest.mark.parametrize("lengths", [(7,), (16,), (31,), (33,), (33, 0, 1, 16, 40)], ids=str)
def test_prompts_of_any_length_on_a_cpu(
    kernels: OpTable, rng: torch.Generator, name: str, lengths: tuple[int, ...]
) -> None:
    check_prompts(kernels, rng, BIG[name], lengths, bound=CPU_BOUND)


@pytest.mark.parametrize("name", ["delta-odd", "delta-by-row-odd", "scan-odd"])
def test_prompts_of_several_slices_on_a_cpu(
    kernels: OpTable, rng: torch.Generator, name: str
) -> None:
    """The numbers of 256 rows of each sequence are prepared at a time."""
    check_prompts(kernels, rng, BIG[name], (300, 1, 270), bound=CPU_BOUND)


@pytest.mark.parametrize("kind", ["delta", "by-row", "scan"])
@pytest.mark.parametrize("speed", [0.0, 1e-3, 100.0, 1e30])
def test_slow_and_fast_decays_on_a_cpu(
    kernels: OpTable, rng: torch.Generator, speed: float, kind: str
) -> None:
    """0: nothing is forgotten. 100: a state is gone after one token. 1e30: the logarithm of a decay
    is so large that sums and differences of such logarithms would lose the small ones."""
    check_prompts(kernels, rng, mixed_decays(kind, speed), (100, 41), bound=CPU_BOUND)


def mixed_decays(kind: str, speed: float) -> tuple[Run, tuple[int, ...], int]:
    """Heads of this decay beside heads that decay slowly."""
    if kind == "scan":
        scan = scan_of(4, 2, 40)
        decay = torch.tensor([speed, 0.01, speed, 0.02])
        return run_scan(replace(scan, decay=decay, steps=(0.0, 1.5)))
    rule = delta_rule_of(2, 4, 40, key_dim=24, is_by_row=kind == "by-row")
    decay = torch.tensor([speed, 0.01, speed, 0.02])
    bias = rule.dt_bias.clone()
    bias[::3] = -40.0  # softplus is 4e-18: decays of 1 beside those that `speed` makes
    return run_delta(replace(rule, decay=decay, dt_bias=bias))


@pytest.mark.parametrize("name", [name for name in BIG if name != "conv-4"])
@pytest.mark.parametrize("isa", available_isas())
def test_chunks_equal_tokens_on_a_cpu(isa: str, name: str, rng: torch.Generator) -> None:
    run, shape, width = BIG[name]
    lengths, past = (64, 37, 16), (0, 9, 300)
    x, states = strided_rows(rng, sum(lengths), width), normal(rng, SLOTS, *shape)
    results = []
    for is_invariant in (False, True):
        table = get_table("cpu", isa=isa, threads=2, batch_invariant=is_invariant)
        held = states.clone()
        results.append((run(table, x, held, rows_of(lengths, past)), held))
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() <= CPU_BOUND * other.abs().max()


@pytest.mark.parametrize("name", BIG)
@pytest.mark.parametrize(
    "lengths",
    [
        *[(count,) for count in (1, 2, 3, 4, 15, 16, 17, 63, 64, 65, 128, 193, 1000)],
        (5, 1, 30, 2, 1, 17, 3),
        (200, 1, 127, 300, 64, 0, 128, 65),
    ],
    ids=str,
)
def test_prompts_of_any_length_on_a_gpu(
    gpu_table: OpTable, rng: torch.Generator, name: str, lengths: tuple[int, ...]
) -> None:
    check_prompts(gpu_table, rng, BIG[name], lengths, bound=GPU_BOUND)


@pytest.mark.parametrize("speed", [0.0, 0.01, 100.0])
def test_long_prompts_with_slow_and_fast_decays_on_a_gpu(
    gpu_table: OpTable, rng: torch.Generator, speed: float
) -> None:
    """100: a state is gone after one token. 0: nothing is forgotten."""
    rule = delta_rule_of(2, 4, 96, key_dim=128)
    case = run_delta(replace(rule, decay=rule.decay * speed))
    check_prompts(gpu_table, rng, case, (300, 190), bound=GPU_BOUND)


@pytest.mark.parametrize("name", BIG)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 31, 32, 33])
def test_decode_rows_on_a_gpu(
    gpu_table: OpTable, rng: torch.Generator, name: str, count: int
) -> None:
    check_prompts(gpu_table, rng, BIG[name], (1,) * count, bound=GPU_BOUND)


def check_prompts(
    table: OpTable,
    rng: torch.Generator,
    case: tuple[Run, tuple[int, ...], int],
    lengths: tuple[int, ...],
    *,
    bound: float,
) -> None:
    """Two calls after one another, the first from zeros in every other sequence; slots permuted."""
    (run, shape, width), seqs = case, len(lengths)
    states = normal(rng, seqs + 3, *shape)
    slots = torch.randperm(seqs + 3, generator=rng)[:seqs]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    past = torch.arange(seqs, dtype=torch.int32) % 2 * 5
    states[slots[past == 0]] = torch.nan  # of an earlier sequence
    exact_states = states.clone()
    for _ in range(2):
        x = strided_rows(rng, sum(lengths), width)
        rows = StateRows(starts, past, slots)
        exact = run(get_table("reference", threads=1), x, exact_states, rows)
        y = run(table, x, states, rows)
        assert (y - exact).abs().max() <= bound * exact.abs().max()
        kept = exact_states[slots]
        assert (states[slots] - kept).abs().max() <= bound * kept.abs().max()
        past = past + torch.tensor(lengths, dtype=torch.int32)
    others = [slot for slot in range(seqs + 3) if slot not in slots.tolist()]
    assert torch.equal(states[others], exact_states[others]), "other slots are not touched"


@pytest.mark.parametrize("name", BIG)
@pytest.mark.parametrize("lengths", [(5, 1, 30), (2,), (1, 1)], ids=str)
def test_rows_of_padding_are_zeros_and_change_nothing(
    gpu_table: OpTable, rng: torch.Generator, name: str, lengths: tuple[int, ...]
) -> None:
    run, shape, width = BIG[name]
    count, padding = sum(lengths), 40
    x = strided_rows(rng, count + padding, width)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    past, slots = torch.zeros(len(lengths), dtype=torch.int32), torch.arange(len(lengths))
    plain, padded = torch.zeros(4, *shape), torch.zeros(4, *shape)
    expected = run(gpu_table, x[:count], plain, StateRows(starts, past, slots))
    # Two sequences without rows, as in a captured graph.
    more = StateRows(
        torch.cat([starts, starts[-1:], starts[-1:]]),
        torch.cat([past, past[:1], past[:1]]),
        torch.cat([slots, torch.tensor([3, 3])]),
    )
    y = run(gpu_table, x, padded, more)
    assert torch.equal(y[count:], torch.zeros(padding, y.shape[1]))
    bound = 2e-5 * expected.abs().max()  # one row per sequence is computed by another kernel
    assert (y[:count] - expected).abs().max() <= bound
    assert torch.allclose(padded, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BIG)
def test_no_bit_depends_on_the_division_in_the_batch_invariant_mode(
    invariant_table: OpTable, name: str
) -> None:
    run, shape, width = BIG[name]
    lengths, rng = (150, 70), torch.Generator().manual_seed(8)
    texts = [strided_rows(rng, count, width) for count in lengths]

    def results(passes: list[tuple[int, int]]) -> list[Tensor]:
        """Rows of both sequences and their states, after passes of rows of each."""
        done, states = [0, 0], torch.zeros(3, *shape)
        found: list[list[Tensor]] = [[], []]
        for counts in passes:
            ends = [at + count for at, count in zip(done, counts, strict=True)]
            parts = [text[at:end] for text, at, end in zip(texts, done, ends, strict=True)]
            rows = StateRows(
                torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32),
                torch.tensor(done, dtype=torch.int32),
                torch.tensor([2, 0]),
            )
            y = run(invariant_table, torch.cat(parts), states, rows)
            for seq, part in enumerate(torch.split(y, list(counts))):
                found[seq].append(part)
            done = ends
        return [*(torch.cat(parts) for parts in found), states[[2, 0]]]

    whole = results([(150, 0), (0, 70)])
    for passes in (
        [(64, 64), (64, 6), (22, 0)],
        [(5, 0), (63, 3), (1, 1), (81, 66)],
        [*[(1, 1)] * 60, (90, 10)],
    ):
        for one, other in zip(results(passes), whole, strict=True):
            assert torch.equal(one, other)
