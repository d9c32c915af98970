"""Reading untrusted files: memory, limits, and files that do not say their size."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from exl_core.errors import ConfigError
from exl_core.files import read_bytes

LIMIT = 1 << 28


@pytest.mark.parametrize("size", [0, 1, 300, 1 << 20])
def test_reading_takes_no_more_memory_than_twice_the_contents(tmp_path: Path, size: int) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * size)
    tracemalloc.start()
    data = read_bytes(file, ConfigError, LIMIT)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert data == b"x" * size
    assert peak <= 2 * size + (256 << 10)


def test_files_that_say_that_they_are_empty_are_read_up_to_the_limit() -> None:
    file = Path("/proc/self/status")
    data = read_bytes(file, ConfigError, LIMIT)
    assert data.startswith(b"Name:")
    assert data.endswith(b"\n")
    with pytest.raises(ConfigError, match="too large for what it is"):
        read_bytes(file, ConfigError, 100)


@pytest.mark.parametrize("size", [99, 100, 101])
def test_the_limit_is_exact(tmp_path: Path, size: int) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * size)
    if size > 100:
        with pytest.raises(ConfigError, match=r"at most 100 bytes, got 101"):
            read_bytes(file, ConfigError, 100)
    else:
        assert len(read_bytes(file, ConfigError, 100)) == size
