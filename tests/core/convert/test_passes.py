"""Passes that stop at each group of matrices: what they show, and what they compute twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.convert.layers import compute_type, read_layer
from exl_core.convert.parallel import Workers
from exl_core.convert.passes import CapturingPass, LayerFunction
from exl_core.formats.checkpoint import Checkpoint
from exl_core.session.open import open_checkpoint
from support.tiny_models import save, tiny_arcee, tiny_cohere, tiny_gemma3, tiny_gemma4, tiny_llama

CPU = torch.device("cpu")
ROWS, PIECE_ROWS = 3, 2  # two pieces, the last of one row


@pytest.mark.parametrize(
    ("build", "repeated"),
    [
        (tiny_llama, set()),
        (tiny_gemma3, set()),  # norms after the last matrix of a part
        (tiny_gemma4, set()),  # a factor after the MLP
        (tiny_arcee, set()),  # an MLP without a gate
        # Attention and MLP of a parallel layer are one step.
        (tiny_cohere, {"q", "k", "v", "output", "gate", "up"}),
    ],
)
def test_each_matrix_is_shown_its_inputs_and_multiplied_once(
    tmp_path: Path, build: Callable[[], Any], repeated: set[str]
) -> None:
    source, config, quantization = open_checkpoint(save(build(), tmp_path))
    checkpoint = Checkpoint(source, config, quantization, is_exact=True)
    layer = read_layer(checkpoint, config, 0, CPU)
    calls: Counter[str] = Counter()
    multiply = layer.products()
    seen: dict[str, Tensor] = {}

    def product(role: str, x: Tensor) -> Tensor:
        calls[role] += 1
        seen[role] = x.to(compute_type(CPU))
        return multiply(role, x)

    function = LayerFunction(config, 0, layer.vectors(), product)
    x = torch.randn(ROWS, 9, config.hidden_size, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        pieces = [function(piece) for piece in x.split(PIECE_ROWS)]
        expected_inputs = dict(seen)  # of the last piece
        calls.clear()
        states, shown = x.clone(), list[str]()
        workers = Workers(None, lambda: False)
        workers.rows_per_piece = PIECE_ROWS
        one_pass = CapturingPass(function, states, CPU, workers)
        for roles in one_pass.groups():
            shown += roles
            for role in roles:
                assert torch.equal(one_pass.inputs[-1], expected_inputs[role]), role

    assert torch.equal(states, torch.cat(pieces))
    assert sorted(shown) == sorted(expected_inputs)
    assert {role for role in shown if calls[role] > len(pieces)} == repeated
    assert all(calls[role] >= len(pieces) for role in shown)
