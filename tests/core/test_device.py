"""GPUs that are missing or unusable: one error with advice, raised before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exl_core.errors import DeviceError, OutOfMemoryError, RequestError
from exl_core.ops.backends.cuda import device
from exl_core.ops.open import device_failures, get_table
from exl_kernels import cuda


class FakeLibrary:
    architectures = (80, 90)

    def call(self, name: str, index: int) -> None:
        assert name == "open_device"
        if index != 0:
            raise cuda.CudaError(name, 101, "cudaErrorInvalidDevice", "invalid device ordinal")


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Simulates a machine with one GPU of compute capability 9.0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    monkeypatch.setattr(cuda, "load", FakeLibrary)
    return monkeypatch


def test_torch_without_cuda_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(
        DeviceError, match=r"torch that was built without CUDA.*--device cpu"
    ) as error:
        get_table("cuda", threads=1)
    assert error.value.exit_code == 5


def test_torchs_message_about_an_old_driver_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\n..")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(DeviceError, match=r"too old \(found version 11040\)"):
        device.open_device("cuda")


def test_the_driver_is_started_before_torch_is_queried(one_gpu: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    one_gpu.setattr(FakeLibrary, "call", lambda _, name, index: calls.append(f"{name} {index}"))

    def is_available() -> bool:
        calls.append("torch")
        return False

    one_gpu.setattr(torch.cuda, "is_available", is_available)
    with pytest.raises(DeviceError, match="no GPU can be used"):
        device.open_device("cuda:1")
    assert calls == ["open_device 1", "torch"]


def test_a_driver_that_does_not_start_is_reported(
    one_gpu: pytest.MonkeyPatch,
) -> None:
    def call(*_: object) -> None:
        raise cuda.CudaError("exl_cuda_open_device", 46, "cudaErrorDevicesUnavailable", "busy")

    one_gpu.setattr(FakeLibrary, "call", call)
    with pytest.raises(DeviceError, match=r"the GPU's start failed .*cudaErrorDevicesUnavailable"):
        device.open_device("cuda")


def test_a_gpu_index_out_of_range_is_refused(one_gpu: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match=r"cuda:3: no such GPU \(expected cuda:0\)"):
        device.open_device("cuda:3")


def test_an_install_without_cuda_kernels_is_reported(
    one_gpu: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing() -> None:
        raise OSError("no such file")

    one_gpu.setattr(cuda, "load", missing)
    one_gpu.setattr(cuda, "LIBRARY", tmp_path / "libexl_cuda.so")
    with pytest.raises(DeviceError, match=r"no CUDA kernels.*nvcc is on PATH"):
        device.open_device("cuda")


def test_a_gpu_that_is_too_old_is_refused(one_gpu: pytest.MonkeyPatch) -> None:
    one_gpu.setattr(torch.cuda, "get_device_capability", lambda _: (6, 1))
    with pytest.raises(
        DeviceError, match=r"Some GPU is too old \(expected .* 7.5 or later, got 6.1\)"
    ):
        device.open_device("cuda")


def test_kernels_built_only_for_later_gpus_are_reported(one_gpu: pytest.MonkeyPatch) -> None:
    one_gpu.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(
        DeviceError, match=r"built for later GPUs .*7.5, got 8.0, 9.0.*EXL_CUDA_ARCH"
    ):
        device.open_device("cuda")


@pytest.mark.parametrize(
    "name", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:0:1", "CUDA", "cuda:9999"]
)
def test_invalid_device_names_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match="expected auto, cpu, cuda or cuda:N"):
        device.parse_device(name)


def test_auto_is_the_cpu_without_kernels(one_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one_gpu.setattr(cuda, "LIBRARY", tmp_path / "libexl_cuda.so")
    assert device.parse_device("auto") == "cpu"
    (tmp_path / "libexl_cuda.so").touch()
    assert device.parse_device("auto") == "cuda"
    assert device.parse_device("cuda:1") == "cuda:1"


def test_gpu_failures_become_typed_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 << 20, 8 << 20))
    gpu = torch.device("cuda", 0)
    out_of_memory = pytest.raises(OutOfMemoryError, match=r"a pass does not fit .*3 MiB free of 8")
    with out_of_memory, device_failures(gpu, "a pass"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")
    assert OutOfMemoryError.exit_code == 4
    with pytest.raises(OutOfMemoryError), device_failures(gpu, "a pass"):
        raise cuda.CudaError("exl_cuda_prepare", 2, "cudaErrorMemoryAllocation", "out of memory")
    failed = pytest.raises(DeviceError, match=r"a pass failed .*cudaErrorLaunchFailure.*exl doctor")
    with failed, device_failures(gpu, "a pass"):
        raise cuda.CudaError("exl_cuda_prepare", 719, "cudaErrorLaunchFailure", "launch failed")


def test_errors_on_the_cpu_are_not_converted() -> None:
    with pytest.raises(RuntimeError, match="as it was"), device_failures(torch.device("cpu"), "x"):
        raise RuntimeError("as it was")


@pytest.mark.parametrize(("kind", "size", "most"), [("taps", 9, 8), ("depth", 264, 256)])
def test_recurrent_sizes_that_no_kernel_takes_are_refused(kind: str, size: int, most: int) -> None:
    device.check_states([(kind, most), ("taps", 4)], "a model")
    with pytest.raises(DeviceError, match=f"a model: .* at most {most}, got {size}"):
        device.check_states([(kind, size)], "a model")
