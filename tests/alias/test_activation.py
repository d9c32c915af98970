"""Activation: who finds the alias under the name exllamav2, and who does not."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import files, version
from pathlib import Path

import pytest

from exl_core.errors import ExlError
from exl_exllamav2 import permanent
from exl_exllamav2.__main__ import parse
from exl_exllamav2.activation import SHADOW, ActivationError

PROGRAM = """
import importlib.metadata, importlib.util, subprocess, sys
assert importlib.util.find_spec("exllamav2") is not None
from exllamav2 import *
from exllamav2 import model_init, generator, cache, tokenizer, ext
from exllamav2.generator import *
print(sys.argv[1:], ExLlamaV2.__name__, ExLlamaV2DynamicJob.__name__)
print(importlib.metadata.version("exllamav2"), generator.__version__)
child = "import exllamav2; print(hasattr(exllamav2, '__exl__'))"
done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, cwd=sys.prefix)
print(done.stdout.strip())
"""


def python(*args: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, check=False, cwd=folder
    )


@pytest.mark.thorough
def test_exec_activates_the_alias_for_the_script_and_its_children(tmp_path: Path) -> None:
    (tmp_path / "exllamav2").mkdir()  # the script lies in a checkout of the original
    (tmp_path / "exllamav2/__init__.py").write_text("raise ImportError('the original')")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    done = python("-m", "exl_cli", "exec", "--strict", str(script), "-m", "x", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "['-m', 'x'] ExLlamaV2 ExLlamaV2DynamicJob",
        "0.3.2+exl1 0.3.2",
        "True",
    ]


def test_without_activation_nothing_is_called_exllamav2(tmp_path: Path) -> None:
    done = python("-c", "import exl_exllamav2, exllamav2", folder=tmp_path)
    assert "No module named 'exllamav2'" in done.stderr


def test_the_options_end_at_the_program() -> None:
    found = parse(["--model", "/a=b", "--model=/c=d", "--cuda-noop", "x.py", "--model", "e"])
    assert (found.models, found.script) == ({"/a": "b", "/c": "d"}, "x.py")
    assert found.arguments == ["--model", "e"]
    module = parse(["-m", "package.tool", "-i", "in"])
    assert (module.module, module.arguments) == ("package.tool", ["-i", "in"])


@pytest.mark.parametrize(
    "arguments", [[], ["--model", "x", "y.py"], ["--what", "y.py"], ["--threads", "0", "y.py"]]
)
def test_bad_options_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ActivationError):
        parse(arguments)


def test_the_permanent_alias_is_installed_and_removed(tmp_path: Path) -> None:
    assert permanent.status(tmp_path).startswith("off")
    permanent.turn_on(tmp_path)
    assert "0.3.2+exl1" in permanent.status(tmp_path)
    assert (tmp_path / "exllamav2" / "__init__.py").is_file()
    assert "already" in permanent.turn_on(tmp_path)
    permanent.turn_off(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert "already" in permanent.turn_off(tmp_path)


def test_the_permanent_alias_refuses_where_the_original_is(tmp_path: Path) -> None:
    (tmp_path / "exllamav2-0.3.2.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: exllamav2\nVersion: 0.3.2\n"
    (tmp_path / "exllamav2-0.3.2.dist-info/METADATA").write_text(metadata, encoding="utf-8")
    with pytest.raises(ExlError, match="another exllamav2"):
        permanent.turn_on(tmp_path)
    permanent.turn_off(tmp_path)
    assert (tmp_path / "exllamav2-0.3.2.dist-info").is_dir()


def test_an_environment_that_cannot_be_changed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(permanent, "site_folder", lambda: tmp_path)
    (tmp_path / "exllamav2").symlink_to("nowhere")
    assert permanent.main(["on"]) == 1
    line = capsys.readouterr().err
    assert "the environment cannot be changed (got File exists)" in line
    assert "Traceback" not in line
    assert [path.name for path in tmp_path.iterdir()] == ["exllamav2"]  # no metadata is left


@pytest.mark.parametrize(
    ("stdout", "code", "message"), [("> /dev/full", 1, "No space left"), ("| true", 141, "")]
)
def test_status_to_a_full_disk_or_a_closed_pipe(stdout: str, code: int, message: str) -> None:
    run = f"sleep 0.1; {sys.executable} -m exl_exllamav2.permanent status"
    done = subprocess.run(
        ["bash", "-c", f"({run}) {stdout}; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{code}\n"
    assert done.stderr.count("\n") == bool(message)
    assert message in done.stderr


def test_no_distribution_installs_a_package_exllamav2() -> None:
    assert version("exl-exllamav2")
    installed = [str(path) for path in files("exl-exllamav2") or ()]  # none from a source tree
    built = {path.name for path in SHADOW.parent.parent.iterdir()}
    assert not [name for name in installed if name.startswith("exllamav2/")]
    assert "exl_exllamav2" in built
    assert "exllamav2" not in built
