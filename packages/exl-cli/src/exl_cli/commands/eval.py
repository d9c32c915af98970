"""`exl eval perplexity`: the figure, its error, and every choice it depends on.

What is computed lives in `exl_eval`; this module reads the text and shows the result.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl_cli import options, output, prompts
from exl_cli.interrupt import exits_at_once
from exl_core.cache.format import parse_cache_type

if TYPE_CHECKING:
    from exl_eval.result import PerplexityResult

EXAMPLES = (
    ("exl eval perplexity --text wiki.txt --windows 20", "the default model, 20 windows"),
    ("exl eval perplexity gemma.gguf --text wiki.txt --bos each", "Gemma needs BOS"),
    ("exl eval perplexity -m model --text wiki.txt --cache-type q4", "what a small cache costs"),
    ("exl eval perplexity -m model --text wiki.txt --json", "for a program to read"),
)


def perplexity(
    *,
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="UTF-8 text to score.")],
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    ctx: Annotated[
        int, typer.Option("--ctx", metavar="N", min=2, help="Tokens in a window.")
    ] = 2048,
    windows: Annotated[
        int | None,
        typer.Option(
            "--windows", metavar="N", min=1, help="Only the first N windows. Without it: all."
        ),
    ] = None,
    bos: Annotated[
        str,
        typer.Option(
            "--bos",
            metavar="RULE",
            help="none; once: before the whole text; each: before every window, in place of its "
            "last token; default: once for a tokenizer that adds BOS by itself, none otherwise.",
        ),
    ] = "default",
    json: options.Json = False,
    quiet: options.Quiet = False,
    device: options.Device = "auto",
    threads: options.Threads = None,
    cache_type: options.CacheType = "fp16",
    token_by_token: Annotated[
        bool,
        typer.Option(
            "--token-by-token",
            help="A pass for every token, as in decoding, in place of passes of 512: slower.",
        ),
    ] = False,
    exact: options.Exact = False,
) -> None:
    """Perplexity of a text, with its standard error.

    The text is tokenized once and cut into disjoint windows; what is left at the end is dropped. Of
    each window all tokens but the first are scored. Compare figures only where text, tokenizer,
    context and BOS rule agree: they are printed with it.
    """
    spec = options.pick_model(model, model_option)
    kv_format = parse_cache_type(cache_type)
    content = prompts.read_text_file(text)
    with exits_at_once():
        from exl_cli.load import load_quietly
        from exl_cli.render import windows_progress
        from exl_eval.perplexity import PerplexityOptions, measure_perplexity
    loaded = load_quietly(spec, device=device, threads=threads, is_quiet=quiet, exact=exact)
    choices = PerplexityOptions(
        ctx=ctx, windows=windows, bos=bos, kv_format=kv_format, token_by_token=token_by_token
    )
    with windows_progress(is_quiet=quiet) as on_window:
        result = measure_perplexity(loaded, content, choices, on_window)
    if json:
        output.write_json(result.as_dict())
    else:
        _show(result, text)


def _show(result: PerplexityResult, text: Path) -> None:
    from exl_cli.render import facts_table, format_bytes, print_answer

    table = facts_table(
        {
            "perplexity": f"{result.perplexity:.4f} ± {result.stderr:.4f}",
            "nll": f"{result.nll:.5f} ± {result.nll_stderr:.5f} nats a token",
            "scored": f"{result.tokens} tokens in {result.windows} windows of {result.ctx}",
            "style": f"{result.style}, BOS {result.bos}",
            "text": f"{text}, {format_bytes(result.text_bytes)}, {result.text_tokens} tokens",
            "text sha256": result.text_sha256,
            "tokenizer sha256": result.tokenizer_sha256,
            "model": f"{result.model}, {format_bytes(result.weights_bytes)} in memory, "
            f"{result.kv_format} cache" + ", exact" * result.exact,
            "time": f"{result.seconds:.1f} s, {result.tokens_per_s:.0f} tokens/s",
        }
    )
    print_answer(table)
