"""Hybrids on a GPU: recurrent kernels beside torch ops in float64 in the same model, and drafts by
a model's own layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import Event, FinishEvent
from exl_core.engine.request import Request
from exl_core.model import cuda_graphs
from exl_core.model.cuda_graphs import PASSES_BEFORE_CAPTURE
from exl_core.model.runner import Runner, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.ops.backends.cuda.recurrent import CudaRecurrentOps
from exl_core.ops.backends.recurrence import (
    conv,
    delta_inputs,
    delta_steps,
    scan_inputs,
    scan_steps,
    spans,
    start_of,
)
from exl_core.ops.recurrent import DeltaRule, StateRows, StateScan, Taps
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import LoadedModel, load_model
from exl_core.speculate.mtp import MtpDrafter
from support.tiny_hybrids import (
    tiny_granite_hybrid,
    tiny_kimi_linear,
    tiny_lfm2,
    tiny_nemotron_h,
    tiny_qwen35,
    tiny_qwen35_moe,
)
from support.tiny_models import VOCAB_SIZE, save
from support.tiny_mtp import MtpCheckpoint

pytestmark = pytest.mark.cuda

PAGES = 24
HEADS = {"hidden_size": 96, "head_dim": 32}
HYBRIDS: dict[str, Callable[[], Any]] = {
    "lfm2": lambda: tiny_lfm2(hidden_size=192, head_dim=32, block_multiple_of=32),
    "qwen3.5": lambda: tiny_qwen35(
        **HEADS, intermediate_size=160, linear_value_head_dim=32, rms_norm_eps=1e-6
    ),
    "granite4-hybrid": lambda: tiny_granite_hybrid(
        hidden_size=192, head_dim=32, mamba_d_head=64, shared_intermediate_size=160
    ),
    # Tokens pass all experts: a router chooses others where two have almost the same score, and one
    # such row of 700 differs by more than all rounding.
    "qwen3.5-moe": lambda: tiny_qwen35_moe(
        **{**HEADS, "linear_value_head_dim": 32, "rms_norm_eps": 1e-6},
        **{"moe_intermediate_size": 32, "num_experts_per_tok": 8},
    ),
    "nemotron-h": lambda: tiny_nemotron_h(**HEADS, num_experts_per_tok=8, n_group=1, topk_group=1),
    "kimi-linear": lambda: tiny_kimi_linear(
        **{"hidden_size": 96, "linear_head_dim": 40},
        **{"num_experts_per_token": 8, "n_group": 1, "topk_group": 1},
    ),
}


class ExactOps:
    """Recurrent ops of a GPU in float64, token by token. The host reads the rows."""

    @staticmethod
    def causal_conv(_: object, x: Tensor, taps: Taps, states: Tensor, rows: StateRows) -> Tensor:
        out = torch.zeros(x.shape, device=x.device)
        for span in spans(rows):
            part, before = x[span.first : span.last].double(), start_of(states, span).double()
            y, after = conv(part, taps, before)
            out[span.first : span.last], states[span.slot] = y.float(), after.float()
        return out

    @staticmethod
    def delta_rule(
        _: object, qkv: Tensor, ba: Tensor, rule: DeltaRule, states: Tensor, rows: StateRows
    ) -> Tensor:
        out = torch.zeros(len(qkv), rule.value_heads * rule.value_dim, device=qkv.device)
        for span in spans(rows):
            part, before = slice(span.first, span.last), start_of(states, span).double()
            inputs = delta_inputs(qkv[part].double(), ba[part].double(), rule)
            y, after = delta_steps(inputs, before)
            out[part], states[span.slot] = y.flatten(1).float(), after.float()
        return out

    @staticmethod
    def state_scan(
        _: object, xbc: Tensor, dt: Tensor, scan: StateScan, states: Tensor, rows: StateRows
    ) -> Tensor:
        out = torch.zeros(len(xbc), scan.heads * scan.head_dim, device=xbc.device)
        for span in spans(rows):
            part, before = slice(span.first, span.last), start_of(states, span).double()
            inputs = scan_inputs(xbc[part].double(), dt[part].double(), scan)
            y, after = scan_steps(inputs, before, scan.skip)
            out[part], states[span.slot] = y.flatten(1).float(), after.float()
        return out


class BothWays:
    """Passes of one model with the kernels, and with `ExactOps` in their place."""

    def __init__(self, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self._runners = [
            Runner(loaded.model, store_for(loaded.model, KVFormat.FP16, PAGES, num_states=4))
            for _ in range(2)
        ]
        self._patch = monkeypatch
        self._random = torch.Generator().manual_seed(8)
        self._lengths = [0] * 4

    def feed(self, **counts: int) -> None:
        """Runs one pass; `s2=5` feeds five more tokens of sequence 2."""
        segments = []
        for name, count in counts.items():
            i = int(name[1:])
            ids = torch.randint(3, VOCAB_SIZE, (count,), generator=self._random).tolist()
            pages = tuple(range(6 * i, 6 * i + 6))
            segments.append(
                Segment(tuple(ids), self._lengths[i], pages, LogitRows.ALL, state_slot=3 - i)
            )
            self._lengths[i] += count
        kernels = self._runners[0].run(segments).double()
        with self._patch.context() as patch:
            for op in ("causal_conv", "delta_rule", "state_scan"):
                patch.setattr(CudaRecurrentOps, op, getattr(ExactOps, op))
            patch.setattr(cuda_graphs, "shape_of", lambda *_, **__: None)  # no captured graphs
            exact = self._runners[1].run(segments).double()
        error = float((kernels - exact).norm() / exact.norm())
        print(f"{counts}: {error:.1e}")
        assert error < 3e-3, f"{counts}: {error:.1e}"


@pytest.mark.parametrize("name", HYBRIDS)
def test_kernels_agree_with_float64_ops_in_a_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads whose outputs nearly cancel are scaled up by the norms of Qwen3.5, and with them the
    rounding of all that comes before. Here only the recurrent ops differ."""
    loaded = load_model(save(HYBRIDS[name](), tmp_path / name), device="cuda")
    run = BothWays(loaded, monkeypatch)
    run.feed(s0=1)
    run.feed(s1=300, s2=37)
    run.feed(s1=64, s0=3, s3=130)
    for i in range(PASSES_BEFORE_CAPTURE + 2):  # later ones as graphs
        run.feed(s0=1, s1=1, s2=1)
        run.feed(s1=130 - i, s0=1, s2=2)
    run.feed(s3=700)
    run.feed(s0=1, s3=1)


MTP_SIZES: dict[str, dict[str, Any]] = {
    "glm4-moe": {"head_dim": 32},
    "qwen3.5": {**HEADS, "linear_value_head_dim": 32},
    "qwen3.5-moe": {**HEADS, "linear_value_head_dim": 32, "moe_intermediate_size": 32},
}
TOKENS = 259  # ids of the tiny tokenizer


def greedy_tokens(loaded: LoadedModel, *, has_mtp: bool) -> list[FinishEvent]:
    drafter = None
    if has_mtp:
        assert loaded.mtp is not None
        drafter = MtpDrafter(loaded.mtp, vocab_size=TOKENS, max_tokens=3, min_probability=0.0)
    options = EngineOptions(4096, max_batch=4, prefill_chunk=300, adapt_drafts=False)
    engine = Engine(loaded.model, loaded.tokenizer, options, drafter=drafter)
    draws = Random(5)
    lengths = (40, 2, 530)
    requests = [
        Request(
            tuple(draws.randint(3, TOKENS - 1) for _ in range(length)),
            max_tokens=24,
            sampler=SamplerParams(temperature=0.0),
        )
        for length in lengths
    ]
    for request in requests:
        engine.submit(request)
    events: list[Event] = []
    while not engine.is_idle:
        events += engine.step()
    ends = {one.request_id: one for one in events if isinstance(one, FinishEvent)}
    return [ends[request.request_id] for request in requests]


@pytest.mark.parametrize("family", MTP_SIZES)
def test_greedy_text_with_mtp_is_the_text_without(family: str, tmp_path: Path) -> None:
    """The model's tokens are clear, so that passes of other shapes choose the same. Its layer
    proposes the same tokens, which saves passes."""
    checkpoint = MtpCheckpoint(family, **MTP_SIZES[family])
    checkpoint.be_right()
    loaded = load_model(checkpoint.save(tmp_path), device="cuda", mtp=True)
    plain = greedy_tokens(loaded, has_mtp=False)
    drafted = greedy_tokens(loaded, has_mtp=True)
    assert [end.token_ids for end in drafted] == [end.token_ids for end in plain]
    for end in drafted:
        assert end.drafting is not None
        assert end.drafting.rejected == 0
        assert end.drafting.rounds < 12


@pytest.mark.parametrize("family", MTP_SIZES)
def test_wrong_drafts_leave_greedy_text_unchanged(family: str, tmp_path: Path) -> None:
    """Random weights: most drafts are wrong. A first difference may only be between tokens that are
    almost equally likely, as passes of other shapes round differently."""
    checkpoint = MtpCheckpoint(family, **MTP_SIZES[family])
    loaded = load_model(checkpoint.save(tmp_path), device="cuda", mtp=True)
    plain = greedy_tokens(loaded, has_mtp=False)
    drafted = greedy_tokens(loaded, has_mtp=True)
    assert any(end.drafting and end.drafting.rejected for end in drafted)
    draws = Random(5)
    for one, other, length in zip(plain, drafted, (40, 2, 530), strict=True):
        ids = [draws.randint(3, TOKENS - 1) for _ in range(length)]
        both = enumerate(zip(one.token_ids, other.token_ids, strict=False))
        first = next((i for i, (a, b) in both if a != b), None)
        if first is None:
            continue
        runner = Runner(loaded.model, store_for(loaded.model, KVFormat.FP16, 4, num_states=1))
        known = (*ids, *one.token_ids[:first])
        segment = Segment(known, 0, (0, 1, 2, 3), LogitRows.LAST, state_slot=0)
        logits = runner.run([segment])[0].float()
        gap = logits[one.token_ids[first]] - logits[other.token_ids[first]]
        assert gap.abs() < 0.05 * logits.std(), f"token {first}"
