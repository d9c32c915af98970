"""Operands that break a contract raise an error that names the operand, and never crash."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exl_core.ops.attention import AttentionRows, CacheLayer, Scoring
from exl_core.ops.elementwise import RmsNorm
from exl_core.ops.table import OpTable
from exl_core.ops.weights import DenseColumns, DenseLayout

I32, I64 = torch.int32, torch.int64


@pytest.fixture
def table(cpu_table: OpTable) -> OpTable:
    """Backends that check their operands: all but the GPU."""
    return cpu_table


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    "x",
    [
        zeros(2, 8, dtype=torch.float16),
        zeros(2, 9),
        zeros(8),
        zeros(2, 16)[:, ::2],
        zeros(8, 2).T,
        zeros(1, 8).expand(2, 8),
        torch.zeros(2, 8, device="meta"),
    ],
    ids=["dtype", "columns", "rank", "column-stride", "transposed", "overlapping", "device"],
)
def test_linear_refuses_other_activations(table: OpTable, x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="linear: x"):
        table.linear(x, table.new_linear(DenseLayout(4, 8, torch.float32)))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((0, 8), torch.float32), ((8, -1), torch.float16), ((4, 4), torch.float64), ((4, 4), I64)],
)
def test_impossible_linears_are_refused(
    table: OpTable, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    with pytest.raises(ValueError, match=r"new_linear|PackedLinear"):
        table.new_linear(DenseLayout(*shape, dtype))


@pytest.mark.parametrize(
    ("offset", "weight", "bias", "names"),
    [
        (0, zeros(4, 8, dtype=torch.float16), zeros(4), "weight"),
        (0, zeros(4, 9), zeros(4), "weight"),
        (0, zeros(8, 4).T, zeros(4), "weight"),
        (15, zeros(4, 8), zeros(4), "row_offset|first_column"),
        (-1, zeros(4, 8), zeros(4), "row_offset|first_column"),
        (2**62, zeros(4, 8), zeros(4), "row_offset|first_column"),
        (0, zeros(4, 8), None, "bias"),
        (0, zeros(4, 8), zeros(5), "bias"),
    ],
)
def test_fill_refuses_operands_that_do_not_fit(
    table: OpTable, offset: int, weight: torch.Tensor, bias: torch.Tensor | None, names: str
) -> None:
    w = table.new_linear(DenseLayout(16, 8, torch.float32, has_bias=True))
    with pytest.raises(ValueError, match=names):
        table.fill_linear(w, offset, DenseColumns(weight, bias))


def test_a_bias_is_refused_where_the_linear_has_none(table: OpTable) -> None:
    w = table.new_linear(DenseLayout(4, 8, torch.float32))
    with pytest.raises(ValueError, match="bias"):
        table.fill_linear(w, 0, DenseColumns(zeros(4, 8), zeros(4)))


@pytest.mark.parametrize(
    "ids",
    [torch.tensor([0, 16]), torch.tensor([-1]), torch.tensor([2**40]), zeros(2, dtype=I32)],
    ids=["past-the-end", "negative", "huge", "dtype"],
)
def test_embedding_refuses_ids_out_of_range(table: OpTable, ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="token_ids"):
        table.embedding(ids, table.new_linear(DenseLayout(16, 8, torch.float32)))


def test_norms_refuse_other_weights(table: OpTable) -> None:
    with pytest.raises(ValueError, match="rms_norm: weight"):
        table.rms_norm(zeros(2, 8), RmsNorm(zeros(9), 1e-5))
    with pytest.raises(ValueError, match="rms_norm_heads_: weight"):
        table.rms_norm_heads_(zeros(2, 3, 8), RmsNorm(zeros(24), 1e-5))
    with pytest.raises(ValueError, match="rms_norm_heads_: x"):
        table.rms_norm_heads_(zeros(2, 8, 3).transpose(1, 2), RmsNorm(zeros(8), 1e-5))


@pytest.mark.parametrize(
    ("cos", "sin", "names"),
    [
        (zeros(2, 5), zeros(2, 5), "cos"),
        (zeros(3, 4), zeros(3, 4), "cos"),
        (zeros(2, 4), zeros(2, 3), "sin"),
        (zeros(4, 2).T, zeros(2, 4), "cos"),
    ],
    ids=["too-wide", "rows", "unequal", "transposed"],
)
def test_rope_refuses_other_angles(
    table: OpTable, cos: torch.Tensor, sin: torch.Tensor, names: str
) -> None:
    with pytest.raises(ValueError, match=f"rope_: {names}"):
        table.rope_(zeros(2, 3, 8), cos, sin)


def test_gated_activation_refuses_odd_rows_and_other_kinds(table: OpTable) -> None:
    with pytest.raises(ValueError, match="gated_activation"):
        table.gated_activation(zeros(2, 9), "silu")
    with pytest.raises(ValueError, match="relu"):
        table.gated_activation(zeros(2, 8), "relu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"slots": torch.tensor([0, 32])}, "slots"),
        ({"slots": torch.tensor([0, -1])}, "slots"),
        ({"slots": torch.tensor([0, 1, 2])}, "slots"),
        ({"slots": torch.tensor([0, 1], dtype=I32)}, "slots"),
        ({"value": zeros(2, 3, 9)}, "value"),
        ({"key_cache": zeros(2, 3, 16, 8, dtype=torch.bfloat16)}, "key_cache"),
        ({"key_cache": zeros(2, 4, 16, 8)}, "key_cache"),
        ({"value_cache": zeros(2, 3, 16, 8, dtype=torch.float16)}, "value_cache"),
        ({"value_cache": zeros(2, 16, 3, 8).transpose(1, 2)}, "value_cache"),
    ],
)
def test_write_kv_refuses_writes_outside_of_the_cache(
    table: OpTable, change: dict[str, Any], names: str
) -> None:
    operands: dict[str, Any] = {
        "key": zeros(2, 3, 8),
        "value": zeros(2, 3, 8),
        "key_cache": zeros(2, 3, 16, 8),
        "value_cache": zeros(2, 3, 16, 8),
        "slots": torch.tensor([0, 31]),
    }

    def write(
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        table.write_kv(key, value, CacheLayer(key_cache, value_cache), slots)

    write(**operands)
    with pytest.raises(ValueError, match=names):
        write(**(operands | change))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=I32)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"q": zeros(3, 5, 8)}, "key_cache|heads"),
        ({"q": zeros(3, 4, 9)}, "key_cache"),
        ({"q": zeros(3, 4, 8, dtype=torch.float64)}, "q"),
        ({"q": zeros(3, 8, 4).transpose(1, 2)}, "q"),
        ({"key_cache": zeros(4, 2, 16, 8, dtype=torch.bfloat16)}, "key_cache"),
        ({"value_cache": zeros(4, 2, 16, 9)}, "value_cache"),
        ({"page_table": ints(0, 1, 4, 3).view(2, 2)}, "page_table"),
        ({"page_table": ints(0, -1, 2, 3).view(2, 2)}, "page_table"),
        ({"page_table": zeros(2, 2, dtype=I64)}, "page_table"),
        ({"page_table": ints(0, 1).view(2, 1)}, "page_table|past_lens"),
        ({"past_lens": ints(31, 31)}, "page_table|past_lens"),
        ({"past_lens": ints(-1, 16)}, "past_lens"),
        ({"past_lens": ints(0)}, "past_lens"),
        ({"row_starts": ints(0, 1, 2)}, "row_starts"),
        ({"row_starts": ints(1, 2, 3)}, "row_starts"),
        ({"row_starts": ints(0, 4, 3)}, "row_starts"),
        ({"row_starts": ints(0, 3)}, "row_starts"),
        ({"window": -1}, "window"),
        ({"softcap": -1.0}, "softcap"),
        ({"softcap": torch.nan}, "softcap"),
    ],
)
def test_attention_refuses_reads_outside_of_the_cache(
    table: OpTable, change: dict[str, Any], names: str
) -> None:
    operands: dict[str, Any] = {
        "q": zeros(3, 4, 8),
        "key_cache": zeros(4, 2, 16, 8),
        "value_cache": zeros(4, 2, 16, 8),
        "page_table": ints(0, 1, 2, 3).view(2, 2),
        "row_starts": ints(0, 2, 3),
        "past_lens": ints(20, 16),
    }

    def attend(
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        *,
        window: int = 0,
        softcap: float = 0.0,
        **rows: Any,
    ) -> None:
        cache = CacheLayer(key_cache, value_cache)
        table.paged_attention(q, cache, AttentionRows(**rows), Scoring(1.0, window, softcap))

    attend(**operands)
    with pytest.raises(ValueError, match=names):
        attend(**(operands | change))


def test_the_message_names_expected_and_given_operands(kernels: OpTable) -> None:
    with pytest.raises(
        ValueError,
        match=r"linear: x \(expected float32 \[any, 8\], got float16 \[2, 9\]\)",
    ):
        w = kernels.new_linear(DenseLayout(4, 8, torch.float32))
        kernels.linear(zeros(2, 9, dtype=torch.float16), w)


def test_objects_other_than_tensors_are_refused(kernels: OpTable) -> None:
    with pytest.raises(ValueError, match=r"weight \(expected a tensor, got list\)"):
        kernels.rms_norm(zeros(2, 8), RmsNorm([1.0] * 8, 1e-5))  # type: ignore[arg-type]
