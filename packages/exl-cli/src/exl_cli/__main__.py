"""Where the installed command and `python -m exl_cli` start: Ctrl-C is quiet from here on."""

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
