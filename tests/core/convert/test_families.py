"""Every family's layers as a conversion computes them, and conversions of every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from exl_core.arch.modules import module_table
from exl_core.convert import trellis
from exl_core.convert.calibration import CalibrationRows
from exl_core.convert.layers import LayerSource, read_final_norm, read_layer, read_tensor
from exl_core.convert.passes import LayerFunction, final_states
from exl_core.convert.plan import ConvertOptions
from exl_core.convert.preflight import rate_limits
from exl_core.convert.target import Target
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.verify import verify
from exl_core.ops.backends.autograd.linear import Product
from exl_core.session.load import LoadOptions
from exl_core.session.open import open_checkpoint
from support.conversions import conversion, hooks, run
from support.exl2_directory import read_model
from support.families import (
    EXPERT_FAMILIES,
    FAMILIES,
    HYBRID_FAMILIES,
    LATENT_FAMILIES,
    save_family,
)
from support.paged import logits_of
from support.profiles import first_by_default
from support.quick_rings import QuickRings
from support.tiny_models import VOCAB_SIZE

IDS = torch.randint(3, VOCAB_SIZE, (1, 80), generator=torch.Generator().manual_seed(6))
"""Longer than the windows and original contexts of all tiny models."""


def plain_product(source: LayerSource) -> Product:
    return lambda role, x: linear(x, source.matrix(role), source.bias(role))


def our_logits(folder: Path, x: Tensor) -> Tensor:
    """Logits for states x [1, T, hidden] before the first layer, by the conversion's functions."""
    source, config, quantization = open_checkpoint(folder)
    checkpoint, table = (
        Checkpoint(source, config, quantization, is_exact=True),
        module_table(config),
    )
    x = x / config.multipliers.residual
    for layer in range(config.num_layers):
        own = read_layer(checkpoint, config, layer, torch.device("cpu"))
        x = LayerFunction(config, layer, own.vectors(), plain_product(own))(x)
    head = read_tensor(checkpoint, (table.embed if table.is_tied else table.head).name)
    logits = linear(final_states(config, read_final_norm(checkpoint, config), x), head)
    cap = config.final_softcap
    return logits if cap is None else torch.tanh(logits / cap) * cap


BUILDERS = FAMILIES | EXPERT_FAMILIES | HYBRID_FAMILIES | LATENT_FAMILIES


@pytest.mark.parametrize("family", BUILDERS)
def test_layers_and_their_gradients_match_transformers(tmp_path: Path, family: str) -> None:
    model: Any = BUILDERS[family]()
    output = model(IDS, output_hidden_states=True)
    first = output.hidden_states[0]
    probe = torch.randn(output.logits.shape, generator=torch.Generator().manual_seed(2))
    (expected,) = torch.autograd.grad((output.logits * probe).sum(), first)
    x = first.detach().requires_grad_()

    logits = our_logits(save_family(family, model, tmp_path), x)

    assert (logits - output.logits).abs().max() <= 1e-4 * output.logits.abs().max()
    (gradient,) = torch.autograd.grad((logits * probe).sum(), x)
    assert (gradient - expected).abs().max() <= 1e-4 * expected.abs().max()


def make_rows(step: Any) -> CalibrationRows:
    ids = torch.randint(3, 259, (2, 64), generator=torch.Generator().manual_seed(5))
    return CalibrationRows(ids, "0" * 64, "random bytes")


@pytest.mark.parametrize("family", first_by_default([*BUILDERS], 1))
def test_every_family_is_written_as_exl3(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trellis, "open_rings", lambda _: QuickRings())
    source = save_family(family, BUILDERS[family](), tmp_path / "source")
    options = ConvertOptions(format="exl3", fast=True, head_bits=8)
    _, most = rate_limits(open_checkpoint(source)[1], Target("mul1"))
    settings: dict[str, Any] = {"bits": int(most * 100) / 100, "rows": 2, "length": 64}
    task = conversion(source, tmp_path, **settings, stages=options, shard_bytes=1 << 22)

    out = run(task, hooks(make_rows=make_rows))

    report = verify(*open_checkpoint(out))
    assert (report.problems, report.zeros) == ((), ())
    converted, exact = (Checkpoint(*open_checkpoint(folder)) for folder in (out, source))
    assert logits_of(out, IDS[0].tolist()).isfinite().all()
    for row in converted.rows.values():
        if row.is_converted and row.layer is not None:
            found, expected = (read_tensor(one, row.name) for one in (converted, exact))
            assert (found - expected).norm() < 0.3 * expected.norm(), row.name


FIRST = ("cohere", "gemma4-values")
TUNED = ("cohere-head-norm", "gemma4", "orion", "apertus")
"""Families whose conversion runs with all steps: norms with biases, by head, numbers of a layer."""


@pytest.mark.parametrize(
    "family", first_by_default([*FIRST, *(name for name in FAMILIES if name not in FIRST)], 2)
)
def test_converted_models_stay_close_to_their_sources(tmp_path: Path, family: str) -> None:
    source = save_family(family, FAMILIES[family](), tmp_path / "source")
    settings: dict[str, Any] = {"bits": 8.0, "rows": 2, "length": 64}
    is_tuned = family in TUNED
    task = conversion(source, tmp_path, **settings, stages=ConvertOptions(fast=not is_tuned))

    out = run(task, hooks(make_rows=make_rows))

    opened = open_checkpoint(out)
    assert not verify(*opened).problems
    names = {row.name for row in module_table(opened[1]).rows}
    assert read_model(out).keys() == names  # an independent reader finds the same tensors
    exact = LoadOptions(exact=True)
    found, expected = (logits_of(folder, IDS[0].tolist(), exact) for folder in (out, source))
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert float(error) < 0.06  # matrices of 8 bits, a head of 6
