"""`exl inspect tokens`: the token ids of a text, with the text of each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from exl_cli import options, output, prompts
from exl_cli.interrupt import exits_at_once

if TYPE_CHECKING:
    from exl_core.tokenizer.base import Tokenizer

EXAMPLES = (
    ('exl inspect tokens -p "Hello world"', "tokens of a text"),
    ("exl inspect tokens model.gguf -f prompt.txt --json", "machine-readable output"),
    ('exl inspect tokens -p "<|im_start|>user" --parse-special', "special tokens by their names"),
)
SCHEMA_VERSION = 1


def inspect_tokens(
    *,
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", metavar="TEXT", help="The text. '-' reads it from stdin."),
    ] = None,
    file: Annotated[
        str | None, typer.Option("-f", "--file", metavar="FILE", help="Read the text from FILE.")
    ] = None,
    parse_special: Annotated[
        bool,
        typer.Option(
            "--parse-special", help="Names of special tokens in the text become those tokens."
        ),
    ] = False,
    json: options.Json = False,
) -> None:
    """Show the token ids of a text, and the text of each token.

    Reads the tokenizer only. BOS comes first if the tokenizer adds it by default. A token that is
    a part of a character has its bytes in hexadecimal.
    """
    spec = options.pick_model(model, model_option)
    text = prompts.read_prompt(prompt, file)
    with exits_at_once():
        from exl_core.session.open import open_model
    files = open_model(spec)
    tokenizer = files.tokenizer
    ids = tokenizer.encode(text, allow_special=parse_special, add_bos=None)
    if not json:
        _show(tokenizer, ids, len(text))
        return
    output.write_json(
        {
            "schema_version": SCHEMA_VERSION,
            "model": files.name,
            "token_ids": ids,
            "tokens": [shown(tokenizer, token_id) for token_id in ids],
        }
    )


def shown(tokenizer: Tokenizer, token_id: int) -> str:
    """Text of one token; the bytes, as `<F0 9F>`, if they are no text by themselves."""
    piece = tokenizer.token_bytes(token_id, skip_special=False)
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return f"<{piece.hex(' ').upper()}>"


def _show(tokenizer: Tokenizer, ids: list[int], num_characters: int) -> None:
    from rich.markup import escape

    from exl_cli.render import columns_table, print_answer

    table = columns_table("token", "text")
    for token_id in ids:
        table.add_row(str(token_id), escape(repr(shown(tokenizer, token_id))[1:-1]))
    each = f", {num_characters / len(ids):.2f} characters per token" if ids else ""
    print_answer(table, f"Tokens: {len(ids)}, characters: {num_characters}{each}.")
