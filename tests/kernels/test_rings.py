"""`nearest_rings`: the search for trellis codes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from exl_core.formats.codecs.exl3 import layout as exl3
from exl_core.ops.backends.rings import search
from exl_core.ops.open import get_table
from exl_core.ops.rings import REACH, new_bits
from exl_core.ops.table import OpTable
from exl_core.ops.weights import CODEBOOKS, TRELLIS_RATES, Codebook

KINDS = [(r, book) for book in CODEBOOKS for r in TRELLIS_RATES if r % 1 == 0 or book == "mul1"]

QUICK = [(2, "mul1"), (2.5, "mul1"), (4, "mul1"), (3, "mcg"), (8, "3inst")]


def costs(states: Tensor, targets: Tensor, values: Tensor) -> Tensor:
    """Squared error of each ring."""
    return (values[states.long()] - targets).double().square().sum(1)


def assert_rings(states: Tensor, rate: float) -> None:
    """Checks that neighboring states share all but their new bits."""
    kept = states.long() >> torch.tensor(new_bits(rate))
    before = states.long().roll(1, 1) & (1 << 16 - torch.tensor(new_bits(rate))) - 1
    assert torch.equal(kept, before)


@cache
def searched(rate: float, codebook: Codebook) -> tuple[Tensor, Tensor, Tensor]:
    """Values, random targets in strided rows, and the rings that the search in torch finds."""
    values = exl3.codebook_values(codebook).float()
    generator = torch.Generator().manual_seed(int(10 * rate))
    targets = torch.randn(3, 300, generator=generator)[:, :256]
    return values, targets, search(targets, values, rate, REACH)


@pytest.mark.parametrize(("rate", "codebook"), KINDS)
def test_rings_are_those_of_the_search_in_torch(
    kernels: OpTable, rate: float, codebook: Codebook
) -> None:
    values, targets, expected = searched(rate, codebook)

    states = kernels.nearest_rings(targets, values, rate)

    assert states.dtype is torch.int32
    assert_rings(states, rate)
    # A sum without fma differs in its last bit, and then the choice may differ too.
    torch.testing.assert_close(
        costs(states, targets, values), costs(expected, targets, values), rtol=1e-4, atol=0
    )
    assert (states == expected).float().mean() > 0.9


GOLDEN = [
    pytest.param(rate, book, marks=() if (rate, book) in QUICK else pytest.mark.thorough)
    for rate, book in KINDS
]


@pytest.mark.parametrize(("rate", "codebook"), GOLDEN)
def test_with_float16_costs_the_rings_are_those_of_exllamav3(
    shared_dir: Path, rate: float, codebook: Codebook
) -> None:
    case = f"encode.{f'{rate:g}'.replace('.', '_')}.{codebook}"
    with safe_open(shared_dir / "golden" / "exl3_reference.safetensors", "pt") as file:
        assert case in json.loads(file.metadata()["cases"])
        targets, states = (file.get_tensor(f"{case}.{name}") for name in ("tiles", "states"))
    values = exl3.codebook_values(codebook)
    assert torch.equal(search(targets.half(), values, rate, 128), states.int() & 0xFFFF)


@pytest.mark.parametrize(("rate", "codebook"), KINDS)
def test_a_gpu_finds_the_rings_of_the_cpu(
    gpu_table: OpTable, rng: torch.Generator, rate: float, codebook: Codebook
) -> None:
    """Bit by bit: both add squares with one rounding. The GPU has more rings than blocks."""
    values = exl3.codebook_values(codebook).float()
    targets = torch.randn(140, 300, generator=rng)[:, :256]
    targets[3] = 0  # many equal costs
    targets[5] = targets[5].round()
    states = gpu_table.nearest_rings(targets, values, rate)
    assert_rings(states, rate)
    some = torch.tensor([0, 3, 5, 131, 139])
    expected = get_table("cpu", threads=2).nearest_rings(targets[some], values, rate)
    assert torch.equal(states[some], expected)
    assert torch.equal(gpu_table.nearest_rings(targets[139:], values, rate)[0], states[139])


def test_a_ring_that_exists_is_found(kernels: OpTable, rng: torch.Generator) -> None:
    values = exl3.codebook_values("mul1").float()
    for rate in TRELLIS_RATES:
        words = torch.randint(-32768, 32768, (2, int(16 * rate)), generator=rng).to(torch.int16)
        targets = values[exl3.unpack_states(words, rate)]
        found = kernels.nearest_rings(targets, values, rate)
        assert torch.equal(values[found.long()], targets)


def test_results_do_not_depend_on_threads_or_other_rings(rng: torch.Generator) -> None:
    values = exl3.codebook_values("3inst").float()
    targets = torch.randn(7, 256, generator=rng)
    one, three = (get_table("cpu", threads=count) for count in (1, 3))
    states = three.nearest_rings(targets, values, 3)
    assert torch.equal(one.nearest_rings(targets, values, 3), states)
    assert torch.equal(one.nearest_rings(targets[4:5], values, 3), states[4:5])
    assert one.nearest_rings(targets[:0], values, 3).shape == (0, 256)


def test_targets_without_a_value_do_no_harm(table: OpTable) -> None:
    values = exl3.codebook_values("mul1").float()
    for value in (torch.inf, torch.nan, 1e30):
        targets = torch.zeros(1, 256)
        targets[0, ::7] = value
        for rate in (1, 2.5, 8):
            states = table.nearest_rings(targets, values, rate)
            assert int(states.min()) >= 0
            assert int(states.max()) < 1 << 16


def test_operands_are_checked(cpu_table: OpTable) -> None:
    targets, values = torch.zeros(2, 256), torch.zeros(65536)
    for operands in (
        (targets.half(), values, 3),
        (targets[:, :255], values, 3),
        (targets, values[1:], 3),
        (targets, values, 4.5),
        (targets, values, 0),
    ):
        with pytest.raises(ValueError, match="nearest_rings"):
            cpu_table.nearest_rings(*operands)
