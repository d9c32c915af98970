"""`exl eval compare-layers`: hidden states of two models of one architecture, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from exl_cli import eval_options, options, output
from exl_cli.interrupt import exits_at_once
from exl_cli.model_options import ModelOptions
from exl_cli.option_groups import spread
from exl_core.cache.format import parse_cache_type

if TYPE_CHECKING:
    from exl_eval.result import Estimate, LayerComparison

EXAMPLES = (
    ("exl eval compare-layers f16 q4.gguf --text wiki.txt --windows 4", "which layers lose most"),
    ("exl eval compare-layers f16 exl2-4.0 --text wiki.txt --json", "machine-readable output"),
)

First = Annotated[
    str,
    typer.Argument(
        metavar="A", help="Reference model, usually the unquantized one.", show_default=False
    ),
]
Second = Annotated[
    str, typer.Argument(metavar="B", help="Model that is compared with A.", show_default=False)
]


@spread
def compare_layers(
    first: First,
    second: Second,
    *,
    source: eval_options.TextOptions,
    ctx: eval_options.StyleCtx = None,
    windows: eval_options.Windows = None,
    bos: eval_options.Bos = "default",
    json: options.Json = False,
    quiet: options.Quiet = False,
    changes: ModelOptions,
    device: options.Device = "auto",
    threads: options.Threads = None,
    cache_type: options.CacheType = "fp16",
    exact: options.Exact = False,
    batch_invariant: options.EvalBatchInvariant = True,
) -> None:
    """Compare the hidden states of two models of one architecture, layer by layer.

    Prints relative error (norm of the difference over norm of A's state) and cosine after each
    layer, as means over all tokens. 'propagated' is with each model's own states, so errors of
    earlier layers are included. 'local' is the error of the layer alone: B's layer reads A's
    states. Both models are in memory at once. --cache-type applies to B.
    """
    kv_format = parse_cache_type(cache_type)
    content = source.read()
    with exits_at_once():
        from exl_cli.render import windows_progress
        from exl_core.session.open import open_model
        from exl_eval.compare_layers import check_same_layers
        from exl_eval.compare_layers import compare_layers as compare
        from exl_eval.divergence import DivergenceOptions
    a, b = open_model(first), open_model(second)
    check_same_layers(a, b)
    loading = eval_options.Loading(
        device, threads, quiet, exact, batch_invariant, changes=changes, ctx=ctx
    )
    choices = DivergenceOptions("paper", ctx, None, windows, bos, source.special_text, kv_format)
    loaded = loading.load(a), loading.load(b)
    with windows_progress("relative error", is_quiet=quiet) as on_window:
        result = compare(*loaded, content, choices, on_window)
    if json:
        output.write_json(result.as_dict())
    else:
        _show(result)


def _show(result: LayerComparison) -> None:
    from exl_cli.render import columns_table, facts_table, print_answer

    table = columns_table("after", "error, propagated", "cosine", "error, local", "cosine")
    embedding = result.embedding
    shown = _shown(embedding.relative_error), f"{embedding.cosine.mean:.6f}"
    table.add_row("embedding", *shown, *shown)
    for one in result.layers:
        cells = []
        for found in (one.propagated, one.local):
            cells += [_shown(found.relative_error), f"{found.cosine.mean:.6f}"]
        table.add_row(f"layer {one.layer}", *cells)
    worst = max(result.layers, key=lambda one: one.local.relative_error.mean)
    facts = {
        "model": eval_options.model_text(result.model),
        "compared with": result.reference,
        "largest local error": f"layer {worst.layer}, {_shown(worst.local.relative_error)}",
        "tokens": f"{result.tokens} in {eval_options.windows_text(result.text)}",
        "time": f"{result.seconds:.1f} s",
    }
    print_answer(facts_table({**facts, **eval_options.text_facts(result.text)}), "", table)


def _shown(value: Estimate) -> str:
    return eval_options.with_error(value.mean, value.stderr, ".5f")
