"""Layers that differ in head counts, head sizes, windows, widths, RoPE tables and norms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from exl_core.arch.checks import check_config
from exl_core.arch.layers import FeedForward, LayerSpec, Mixer
from exl_core.cache.format import KVFormat, kv_bytes_per_token
from exl_core.cache.need import CacheNeed
from exl_core.convert.layers import LayerSource, compute_type, read_layer
from exl_core.convert.parallel import worker_pool
from exl_core.convert.passes import CapturingPass, LayerFunction
from exl_core.errors import ConfigError, UnsupportedModelError
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.containers.safetensors import SafetensorsSource
from exl_core.model.context import Context
from exl_core.model.observe import StateRecorder
from exl_core.model.segment import LogitRows
from exl_core.ops.backends.autograd.linear import Product
from exl_core.session.placement import DeviceMemory, fit_all
from support.mixed_model import (
    CODES_CONFIG,
    CONFIG,
    VOCAB_SIZE,
    mixed_model,
    random_tensors,
    reference_logits,
    write_tensors,
)
from support.paged import PagedRun

IDS = torch.randint(0, VOCAB_SIZE, (300,), generator=torch.Generator().manual_seed(4)).tolist()
BACKENDS = ("reference", "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefill_chunks_and_paged_decode_match_plain_torch(tmp_path: Path, backend: str) -> None:
    model, tensors = mixed_model(tmp_path, backend)
    expected = [reference_logits(CONFIG, tensors, ids) for ids in (IDS, IDS[::-1])]
    one_pass = PagedRun(model, num_seqs=2, max_len=300).feed({0: IDS, 1: IDS[::-1]})
    chunked = PagedRun(model, num_seqs=2, max_len=300)
    done = []
    ends = [1, 8, 73, 262, *range(263, 301)]  # chunks over windows and a page end, then decode
    for start, end in zip([0, *ends], ends, strict=False):
        done.append(chunked.feed({0: IDS[start:end], 1: IDS[::-1][start:end]}))
    for seq in range(2):
        scale = expected[seq].abs().max()
        for found in (one_pass[seq], torch.cat([part[seq] for part in done])):
            assert (found.double() - expected[seq]).abs().max() < 2e-5 * scale


def test_keys_of_each_layer_are_smoothed_by_their_own_geometry(tmp_path: Path) -> None:
    model, tensors = mixed_model(tmp_path, "cpu", CODES_CONFIG, tuple(IDS[:200]))
    expected = reference_logits(CODES_CONFIG, tensors, IDS)
    context = Context(model, 300, kv_format=KVFormat.Q8)
    found = context.feed([IDS], LogitRows.ALL)[0]
    assert (found.double() - expected).abs().max() < 0.05 * expected.abs().max()
    sizes = [one.scale.numel() for one in model._key_smoothing if one is not None]
    assert sizes == [
        (layer.attention.num_q_heads + layer.attention.num_kv_heads) * layer.attention.head_dim
        for layer in CODES_CONFIG.layers
    ]


def plain_product(source: LayerSource) -> Product:
    return lambda role, x: linear(x, source.matrix(role), source.bias(role))


def test_the_converters_layers_match_plain_torch(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    checkpoint = Checkpoint(write_tensors(tmp_path, tensors), CONFIG)
    x = tensors["model.embed_tokens.weight"][IDS][None]
    for layer in range(CONFIG.num_layers):
        source = read_layer(checkpoint, CONFIG, layer, torch.device("cpu"))
        x = LayerFunction(CONFIG, layer, source.vectors(), plain_product(source))(x)
    expected = reference_logits(CONFIG, tensors, IDS)
    normed = rms_norm(x[0], (48,), tensors["model.norm.weight"], 1e-5)
    found = normed @ tensors["lm_head.weight"].T
    assert (found.double() - expected).abs().max() < 2e-5 * expected.abs().max()


def test_the_converters_layers_match_the_reference_backend(tmp_path: Path) -> None:
    model, _ = mixed_model(tmp_path, "reference")
    checkpoint = Checkpoint(SafetensorsSource(tmp_path), CONFIG)
    recorder = StateRecorder(layers=range(CONFIG.num_layers))
    Context(model, 300, kv_format=KVFormat.FP32).feed([IDS], observe=recorder)
    x = recorder.embedding[None]
    for layer in range(CONFIG.num_layers):
        source = read_layer(checkpoint, CONFIG, layer, torch.device("cpu"))
        y = LayerFunction(CONFIG, layer, source.vectors(), plain_product(source))(x)
        expected = recorder.layers[layer]
        assert (y[0] - expected).abs().max() < 1e-5 * expected.abs().max(), layer
        x = expected[None]


@pytest.mark.parametrize("layer", range(CONFIG.num_layers))
def test_a_pass_stops_before_each_group_of_matrices(tmp_path: Path, layer: int) -> None:
    """Matrices that are not known before their inputs are give the same states as known ones."""
    checkpoint = Checkpoint(write_tensors(tmp_path, random_tensors(CONFIG)), CONFIG)
    source = read_layer(checkpoint, CONFIG, layer, torch.device("cpu"))
    inputs: dict[str, Tensor] = {}
    known: set[str] = set()
    compute = compute_type(torch.device("cpu"))

    def rounded(role: str, x: Tensor) -> Tensor:
        """The product of inputs rounded as the converter's products round them."""
        return plain_product(source)(role, x.to(compute).float())

    def noted(role: str, x: Tensor) -> Tensor:
        inputs[role] = x
        return rounded(role, x)

    def product(role: str, x: Tensor) -> Tensor:
        assert role in known, f"{role} is multiplied before the caller has seen its inputs"
        return rounded(role, x)

    x = torch.randn(3, 30, 48, generator=torch.Generator().manual_seed(layer))
    expected = LayerFunction(CONFIG, layer, source.vectors(), noted)(x)
    states, stops = x.clone(), []
    function = LayerFunction(CONFIG, layer, source.vectors(), product)
    with worker_pool(torch.device("cpu"), lambda: False) as workers:
        one = CapturingPass(function, states, torch.device("cpu"), workers)
        for roles in one.groups():
            stops.append(roles)
            known |= set(roles)
            seen = torch.cat(one.inputs).float()
            tolerance = 2**-8 if one.inputs[0].dtype is torch.bfloat16 else 1e-5
            torch.testing.assert_close(seen, inputs[roles[0]], rtol=tolerance, atol=tolerance)
    assert stops == [("q", "k", "v"), ("output",), ("gate", "up"), ("down",)]
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)


def test_the_cache_is_the_sum_over_layers(tmp_path: Path) -> None:
    model, _ = mixed_model(tmp_path, "cpu")
    context = Context(model, 300)
    heads = 2 * 16 + 1 * 32 + 3 * 64 + 4 * 24
    assert kv_bytes_per_token(CONFIG.kv_shapes, KVFormat.FP16) == 2 * 2 * heads
    assert context.store.size_bytes == 2 * 256 * 2 * 2 * heads
    assert [context.store.layer(layer).keys.shape[1:] for layer in range(4)] == [
        (2, 256, 16),
        (1, 256, 32),
        (3, 256, 64),
        (4, 256, 24),
    ]
    fit = fit_all(1000, CONFIG, CacheNeed(300), [DeviceMemory("cuda:0", "a GPU", 1 << 40)])[0]
    assert fit.needed_bytes - fit.memory.overhead_bytes - 1000 == context.store.size_bytes
    assert KVFormat.Q4 not in fit.contexts  # two of the head sizes are no multiples of 32


@dataclass(frozen=True, slots=True)
class Convolution(Mixer):
    taps: int


@dataclass(frozen=True, slots=True)
class Experts(FeedForward):
    count: int


@pytest.mark.parametrize(
    "layer, message",
    [
        (LayerSpec(Convolution(3), CONFIG.layers[0].dense), "mixer.*Convolution"),
        (LayerSpec(CONFIG.layers[0].attention, Experts(8)), "feed-forward.*Experts"),
    ],
    ids=["mixer", "feed-forward"],
)
def test_unknown_kinds_of_layers_are_refused(layer: LayerSpec, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        check_config(replace(CONFIG, layers=(*CONFIG.layers, layer)), "a test")


def test_head_counts_are_checked_in_every_layer() -> None:
    layers = list(CONFIG.layers)
    layers[2] = replace(layers[2], mixer=replace(layers[2].attention, num_q_heads=4))
    with pytest.raises(ConfigError, match="4 query heads, 3 key/value heads"):
        check_config(replace(CONFIG, layers=tuple(layers)), "a test")
