"""Models that add a vector of each position to the embedding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exl_core.errors import RequestError, UnsupportedModelError
from exl_core.session.load import LoadOptions, load_model
from support.commands import Command
from support.paged import logits_of
from support.tiny_models import save, tiny_gpt2


@pytest.mark.parametrize("options", [LoadOptions(max_seq_len=401), LoadOptions(rope_alpha=2.0)])
def test_positions_beyond_the_table_are_refused(tmp_path: Path, options: LoadOptions) -> None:
    folder = save(tiny_gpt2(), tmp_path)
    with pytest.raises(RequestError, match="at most 400 tokens, and no options of RoPE"):
        load_model(str(folder), options)


def test_streamed_layers_have_positions_too(tmp_path: Path) -> None:
    model, ids = tiny_gpt2(), list(range(3, 60))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    logits = logits_of(save(model, tmp_path), ids, LoadOptions(held_bytes=0))
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_a_reply_and_a_description(tmp_path: Path, exl: Command) -> None:
    folder = save(tiny_gpt2(), tmp_path / "model")
    assert exl("generate", "-m", folder, "-p", "Hello", "-n", 8, "--temperature", 0).code == 0
    assert "400 tokens" in exl("inspect", "model", folder).out
    assert exl("generate", "-m", folder, "-p", "Hello", "--ctx-size", 600).code == 2


def test_convert_refuses_positions(tmp_path: Path, exl: Command) -> None:
    folder = save(tiny_gpt2(), tmp_path / "model")
    line = exl("convert", folder, "-o", tmp_path / "out", "--bits", 4).error_line(3)
    assert "models whose positions have vectors" in line


def test_variants_of_attention_are_refused(tmp_path: Path) -> None:
    folder = save(tiny_gpt2(scale_attn_by_inverse_layer_idx=True), tmp_path)
    with pytest.raises(UnsupportedModelError, match="scale_attn_by_inverse_layer_idx"):
        load_model(str(folder))
