"""Logits of passes by `Runner` do not depend on the other sequences or their adapters: same bits.

Sequences run alone, and then together in random passes: decode, drafts, prompt chunks and mixtures,
some of them with LoRA adapters. On a GPU most of these passes are captured graphs, and the
sequences run alone without any.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.cache.format import PAGE_SIZE, KVFormat
from exl_core.lora.adapter import load_adapter
from exl_core.model.adapters import AdapterUse
from exl_core.model.runner import Runner, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.model.transformer import Transformer
from exl_core.ops.open import available_isas
from exl_core.session.load import LoadOptions, load_model
from support.adapters import random_pairs, stored, write_adapter
from support.profiles import first_by_default
from support.quantized_models import SIZES, quantized_llama
from support.tiny_models import VOCAB_SIZE, save, tiny_llama

ISAS = available_isas()
GPU = pytest.param("gpu", marks=pytest.mark.cuda)
PLACES: list[Any] = [*first_by_default(reversed(ISAS)), GPU]
LENGTHS = (700, 17, 90, 41, 300)  # tokens; 700 keys are two partitions of a GPU's attention
PAGES_EACH = -(-max(LENGTHS) // PAGE_SIZE)
PASSES = 60  # at most; a GPU captures the graph of a shape in its third pass


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def opened(path: Path, place: str) -> Transformer:
    on_gpu = LoadOptions(device="cuda", batch_invariant=True)
    on_cpu = LoadOptions(device="cpu", isa=place, threads=2, batch_invariant=True)
    return load_model(str(path), on_gpu if place == "gpu" else on_cpu).model


class Sequences:
    """Fixed random texts in one store. `fed` counts the tokens of each that passes have had."""

    def __init__(
        self, model: Transformer, kv_format: KVFormat, uses: Sequence[tuple[AdapterUse, ...]]
    ) -> None:
        rng = torch.Generator().manual_seed(11)
        self._texts = [torch.randint(3, VOCAB_SIZE, (n,), generator=rng).tolist() for n in LENGTHS]
        self._uses = uses
        self._runner = Runner(model, store_for(model, kv_format, len(LENGTHS) * PAGES_EACH))
        self._logits: list[list[Tensor]] = [[] for _ in LENGTHS]
        self.fed = [0] * len(LENGTHS)

    def feed(self, counts: dict[int, int]) -> None:
        """One pass: feeds the next tokens of these sequences, as far as they have any."""
        segments = {}
        for seq, count in counts.items():
            ids = self._texts[seq][self.fed[seq] : self.fed[seq] + count]
            pages = tuple(range(seq * PAGES_EACH, (seq + 1) * PAGES_EACH))
            if ids:
                segments[seq] = Segment(
                    tuple(ids), self.fed[seq], pages, LogitRows.ALL, adapters=self._uses[seq]
                )
        if not segments:
            return
        logits = self._runner.run(list(segments.values())).clone()
        sizes = [len(segment.token_ids) for segment in segments.values()]
        for seq, part in zip(segments, logits.split(sizes), strict=True):
            self._logits[seq].append(part)
            self.fed[seq] += len(part)

    def logits(self) -> list[Tensor]:
        for seq in range(len(LENGTHS)):
            self.feed({seq: max(LENGTHS)})
        return [torch.cat(parts) for parts in self._logits]


def alone(model: Transformer, kv_format: KVFormat, uses: list[tuple[AdapterUse, ...]]) -> Any:
    return Sequences(model, kv_format, uses).logits()


def together(
    model: Transformer, kv_format: KVFormat, uses: list[tuple[AdapterUse, ...]], seed: int
) -> Any:
    """Random passes over several sequences at once; shapes recur, so that graphs are captured."""
    run = Sequences(model, kv_format, uses)
    rng = torch.Generator().manual_seed(seed)
    for _ in range(PASSES):
        kind, first, size = torch.randint(0, 1 << 16, (3,), generator=rng).tolist()
        members = [seq for seq in range(len(LENGTHS)) if (first >> seq) & 1]
        if kind % 3 == 0:
            run.feed(dict.fromkeys(members, 1))
        elif kind % 3 == 1:
            run.feed(dict.fromkeys(members, 4))
        else:
            run.feed(dict.fromkeys(members, 1) | {size % len(LENGTHS): 1 + size % 100})
    return run.logits()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kv_format", [KVFormat.FP16, KVFormat.Q4])
@pytest.mark.parametrize("codec", ["exl2", "dense"])
def test_logits_with_adapters_do_not_depend_on_the_pass(
    tmp_path: Path, place: str, kv_format: KVFormat, codec: str
) -> None:
    """Two sequences without adapters, two with one, and one with two."""
    source = tiny_llama(**SIZES)
    path = quantized_llama("exl2", tmp_path / "m") if codec == "exl2" else save(source, tmp_path)
    model = opened(path, place)
    first, second = (
        load_adapter(
            write_adapter(tmp_path / name, stored(random_pairs(source, linears, seed=seed))), model
        )
        for name, linears, seed in (
            ("all", ("q_proj", "o_proj", "up_proj", "down_proj"), 1),
            ("gate", ("gate_proj", "v_proj"), 2),
        )
    )
    one, other = AdapterUse(first, 0.5), AdapterUse(second)
    uses: list[tuple[AdapterUse, ...]] = [(), (one,), (other,), (), (one, other)]
    expected = alone(model, kv_format, uses)
    for seed in (1, 2):
        for got, right in zip(together(model, kv_format, uses, seed), expected, strict=True):
            assert same_bits(got, right)
    none: list[tuple[AdapterUse, ...]] = [()] * len(LENGTHS)
    plain = alone(model, kv_format, none)
    assert same_bits(expected[0], plain[0])
    assert not same_bits(expected[1], plain[1])


@pytest.mark.parametrize("place", [GPU])
@pytest.mark.parametrize("kv_format", list(KVFormat))
def test_logits_of_graphs_are_those_of_direct_passes(
    tmp_path: Path, place: str, kv_format: KVFormat
) -> None:
    model = opened(quantized_llama("exl2", tmp_path / "m"), place)
    none: list[tuple[AdapterUse, ...]] = [()] * len(LENGTHS)
    expected = alone(model, kv_format, none)
    for seed in (3, 4):
        for got, right in zip(together(model, kv_format, none, seed), expected, strict=True):
            assert same_bits(got, right)
