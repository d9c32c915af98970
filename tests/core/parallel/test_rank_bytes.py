"""Bytes of weights that each rank loads: a share of the model, for every codec."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from exl_core.ops.open import get_table
from exl_core.parallel.plan import Rank
from exl_core.session.hosts import load_part
from exl_core.session.load import LoadOptions
from exl_core.session.open import open_model
from support import quantized_models
from support.gguf_models import write_gguf
from support.quantized_models import METHODS, TIED, quantize
from support.tiny_models import save, tiny_llama

pytestmark = pytest.mark.thorough

SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "head_dim": 64}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8}
VOCABULARY = 512
"""Divides evenly; that of the GGUF files is the tokenizer's 300."""
GROUPS = {256: [(6, 128), (4, 128)], 1024: [(5, 512), (3, 512)]}
RATES = {256: 4, 1024: 3}
TOLERANCE = 0.03
"""The largest rank over an equal share: norms, which all ranks have whole, and units (groups,
blocks) that do not divide evenly."""
OUTPUT_SHARE = 0.17
"""The attention's last matrix among those of a layer."""
PADDING = {("exl2", 2): 0.125, ("exl2", 4): 0.25, ("gptq", 2): 1.0, ("gptq", 4): 3.0}
"""Rows with which that matrix is padded at most, over its share. With act-order every group has
rows of all heads, and each rank's part of a group takes whole blocks of 32 rows: 8 and 4 blocks of
512 rows get one more, and groups of 32 rows have one on every rank."""


def plain(folder: Path) -> Path:
    return save(tiny_llama(**SIZES, **HEADS, vocab_size=VOCABULARY), folder)


def with_blocks(kind: str) -> Callable[[Path], Path]:
    model_kind = GGMLQuantizationType[kind]
    return lambda folder: write_gguf(
        tiny_llama(**SIZES, **HEADS), folder.with_suffix(".gguf"), model_kind
    )


def with_method(method: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        model = tiny_llama(
            **SIZES, **HEADS, vocab_size=VOCABULARY, tie_word_embeddings=method in TIED
        )
        quantize(save(model, folder), *METHODS[method])
        return folder

    return write


MODELS: dict[str, Callable[[Path], Path]] = {
    "unquantized": plain,
    **{kind: with_blocks(kind) for kind in ("Q4_0", "Q8_0", "Q4_K", "Q6_K")},
    **{method: with_method(method) for method in METHODS},
}


@pytest.mark.parametrize("name", MODELS)
def test_ranks_load_equal_shares(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_models, "GROUPS", GROUPS)
    monkeypatch.setattr(quantized_models, "EXL3_RATES", RATES)
    files = open_model(MODELS[name](tmp_path / "model"))
    options, table = LoadOptions(device="cpu"), get_table("cpu", threads=1)

    def loaded_bytes(index: int, count: int) -> int:
        return load_part(files, options, Rank(index, count), table).weights.size_bytes

    whole = loaded_bytes(0, 1)
    for count in (2, 4):
        found = [loaded_bytes(index, count) for index in range(count)]
        print(name, count, [round(size * count / whole, 3) for size in found])
        excess = TOLERANCE + OUTPUT_SHARE * PADDING.get((name, count), 0.0)
        assert max(found) <= whole / count * (1 + excess)
        assert sum(found) >= whole  # no part of a matrix is missing
