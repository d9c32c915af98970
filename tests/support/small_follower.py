"""Process of a rank on the CPU whose address space a test limits, and the time of its failure.

The rank named by `EXL_TEST_SPACE` ("RANK:BYTES:FILE") may map BYTES more than its imports have. It
writes the monotonic time, in seconds, to FILE before it reports its failure.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

from exl_core.parallel.follower import Reports
from exl_core.session.follower import main

MODULE = "support.small_follower"
SPACE = "EXL_TEST_SPACE"


def limit_space(limit_bytes: int) -> None:
    import exl_core.parallel.peers
    import exl_core.session.hosts  # noqa: F401 - what a follower imports

    text = Path("/proc/self/status").read_text(encoding="ascii")
    used = int(text.partition("VmSize:")[2].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (used + limit_bytes,) * 2)


def stamp_failure(file: Path) -> None:
    report = Reports.failed

    def failed(self: Reports, line: str, exit_code: int) -> None:
        file.write_text(str(time.monotonic()), encoding="ascii")
        report(self, line, exit_code)

    Reports.failed = failed  # type: ignore[method-assign]


if __name__ == "__main__":
    limited, size, stamp = os.environ[SPACE].split(":", 2)
    if sys.argv[3] == limited:
        stamp_failure(Path(stamp))
        limit_space(int(size))
    main(sys.argv[1:])
