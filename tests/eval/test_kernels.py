"""`exl bench --kernels`: the ops of a forward pass, with the bytes and operations of each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exl_core.arch.layers import MLA
from exl_core.cache.format import KVFormat
from exl_core.session.load import LoadedModel, load_model
from exl_eval import kernels
from exl_eval.kernels import measure_kernels
from exl_eval.result import KernelPass
from exl_eval.speed import SpeedOptions
from exl_eval.workload import Workload
from support import tiny_hybrids, tiny_models
from support.tiny_latent import tiny_deepseek3

BANDWIDTH = 1e9
HIDDEN, INTERMEDIATE, LAYERS, VOCAB = 72, 112, 3, 300
Q_SIZE, KV_SIZE = 6 * 20, 2 * 20
QKV = Q_SIZE + 2 * KV_SIZE


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "memory_bandwidth", lambda _ops: BANDWIDTH)
    monkeypatch.setattr(kernels, "MIN_SECONDS", 0.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("tiny")
    return load_model(str(tiny_models.save(tiny_models.tiny_llama(), folder)))


def passes(loaded: LoadedModel, **options: object) -> tuple[KernelPass, ...]:
    chosen = SpeedOptions(repeat=1, **options)  # type: ignore[arg-type]
    return measure_kernels(loaded, chosen).passes


def test_a_decode_step_lists_and_counts_all_its_ops(tiny: LoadedModel) -> None:
    step, _ = passes(tiny, batch=(2,), prefill=(8,), depth=5)
    assert (step.rows, step.batch, step.past_len, step.launches) == (2, 2, 5, None)
    assert [(run.op, run.shape, run.calls) for run in step.kernels] == [
        ("embedding", f"{VOCAB} x {HIDDEN}", 1),
        ("norm_linear", f"{HIDDEN} -> {QKV}", LAYERS),
        ("attend_", "6 heads of 20, 6 keys", LAYERS),
        ("linear_add_", f"{Q_SIZE} -> {HIDDEN}", LAYERS),
        ("norm_gated_linear", f"{HIDDEN} -> {2 * INTERMEDIATE}", LAYERS),
        ("linear_add_", f"{INTERMEDIATE} -> {HIDDEN}", LAYERS),
        ("norm_linear", f"{HIDDEN} -> {VOCAB}", 1),
    ]
    assert step.calls == 5 * LAYERS + 2
    assert step.kernel_seconds == sum(run.calls * run.seconds for run in step.kernels) > 0
    for run in step.kernels:
        assert run.share == pytest.approx(run.bytes / BANDWIDTH / run.seconds)
        assert run.launches is None


def test_bytes_and_operations_follow_from_shapes(tiny: LoadedModel) -> None:
    step, prompt = passes(tiny, batch=(3,), prefill=(7,), depth=300)
    each = {(run.op, run.shape): run for run in step.kernels}
    weights = sum(run.calls * run.bytes for run in step.kernels if "linear" in run.op)
    assert weights > tiny.model.decode_weight_bytes * 0.99  # all except a few norms

    rows, keys = 3, 301
    attend = each["attend_", f"6 heads of 20, {keys} keys"]
    cached = rows * (keys + 1) * 2 * 2 * 20 * 2  # 2 heads, k and v, D, fp16; + 1 is the write
    assert attend.bytes == cached + 4 * rows * (QKV + Q_SIZE)
    assert attend.operations == rows * keys * 4 * Q_SIZE

    down = each["linear_add_", f"{INTERMEDIATE} -> {HIDDEN}"]
    activations = 4 * rows * (INTERMEDIATE + 2 * HIDDEN)
    matrix = down.bytes - activations
    assert matrix == pytest.approx(4 * INTERMEDIATE * HIDDEN, rel=0.2)  # padded to whole panels
    assert down.operations == 2 * rows * INTERMEDIATE * HIDDEN

    more = {(run.op, run.shape): run for run in prompt.kernels}
    assert more["linear_add_", f"{INTERMEDIATE} -> {HIDDEN}"].bytes == (
        matrix + activations * 7 // 3
    )
    assert more["attend_", "6 heads of 20, 7 keys"].operations == sum(range(1, 8)) * 4 * Q_SIZE
    head = more["norm_linear", f"{HIDDEN} -> {VOCAB}"]
    assert head.operations == 2 * HIDDEN * VOCAB  # the head runs for the last token only


def test_a_prompt_is_measured_as_one_pass_of_at_most_pass_rows(tiny: LoadedModel) -> None:
    step, *prompts = passes(tiny, prefill=(4, 40, 50), pass_rows=32)
    assert (step.rows, step.past_len) == (1, 1)
    assert [(one.rows, one.batch, one.past_len) for one in prompts] == [(4, 1, 0), (32, 1, 0)]


def test_attention_windows_and_extra_norms_of_gemma3(tmp_path: Path) -> None:
    loaded = load_model(str(tiny_models.save(tiny_models.tiny_gemma3(), tmp_path)))
    step, _ = passes(loaded, prefill=(2,), depth=99, kv_format=KVFormat.FP32)
    shapes = {(run.op, run.shape): run.calls for run in step.kernels}
    assert shapes["attend_", "6 heads of 20, 100 keys"] == 2
    assert shapes["attend_", "6 heads of 20, 40 keys"] == 2
    assert shapes["rms_norm", "1 x 72"] == 2 * 4  # two branches in each of four layers


def test_measuring_does_not_change_the_model(tiny: LoadedModel) -> None:
    ops = tiny.model.ops

    def logits() -> list[int]:
        work = Workload(tiny.model, KVFormat.FP16, tokens=9, batch=1)
        return work.step(work.fill(8), 8)

    before = logits()
    passes(tiny, batch=(1, 2), prefill=(3,))
    assert tiny.model.ops is ops
    assert logits() == before
    assert not torch.is_inference_mode_enabled()


def test_recurrent_ops_read_and_write_the_states_of_their_sequences(tmp_path: Path) -> None:
    loaded = load_model(str(tiny_models.save(tiny_hybrids.tiny_qwen35(), tmp_path)))
    step, prompt = passes(loaded, batch=(3,), prefill=(7,), depth=20)
    each = {(run.op, run.shape): run for run in step.kernels}
    rows, heads, key, value, layers = 3, 6, 16, 20, 3  # every third of four layers has attention
    channels = 2 * 2 * key + heads * value

    rule = each["delta_rule", f"{heads} x {key} x {value}"]
    inputs = rows * (channels + 2 * heads)
    state = heads * key * value
    assert rule.calls == layers
    assert rule.bytes == 4 * (inputs + rows * heads * value + 2 * rows * state)
    assert rule.operations == 7 * rows * state

    conv = each["causal_conv", f"4 x {channels}"]
    assert conv.bytes == 4 * channels * (2 * rows + 2 * rows * 3 + 4)
    assert conv.operations == 2 * rows * 4 * channels

    more = {run.op: run for run in prompt.kernels}
    assert more["delta_rule"].bytes == 4 * (7 * inputs // 3 + 7 * heads * value + state)


def test_experts_and_latent_attention_are_counted(tmp_path: Path) -> None:
    loaded = load_model(str(tiny_models.save(tiny_deepseek3(), tmp_path)))
    step, _ = passes(loaded, batch=(2,), prefill=(3,), depth=20)
    each = {run.op: run for run in step.kernels}
    rows, heads, hidden, rank, rope, width = 2, 6, 72, 40, 8, 40

    experts = each["add_experts_"]
    assert (experts.shape, experts.calls) == (f"3 of 8, {hidden} -> {width}", 2)
    assert experts.operations == 2 * rows * hidden * (3 * 3 * width + 8)

    latent, config = each["attend_latent"], loaded.config.layers[0].mixer
    assert isinstance(config, MLA)
    assert latent.shape == f"{heads} heads, rows of {rank + rope}, 21 keys"
    inner = config.nope_dim + config.value_dim
    attended = 2 * rows * 21 * heads * (2 * rank + rope)
    assert latent.operations == attended + 2 * rows * heads * inner * rank
    cached = rows * (21 + 1) * 2 * (rank + rope)
    assert latent.bytes > cached
