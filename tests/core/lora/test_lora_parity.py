"""A model with adapters, compared with transformers after merging the products into its weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.errors import AdapterError
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.codecs.exl2 import layout as exl2
from exl_core.formats.codecs.exl3 import layout as exl3
from exl_core.formats.codecs.gptq import layout as gptq
from exl_core.lora.adapter import load_adapter
from exl_core.model.adapters import AdapterUse
from exl_core.model.context import Context
from exl_core.model.runner import Runner
from exl_core.model.segment import LogitRows, Segment
from exl_core.model.transformer import Transformer
from exl_core.session.load import LoadOptions, load_model
from exl_core.session.open import open_checkpoint
from support.adapters import merged, random_pairs, stored, untie, write_adapter
from support.gguf_hybrids import write_hybrid
from support.gguf_models import write_gguf
from support.quantized_models import GPTQ_SETTINGS, METHODS, SIZES, quantize, quantized_llama
from support.runtime_form import evaluate
from support.tiny_hybrids import (
    tiny_granite_hybrid,
    tiny_lfm2,
    tiny_nemotron_h,
    tiny_qwen3_next,
    tiny_qwen35,
    tiny_qwen35_moe,
)
from support.tiny_latent import tiny_deepseek2, tiny_deepseek3
from support.tiny_models import (
    VOCAB_SIZE,
    save,
    tiny_apertus,
    tiny_cohere,
    tiny_ernie,
    tiny_gemma3,
    tiny_gemma4,
    tiny_gpt2,
    tiny_granite,
    tiny_hunyuan,
    tiny_llama,
    tiny_olmo3,
    tiny_qwen2_moe,
    tiny_smollm3,
    tiny_starcoder2,
)

TOLERANCE = 1e-4  # of the largest logit: fp32 on both sides, sums in a different order
IDS = torch.randint(3, VOCAB_SIZE, (2, 60), generator=torch.Generator().manual_seed(7))

FAMILIES: dict[str, Any] = {
    "llama": tiny_llama,
    "llama-tied-bias": lambda: tiny_llama(
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "ernie4.5": tiny_ernie,  # interleaved RoPE rows
    "olmo3": tiny_olmo3,  # post norms alone, norms over all heads
    "granite": tiny_granite,  # multipliers
    "gemma4": tiny_gemma4,  # values from keys, layers with heads of different sizes
    "hunyuan": tiny_hunyuan,  # norms after RoPE
    "apertus": tiny_apertus,  # an activation with numbers of its own
    "cohere": tiny_cohere,  # attention and MLP in parallel, LayerNorm
    "starcoder2": tiny_starcoder2,  # an MLP without a gate
    "gemma3": tiny_gemma3,  # post norms, a scaled embedding, a tied head
}


# Models whose adapters change embedding and head: on one device, and with these on two.
ENDS = [(tiny_llama, "none"), (tiny_gemma3, "none"), (tiny_llama, "cpu=1,cpu=2")]


def expected_logits(model: Any) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(IDS).logits
    return logits


def logits_of(model: Transformer, *uses: AdapterUse) -> Tensor:
    """Logits of both texts: 50 tokens in one pass, then token by token through the cache."""
    context = Context(model, 64, batch_size=2, kv_format=KVFormat.FP32)
    parts = [context.forward(IDS[:, :50], adapters=uses)]
    parts += [context.forward(IDS[:, i : i + 1], adapters=uses) for i in range(50, 60)]
    return torch.cat(parts, 1)


def assert_close(logits: Tensor, expected: Tensor) -> None:
    assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Any, Path]:
    model = FAMILIES[request.param]()
    return model, save(model, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: Any) -> tuple[Any, Transformer]:
    model = tiny_llama()
    folder = save(model, tmp_path_factory.mktemp("llama"))
    return model, load_model(str(folder)).model


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_adapters_of_all_linears_match_in_prefill_and_decode(
    family: tuple[Any, Path], backend: str, tmp_path: Path
) -> None:
    model, folder = family
    pairs = random_pairs(model, rank=4)
    adapter_folder = write_adapter(tmp_path, stored(pairs), r=4, lora_alpha=6)
    ours = load_model(str(folder), LoadOptions(device=backend)).model
    adapter = load_adapter(adapter_folder, ours)
    assert set(adapter.modules) == {name.split(".", 3)[3] for name in pairs}

    logits = logits_of(ours, AdapterUse(adapter))

    expected = expected_logits(merged(model, (pairs, 6 / 4)))
    assert_close(logits, expected)
    plain = expected_logits(model)
    assert (expected - plain).abs().max() > 0.1 * plain.abs().max()  # the adapter has an effect
    assert_close(logits_of(ours), plain)


@pytest.mark.parametrize("linears", [("q_proj", "v_proj"), ("k_proj",), ("up_proj",), ("o_proj",)])
def test_adapters_of_some_linears_match(
    llama: tuple[Any, Transformer], linears: tuple[str, ...], tmp_path: Path
) -> None:
    model, ours = llama
    pairs = random_pairs(model, linears)
    adapter = load_adapter(write_adapter(tmp_path, stored(pairs)), ours)
    assert_close(logits_of(ours, AdapterUse(adapter)), expected_logits(merged(model, (pairs, 1))))


def test_adapters_of_gpt2_match(tmp_path: Path) -> None:
    """PEFT writes `fan_in_fan_out` for them, because GPT-2 stores weights as [in, out]."""
    model = tiny_gpt2()
    names = [n for n, _ in model.named_modules() if n.endswith(("c_attn", "c_proj", "c_fc"))]
    generator = torch.Generator().manual_seed(6)
    reference, pairs = copy.deepcopy(model), {}
    with torch.no_grad():
        for name in names:
            weight = reference.get_parameter(f"{name}.weight")  # [in, out]
            a = torch.randn(4, weight.shape[0], generator=generator) / weight.shape[0] ** 0.5
            b = torch.randn(weight.shape[1], 4, generator=generator) / 4
            weight.add_((b @ a).T)
            pairs[name] = a, b
    ours = load_model(str(save(model, tmp_path / "model"))).model
    folder = write_adapter(tmp_path / "adapter", stored(pairs), fan_in_fan_out=True)

    logits = logits_of(ours, AdapterUse(load_adapter(folder, ours)))

    assert_close(logits, expected_logits(reference))


def test_adapters_of_fused_projections_match(
    llama: tuple[Any, Transformer], tmp_path: Path
) -> None:
    """Checkpoints with fused q, k, v have adapters with one A for all three."""
    model, ours = llama
    generator = torch.Generator().manual_seed(5)
    fused: dict[str, tuple[Tensor, Tensor]] = {}
    split: dict[str, tuple[Tensor, Tensor]] = {}
    for layer in range(3):
        for name, parts in (
            ("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("mlp.gate_up_proj", ("gate_proj", "up_proj")),
        ):
            path = f"model.layers.{layer}.{name.partition('.')[0]}."
            sizes = [model.get_submodule(path + part).weight.shape[0] for part in parts]
            a = torch.randn(4, 72, generator=generator) / 72**0.5
            b = torch.randn(sum(sizes), 4, generator=generator) / 4
            fused[f"model.layers.{layer}.{name}"] = a, b
            split |= {
                path + part: (a, rows) for part, rows in zip(parts, b.split(sizes), strict=True)
            }
    adapter = load_adapter(write_adapter(tmp_path, stored(fused)), ours)
    assert adapter.modules == ("mlp.gate_up_proj", "self_attn.qkv_proj")
    assert_close(logits_of(ours, AdapterUse(adapter)), expected_logits(merged(model, (split, 1))))


@pytest.mark.parametrize("build", [tiny_deepseek2, tiny_deepseek3])
def test_adapters_of_latent_attention_match(build: Any, tmp_path: Path) -> None:
    """With and without low-rank queries. The matrices from latent vectors take no adapters."""
    model = build()
    names = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
    pairs = random_pairs(model, linears=names)
    ours = load_model(str(save(model, tmp_path / "model"))).model
    adapter = load_adapter(write_adapter(tmp_path / "adapter", stored(pairs)), ours)
    assert_close(logits_of(ours, AdapterUse(adapter)), expected_logits(merged(model, (pairs, 1))))


HYBRIDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "lfm2": (tiny_lfm2, ("in_proj", "out_proj", "q_proj", "w1", "w2")),
    "granite4": (tiny_granite_hybrid, ("in_proj", "out_proj", "k_proj", "input_linear")),
    # Queries and their gates are one module, whose rows alternate by head.
    "qwen3.5": (
        tiny_qwen35,
        ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "v_proj"),
    ),
    "qwen3-next": (tiny_qwen3_next, ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj")),
    # The score of a shared expert, which takes no adapters, passes the same ops.
    "qwen3.5-moe": (tiny_qwen35_moe, ("in_proj_qkv", "q_proj", "k_proj")),
    "nemotron-h": (tiny_nemotron_h, ("in_proj", "out_proj", "q_proj", "o_proj", "up_proj")),
    "qwen2-moe": (tiny_qwen2_moe, ("q_proj", "o_proj")),
}


@pytest.mark.parametrize(
    ("name", "linears"),
    [
        (name, chosen)
        for name, (_, linears) in HYBRIDS.items()
        for chosen in (linears, *((one,) for one in linears))
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_adapters_of_hybrids_and_shared_experts_match(
    name: str, linears: tuple[str, ...], tmp_path: Path
) -> None:
    """All linears together, then each kind alone."""
    model = HYBRIDS[name][0]()
    pairs = {
        module: pair
        for module, pair in random_pairs(model, linears).items()
        if ".experts." not in module and ".shared_expert_gate" not in module
    }
    ours = load_model(str(save(model, tmp_path / "model"))).model
    adapter = load_adapter(write_adapter(tmp_path / "adapter", stored(pairs)), ours)
    assert_close(logits_of(ours, AdapterUse(adapter)), expected_logits(merged(model, (pairs, 1))))


def test_adapters_of_reordered_value_heads_are_refused(tmp_path: Path) -> None:
    """GGUF files of Qwen3.5 have other value heads next to each other than the adapter's model."""
    model = tiny_qwen35()
    ours = load_model(str(write_hybrid(model, tmp_path / "model.gguf", "qwen35"))).model
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"):
        folder = write_adapter(tmp_path / name, stored(random_pairs(model, (name,))))
        with pytest.raises(AdapterError, match="in another order") as caught:
            load_adapter(folder, ours)
        assert "safetensors" in str(caught.value)
    pairs = random_pairs(model, ("q_proj", "o_proj", "up_proj"))
    adapter = load_adapter(write_adapter(tmp_path / "others", stored(pairs)), ours)
    assert_close(logits_of(ours, AdapterUse(adapter)), expected_logits(merged(model, (pairs, 1))))


def test_deltas_of_several_adapters_add_up_with_their_scales(
    llama: tuple[Any, Transformer], tmp_path: Path
) -> None:
    model, ours = llama
    one, two = random_pairs(model, rank=4, seed=1), random_pairs(model, rank=2, seed=2)
    first = load_adapter(write_adapter(tmp_path / "1", stored(one)), ours)
    second = load_adapter(write_adapter(tmp_path / "2", stored(two), r=2, lora_alpha=2), ours)
    assert first.serial != second.serial
    logits = logits_of(ours, AdapterUse(first, 0.5), AdapterUse(second, -1.25))
    assert_close(logits, expected_logits(merged(model, (one, 0.5), (two, -1.25))))
    undone = logits_of(ours, AdapterUse(first, 1.0), AdapterUse(first, -1.0))
    assert_close(undone, expected_logits(model))
    assert torch.equal(logits_of(ours, AdapterUse(first, 0.0)), logits_of(ours))


def test_rslora_and_pattern_scales_match(llama: tuple[Any, Transformer], tmp_path: Path) -> None:
    model, ours = llama
    pairs = random_pairs(model, ("q_proj", "down_proj"), rank=4)
    pairs |= random_pairs(model, ("o_proj",), rank=9)
    folder = write_adapter(
        tmp_path,
        stored(pairs),
        r=4,
        lora_alpha=8,
        use_rslora=True,
        rank_pattern={"o_proj": 9},
        alpha_pattern={
            r"^model\.layers\.[12]\.mlp\.down_proj": 2.5,
            "layers.0.self_attn.q_proj": 1,
        },
    )
    adapter = load_adapter(folder, ours)

    def scale(name: str) -> float:
        if "o_proj" in name:
            return 8 / 3
        if "down_proj" in name and "layers.0" not in name:
            return 2.5 / 2
        return 1 / 2 if name == "model.layers.0.self_attn.q_proj" else 8 / 2

    changes = [({name: pair}, scale(name)) for name, pair in pairs.items()]
    assert_close(logits_of(ours, AdapterUse(adapter)), expected_logits(merged(model, *changes)))


def test_rows_of_one_pass_can_use_different_adapters(
    llama: tuple[Any, Transformer], tmp_path: Path
) -> None:
    """Mixes prefill and decode, as the engine does. Each row must match a pass of its own."""
    model, ours = llama
    pairs = [random_pairs(model, seed=seed) for seed in (1, 2)]
    one, two = (
        load_adapter(write_adapter(tmp_path / str(i), stored(found)), ours)
        for i, found in enumerate(pairs)
    )
    uses = [(), (AdapterUse(one),), (AdapterUse(two, 0.5),), (AdapterUse(one), AdapterUse(two)), ()]
    tokens = IDS[0].tolist()
    context = Context(ours, 64, batch_size=5, kv_format=KVFormat.FP32)
    runner = Runner(ours, context.store)
    found: list[list[Tensor]] = [[] for _ in uses]
    for step in ((0, 20), (20, 21), (21, 22), (22, 40)):
        segments = []
        for row, adapters in enumerate(uses):
            first, last = step if row != 4 else (step[0], step[1])
            segments.append(
                Segment(tuple(tokens[first:last]), first, (row,), LogitRows.ALL, adapters)
            )
        logits = runner.run(segments).split([step[1] - step[0]] * 5)
        for row, part in enumerate(logits):
            found[row].append(part)
    changes: list[Any] = [
        (),
        [(pairs[0], 1)],
        [(pairs[1], 0.5)],
        [(pairs[0], 1), (pairs[1], 1)],
        (),
    ]
    for row, change in enumerate(changes):
        assert_close(torch.cat(found[row]), expected_logits(merged(model, *change))[0, :40])


@pytest.mark.parametrize(("build", "split"), ENDS)
def test_adapters_that_replace_embedding_and_head_match(
    build: Any, split: str, tmp_path: Path
) -> None:
    model = build()
    ours = load_model(str(save(model, tmp_path / "model")), split=split).model
    generator = torch.Generator().manual_seed(9)
    pairs = random_pairs(model, ("q_proj",))
    changed = untie(model)
    head = torch.randn(VOCAB_SIZE, 72, generator=generator) / 72**0.5
    table = torch.randn(VOCAB_SIZE, 72, generator=generator)
    whole = {"lm_head.weight": head, "model.embed_tokens.weight": table.half()}
    with torch.no_grad():
        changed.lm_head.weight.copy_(head)
        changed.model.embed_tokens.weight.copy_(table.half())
    own = load_adapter(
        write_adapter(
            tmp_path / "own",
            stored(pairs) | {f"base_model.model.{name}": t for name, t in whole.items()},
        ),
        ours,
    )
    other = load_adapter(
        write_adapter(tmp_path / "other", {"base_model.model.lm_head.weight": -head}), ours
    )
    assert own.modules == ("embed_tokens", "lm_head", "self_attn.q_proj")
    expected = expected_logits(merged(changed, (pairs, 1)))
    assert_close(logits_of(ours, AdapterUse(own)), expected)
    # The first adapter that has a head provides it.
    assert_close(logits_of(ours, AdapterUse(own), AdapterUse(other)), expected)
    assert torch.equal(logits_of(ours, AdapterUse(own, 0)), logits_of(ours))

    rows = [(AdapterUse(own),), (), (AdapterUse(other),), (AdapterUse(own),), ()]
    tokens = tuple(IDS[0, :8].tolist())
    context = Context(ours, 8, batch_size=5, kv_format=KVFormat.FP32)
    segments = [
        Segment(tokens, 0, (row,), kind, uses)
        for (row, uses), kind in zip(
            enumerate(rows),
            (LogitRows.ALL, LogitRows.LAST, LogitRows.LAST, LogitRows.NONE, LogitRows.ALL),
            strict=True,
        )
    ]
    logits = Runner(ours, context.store).run(segments)
    plain = expected_logits(model)[0, :8]
    other_model = untie(model)
    with torch.no_grad():
        other_model.lm_head.weight.copy_(-head)
    assert_close(logits[:8], expected[0, :8])
    assert_close(logits[8], plain[7])
    assert_close(logits[9], expected_logits(other_model)[0, 7])
    assert_close(logits[10:], plain)


@pytest.mark.parametrize(("build", "split"), ENDS)
def test_low_rank_embedding_and_head_match(build: Any, split: str, tmp_path: Path) -> None:
    model = build()
    ours = load_model(str(save(model, tmp_path / "model")), split=split).model
    generator = torch.Generator().manual_seed(9)

    def pair(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        a = torch.randn(4, columns, generator=generator)
        return a, torch.randn(rows, 4, generator=generator) / 8

    pairs = {"model.embed_tokens": pair(72, VOCAB_SIZE), "lm_head": pair(VOCAB_SIZE, 72)}
    adapter = load_adapter(write_adapter(tmp_path / "adapter", stored(pairs), lora_alpha=2), ours)
    logits = logits_of(ours, AdapterUse(adapter, 1.5))
    assert_close(logits, expected_logits(merged(untie(model), (pairs, 0.75))))


@pytest.mark.parametrize("build", [tiny_llama, tiny_smollm3], ids=["llama", "smollm3"])
def test_gguf_models_accept_the_same_adapters(build: Callable[[], Any], tmp_path: Path) -> None:
    """GGUF files permute query and key rows, also of layers without RoPE; loading restores the
    order that adapters assume."""
    model = build()
    pairs = random_pairs(model)
    ours = load_model(str(write_gguf(model, tmp_path / "m.gguf"))).model
    adapter = load_adapter(write_adapter(tmp_path, stored(pairs)), ours)
    assert_close(logits_of(ours, AdapterUse(adapter)), expected_logits(merged(model, (pairs, 1))))


@pytest.mark.parametrize("is_exact", [False, True], ids=["codes", "exact"])
@pytest.mark.parametrize("method", ["exl2", "exl3", "gptq"])
def test_adapters_on_quantized_weights_match(method: str, is_exact: bool, tmp_path: Path) -> None:
    model = tiny_llama(**SIZES, tie_word_embeddings=method == "gptq")
    pairs = random_pairs(model)
    folder = save(model, tmp_path / "model")
    pieces = quantize(folder, *METHODS[method])
    checkpoint = Checkpoint(*open_checkpoint(folder))
    with torch.no_grad():
        for stem, parts in pieces.items():
            if method == "exl3":
                trellis = exl3.check(parts, stem)
                dense = exl3.dequantize(trellis, 0, trellis.out_features)
            elif not is_exact:  # values of the codes without rounding to float16
                dense = torch.from_numpy(evaluate(checkpoint.matrix(f"{stem}.weight")))
            elif method == "exl2":
                dense = exl2.dequantize(exl2.check(parts, stem))
            else:
                settings = gptq.parse_settings(GPTQ_SETTINGS, "test")
                dense = gptq.dequantize(gptq.check(parts, settings, stem))
            weight = model.get_parameter(f"{stem}.weight")
            weight.copy_(dense[: weight.shape[1], : weight.shape[0]].T)
    options = LoadOptions(exact=True) if is_exact else LoadOptions(device="reference")
    ours = load_model(str(folder), options).model
    adapter = load_adapter(write_adapter(tmp_path / "adapter", stored(pairs)), ours)
    assert_close(logits_of(ours, AdapterUse(adapter)), expected_logits(merged(model, (pairs, 1))))


@pytest.mark.parametrize("method", ["exl2", "exl3", "gptq"])
def test_adapters_of_other_rows_do_not_change_a_rows_bits(method: str, tmp_path: Path) -> None:
    """The fast kernels compute both rows in one product; the plain row must stay bit-equal."""
    ours = load_model(str(quantized_llama(method, tmp_path / "model"))).model
    pairs = random_pairs(tiny_llama(**SIZES))
    adapter = load_adapter(write_adapter(tmp_path / "adapter", stored(pairs)), ours)
    tokens = tuple(IDS[0, :6].tolist())

    def logits(uses: tuple[AdapterUse, ...]) -> Tensor:
        store = Context(ours, 8, batch_size=2).store
        segments = [Segment(tokens, 0, (row,), LogitRows.ALL, (uses, ())[row]) for row in (0, 1)]
        return Runner(ours, store).run(segments)

    plain, mixed = logits(()), logits((AdapterUse(adapter),))
    assert torch.equal(plain[6:], mixed[6:])
    assert not torch.equal(plain[:6], mixed[:6])
