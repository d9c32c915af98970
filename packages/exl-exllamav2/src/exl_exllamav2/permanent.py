"""`exl alias on|off|status`: the shadow package in an environment's own site-packages.

`on` writes a link to the shadow package, and the metadata of a distribution with a RECORD, so that
requirement checks pass and `pip uninstall exllamav2` removes exactly these files.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.metadata import Distribution, distributions
from pathlib import Path

from exl_exllamav2.activation import SHADOW, ActivationError

_NAME = "exllamav2"
_CODE_CLOSED_PIPE = 141


def site_folder() -> Path:
    """Folder of pure Python packages of this environment."""
    return Path(sysconfig.get_path("purelib"))


def found_in(folder: Path) -> Distribution | None:
    """Distribution `exllamav2` that is installed in this folder."""
    return next(iter(distributions(name=_NAME, path=[str(folder)])), None)


def is_ours(found: Distribution) -> bool:
    return (found.read_text("INSTALLER") or "").strip() == "exl"


def turn_on(folder: Path) -> str:
    """Install the alias. ActivationError where another exllamav2 is installed."""
    found = found_in(folder)
    if found is not None and is_ours(found):
        return "the alias is on already"
    if found is not None or (folder / _NAME).exists():
        raise ActivationError(
            "another exllamav2 is installed here",
            where=folder,
            got=None if found is None else found.version,
            next_step="Remove it first ('pip uninstall exllamav2'), or use 'exl exec'.",
        )
    source = _metadata_folder(SHADOW)
    target = folder / source.name
    target.mkdir()
    try:
        files = sorted(path.name for path in source.iterdir() if path.is_file())
        for name in files:
            (target / name).write_bytes((source / name).read_bytes())
        listed = [_NAME, *(f"{target.name}/{name}" for name in (*files, "RECORD"))]
        (target / "RECORD").write_text("".join(f"{name},,\n" for name in listed), encoding="utf-8")
        (folder / _NAME).symlink_to(SHADOW / _NAME, target_is_directory=True)
    except OSError:
        shutil.rmtree(target)
        raise
    return f"the alias is on: {folder / _NAME}"


def turn_off(folder: Path) -> str:
    """Remove the alias; another exllamav2 is not touched."""
    found = found_in(folder)
    if found is None or not is_ours(found):
        return "the alias is off already"
    link = folder / _NAME
    if link.is_symlink():
        link.unlink()
    target = _metadata_folder(folder)
    for path in target.iterdir():
        path.unlink()
    target.rmdir()
    return "the alias is off"


def status(folder: Path) -> str:
    """One line on the exllamav2 of this environment."""
    found = found_in(folder)
    if found is None:
        return "off: this environment has no exllamav2; 'exl exec' runs single programs"
    owner = "on: exl's alias" if is_ours(found) else "off: the original"
    return f"{owner}, exllamav2 {found.version} in {folder}"


def _metadata_folder(folder: Path) -> Path:
    return next(iter(sorted(folder.glob(f"{_NAME}-*.dist-info"))))


def main(arguments: list[str]) -> int:
    """Run one action and print its result. Returns the exit code."""
    actions = {"on": turn_on, "off": turn_off, "status": status}
    if len(arguments) != 1 or arguments[0] not in actions:
        print("exl: error: expected on, off or status", file=sys.stderr)
        return 2
    try:
        done = actions[arguments[0]](site_folder())
    except ActivationError as error:
        print(f"exl: error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"exl: error: {_unchangeable(error)}", file=sys.stderr)
        return 1
    return _print(done)


def _unchangeable(error: OSError) -> ActivationError:
    return ActivationError(
        "the environment cannot be changed",
        where=error.filename,
        got=error.strerror,
        next_step="Use an environment of your own ('python -m venv'), or 'exl exec'.",
    )


def _print(line: str) -> int:
    """Print a line. Returns the exit code, which is not 0 if stdout cannot be written."""
    try:
        print(line, flush=True)
    except OSError as error:
        # The interpreter would flush the line again at exit, and fail with code 120.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        if isinstance(error, BrokenPipeError):
            return _CODE_CLOSED_PIPE
        what = f"stdout: the output cannot be written (got {error.strerror})"
        print(f"exl: error: {what}. Free space or choose another file.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
