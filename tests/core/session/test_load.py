"""Loading a whole model: options, progress, memory checks and descriptions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from exl_core.arch.spec import RopeMethod
from exl_core.errors import OutOfMemoryError, RequestError, TokenizerError
from exl_core.session.describe import describe_model
from exl_core.session.load import LoadedModel, LoadOptions, check_memory, load_model
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


def test_exact_keeps_nothing_quantized(smollm2: LoadedModel, smollm2_path: Path) -> None:
    exact = load_model(str(smollm2_path), LoadOptions(exact=True))
    assert smollm2.weights_bytes < 1.01 * smollm2_path.stat().st_size
    assert exact.weights_bytes > 2 * exact.model.config.vocab_size * 576 + 2 * 30 * 3_500_000


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
    assert (
        described.memory_bytes(100) == described.weights_bytes_in_memory + 100 * 4 * 2 * 2 * 20 * 2
    )
    assert described.tokenizer.vocab_size == byte_tokenizer().get_vocab_size()
    assert not described.has_template
    assert described.unused_tensors == ()
