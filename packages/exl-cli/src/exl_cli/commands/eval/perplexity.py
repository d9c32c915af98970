"""`exl eval perplexity`: perplexity with its standard error and all settings that affect it.

`exl_eval` computes the figures. This module reads the text and prints the result.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl_cli import eval_options, options, output
from exl_cli.interrupt import exits_at_once
from exl_cli.model_options import ModelOptions
from exl_cli.option_groups import spread
from exl_core.cache.format import parse_cache_type
from exl_core.parallel.plan import parse_ranks

if TYPE_CHECKING:
    from rich.table import Table

    from exl_cli.commands.eval.replicated import ReplicatedWindows
    from exl_eval.perplexity import PerplexityOptions, ScoredText
    from exl_eval.result import PerplexityPair, PerplexityResult
    from exl_eval.texts import Text

EXAMPLES = (
    ("exl eval perplexity --text wiki.txt --windows 20", "the default model, 20 windows"),
    (
        "exl eval perplexity gemma.gguf --text wiki.txt --bos each --no-special-text",
        "Gemma needs BOS, and has never seen its token <unk>",
    ),
    ("exl eval perplexity m.gguf --text wiki.txt --style llama.cpp", "same as llama-perplexity"),
    ("exl eval perplexity -m model --dataset wikitext", "test split of WikiText-2, from the hub"),
    ("exl eval perplexity -m model --text wiki.txt --cache-type q4", "with a quantized cache"),
    ("exl eval perplexity a --compare-to b --text wiki.txt", "two models, with paired errors"),
    (
        "exl eval perplexity big-model --text wiki.txt --held-memory 4GB",
        "a model that is larger than the memory",
    ),
    ("exl eval perplexity -m model --text wiki.txt --ray auto", "on the GPUs of a Ray cluster"),
    ("exl eval perplexity --text wiki.txt --by-position", "the effect of the context length"),
    ("exl eval perplexity -m model --text wiki.txt --json", "a record for 'exl eval compare'"),
)


Style = Annotated[
    str,
    typer.Option(
        "--style",
        metavar="NAME",
        help="How the text is cut and scored. paper: disjoint windows of 2048 tokens; exl3: the "
        "first 100 of those, without BOS; hf-stride: overlapping windows of the whole context; "
        "llama.cpp: second halves of windows of 512; per-document: every token of each row.",
    ),
]
Stride = Annotated[
    int | None,
    typer.Option(
        "--stride",
        metavar="N",
        min=1,
        help="Tokens between the starts of hf-stride windows. Default: 512.",
    ),
]
CompareTo = Annotated[
    str | None,
    typer.Option(
        "--compare-to",
        metavar="MODEL",
        help="Score a second model and print the ratio of the perplexities with its paired "
        "standard error. With --resume, its windows are stored in FILE.compare-to.",
    ),
]
TokenByToken = Annotated[
    bool,
    typer.Option(
        "--token-by-token",
        help="Run one pass per token, as in decoding, instead of passes of 512 tokens. Slower.",
    ),
]
ByPosition = Annotated[
    bool,
    typer.Option(
        "--by-position",
        help="Also print the negative log-likelihood by position within the window. --json always "
        "has it, as by_position.",
    ),
]


@spread
def perplexity(
    *,
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    source: eval_options.TextOptions,
    style: Style = "paper",
    ctx: eval_options.StyleCtx = None,
    stride: Stride = None,
    windows: eval_options.Windows = None,
    bos: eval_options.Bos = "default",
    compare_to: CompareTo = None,
    resume: eval_options.Resume = None,
    replicas: eval_options.Replicas = None,
    ray: eval_options.Ray = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    changes: ModelOptions,
    device: options.Device = "auto",
    threads: options.Threads = None,
    cache_type: options.CacheType = "fp16",
    token_by_token: TokenByToken = False,
    by_position: ByPosition = False,
    exact: options.Exact = False,
    held_memory: options.HeldMemory = None,
    tensor_parallel: options.TensorParallel = "1",
    batch_invariant: options.EvalBatchInvariant = True,
) -> None:
    """Measure perplexity of a text, with standard error, word perplexity and bits per byte.

    The five styles yield figures that differ by tens of percent. Compare figures only if style,
    text, tokenizer, context and BOS rule agree: they are printed with the result, and 'exl eval
    compare' checks them. Only bits per byte and word perplexity are comparable across tokenizers.
    Without --text and --dataset, a small public-domain text of the package is scored in windows of
    256 tokens; figures on it compare with nothing published. A figure that does not exist, such as
    the standard error of a single token, is null in the output of --json.
    """
    spec = options.pick_model(model, model_option)
    kv_format = parse_cache_type(cache_type)
    content, ctx = _text_of(source, ctx, is_quiet=quiet)
    with exits_at_once():
        from exl_eval.perplexity import PerplexityOptions, compare_scored
    choices = PerplexityOptions(
        *(style, ctx, stride, windows, bos, source.special_text, kv_format, token_by_token)
    )
    held_bytes = options.held_bytes(held_memory)
    loading = eval_options.Loading(
        *(device, threads, quiet, exact, batch_invariant, held_bytes, changes, ctx),
        tensor_parallel=parse_ranks(tensor_parallel),
    )
    where = eval_options.Where.of(replicas, ray)
    if compare_to is None:
        result = _scored(loading, spec, content, choices, file=resume, where=where).result
        _show(result, is_json=json, has_positions=by_position)
        return
    choices = _with_shared_windows(spec, compare_to, content, choices)
    first = _scored(loading, spec, content, choices, file=resume, where=where)
    beside = None if resume is None else resume.with_name(f"{resume.name}.compare-to")
    second = _scored(loading, compare_to, content, choices, file=beside, where=where)
    _show_pair(compare_scored(first, second), is_json=json, has_positions=by_position)


def _text_of(
    source: eval_options.TextOptions, ctx: int | None, *, is_quiet: bool
) -> tuple[Text, int | None]:
    """The text and the window size. Without a text: the packaged one, with a note on stderr."""
    if source.is_given:
        return source.read(), ctx
    from exl_cli.render import print_note
    from exl_eval.texts import PACKAGED_CTX, packaged_text

    text = packaged_text()
    if not is_quiet:
        print_note(
            "exl: note: no --text, so the packaged text is scored, SHA-256 "
            f"{text.sha256[:16]}. Figures on it compare with nothing published."
        )
    return text, ctx or PACKAGED_CTX


def _scored(
    loading: eval_options.Loading,
    spec: str | None,
    text: Text,
    choices: PerplexityOptions,
    *,
    file: Path | None,
    where: eval_options.Where | None,
) -> ScoredText:
    """Load the model, here or in replicas, score the text and free the model."""
    from exl_cli.render import windows_progress
    from exl_eval.perplexity import WindowScorer, gather

    with ExitStack() as stack:
        scores: WindowScorer | ReplicatedWindows
        if where is None:
            loaded = loading.load(spec)
            stack.callback(loaded.unload)
            scores = WindowScorer(loaded, text, choices)
        else:
            from exl_cli.commands.eval.replicated import WindowJob, replicated

            job = WindowJob(loading, spec, text, choices)
            num_windows = _num_windows(spec, text, choices)
            scores = stack.enter_context(replicated(job, where, num_windows))
        stack.enter_context(eval_options.report_kept_file(file))
        on_window = stack.enter_context(windows_progress("perplexity", is_quiet=loading.is_quiet))
        return gather(scores.facts, scores.score, on_window, resume=file)


def _num_windows(spec: str | None, text: Text, choices: PerplexityOptions) -> int:
    """Windows of the text for a model. Reads headers only."""
    from exl_core.session.open import open_model
    from exl_eval.styles import lay_out

    files = open_model(spec)
    longest = max(files.config.max_seq_len, choices.ctx or 0)
    return len(lay_out(text, files.tokenizer, choices, longest).windows)


def _with_shared_windows(
    spec: str | None, other: str, text: Text, choices: PerplexityOptions
) -> PerplexityOptions:
    """`choices` with a context size and a BOS rule under which both models get the same windows.

    Reads headers only, so that an impossible combination is reported before a model is loaded.
    """
    from dataclasses import replace

    from exl_core.session.open import open_model
    from exl_eval.divergence import lay_out_for_both

    first, second = open_model(spec), open_model(other)
    own = min(first.config.max_seq_len, second.config.max_seq_len)
    longest = max(own, choices.ctx or 0)
    facts = lay_out_for_both(first.tokenizer, second.tokenizer, text, choices, longest).facts
    return replace(choices, ctx=facts.ctx, bos=facts.bos)


def _show(result: PerplexityResult, *, is_json: bool, has_positions: bool) -> None:
    from exl_cli.render import facts_table, print_answer

    if is_json:
        output.write_json(result.as_dict())
    else:
        print_answer(facts_table({**_figures(result), **eval_options.text_facts(result.text)}))
        if has_positions:
            print_answer("", _positions(result))


def _show_pair(pair: PerplexityPair, *, is_json: bool, has_positions: bool) -> None:
    from math import exp

    from exl_cli.render import facts_table, print_answer

    if is_json:
        output.write_json(pair.as_dict())
        return
    with_error = eval_options.with_error
    ratio, stderr = exp(pair.ln_ppl_ratio), pair.ln_ppl_ratio_stderr
    error = None if stderr is None else ratio * stderr
    facts = {
        "ratio": f"{with_error(ratio, error, '.5f')}, first to second",
        "ln ratio": f"{with_error(pair.ln_ppl_ratio, stderr, '+.6f')}, paired by token",
    }
    print_answer(
        facts_table(facts),
        "",
        facts_table(_figures(pair.first)),
        "",
        facts_table({**_figures(pair.second), **eval_options.text_facts(pair.first.text)}),
    )
    if has_positions:
        print_answer("", _positions(pair.first, pair.second))


def _positions(*results: PerplexityResult) -> Table:
    """Figures by position within the window, one column for each model on the same tokens."""
    from exl_cli.render import columns_table

    names = ["nll"] if len(results) == 1 else ["nll, first", "nll, second"]
    table = columns_table("position", "tokens", *names)
    for buckets in zip(*(result.by_position for result in results), strict=True):
        one = buckets[0]
        places = f"{one.first}" if one.first == one.last else f"{one.first} to {one.last}"
        figures = [
            eval_options.with_error(bucket.nll, bucket.nll_stderr, ".4f") for bucket in buckets
        ]
        table.add_row(places, f"{one.tokens}", *figures)
    return table


def _figures(result: PerplexityResult) -> dict[str, str]:
    words, bits, with_error = result.word_perplexity, result.bits_per_byte, eval_options.with_error
    facts = {
        "perplexity": with_error(result.perplexity, result.stderr, ".4f"),
        "nll": f"{with_error(result.nll, result.nll_stderr, '.5f')} nats per token",
        "word perplexity": "none: too few words" if words is None else f"{words:.4f}",
        "bits per byte": "none: the scored tokens have no bytes"
        if bits is None
        else with_error(bits, result.bits_per_byte_stderr, ".5f"),
        "scored": f"{result.tokens} tokens, {result.words} words, {result.bytes} bytes in "
        f"{eval_options.windows_text(result.text)}",
        "model": eval_options.model_text(result.model),
    }
    if result.tokens_per_s is not None:
        facts["time"] = f"{result.seconds:.1f} s, {result.tokens_per_s:.0f} tokens/s"
    if result.kept_windows:
        facts["kept"] = f"{result.kept_windows} windows of an earlier run"
    return facts
