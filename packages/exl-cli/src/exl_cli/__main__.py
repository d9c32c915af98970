"""Entry point of the `exl` command and of `python -m exl_cli`. Makes Ctrl-C exit quietly."""

from __future__ import annotations

import sys
from typing import NoReturn

from exl_cli.interrupt import exits_at_once


def run() -> NoReturn:
    with exits_at_once():
        from exl_cli.main import main
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
