"""Entry point of the `exl` command and of `python -m exl_cli`. Makes Ctrl-C exit quietly."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

from exl_cli.interrupt import exits_at_once


def run() -> NoReturn:
    with exits_at_once():
        from exl_cli.main import CODE_INTERRUPTED, main
    try:
        code = main(sys.argv[1:])
        # The command is complete. Ctrl-C would only replace its exit code while Python exits.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        code = CODE_INTERRUPTED
    # CPython ends by SIGINT instead of with the code if an interrupt has once left a string that
    # `exec` ran, as it may while a dataclass is made. The next string clears that.
    exec("")
    sys.exit(code)


if __name__ == "__main__":
    run()
