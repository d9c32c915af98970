"""`python -m exl_cli` is `exl`."""

from exl_cli.main import run

run()
