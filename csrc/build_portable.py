"""Links the libraries so that they run on systems with an older C and C++ library than this one.

The linker binds a reference to the newest version of a symbol that the system has, such as
pthread_once@GLIBC_2.34. The same libraries still export the older versions that programs of the
past need, such as pthread_once@GLIBC_2.2.5. This module copies the objects with references to these
(`objcopy --redefine-syms`), and the linker takes them as they are. Names without an older version
become functions of `src/portable/portable.cpp`. After the link, a reference that is too new ends
the build.

EXL_PORTABLE=1 asks for it, which `scripts/build_wheels.py` does. It needs GNU binutils, and x86-64
Linux with glibc. Objects themselves do not change: a portable build reuses those of another build.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

VARIABLE = "EXL_PORTABLE"
PLATFORM = "manylinux_2_28"
OLDEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
"""Newest versions of symbols that PLATFORM allows, by the library's prefix."""
SYSTEM_LIBRARIES = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1")
REPLACEMENTS = {
    "__libc_single_threaded": "exl_portable_single_threaded",
    "_ZSt28__throw_bad_array_new_lengthv": "exl_portable_bad_array_length",
    "_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv": "exl_portable_add_reference",
    "_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv": "exl_portable_release",
}
SOURCE = "src/portable/portable.cpp"
# Older systems have these functions in libraries of their own, which newer ones keep as shells.
LINKER_OPTIONS = (
    *("--push-state", "--no-as-needed", "-l:libpthread.so.0", "-l:librt.so.1", "-l:libdl.so.2"),
    "--pop-state",
)

_EXPORT = re.compile(r"(\(?)((?:GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+)\)?\s+(\S+)$")


def is_wanted(environ: Mapping[str, str]) -> bool:
    return environ.get(VARIABLE, "") not in ("", "0")


def older_versions(compiler: Sequence[str]) -> dict[str, str]:
    """`symbol@version` of each symbol whose newest version is too new, as this system has it."""
    default: dict[str, str] = {}
    kept: dict[str, list[str]] = {}
    for name in SYSTEM_LIBRARIES:
        path = _output([*compiler, f"-print-file-name={name}"]).strip()
        for line in _output(["objdump", "-T", path]).splitlines():
            match = _EXPORT.search(line)
            if match is None or "*UND*" in line:
                continue
            if not match[1]:
                default[match[3]] = match[2]
            if not is_too_new(match[2]):
                kept.setdefault(match[3], []).append(match[2])
    return {
        symbol: f"{symbol}@{max(kept[symbol], key=_version)}"
        for symbol, version in default.items()
        if is_too_new(version) and symbol in kept
    }


def lowered(files: Sequence[str], folder: Path, renames: Mapping[str, str]) -> list[str]:
    """Copies of objects and archives in `folder`, with references to older versions.

    A symbol that one of the files defines is not renamed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    defined = set(_output(["nm", "-j", "--defined-only", *files]).splitlines())
    wanted = {one: other for one, other in renames.items() if one not in defined}
    table = folder / "renames"
    table.write_text("".join(f"{one} {other}\n" for one, other in sorted(wanted.items())))
    copies = []
    for number, file in enumerate(files):
        copy = folder / f"{number}-{Path(file).name}"
        _output(["objcopy", f"--redefine-syms={table}", file, str(copy)])
        copies.append(str(copy))
    return copies


def check(library: Path) -> None:
    """Ends the build if `library` refers to a version that PLATFORM does not have."""
    found = too_new(_output(["objdump", "-T", str(library)]).splitlines())
    if found:
        raise SystemExit(
            f"exl-kernels: {library.name} needs {', '.join(found)}, which {PLATFORM} does not "
            f"have. Add them to REPLACEMENTS of csrc/build_portable.py, or unset {VARIABLE}."
        )


def too_new(lines: Iterable[str]) -> list[str]:
    """`symbol@version` of undefined symbols in the output of `objdump -T` that are too new."""
    matches = (_EXPORT.search(line) for line in lines if "*UND*" in line)
    return sorted(f"{one[3]}@{one[2]}" for one in matches if one and is_too_new(one[2]))


def is_too_new(version: str) -> bool:
    """Whether PLATFORM lacks a version such as GLIBC_2.34."""
    return _version(version) > OLDEST[version.partition("_")[0]]


def _version(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.partition("_")[2].split("."))


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except OSError as error:
        raise SystemExit(
            f"exl-kernels: {VARIABLE} needs GNU binutils, but {command[0]} cannot be run"
        ) from error
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"exl-kernels: {' '.join(command[:3])} failed: {error.stderr}") from error
    return done.stdout
