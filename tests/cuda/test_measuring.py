"""`exl bench` on a GPU: its figures are consistent with each other and with memory bandwidth."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from exl_core.session.load import LoadedModel, LoadOptions, load_model
from exl_eval.gpu import copy_bandwidth, count_launches, graph_seconds, queued_seconds
from exl_eval.kernels import measure_kernels
from exl_eval.speed import SpeedOptions, measure_speed

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda", 0)
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
FEW, MANY = 3, 200


@pytest.fixture(scope="module", params=["exl2", "gptq"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("models") / request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        script = importlib.import_module("random_exl2")
        size = script.SIZES["tiny"]
        is_gptq = request.param == "gptq"
        mix = script.parse_mix(script.MIXES["4"])
        writer = script.GptqWriter() if is_gptq else script.Exl2Writer(mix, 6, has_own_orders=False)
        script.write_model(folder, size, writer)
    return load_model(str(folder), LoadOptions(device="cuda"))


def test_timed_copies_agree_with_the_copy_bandwidth() -> None:
    bandwidth = copy_bandwidth(DEVICE, repeat=5)
    assert 1e10 < bandwidth < 1e14
    sources = [torch.rand(1 << 26, device=DEVICE) for _ in range(2)]
    target = torch.empty_like(sources[0])
    calls = [lambda source=source: target.copy_(source) for source in sources]
    floor = 2 * target.nbytes / bandwidth
    for timed in (graph_seconds, queued_seconds):
        seconds = timed(calls, DEVICE, 3)
        assert len(seconds) == 3
        assert all(0.7 * floor < each < 3 * floor for each in seconds)


def test_launches_are_counted() -> None:
    x = torch.rand(1000, device=DEVICE)
    assert count_launches(lambda: x.mul(2).add(1), DEVICE) == 2


def test_speed_memory_and_launches_are_plausible(tiny: LoadedModel) -> None:
    options = SpeedOptions(prefill=(MANY,), decode=4, batch=(1, FEW), repeat=1, depth=20)
    result = measure_speed(tiny, options, start_memory_bytes=0)
    assert result.device.startswith("cuda:0, ")
    assert result.device_peak_bytes is not None
    assert result.device_working_bytes is not None
    assert result.device_peak_bytes > result.device_working_bytes > 0
    layers = tiny.config.num_layers
    for run in result.runs:
        assert run.decode.median > 0
        assert run.launches is not None
        assert 5 * layers < run.launches < 20 * layers + 20


def test_kernels_of_a_step_and_of_a_prompt_add_up(tiny: LoadedModel) -> None:
    options = SpeedOptions(prefill=(MANY,), batch=(1, FEW), repeat=1, depth=20)
    result = measure_kernels(tiny, options)
    assert [(one.rows, one.past_len) for one in result.passes] == [(1, 20), (FEW, 20), (MANY, 0)]
    for one in result.passes:
        assert one.launches is not None
        counted = sum(run.calls * (run.launches or 0) for run in one.kernels)
        assert 0.5 * counted < one.launches < counted + 20
        assert all(run.seconds > 0 for run in one.kernels)
