"""gpt-oss with experts in MXFP4: the logits of transformers' dequantization and of GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from torch import Tensor

from exl_core.session.load import LoadOptions, load_model
from support.gguf_models import write_gguf
from support.mxfp4 import gguf_blocks, save_as_mxfp4
from support.paged import PagedRun, logits_of
from support.tiny_models import VOCAB_SIZE, converted, save, tiny_gpt_oss

FLOAT32 = 1e-4  # both sides sum in float32
INTEGERS = 1e-3  # the CPU's kernels round the inputs of experts to 16 bits


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model, and its checkpoint with experts in MXFP4."""
    model = tiny_gpt_oss()
    return model, save_as_mxfp4(model, tmp_path_factory.mktemp("mxfp4") / "model")


def random_ids(count: int) -> list[int]:
    rng = torch.Generator().manual_seed(7)
    return torch.randint(3, VOCAB_SIZE, (count,), generator=rng).tolist()


def expected_logits(model: Any, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def assert_close(logits: Tensor, expected: Tensor, tolerance: float) -> None:
    assert (logits - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        (LoadOptions(device="cpu"), INTEGERS),
        (LoadOptions(device="cpu", exact=True), FLOAT32),
        (LoadOptions(device="reference"), FLOAT32),
    ],
    ids=["cpu", "cpu-exact", "reference"],
)
def test_logits_are_those_of_transformers_dequantization(
    stored: tuple[Any, Path], options: LoadOptions, tolerance: float
) -> None:
    model, path = stored
    ids = random_ids(120)  # longer than the window, and than YaRN's original context
    expected = expected_logits(model, ids)

    run = PagedRun(load_model(str(path), options).model, num_seqs=1, max_len=120)

    first = 0
    for count in (65, 1, 7, 46, 1):
        logits = run.feed({0: ids[first : first + count]})[0]
        assert_close(logits, expected[first : first + count], tolerance)
        first += count


def test_experts_stay_packed_in_memory(stored: tuple[Any, Path]) -> None:
    model, path = stored
    loaded = load_model(str(path), LoadOptions(device="cpu")).model
    size = 0
    for block in model.model.layers:
        matrices = [block.mlp.experts.get_parameter(part) for part in ("gate_up_proj", "down_proj")]
        values = sum(matrix.numel() for matrix in matrices)
        size += 4 * values - values * 17 // 32  # 4 bits each, and 8 bits for 32 of them
    whole = sum(parameter.nbytes for parameter in model.parameters())
    # Kernels round matrices up to panels of 16 columns.
    assert loaded.weights_bytes == pytest.approx(whole - size, rel=0.05)


def test_a_gguf_file_gives_the_same_logits(stored: tuple[Any, Path], tmp_path: Path) -> None:
    model, path = stored
    tensors = load_file(path / "model.safetensors")
    kind = GGMLQuantizationType.MXFP4
    packed: dict[str, np.ndarray] = {}
    for layer in range(model.config.num_hidden_layers):
        stem = f"model.layers.{layer}.mlp.experts."
        wide, narrow = (
            gguf_blocks(tensors[f"{stem}{part}_blocks"], tensors[f"{stem}{part}_scales"])
            for part in ("gate_up_proj", "down_proj")
        )
        parts = {"gate": wide[:, ::2], "up": wide[:, 1::2], "down": narrow}
        packed |= {f"blk.{layer}.ffn_{part}_exps.weight": raw for part, raw in parts.items()}
    file = write_gguf(model, tmp_path / "tiny.gguf", packed={kind: packed})
    ids = random_ids(90)
    options = LoadOptions(device="cpu")

    logits = logits_of(file, ids, options)

    assert_close(logits, logits_of(path, ids, options), 1e-5)
    assert_close(logits, expected_logits(model, ids), INTEGERS)


def test_a_checkpoint_in_bfloat16(tmp_path: Path) -> None:
    model = tiny_gpt_oss()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    ids = random_ids(60)
    expected = expected_logits(model, ids)
    path = save(converted(model, torch.bfloat16), tmp_path)
    assert_close(logits_of(path, ids, LoadOptions(device="cpu")), expected, FLOAT32)
