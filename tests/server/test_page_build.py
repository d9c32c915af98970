"""The built chat page matches its sources, and the tests of its sources pass in Node.js."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "packages/exl-cli/page"
BUILT = ROOT / "packages/exl-cli/src/exl_cli/server/page.html"
LIMIT_S = 300


def test_built_page_is_that_of_its_sources() -> None:
    names = ["build.mjs", "package-lock.json"]
    names += sorted(f"src/{path.name}" for path in (SOURCES / "src").iterdir())
    found = hashlib.sha256()
    for name in names:
        found.update(f"{name}\n".encode() + (SOURCES / name).read_bytes() + b"\n")
    built = re.search(r"Sources: sha256 ([0-9a-f]{64})", BUILT.read_text(encoding="utf-8"))
    assert built is not None and built[1] == found.hexdigest(), "nox -s page builds it"


def test_page_has_no_address_of_another_site_in_markup_or_styles() -> None:
    html = BUILT.read_text(encoding="utf-8")
    others = r"<script>.*?</script>|<pre.*?</pre>|url\(data:[^)]*\)"  # scripts, licenses, fonts
    markup = re.sub(others, "", html, flags=re.DOTALL)
    assert not re.search(r"(?:https?:)?//\w|@import|url\(", markup)
    assert "MIT License" in html and "BSD 3-Clause" in html, "licenses of the libraries"


def test_sources_never_parse_text_as_html() -> None:
    for path in (SOURCES / "src").iterdir():
        text = path.read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text
        )


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with the libraries of the lock file."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("no Node.js with npm on this machine")
    copy = tmp_path_factory.mktemp("page") / "page"
    shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("node_modules"))
    run(copy, "npm", "ci")
    return copy


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.mark.thorough
def test_build_reproduces_the_page(sources: Path, tmp_path: Path) -> None:
    run(sources, "node", "build.mjs", str(tmp_path / "page.html"))
    assert (tmp_path / "page.html").read_bytes() == BUILT.read_bytes()


@pytest.mark.thorough
def test_tests_of_the_sources_pass(sources: Path) -> None:
    said = run(sources, "node", "--test", "--test-reporter=tap", "test/")
    passed = re.search(r"^# pass (\d+)$", said, re.MULTILINE)
    assert passed is not None and int(passed[1]) > 80, said[-2000:]
