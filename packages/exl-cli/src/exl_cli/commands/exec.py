"""`exl exec`: run a program that was written for exllamav2."""

from __future__ import annotations

from typing import Annotated

import typer

from exl_cli.old_programs import replace_process

EXAMPLES = (
    ("exl exec examples/inference.py", "run a script"),
    (
        "exl exec --model /mnt/models/llama=smollm2 chat.py -m /mnt/models/llama",
        "use another model for a path that the script names",
    ),
    ("exl exec -m my_package.server --port 5000", "run a module"),
)


def exec_program(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OPTIONS] (SCRIPT | -m MODULE) [ARGS]...",
            help="The program and its arguments, after the options of exl.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run a Python program that was written for exllamav2, unchanged.

    In the program, and in processes that it starts, `import exllamav2` finds exl. Nothing else on
    the machine changes. Options, before the program: --model OLD=NEW replaces a model path in the
    program by another path, name or hub id ('*' replaces every path). --device cpu|cuda|cuda:N
    selects the device, --threads N the number of CPU threads. --cuda-noop makes calls of
    torch.cuda do nothing on a machine without a GPU. --strict makes an error of each setting that
    has no effect.
    """
    replace_process("exl_exllamav2", arguments or [])
