"""The reader of a step's sum is the op that `OpTable.before` announces."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.model.context import Context
from exl_core.model.observe import StateRecorder
from exl_core.model.transformer import Transformer
from exl_core.ops.elementwise import Norm
from exl_core.ops.linear import Inputs, NextRead, PackedLinear
from exl_core.ops.table import LayerOps, OpTable
from exl_core.ops.wrapped import WrappedOps
from exl_core.session.load import load_model
from support.families import (
    EXPERT_FAMILIES,
    FAMILIES,
    HYBRID_FAMILIES,
    LATENT_FAMILIES,
    save_family,
)
from support.tiny_models import VOCAB_SIZE

BUILDERS = {**FAMILIES, **EXPERT_FAMILIES, **HYBRID_FAMILIES, **LATENT_FAMILIES}
IDS = torch.randint(3, VOCAB_SIZE, (2, 30), generator=torch.Generator().manual_seed(7))


class CheckingOps(WrappedOps):
    """Asserts that the first op after a step reads the step's sum as `before` was told."""

    def __init__(self, table: OpTable) -> None:
        super().__init__(table)
        self.expected: tuple[Tensor, NextRead] | None = None
        self.num_checked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # functions of a table that no layer calls

    def before(self, read: NextRead) -> LayerOps:
        return EndingOps(self, read)

    def check(self, name: str, operands: tuple[Any, ...]) -> None:
        if self.expected is None or name == "inputs_for":  # reads no states
            return
        (x, read), self.expected = self.expected, None
        assert name in ("norm_linear", "norm_gated_linear", "norm_activated_linear"), name
        assert operands[0] is x
        assert operands[1] is read.norm
        assert operands[2] is read.w
        self.num_checked += 1


class EndingOps(WrappedOps):
    """Ops of a step whose sum is read as `read` says."""

    inner: CheckingOps

    def __init__(self, inner: CheckingOps, read: NextRead) -> None:
        super().__init__(inner)
        self._read = read

    def linear_add_(self, x: Inputs, w: PackedLinear, residual: Tensor) -> Tensor:
        y = self.inner.linear_add_(x, w, residual)
        self.inner.expected = y, self._read
        return y


def _checked(name: str) -> Any:
    def op(self: CheckingOps, *operands: Any, **named: Any) -> Any:
        self.check(name, operands)
        return getattr(self.inner, name)(*operands, **named)

    return op


for _name in vars(WrappedOps):
    if not _name.startswith("_"):
        setattr(CheckingOps, _name, _checked(_name))


def checked(model: Transformer) -> CheckingOps:
    """Replaces the op table of the model's layers."""
    (stage,) = model.stages
    ops = CheckingOps(stage.ops)
    stage.ops = cast(OpTable, ops)
    return ops


def context_of(model: Transformer) -> Context:
    return Context(model, 64, batch_size=2, kv_format=KVFormat.FP32)


def family(name: str, folder: Path) -> Transformer:
    return load_model(str(save_family(name, BUILDERS[name](), folder))).model


@pytest.mark.parametrize("name", BUILDERS)
def test_the_next_op_reads_the_sum_as_announced(tmp_path: Path, name: str) -> None:
    model = family(name, tmp_path)
    expected = context_of(model).forward(IDS)
    ops = checked(model)
    assert torch.equal(context_of(model).forward(IDS), expected)
    assert ops.expected is None, "the sum of the last layer is read by other ops"


@pytest.mark.parametrize(("name", "of_layer"), [("llama", 2), ("starcoder2", 2), ("mixtral", 0)])
def test_sums_of_plain_layers_are_announced(tmp_path: Path, name: str, of_layer: int) -> None:
    model = family(name, tmp_path)
    ops = checked(model)
    context_of(model).forward(IDS)
    assert ops.num_checked == max(of_layer * model.config.num_layers - 1, 0)


def test_nothing_is_announced_to_observed_passes(tmp_path: Path) -> None:
    model = family("llama", tmp_path)
    ops = checked(model)
    context_of(model).forward(IDS, observe=StateRecorder(layers=(0, 1)))
    assert ops.num_checked == 0


def test_norms_are_those_of_the_layers(tmp_path: Path) -> None:
    """The norm of the MLP follows attention, and the norm of the next attention the MLP."""
    model = family("llama", tmp_path)
    found: list[Norm] = []

    class Recorder(CheckingOps):
        def before(self, read: NextRead) -> LayerOps:
            found.append(read.norm)
            return self

    (stage,) = model.stages
    stage.ops = cast(OpTable, Recorder(stage.ops))
    context_of(model).forward(IDS)
    blocks = model._weights.blocks
    norms = [norm for block in blocks for norm in (block.attention.norm, cast(Any, block.mlp).norm)]
    assert [id(norm) for norm in found] == [id(norm) for norm in norms[1:]]
