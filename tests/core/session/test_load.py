"""Loading a whole model: options, progress, memory checks and descriptions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from exl_core.arch.layers import MLA
from exl_core.arch.spec import RopeMethod
from exl_core.cache.format import KVFormat
from exl_core.cache.need import CacheNeed
from exl_core.engine.engine import EngineOptions
from exl_core.errors import ExlError, OutOfMemoryError, RequestError, TokenizerError
from exl_core.formats.codecs.rounded.matrix import layout_of, rounded
from exl_core.generate.base import BaseGenerator
from exl_core.model.context import Context
from exl_core.model.segment import LogitRows
from exl_core.ops.backends.reference.table import ReferenceTable
from exl_core.sampling.params import SamplerParams
from exl_core.session import describe, load
from exl_core.session.describe import describe_model
from exl_core.session.load import LoadedModel, LoadFields, LoadOptions, checkpoint_of, load_model
from exl_core.session.open import open_model
from exl_core.session.weights import check_memory
from exl_core.settings import Settings
from support.gguf_latent import write_latent
from support.quantized_models import SIZES
from support.tiny_latent import tiny_deepseek3
from support.tiny_models import byte_tokenizer, converted, save, tiny_gemma3, tiny_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tiny_llama(), tmp_path / "tiny")


def test_progress_increases_to_the_bytes_of_all_weights(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_model(str(folder), progress=lambda done, total: seen.append((done, total)))
    done = [d for d, _ in seen]
    assert done == sorted(done)
    whole = sum(tensor.bytes for tensor in describe_model(str(folder)).tensors)
    assert seen[-1] == (whole, whole)


def test_options_change_only_their_configuration_values(folder: Path) -> None:
    plain = load_model(str(folder)).config
    changed = load_model(
        str(folder), LoadOptions(max_seq_len=99, rope_factor=2.0, rope_alpha=3.0)
    ).config
    rope = replace(plain.ropes[0], method=RopeMethod.LINEAR, factor=2.0, alpha=3.0)
    assert changed == replace(plain, max_seq_len=99, ropes=(rope,))


@pytest.mark.parametrize(("threads", "cores", "expected"), [(None, 4, 3), (None, 1, 1), (4, 4, 4)])
def test_experts_beside_a_gpu_leave_it_a_core(
    threads: int | None, cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "available_cpus", lambda: cores)
    options = LoadOptions(threads=threads)
    make_table = partial(load._make_table, options, Settings(isa=None, threads=cores), cores)
    assert make_table("cpu").threads == cores
    assert make_table("cpu", host_experts=True).threads == expected


def test_yarn_stretches_the_models_own_context(folder: Path) -> None:
    plain = load_model(str(folder)).config
    changed = load_model(str(folder), LoadOptions(yarn_factor=4.0)).config
    rope = replace(
        plain.ropes[0],
        method=RopeMethod.YARN,
        factor=4.0,
        original_max_seq_len=plain.max_seq_len,
    )
    assert changed == replace(plain, ropes=(rope,))
    with pytest.raises(RequestError, match="YaRN"):
        load_model(str(folder), LoadOptions(yarn_factor=0.0))


@pytest.mark.parametrize(
    "options",
    [
        LoadOptions(rope_factor=0.0),
        LoadOptions(rope_alpha=float("nan")),
        LoadOptions(rope_alpha=float("inf")),
        LoadOptions(max_seq_len=-1),
    ],
    ids=str,
)
def test_invalid_options_are_refused(folder: Path, options: LoadOptions) -> None:
    with pytest.raises(RequestError):
        load_model(str(folder), options)


@pytest.mark.thorough
def test_options_may_be_given_by_keyword(folder: Path) -> None:
    assert load_model(folder, device="cpu", max_seq_len=64).config.max_seq_len == 64
    with pytest.raises(RequestError, match=r"no such option: devise .*Did you mean 'device'"):
        load_model(folder, **cast(Any, {"devise": "cpu"}))
    with pytest.raises(RequestError, match=r"options .*expected LoadOptions or None, got 'cpu'"):
        load_model(folder, cast(Any, "cpu"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 3) for name in ("device", "isa", "kv_format", "job")),
        *((name, None) for name in ("device", "split", "experts_on", "reserve", "kv_format")),
        *((name, "false") for name in ("exact", "has_drafts", "is_command", "mtp", "load_in_4bit")),
        *((name, -1) for name in ("threads", "held_bytes", "cache_tokens", "reserved_bytes")),
        *(("tensor_parallel", value) for value in ("2", None, 1.5, True)),
        *(("threads", value) for value in (True, 0, 1.5)),
        ("max_batch", 0),
        ("max_seq_len", "x"),
        ("rope_alpha", "2"),
        ("embeddings_on", "gpu"),
        ("exchange", "mpi"),
        ("batch_invariant", "x"),
        ("reserved_bytes", "x"),
        ("kv_format", "q8"),
    ],
)
def test_options_of_another_type_or_below_their_limit_are_named(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name):
        LoadOptions(**cast(Any, {name: value}))


def test_whole_numbers_of_numpy_become_integers() -> None:
    options = LoadOptions(threads=cast(Any, np.int64(2)), rope_alpha=cast(Any, np.float32(2)))
    assert type(options.threads) is int
    assert options == LoadOptions(threads=2, rope_alpha=2)


@pytest.mark.parametrize(
    ("device", "name"), [("cuda:1", "cuda:1"), ("cpu", "cpu"), ("cpu:0", "cpu")]
)
def test_a_device_of_torch_names_a_device(device: str, name: str) -> None:
    assert LoadOptions(device=cast(Any, torch.device(device))) == LoadOptions(device=name)


def test_exact_keeps_nothing_quantized(smollm2: LoadedModel, smollm2_path: Path) -> None:
    exact = load_model(str(smollm2_path), LoadOptions(exact=True))
    assert smollm2.weights_bytes < 1.01 * smollm2_path.stat().st_size
    assert exact.weights_bytes > 2 * exact.model.config.vocab_size * 576 + 2 * 30 * 3_500_000


def _round_weights(folder: Path) -> None:
    """Replaces the layers' matrices in a folder by the values of their 4-bit codes."""
    path, table = folder / "model.safetensors", ReferenceTable(threads=1)
    tensors = load_file(path)
    for name, values in tensors.items():
        if name.endswith("_proj.weight"):
            packed = table.new_linear(layout_of(*values.shape))
            table.fill_linear(packed, 0, rounded(values, name))
            tensors[name] = table.embedding(torch.arange(len(values)), packed)
    save_file(tensors, path, {"format": "pt"})


def test_float_weights_are_rounded_to_4_bits_at_load(tmp_path: Path) -> None:
    folder = save(tiny_llama(**SIZES), tmp_path / "wide")
    plain, packed = (
        load_model(folder, device="cpu", load_in_4bit=wanted) for wanted in (False, True)
    )
    assert packed.label.endswith("(rounded to 4 bits)")
    ends = 2 * plain.model._weights.embed.size_bytes
    assert packed.weights_bytes - ends < (plain.weights_bytes - ends) / 32 * 5.5
    held = load_model(folder, device="cpu", load_in_4bit=True, held_bytes=0)
    ids = (tuple(range(1, 40)),)
    _round_weights(folder)
    expected = load_model(folder, device="cpu", exact=True)
    found = [
        Context(one.model, 64).feed(ids, LogitRows.LAST)[0] for one in (expected, packed, held)
    ]
    # The kernels round activations to 16 bits.
    assert (found[1] - found[0]).norm() / found[0].norm() < 1e-3
    assert torch.equal(found[1], found[2]), "layers that are read again are the same"
    with pytest.raises(RequestError, match="--exact or --load-in-4bit"):
        load_model(folder, exact=True, load_in_4bit=True)


def test_quantized_weights_are_not_rounded_again(smollm2_path: Path) -> None:
    with pytest.raises(RequestError, match="quantized already"):
        load_model(smollm2_path, device="cpu", load_in_4bit=True)


def test_the_place_of_the_embedding_matters_on_gpus_only(tmp_path: Path) -> None:
    folder = save(tiny_llama(tie_word_embeddings=True), tmp_path / "tied")
    load_model(folder, device="cpu", embeddings_on="cpu")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    folder = save(tiny_llama(vocab_size=200), tmp_path)
    with pytest.raises(TokenizerError, match="200"):
        load_model(str(folder))


def test_tied_embeddings_are_in_memory_once(tmp_path: Path) -> None:
    tied = load_model(str(save(tiny_llama(tie_word_embeddings=True), tmp_path / "tied")))
    untied = load_model(str(save(tiny_llama(), tmp_path / "untied")))
    one_copy = 304 * 72 * 4  # 300 rows in panels of 16
    assert untied.weights_bytes - tied.weights_bytes == one_copy


def test_weights_too_large_for_memory_are_refused_with_the_numbers() -> None:
    check_memory(100, None, "m")
    check_memory(100, 100, "m")
    with pytest.raises(OutOfMemoryError, match=r"3 MiB.*2 MiB free"):
        check_memory(3 << 20, 2 << 20, "m")


def test_a_description_counts_parameters_layers_and_memory(tmp_path: Path) -> None:
    model = converted(tiny_gemma3(), torch.bfloat16)
    folder = save(model, tmp_path)
    described = describe_model(str(folder))
    assert described.parameters == sum(p.numel() for p in model.parameters())
    assert described.bits_per_weight == 16.0
    assert [layer.name for layer in described.layers] == [
        "embed_tokens",
        *(f"layer {i}" for i in range(4)),
        "norm",
    ]
    cache = 100 * 4 * 2 * 2 * 20 * 2
    assert described.memory_bytes(CacheNeed(100)) == described.weights_bytes_in_memory + cache
    assert described.tokenizer.vocab_size == byte_tokenizer().get_vocab_size()
    assert not described.has_template
    assert described.unused_tensors == ()


def test_a_split_model_replies_as_on_one_device(folder: Path) -> None:
    whole = load_model(str(folder), device="cpu")
    split = load_model(str(folder), split="cpu=1,cpu=2")
    assert [(one.device, one.layers) for one in split.plan] == [
        ("cpu", range(1)),
        ("cpu", range(1, 3)),
    ]
    assert not whole.plan
    prompts = ["x", "ab", "a longer prompt"]
    options = EngineOptions(cache_tokens=1024, kv_format=KVFormat.FP16, max_batch=3)
    replies = [
        BaseGenerator(loaded, options).generate_simple(
            prompts, num_tokens=20, sampler=SamplerParams(temperature=0.8), seed=4
        )
        for loaded in (whole, split)
    ]
    assert replies[0] == replies[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "4,4", "device": "cpu"}, "no GPU to split"),
        ({"cpu_layers": 3, "device": "cpu"}, "no GPU to split"),
        ({"split": "cpu=1,cpu=1"}, "expected 3, got 2 in all"),
        ({"split": "cpu=1,tpu=2"}, "no such backend"),
        ({"split": "cpu=1,cpu=2", "held_bytes": 0}, "is on one device"),
    ],
)
def test_splits_that_cannot_be_made_are_refused(
    options: LoadFields, message: str, folder: Path
) -> None:
    with pytest.raises(ExlError, match=message):
        load_model(str(folder), **options)


@pytest.mark.parametrize("is_gguf", [False, True])
def test_transposed_keys_of_latent_attention_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_gguf: bool
) -> None:
    """The CPU keeps them for prompts. Files have keys and values in one matrix (safetensors) or in
    two (GGUF)."""
    monkeypatch.setattr(describe, "default_device", lambda: "cpu")
    model = tiny_deepseek3()
    path = write_latent(model, tmp_path / "a.gguf") if is_gguf else save(model, tmp_path / "a")
    files = open_model(path)
    normal, invariant = (
        checkpoint_of(files, files.config, LoadOptions(device="cpu", batch_invariant=is_invariant))
        for is_invariant in (False, True)
    )
    mixers = [layer.mixer for layer in files.config.layers]
    transposed = sum(
        4 * one.num_q_heads * one.nope_dim * one.kv_rank for one in mixers if isinstance(one, MLA)
    )
    assert normal.packed_bytes - invariant.packed_bytes == transposed > 0
    assert describe_model(str(path)).weights_bytes_in_memory == normal.packed_bytes
