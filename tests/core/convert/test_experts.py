"""Conversion of models with experts: rows of each expert, allocation, memory, and results."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor

from exl_core.arch.modules import module_table
from exl_core.convert import layers, passes, quantize, sensitivity
from exl_core.convert.calibration import CalibrationRows
from exl_core.convert.events import Stage
from exl_core.convert.experts import ROWS_PER_FEATURE, Routes, gather
from exl_core.convert.gptq import Variant, identity_factor, quantize_columns
from exl_core.convert.hessian import InputStatistics, measure_hessian
from exl_core.convert.layers import embed_rows, in_file_order, is_kept, read_layer
from exl_core.convert.matrix import TRIALS
from exl_core.convert.measure import measure_layer
from exl_core.convert.measurement import matrix_sets
from exl_core.convert.parallel import Workers
from exl_core.convert.plan import ConvertOptions, Layout
from exl_core.convert.sensitivity import PRIOR_ROWS, MatrixSensitivity, measure_sensitivity
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.codecs.exl2 import writer
from exl_core.formats.verify import verify
from exl_core.session.load import LoadOptions
from exl_core.session.open import open_checkpoint
from support.conversions import content, conversion, hooks, run, stops_until_done
from support.exl2_directory import read_model, read_tensors
from support.families import EXPERT_FAMILIES, HYBRID_FAMILIES, LATENT_FAMILIES
from support.gguf_models import write_gguf
from support.mxfp4 import save_as_mxfp4
from support.paged import logits_of
from support.profiles import first_by_default
from support.quantized_models import METHODS, SIZES
from support.quantized_models import quantize as replace_matrices
from support.tiny_models import (
    save,
    tiny_glm4_moe,
    tiny_granite_moe,
    tiny_llama,
    tiny_mixtral,
    tiny_qwen2_moe,
    tiny_qwen3_moe,
)

ROWS, LENGTH = 4, 96
IDS = torch.randint(3, 259, (80,), generator=torch.Generator().manual_seed(6)).tolist()
FAST = ConvertOptions(fast=True)
CPU = torch.device("cpu")


def make_rows(step: Any, rows: int = ROWS, length: int = LENGTH) -> CalibrationRows:
    ids = torch.randint(3, 259, (rows, length), generator=torch.Generator().manual_seed(5))
    return CalibrationRows(ids, "0" * 64, "random bytes")


def convert(source: Path, folder: Path, **changes: Any) -> Path:
    settings = {"bits": 8.0, "rows": ROWS, "length": LENGTH, "stages": FAST, **changes}
    return run(conversion(source, folder, **settings), hooks(make_rows=make_rows))


def exact_logits(folder: Path) -> Tensor:
    return logits_of(folder, IDS, LoadOptions(device="reference", exact=True))


def with_all_experts(folder: Path) -> Path:
    """Lets each token use all experts, so that rounding does not change a choice: a changed choice
    changes the logits by as much as they differ between tokens."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config", config.get("ffn_config", config))
    counts = [text[key] for key in COUNT_KEYS if key in text]
    text |= dict.fromkeys((key for key in TOP_K_KEYS if key in text), sum(counts[:1]))
    groups = [text[key] for key in ("n_group", "num_expert_group") if key in text]
    text |= {"topk_group": groups[0]} if "topk_group" in text else {}
    path.write_text(json.dumps(config))
    return folder


COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K_KEYS = (
    *("num_experts_per_tok", "num_experts_per_token"),
    *("moe_k", "moe_topk", "moe_top_k", "top_k_experts"),
)


def error_of(found: Path, source: Path) -> float:
    """Relative error of the logits."""
    ours, expected = exact_logits(found), exact_logits(source)
    return float((ours - expected).norm() / expected.norm())


NEW = ("gpt-oss", "gemma4-moe", "llama4", "dbrx")
OTHERS = HYBRID_FAMILIES | LATENT_FAMILIES
BUILDERS = EXPERT_FAMILIES | OTHERS
FIRST = ("gemma4-moe", "llama4", "granite4-hybrid", "lfm2-moe", "qwen3.5", "glm4.7-flash")
TUNED = (
    *("qwen2-moe", "qwen3-next", "granite4-hybrid-moe", "deepseek3", "gpt-oss"),
    *("nemotron-3-super", "kimi-linear"),
)
"""Families whose conversion runs with all steps."""


@pytest.mark.parametrize(
    "family", first_by_default([*FIRST, *(name for name in BUILDERS if name not in FIRST)], 6)
)
def test_converted_models_stay_close_to_their_sources(tmp_path: Path, family: str) -> None:
    source = with_all_experts(save(BUILDERS[family](), tmp_path / "source"))

    out = convert(
        source, tmp_path, stages=ConvertOptions(fast=family not in TUNED), shard_bytes=1 << 30
    )

    opened = open_checkpoint(out)
    assert not verify(*opened).problems
    table, plain = module_table(opened[1]), read_model(out)
    assert plain.keys() == {row.name for row in table.rows}  # an independent reader finds them all
    assert {row.name for row in table.rows if is_kept(row)} <= read_tensors(out).keys()
    error = error_of(out, source)  # matrices of 8 bits, a head of 6
    if error >= 0.06:  # the model amplifies errors
        assert error < 1.1 * error_of(rounded_to_nearest(out, source, tmp_path / "nearest"), source)


def test_names_are_those_of_exllamav2(tmp_path: Path) -> None:
    source = save(tiny_mixtral(**SIZES, num_hidden_layers=1), tmp_path / "source")
    names = read_tensors(convert(source, tmp_path)).keys()
    experts = "model.layers.0.block_sparse_moe"
    parts = ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm")
    assert {name for name in names if experts in name} == {
        f"{experts}.gate.weight",
        *(
            f"{experts}.experts.{e}.{w}.{p}"
            for e in range(4)
            for w in ("w1", "w2", "w3")
            for p in parts
        ),
    }


SMALL = {**SIZES, "moe_intermediate_size": 64, "num_experts_per_tok": 8}
SMALL_SHARED = {**SMALL, "head_dim": 16, "shared_expert_intermediate_size": 96}


def fp8(folder: Path) -> Path:
    model = tiny_qwen3_moe(**SMALL, tie_word_embeddings=True)
    replace_matrices(save(model, folder), *METHODS["fp8"])
    return folder


def awq(folder: Path) -> Path:
    model = tiny_qwen2_moe(**SMALL_SHARED, tie_word_embeddings=True)
    replace_matrices(save(model, folder), *METHODS["awq"])
    return folder


def fused(folder: Path) -> Path:
    save(tiny_granite_moe(intermediate_size=160, num_experts_per_tok=6), folder)
    assert "model.layers.0.block_sparse_moe.input_linear.weight" in load_file(
        folder / "model.safetensors"
    )
    return folder


def gguf_qwen3(folder: Path) -> Path:
    folder.mkdir()
    model = tiny_qwen3_moe(**SMALL)
    return write_gguf(model, folder / "tiny.gguf", GGMLQuantizationType.Q8_0)


def gguf_mixtral(folder: Path) -> Path:
    folder.mkdir()
    return write_gguf(tiny_mixtral(**SIZES, num_experts_per_tok=4), folder / "tiny.gguf")


def gguf_glm(folder: Path) -> Path:
    folder.mkdir()
    return write_gguf(tiny_glm4_moe(**SMALL, use_qk_norm=True), folder / "tiny.gguf")


def gguf_qwen2(folder: Path) -> Path:
    folder.mkdir()
    return write_gguf(tiny_qwen2_moe(**SMALL_SHARED), folder / "tiny.gguf")


def mxfp4(folder: Path) -> Path:
    return with_all_experts(save_as_mxfp4(EXPERT_FAMILIES["gpt-oss"](), folder))


def gguf_gpt_oss(folder: Path) -> Path:
    folder.mkdir()
    model = EXPERT_FAMILIES["gpt-oss"](num_experts_per_tok=6)
    return write_gguf(model, folder / "tiny.gguf")


def gguf_gemma4(folder: Path) -> Path:
    folder.mkdir()
    model = EXPERT_FAMILIES["gemma4-moe"](top_k_experts=8)
    return write_gguf(model, folder / "tiny.gguf")


def fp8_latent(folder: Path) -> Path:
    """DeepSeek V3's own form: blocks of FP8, those of the latent projections included."""
    model = LATENT_FAMILIES["deepseek3"](tie_word_embeddings=True)
    replace_matrices(save(model, folder), *METHODS["fp8"])
    assert "model.layers.1.self_attn.kv_b_proj.weight_scale_inv" in load_file(
        folder / "model.safetensors"
    )
    return with_all_experts(folder)


@pytest.mark.parametrize(
    "make",
    first_by_default(
        [
            *(mxfp4, fp8_latent, fused, gguf_qwen3, fp8, awq, gguf_mixtral, gguf_glm),
            *(gguf_qwen2, gguf_gpt_oss, gguf_gemma4),
        ],
        4,
    ),
)
def test_experts_of_each_source_form(tmp_path: Path, make: Any) -> None:
    source = make(tmp_path / "source")
    out = convert(source, tmp_path)
    assert not verify(*open_checkpoint(out)).problems
    assert error_of(out, source) < 0.06


def routes(choices: Sequence[Sequence[int]], scores: Sequence[Sequence[float]]) -> Routes:
    return Routes(torch.tensor(choices, dtype=torch.int32), torch.tensor(scores))


def test_an_expert_reads_the_rows_that_chose_it() -> None:
    found = routes([[0, 1], [2, 0], [1, 2], [0, 2]], [[0.5, 0.3, 0.2]] * 4)
    assert found.rows_of(0, 3).rows.tolist() == [0, 1, 3]
    assert found.rows_of(1, 2).rows.tolist() == [0, 2]


def test_an_expert_of_few_rows_reads_those_with_the_next_scores() -> None:
    scores = [[0.1, 0.4], [0.2, 0.3], [0.2, 0.6], [0.9, 0.1], [0.05, 0.9]]
    found = routes([[1], [1], [1], [0], [1]], scores)
    # Rows 1 and 2 have equal scores: the first one is taken.
    assert found.rows_of(0, 2).rows.tolist() == [1, 3]
    assert found.rows_of(0, 4).rows.tolist() == [0, 1, 2, 3]
    everything = found.rows_of(0, 100)
    assert everything.rows.tolist() == [0, 1, 2, 3, 4]
    assert everything.chosen == 1


def test_rows_are_gathered_across_pieces() -> None:
    pieces = [torch.arange(6.0).view(1, 3, 2), torch.arange(6.0, 14).view(2, 2, 2)]
    rows = torch.tensor([0, 2, 3, 6])
    assert gather(pieces, rows).tolist() == [[0, 1], [4, 5], [6, 7], [12, 13]]


def test_hessians_are_those_of_an_experts_own_rows_and_one_is_in_memory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All experts' Hessians together would take more memory than the layer."""
    source = save(tiny_mixtral(**SIZES, num_hidden_layers=1), tmp_path / "source")
    hessians: list[weakref.ref[Tensor]] = []
    seen: list[tuple[int, int]] = []

    def measured(
        inputs: Sequence[Tensor], sources: Sequence[Tensor] | None, workers: Workers
    ) -> InputStatistics:
        assert not any(hessian() is not None for hessian in hessians)
        statistics = measure_hessian(inputs, sources, workers)
        seen.append((sum(x.shape[0] * x.shape[1] for x in inputs), inputs[0].shape[-1]))
        hessians.append(weakref.ref(statistics.hessian))
        return statistics

    monkeypatch.setattr(quantize, "measure_hessian", measured)

    out = convert(source, tmp_path)

    chosen = [
        rows for rows, _ in seen[2:10]
    ]  # after q, k, v and the output: gate and up, then down
    assert chosen[::2] == chosen[1::2]
    minimum = ROWS_PER_FEATURE * 96
    assert min(chosen) >= minimum
    # Each token chose 2 of 4 experts. Experts of few rows have exactly the minimum.
    own = [rows for rows in chosen[::2] if rows > minimum]
    assert own
    assert sum(own) <= 2 * ROWS * LENGTH
    record = json.loads((out / "exl_conversion.json").read_text())
    few = [i for m in record["matrices"] for i in m["incidents"] if i[1] == "few rows"]
    assert len(few) == (len(own) < 4)


def test_latent_experts_read_the_outputs_of_the_quantized_matrix_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer of Nemotron 3 Super has experts of 64 inputs, and a hidden size of 96."""
    build = HYBRID_FAMILIES["nemotron-3-super"]
    source = save(build(layers_block_type=["moe", "mamba", "attention"]), tmp_path / "source")
    seen: list[tuple[Tensor, Tensor]] = []

    def measured(
        inputs: Sequence[Tensor], sources: Sequence[Tensor] | None, workers: Workers
    ) -> InputStatistics:
        assert sources is not None
        if inputs[0].shape[-1] == 64:
            seen.append((inputs[0][0].float(), sources[0][0].float()))
        return measure_hessian(inputs, sources, workers)

    monkeypatch.setattr(quantize, "measure_hessian", measured)

    out = convert(source, tmp_path, bits=3.0)

    original = load_file(source / "model.safetensors")
    stem = "backbone.layers.0.mixer.fc1_latent_proj"
    weight = original[f"{stem}.weight"]
    rounded = torch.from_numpy(read_model(out)[f"{stem}.weight"]).float().T
    assert (rounded - weight).norm() > 0.05 * weight.norm()
    x = original["backbone.embeddings.weight"].half().float()[make_rows(None).token_ids.flatten()]
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    x = x * original["backbone.layers.0.norm.weight"]
    # Experts, and then `fc2_latent_proj` with the 64 inputs that they return.
    assert len(seen) == 8 + 1
    for pair in seen[:8]:
        for found, matrix in zip(pair, (rounded, weight), strict=True):
            distances = torch.cdist(found, x @ matrix.T).amin(1)  # to the nearest token's
            assert distances.max() < 0.01 * found.norm(dim=1).mean()


def test_sensitivity_counts_the_use_of_an_expert(tmp_path: Path) -> None:
    """A router with a strong preference: expert 0 gets every token, expert 3 hardly any."""
    model = tiny_mixtral(**SIZES, num_hidden_layers=1)
    folder = save(model, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.gate.weight"
    tensors[name][3] = 0.0
    tensors[name][1:3] *= 0.1
    tensors[name][0] *= 20.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source, config, quantization = open_checkpoint(folder)
    checkpoint = Checkpoint(source, config, quantization)
    ids = make_rows(None).token_ids

    found = measure_sensitivity(
        checkpoint, config, ids, options=FAST, workers=Workers(None, lambda: False)
    )

    rows = module_table(config).experts[0]
    means = [float(found[one["expert_up"].name].outputs.mean()) for one in rows]
    assert all(mean > 0 for mean in means)
    assert means[0] > 2 * min(means)
    layer = read_layer(checkpoint, config, 0, CPU)
    assert {row.name for row in layer.rows.values() if row.packed is not None} == set(found)
    assert PRIOR_ROWS < ROWS * LENGTH / 10


@pytest.mark.parametrize("build", [tiny_llama, tiny_mixtral])
def test_sensitivity_does_not_depend_on_the_compute_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Any
) -> None:
    """In float32, gradients of the last matrix are those of the states, which are overwritten."""
    source, config, quantization = open_checkpoint(save(build(**SIZES), tmp_path))
    checkpoint, ids = Checkpoint(source, config, quantization), make_rows(None).token_ids
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        for module in (layers, passes, sensitivity):
            monkeypatch.setattr(module, "compute_type", lambda _, dtype=dtype: dtype)
        workers = Workers(None, lambda: False)
        found.append(measure_sensitivity(checkpoint, config, ids, options=FAST, workers=workers))
    rounded, exact = found
    for name, expected in exact.items():
        ratio = rounded[name].outputs.mean() / expected.outputs.mean()
        assert ratio.log().abs() < 0.2, name


def test_the_cost_of_a_layout_is_the_sum_over_the_experts_by_their_sensitivity(
    tmp_path: Path,
) -> None:
    folder = save(tiny_mixtral(**SIZES, num_hidden_layers=1), tmp_path)
    source, config, quantization = open_checkpoint(folder)
    checkpoint = Checkpoint(source, config, quantization)
    layer, ids = read_layer(checkpoint, config, 0, CPU), make_rows(None).token_ids
    table, generator = module_table(config), torch.Generator().manual_seed(8)
    random = {
        row.name: torch.rand(row.shape[0], generator=generator)
        for row in table.rows
        if row.is_converted
    }

    def errors(weights: Sequence[float]) -> Tensor:
        """Errors of all candidates of the experts' matrices [3, candidates]."""
        given = dict(random)
        for one, weight in zip(table.experts[0], weights, strict=True):
            given |= {row.name: random[row.name] * weight for row in one.values()}
        states = embed_rows(checkpoint, config, ids)
        workers = Workers(None, lambda: False)
        sensitivity = {name: MatrixSensitivity(x, x[:0]) for name, x in given.items()}
        measured = measure_layer(layer, config, states, sensitivity, options=FAST, workers=workers)
        experts = [matrix for matrix in measured.matrices if ".experts.*." in matrix.name]
        assert len(experts) == 3
        rows = torch.zeros(3, max(len(matrix.candidates) for matrix in experts))
        for row, matrix in zip(rows, experts, strict=True):
            row[: len(matrix.candidates)] = torch.tensor([c.error for c in matrix.candidates])
        return rows

    alone = [errors([float(index == expert) for index in range(4)]) for expert in range(4)]
    weights = (3.0, 1.0, 0.25, 0.0)
    expected = sum(weight * one for weight, one in zip(weights, alone, strict=True))
    torch.testing.assert_close(errors(weights), expected)
    assert all((one >= 0).all() and one.any() for one in alone)


def test_experts_of_a_layer_have_one_layout(tmp_path: Path) -> None:
    source = save(EXPERT_FAMILIES["qwen3-moe"](), tmp_path / "source")
    out = convert(source, tmp_path, bits=4.5)
    layouts: dict[str, set[str]] = {}
    for matrix in json.loads((out / "exl_conversion.json").read_text())["matrices"]:
        before, _, after = matrix["name"].partition(".experts.")
        name = f"{before}.experts.*.{after.partition('.')[2]}" if after else before
        layouts.setdefault(name, set()).add(matrix["layout"])
    assert all(len(found) == 1 for found in layouts.values())
    sets = matrix_sets(open_checkpoint(source)[1])
    assert {one.size for one in sets.values()} == {1, 8}
    measured = json.loads((out / "exl_measurement.json").read_text())["layers"]
    assert {m["name"] for layer in measured for m in layer["matrices"]} == set(sets)


def structured(folder: Path, build: Any) -> Path:
    """A model whose matrices are of low rank plus noise, in inputs that differ in size: rounding
    that looks at the inputs matters, and the router's choices are clear."""
    model, generator = build(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            plain = ("embed", "lm_head", "wte", "conv", "_bias")
            if parameter.dim() < 2 or any(part in name for part in plain):
                continue
            *lead, out, inner = parameter.shape
            left = torch.randn(*lead, out, 8, generator=generator)
            right = torch.randn(*lead, 8, inner, generator=generator)
            low = left @ right / 8**0.5
            noise = torch.randn(parameter.shape, generator=generator)
            is_router = "gate.weight" in name or "router" in name
            size = 4.0 if is_router else 1.0
            parameter.copy_((low + 0.3 * noise) * size / inner**0.5)
    return save(model, folder)


def rounded_to_nearest(converted: Path, source: Path, folder: Path) -> Path:
    """The converted model with each matrix of its layers rounded to nearest in the same layout."""
    tensors = load_file(converted / "output.safetensors")
    for file in converted.iterdir():
        if file.suffix == ".json":
            folder.mkdir(exist_ok=True)
            (folder / file.name).write_bytes(file.read_bytes())
    opened = open_checkpoint(source)
    checkpoint = Checkpoint(*opened)
    record = json.loads((converted / "exl_conversion.json").read_text())["matrices"]
    layouts = {matrix["name"]: Layout.parse(matrix["layout"]) for matrix in record}
    for row in module_table(opened[1]).rows:
        if not row.is_converted or row.layer is None:
            continue
        weight = torch.cat([c.values for c in checkpoint.chunks(row.name, torch.float32)])
        weight = in_file_order(row, weight).T
        groups = layouts[row.name].groups(len(weight))
        factor = identity_factor(len(weight), CPU)
        variant = Variant(slice(weight.shape[1]), groups)
        found = quantize_columns(weight.contiguous(), factor, [variant], TRIALS)
        packed = writer.pack(
            found.codes,
            groups=groups,
            scale_codes=found.scales[0][0],
            scale_max=found.scales[0][1],
            invperm=torch.arange(len(weight)),
        )
        for part in ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm"):
            tensors[f"{row.stem}.{part}"] = getattr(packed, part)
    save_file(tensors, folder / "output.safetensors")
    return folder


@pytest.mark.parametrize(
    "family", first_by_default(["qwen3-moe", "mixtral", "gemmoe", "qwen2-moe", *NEW, *OTHERS])
)
def test_results_are_better_than_rounding_to_nearest(tmp_path: Path, family: str) -> None:
    source = structured(tmp_path / "source", BUILDERS[family])
    out = convert(source, tmp_path, bits=3.6, shard_bytes=1 << 30)
    nearest = rounded_to_nearest(out, source, tmp_path / "nearest")

    expected = exact_logits(source).log_softmax(-1)

    def divergence(folder: Path) -> float:
        found = exact_logits(folder).log_softmax(-1)
        return float((expected.exp() * (expected - found)).sum(-1).mean())

    ours, theirs = divergence(out), divergence(nearest)
    print(f"{family}: {ours:.4f} nats per token, rounded to nearest {theirs:.4f}")
    assert ours < 0.9 * theirs


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family",
    [
        *("glm4-moe", "llama4", "qwen3-next", "granite4-hybrid", "glm4.7-flash"),
        *("nemotron-3-super", "kimi-linear"),
    ],
)
def test_resume_after_stop_within_experts_gives_same_bytes(tmp_path: Path, family: str) -> None:
    """Stops repeatedly, each time after more pieces of work."""
    source = save(BUILDERS[family](), tmp_path / "source")
    whole = content(convert(source, tmp_path, out=tmp_path / "whole", bits=5.0))
    task = conversion(source, tmp_path, bits=5.0, rows=ROWS, length=LENGTH, stages=FAST)
    stages = set(stops_until_done(task, 150, make_rows=make_rows))
    assert {Stage.MEASURE, Stage.QUANTIZE} <= stages
    assert content(task.out) == whole
