"""Packed matrices equal the checkpoint's, however chunks and jobs divide them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from exl_core.formats.checkpoint import Checkpoint, row_ranges
from exl_core.model import packer
from exl_core.model.packer import Packer
from exl_core.ops.open import get_table, min_group_rows
from exl_core.ops.weights import DenseLayout, GroupedLayout
from exl_core.session.open import open_checkpoint
from support.gguf_models import write_gguf
from support.quantized_models import (
    GPTQ_SETTINGS,
    SIZES,
    exl2_pieces,
    gptq_pieces,
    quantize,
)
from support.runtime_form import evaluate
from support.tiny_models import save, tiny_llama

SMALL_GROUPS = ("Q2_K", "Q3_K", "Q6_K")
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4}


def checkpoint_of(folder: Path, kind: str, group_rows: int = 32) -> Checkpoint:
    sizes = WIDE if kind in SMALL_GROUPS else SIZES
    model = tiny_llama(**sizes, tie_word_embeddings=kind != "exl2")
    if kind == "exl2":
        quantize(save(model, folder), {"quant_method": "exl2"}, exl2_pieces)
    elif kind == "gptq":
        quantize(save(model, folder), GPTQ_SETTINGS, gptq_pieces)
    else:
        folder = write_gguf(model, folder / "m.gguf", GGMLQuantizationType[kind])
    return Checkpoint(*open_checkpoint(folder), min_group_rows=group_rows)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    "kind",
    ["exl2", "gptq", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", *SMALL_GROUPS],
)
def test_packed_matrices_equal_the_stored_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, backend: str
) -> None:
    monkeypatch.setattr(packer, "CHUNK_BYTES", 1 << 11)  # several chunks in each matrix
    monkeypatch.setattr(packer, "SPLIT_VALUES", 1 << 13)  # and several jobs in the larger ones
    ops = get_table(backend, threads=2)
    checkpoint = checkpoint_of(tmp_path, kind, ops.min_group_rows)
    names = [name for name, row in checkpoint.rows.items() if row.is_matrix]
    parts = ("o_proj", "down_proj", "lm_head", "embed_tokens")  # packed on their own
    alone = [name for name in names if any(part in name for part in parts)]
    assert len(alone) >= 6
    reported: list[int] = []
    with Packer(checkpoint, ops, 2, lambda done, _: reported.append(done)) as jobs:
        for name in alone:
            jobs.start([checkpoint.rows[name]])
        for name in alone:
            w = jobs.packed([checkpoint.rows[name]])
            rows = ops.embedding(torch.arange(w.out_features), w)
            expected = torch.from_numpy(evaluate(checkpoint.matrix(name))).T
            torch.testing.assert_close(rows.double(), expected, rtol=2**-23, atol=0)
    assert reported[-1] == sum(checkpoint.stored[name].size_bytes for name in alone)


@pytest.mark.parametrize("kind", SMALL_GROUPS)
def test_small_groups_stay_where_the_table_takes_them(tmp_path: Path, kind: str) -> None:
    ops = get_table("cpu", threads=1)
    checkpoint = checkpoint_of(tmp_path, kind, ops.min_group_rows)
    name = next(name for name, row in checkpoint.rows.items() if "down_proj" in name)

    assert isinstance(checkpoint.layout(name), GroupedLayout)
    packed = ops.new_linear(checkpoint.layout(name))
    assert packed.size_bytes == checkpoint.packed_bytes_of(checkpoint.rows[name])
    padding = Checkpoint(*open_checkpoint(tmp_path / "m.gguf"), min_group_rows=32)
    assert isinstance(padding.layout(name), DenseLayout)
    exact = Checkpoint(
        *open_checkpoint(tmp_path / "m.gguf"),
        is_exact=True,
        min_group_rows=ops.min_group_rows,
    )
    assert isinstance(exact.layout(name), DenseLayout)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_table_need_not_be_open_to_know_its_groups(backend: str) -> None:
    assert min_group_rows(backend) == get_table(backend, threads=1).min_group_rows


def test_row_ranges_cover_everything_once() -> None:
    for columns, rows, values in ((49152, 576, 1 << 20), (300, 64, 1 << 12), (8, 4096, 64)):
        ranges = row_ranges(columns, rows, values)
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
        assert ranges[-1][1] == columns
        assert all(start % 32 == 0 for start, _ in ranges)
