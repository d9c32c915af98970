"""The checks of `exl doctor`. Each returns its finding.

A missing part is a finding too: no check raises an exception for it.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

from exl_core.errors import ExlError
from exl_core.session.resolve import INSTALL_DEFAULT
from exl_core.settings import Settings, available_cpus, read_settings

OWN_DISTRIBUTIONS = ("exl-cli", "exl-eval", "exl-core", "exl-kernels")
LIBRARIES = {
    "torch": "torch",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "gguf": "gguf",
    "tokenizers": "tokenizers",
    "sentencepiece": "sentencepiece",
    "jinja2": "jinja2",
    "llguidance": "llguidance",
    "huggingface-hub": "huggingface_hub",
    "prompt-toolkit": "prompt_toolkit",
}
KERNELS_FIX = "in the root of the source tree: python -m pip install ./csrc"
_NVIDIA_SMI_TIMEOUT_S = 20


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `state`: ok; note (an optional part is absent); broken (a required part is)."""

    name: str
    state: str
    finding: str
    fix: str | None = None

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def run_checks() -> list[Check]:
    checks = [_python(), *_own_versions(), *_libraries()]
    if any(check.state == "broken" for check in checks):
        return [*checks, Check("kernels", "note", "not tested: a library is missing")]
    try:
        settings = read_settings()
    except ExlError as error:
        checks.append(Check("settings", "broken", str(error)))
        settings = Settings(isa=None, threads=available_cpus())  # defaults without the settings
    return [*checks, *_kernels(settings), _gpus(), _default_model()]


def _python() -> Check:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Check("python", "ok", found)


def _own_versions() -> Iterator[Check]:
    for name in OWN_DISTRIBUTIONS:
        try:
            yield Check(name, "ok", version(name))
        except PackageNotFoundError:
            yield Check(name, "note", "not installed as a distribution; running from source")


def _libraries() -> Iterator[Check]:
    for name, module in LIBRARIES.items():
        if importlib.util.find_spec(module) is None:
            yield Check(name, "broken", "missing", f"python -m pip install {name}")
            continue
        try:
            yield Check(name, "ok", version(name))
        except PackageNotFoundError:
            yield Check(name, "ok", "present, version unknown")


def _kernels(settings: Settings) -> Iterator[Check]:
    from exl_core.ops.open import available_isas, get_table
    from exl_core.ops.selftest import run_selftest

    try:
        isas = available_isas()
    except ExlError as error:
        yield Check("kernels", "broken", str(error), KERNELS_FIX)
        return
    yield _chosen_isa(settings.isa, isas)
    yield Check("threads", "ok", str(settings.threads))
    for isa in isas:
        try:
            results = run_selftest(get_table("cpu", isa=isa, threads=settings.threads))
        except ExlError as error:
            yield Check(f"kernels {isa}", "broken", str(error), KERNELS_FIX)
            continue
        failed = [r for r in results if not r.passed]
        if failed:
            worst = "; ".join(f"{r.op}: error {r.max_error:.3g} > {r.bound:.3g}" for r in failed)
            yield Check(f"kernels {isa}", "broken", worst, f"rebuild, {KERNELS_FIX}")
        else:
            yield Check(f"kernels {isa}", "ok", f"{len(results)} self-tests agree with torch")


def _chosen_isa(forced: str | None, isas: Sequence[str]) -> Check:
    found = ", ".join(isas)
    if forced is None:
        return Check(
            "instruction sets", "ok", f"{found}; in use: {isas[-1]} (the best of this CPU)"
        )
    if forced in isas:
        return Check("instruction sets", "ok", f"{found}; in use: {forced} (forced by EXL_ISA)")
    return Check(
        "instruction sets", "broken", f"{found}, but EXL_ISA asks for {forced}", "unset EXL_ISA"
    )


def _gpus() -> Check:
    import torch

    from exl_core.ops.backends.cuda.device import open_device

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        try:
            open_device("cuda")
        except ExlError as error:
            return Check("GPUs", "note", f"{', '.join(names)}; not used: {error}")
        return Check("GPUs", "ok", f"{', '.join(names)}; in use unless --device cpu")
    listed = _nvidia_smi()
    if listed:
        return Check("GPUs", "note", f"{listed}; this torch build cannot use them")
    return Check("GPUs", "ok", "none; exl computes on the CPU")


def _nvidia_smi() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        done = subprocess.run(
            [tool, "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ", ".join(done.stdout.split("\n")).strip(", ") if done.returncode == 0 else ""


def _default_model() -> Check:
    from exl_core.session.resolve import resolve_model

    try:
        return Check("default model", "ok", str(resolve_model(None)))
    except ExlError as error:
        return Check("default model", "note", str(error), INSTALL_DEFAULT)
