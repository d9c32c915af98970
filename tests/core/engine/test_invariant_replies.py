"""Logits and replies do not depend on other requests, prompt chunks or drafts: the same bits.

Runs whole models in the mode that promises it, on the CPU and on a GPU.
`tests/kernels/test_batch_invariance.py` checks the single ops on random shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import FinishEvent, SampledToken, TextEvent
from exl_core.engine.request import Report
from exl_core.model.transformer import Transformer
from exl_core.ops.open import available_isas
from exl_core.session.load import LoadedModel, LoadOptions, load_model
from exl_core.speculate.ngram import NgramDrafter
from support.driving import ask, run_all, submit
from support.gguf_models import write_gguf
from support.paged import PagedRun
from support.profiles import first_by_default
from support.quantized_models import SIZES, quantized_llama
from support.tiny_hybrids import (
    tiny_granite_hybrid,
    tiny_kimi_linear,
    tiny_lfm2,
    tiny_nemotron_h,
    tiny_qwen35,
    tiny_qwen35_moe,
)
from support.tiny_models import (
    VOCAB_SIZE,
    converted,
    save,
    tiny_gemma2,
    tiny_gemma3,
    tiny_llama,
    tiny_qwen3_moe,
)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
GGUF_TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "IQ4_NL", "MXFP4"]
WINDOWED = {"gemma2": tiny_gemma2, "gemma3": tiny_gemma3}  # and score and logit caps
EXPERTS = {"qwen3-moe": tiny_qwen3_moe}
FILES = ["gptq", "awq", "compressed-tensors", "fp8"]
CODECS = ["exl2", *DTYPES, *FILES, *WINDOWED, *EXPERTS, *GGUF_TYPES]
HYBRIDS: dict[str, Any] = {
    "lfm2": lambda: tiny_lfm2(hidden_size=192, head_dim=32, block_multiple_of=32),
    "qwen3.5": lambda: tiny_qwen35(hidden_size=96, head_dim=32, linear_value_head_dim=32),
    "qwen3.5-moe": lambda: tiny_qwen35_moe(hidden_size=96, head_dim=32, moe_intermediate_size=32),
    "granite4-hybrid": lambda: tiny_granite_hybrid(hidden_size=192, head_dim=32, mamba_d_head=64),
    "nemotron-h": lambda: tiny_nemotron_h(hidden_size=96, head_dim=32),
    "kimi-linear": lambda: tiny_kimi_linear(hidden_size=96),
}
LENGTHS = (330, 17, 90, 41)  # tokens of each sequence; 330 crosses a page
WIDE = {**SIZES, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
"""Sizes for K types, whose blocks have 256 values."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models written so far, by codec."""
    root = tmp_path_factory.mktemp("models")
    return {"root": root}


def path_of(codec: str, paths: dict[str, Path]) -> Path:
    if codec not in paths:
        folder = paths["root"] / codec
        if codec in GGUF_TYPES:
            folder.mkdir()
            sizes = WIDE if codec.endswith("_K") else SIZES
            model = tiny_llama(**sizes)
            kind = GGMLQuantizationType[codec]
            paths[codec] = write_gguf(model, folder / "model.gguf", kind)
        elif codec in DTYPES:
            model = tiny_llama(**SIZES)
            paths[codec] = save(converted(model, DTYPES[codec]), folder)
        elif codec in EXPERTS:
            paths[codec] = save(EXPERTS[codec](head_dim=32), folder)
        elif codec in WINDOWED:
            paths[codec] = save(WINDOWED[codec](head_dim=32), folder)
        else:
            paths[codec] = quantized_llama(codec, folder)
    return paths[codec]


def loaded(codec: str, isa: str, paths: dict[str, Path]) -> LoadedModel:
    """`isa`: an instruction set, or GPU."""
    on_cpu = LoadOptions(device="cpu", isa=isa, threads=2, batch_invariant=True)
    on_gpu = LoadOptions(device="cuda", batch_invariant=True)
    return load_model(str(path_of(codec, paths)), on_gpu if isa == GPU else on_cpu)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def random_texts() -> list[list[int]]:
    rng = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=rng).tolist() for n in LENGTHS]


def logits_of(
    model: Transformer, kv_format: KVFormat, plan: Iterator[dict[int, int]]
) -> list[Tensor]:
    """Logits of all tokens of each sequence. A pass feeds the numbers of tokens that `plan` says,
    by sequence, as far as the sequences have them."""
    texts = random_texts()
    run = PagedRun(model, len(texts), max(LENGTHS), kv_format)
    found: list[list[Tensor]] = [[] for _ in texts]
    while any(done < len(text) for done, text in zip(run.lengths, texts, strict=True)):
        at = run.lengths
        fed: dict[int, Sequence[int]] = {
            seq: texts[seq][at[seq] : at[seq] + count]
            for seq, count in next(plan).items()
            if at[seq] < len(texts[seq])
        }
        for seq, logits in (run.feed(fed) if fed else {}).items():
            found[seq].append(logits)
    return [torch.cat(parts) for parts in found]


def one_by_one() -> Iterator[dict[int, int]]:
    """Each sequence alone, as a whole."""
    yield from ({seq: max(LENGTHS)} for seq in range(len(LENGTHS)))


def together(seed: int) -> Iterator[dict[int, int]]:
    """Random sequences together: single tokens, drafts, and prompt chunks."""
    rng = torch.Generator().manual_seed(seed)
    while True:
        kinds = torch.randint(4, (len(LENGTHS),), generator=rng).tolist()
        sizes = torch.randint(1, 80, (len(LENGTHS),), generator=rng).tolist()
        counts = {
            seq: (0, 1, 1 + size % 9, size)[kind]
            for seq, (kind, size) in enumerate(zip(kinds, sizes, strict=True))
        }
        fed = {seq: count for seq, count in counts.items() if count}
        yield fed


def check_logits(model: Transformer, kv_format: KVFormat) -> None:
    alone = logits_of(model, kv_format, one_by_one())
    for seed in (1, 2):
        for one, other in zip(alone, logits_of(model, kv_format, together(seed)), strict=True):
            assert same_bits(one, other)


FP16 = KVFormat.FP16
GPU = "gpu"
ISAS = available_isas()
FAST_ISAS = ISAS[1:] or ISAS  # the first is scalar
FORMATS = list(KVFormat)
CASES = [("exl2", kv_format, ISAS[-1]) for kv_format in FORMATS]
CASES += [
    (codec, FORMATS[i % len(FORMATS)], FAST_ISAS[i % len(FAST_ISAS)])
    for i, codec in enumerate(CODECS)
]
"""Every cache, and every codec with alternating caches and instruction sets."""
OTHER_CASES = [("exl2", kv_format, isa) for kv_format, isa in product(FORMATS, ISAS[:-1])]
OTHER_CASES += [
    (codec, FORMATS[(i + j) % len(FORMATS)], isa)
    for (i, codec), (j, isa) in product(enumerate(CODECS), enumerate(ISAS))
    if isa != FAST_ISAS[i % len(FAST_ISAS)]
]
GPU_CASES = [
    *(("exl2", kv_format, GPU) for kv_format in FORMATS),
    *((codec, FORMATS[i % len(FORMATS)], GPU) for i, codec in enumerate(CODECS)),
]


def on_gpu(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.cuda)


@pytest.mark.parametrize(
    ("codec", "kv_format", "isa"),
    [
        *first_by_default([*CASES, *OTHER_CASES], len(CASES)),
        *(on_gpu(*case) for case in GPU_CASES),
    ],
)
def test_logits_do_not_depend_on_the_batch(
    paths: dict[str, Path], codec: str, kv_format: KVFormat, isa: str
) -> None:
    check_logits(loaded(codec, isa, paths).model, kv_format)


@pytest.mark.parametrize("place", [ISAS[-1], on_gpu(GPU)])
@pytest.mark.parametrize("family", HYBRIDS)
def test_logits_of_hybrids_do_not_depend_on_the_batch(
    tmp_path: Path, family: str, place: str
) -> None:
    check_logits(loaded(family, place, {family: save(HYBRIDS[family](), tmp_path)}).model, FP16)


def replies(
    model: LoadedModel, prompts: list[list[int]], kv_format: KVFormat, *, has_drafts: bool
) -> list[tuple[tuple[int, ...], list[SampledToken]]]:
    """Greedy replies of one engine that serves all prompts: ids and details of the tokens."""
    drafter = NgramDrafter(min_match=1) if has_drafts else None
    options = EngineOptions(
        cache_tokens=4096, kv_format=kv_format, adapt_drafts=False, prefill_chunk=50
    )
    engine = Engine(model.model, model.tokenizer, options, drafter=drafter)
    requests = [
        ask(ids, max_tokens=30, stop_ids=frozenset(), report=Report(log_probs=2)) for ids in prompts
    ]
    for request in requests:
        submit(engine, request)
    tokens: dict[str, list[SampledToken]] = {}
    ids: dict[str, tuple[int, ...]] = {}
    for event in run_all(engine):
        if isinstance(event, TextEvent | FinishEvent):
            tokens.setdefault(event.request_id, []).extend(event.tokens)
        if isinstance(event, FinishEvent):
            ids[event.request_id] = event.token_ids
    return [(ids[request.request_id], tokens[request.request_id]) for request in requests]


@pytest.mark.parametrize("kv_format", [KVFormat.FP16, KVFormat.Q4])
@pytest.mark.parametrize("isa", [*first_by_default(reversed(ISAS), len(FAST_ISAS)), on_gpu(GPU)])
def test_greedy_replies_do_not_depend_on_neighbours_or_drafts(
    paths: dict[str, Path], isa: str, kv_format: KVFormat
) -> None:
    """Tokens and the bits of their log probabilities."""
    model = loaded("exl2", isa, paths)
    prompts = [text[:60] for text in random_texts()]
    expected = [replies(model, [ids], kv_format, has_drafts=False)[0] for ids in prompts]
    assert replies(model, prompts, kv_format, has_drafts=False) == expected
    assert replies(model, prompts, kv_format, has_drafts=True) == expected
