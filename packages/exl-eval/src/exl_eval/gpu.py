"""Measurements on a GPU: copy bandwidth, time of calls, number of launches.

Knows no models. Times come from CUDA events around many calls. The calls are captured in a CUDA
graph, so that neither the interpreter nor gaps between launches count. Calls that are long enough,
or that cannot be captured, are launched one after the other instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

COPY_BYTES = 1 << 30
"""Size of the copied buffer, in bytes. Far larger than the L2 cache of any GPU."""

CALLS_IN_GRAPH = 32
"""Minimum number of calls per graph. A single call is shorter than the launch of a graph."""


def copy_bandwidth(device: torch.device, *, repeat: int = 20) -> float:
    """Bandwidth of a large copy within the device: bytes read plus bytes written per second, the
    best of `repeat` copies."""
    free, _ = torch.cuda.mem_get_info(device)
    size = min(COPY_BYTES, free // 4)
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    seconds = _event_seconds(lambda: target.copy_(source), device, repeat)
    return 2 * size / min(seconds)


def graph_seconds(
    calls: Sequence[Callable[[], object]], device: torch.device, repeat: int
) -> list[float]:
    """Average seconds per call, measured `repeat` times with all calls in one CUDA graph."""
    rounds = -(-CALLS_IN_GRAPH // len(calls))

    def run() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's, as below
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        run()  # workspaces grow before the capture
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=side):
        run()
    seconds = _event_seconds(graph.replay, device, repeat)
    return [each / (rounds * len(calls)) for each in seconds]


def queued_seconds(
    calls: Sequence[Callable[[], object]], device: torch.device, repeat: int
) -> list[float]:
    """As `graph_seconds`, without a CUDA graph, for calls that cannot be captured."""

    def run() -> None:
        for call in calls:
            call()

    return [each / len(calls) for each in _event_seconds(run, device, repeat)]


def _event_seconds(
    run: Callable[[], object], device: torch.device, repeat: int, warm_up: int = 3
) -> list[float]:
    seconds = []
    for number in range(warm_up + repeat):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record(torch.cuda.current_stream(device))
        run()
        end.record(torch.cuda.current_stream(device))
        end.synchronize()
        if number >= warm_up:
            seconds.append(begin.elapsed_time(end) / 1000)
    return seconds


def count_launches(run: Callable[[], object], device: torch.device) -> int | None:
    """Number of kernels, copies and fills that the device executes for one `run`.

    None if the profiler reports none."""
    run()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        run()
        torch.cuda.synchronize(device)
    return sum(event.device_type.name == "CUDA" for event in found.events() or ()) or None
