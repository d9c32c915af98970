"""Build backend of exl-kernels: that of setuptools, with nvcc from the package index if needed.

Where a GPU is present, or EXL_CUDA_ARCH asks for architectures, and there is no nvcc, the packages
below are installed into the isolated build environment. They hold the parts of the CUDA toolkit
that the build uses, about 100 MB. A build without isolation uses them if they are installed.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 - the hooks that are not replaced here

sys.path.insert(0, str(Path(__file__).resolve().parent))

import build_cuda

NVCC_PACKAGES = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-runtime==13.0.96",
)


def nvcc_requirements() -> list[str]:
    """Packages with nvcc, if this machine needs them for its build."""
    requested = os.environ.get(build_cuda.VARIABLE) or None
    is_wanted = bool(build_cuda.gpu_capabilities()) if requested is None else requested != "none"
    has_wheels = sys.platform == "linux" and platform.machine() == "x86_64"
    if not is_wanted or not has_wheels or build_cuda.find_nvcc(os.environ) is not None:
        return []
    return list(NVCC_PACKAGES)


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *nvcc_requirements()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *nvcc_requirements()]
