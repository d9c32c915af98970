"""Documents: paths, links, commands and generated pages are current."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from exl_core.session.resolve import INSTALL_DEFAULT

ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["architecture", "decisions", "dependencies", "glossary"])
def test_paths_in_backticks_exist(page: str) -> None:
    text = read(f"docs/{page}.md")
    paths = re.findall(r"`((?:[\w.\-]+/)+[\w.\-]*|[\w\-]+\.(?:py|md|txt|toml))`", text)
    core = ROOT / "packages/exl-core/src/exl_core"
    missing = [path for path in paths if not ((ROOT / path).exists() or (core / path).exists())]
    assert not missing


def test_glossary_is_short_and_has_one_line_per_term() -> None:
    rows = re.findall(r"^\| (?!term \|)(.+?) \| (.+) \|$", read("docs/glossary.md"), re.M)
    terms = [term for term, _ in rows]
    assert 20 < len(terms) <= 60
    assert terms == sorted(terms, key=str.lower)
    assert len(set(terms)) == len(terms)


def test_documents_name_existing_nox_sessions() -> None:
    commands = re.findall(r"^python3 -m pip install nox && nox -s (\w+)$", read("README.md"), re.M)
    assert commands == ["demo", "tests"]
    sessions = re.findall(r"@nox\.session\ndef (\w+)\(", read("noxfile.py"))
    assert set(commands) <= set(sessions)
    for name in re.findall(r"nox -s (\w+)", read("README.md") + read("CONTRIBUTING.md")):
        assert name in sessions


def test_the_python_example_of_the_readme_prints_its_output(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = re.findall(r"```python\n(.+?)```", read("README.md"), re.S)
    (example,) = [one for one in examples if "exl_core" in one]  # another example needs a server
    exec(compile(example, "README.md", "exec"), {})
    assert f"# {capsys.readouterr().out.strip()}\n" in example


def test_ci_runs_the_second_command_of_the_readme() -> None:
    assert re.search(r"^{ python3 -m pip install nox && nox -s tests; }", read(".ci/run"), re.M)
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def documents() -> list[str]:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(str(page.relative_to(ROOT)) for page in pages)


@pytest.mark.parametrize("document", documents())
def test_links_between_documents_resolve(document: str) -> None:
    folder = (ROOT / document).parent
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", read(document))
    missing = [link for link in links if not (folder / link).exists()]
    assert not missing


def test_the_site_lists_every_page() -> None:
    listed = re.findall(r"(?:: |- )([\w/\-]+\.md)$", read("mkdocs.yml"), re.M)
    pages = [name.removeprefix("docs/") for name in documents() if name.startswith("docs/")]
    assert sorted(listed) == pages


def test_changelog_has_unreleased_entries() -> None:
    unreleased = read("CHANGELOG.md").partition("## [Unreleased]")[2].partition("\n## ")[0]
    assert re.search(r"^- \S", unreleased, re.M)
    kinds = re.findall(r"^### (.+)$", read("CHANGELOG.md"), re.M)
    assert set(kinds) <= {"Added", "Changed", "Fixed", "Performance", "Removed"}


@pytest.mark.parametrize(
    ("script", "page"),
    [
        ("write_api_docs.py", "docs/api.md"),
        ("write_cli_docs.py", "docs/cli.md"),
        ("write_tree.py", "docs/tree.md"),
    ],
)
def test_generated_pages_are_current(script: str, page: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == read(page), "run 'nox -s docs'"


def test_every_distribution_contains_the_license() -> None:
    for folder in ("csrc", *(f"packages/{one.name}" for one in (ROOT / "packages").iterdir())):
        project = tomllib.loads(read(f"{folder}/pyproject.toml"))["project"]
        assert (project["license"], project["license-files"]) == ("MIT", ["LICENSE"])
        assert read(f"{folder}/LICENSE") == read("LICENSE")


def test_one_distribution_installs_all_in_the_same_version() -> None:
    projects = {
        path.parent.name: tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        for path in (*ROOT.glob("packages/*/pyproject.toml"), ROOT / "csrc/pyproject.toml")
    }
    whole = projects.pop("exl")
    # The alias for scripts of exllamav2 is installed by those who want it.
    parts = [one for name, one in projects.items() if name != "exl-exllamav2"]
    assert sorted(whole["dependencies"]) == sorted(
        f"{one['name']}=={whole['version']}" for one in parts
    )
    assert {one["version"] for one in parts} == {whole["version"]}
    assert whole["scripts"] == projects["exl-cli"]["scripts"]


def test_the_default_model_has_one_version_everywhere() -> None:
    package = re.search(r"\S+==\S+$", INSTALL_DEFAULT)
    assert package is not None
    assert package[0] in read("README.md")
    assert f'DEFAULT_MODEL = ("{package[0]}",)' in read("noxfile.py")


def test_nox_selects_by_declared_markers() -> None:
    options = tomllib.loads(read("pyproject.toml"))["tool"]["pytest"]["ini_options"]
    declared = {line.partition(":")[0] for line in options["markers"]}
    chosen = " ".join(re.findall(r'run_tests\(session, "(.+?)"', read("noxfile.py")))
    assert set(re.findall(r"\w+", chosen)) - {"not", "and", "or", "hypothesis"} == declared
