"""`exl eval acceptance`: acceptance and speed-up of speculative decoding, compared with theory.

`exl_eval/acceptance.py` measures. This module opens the models and prints the figures.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from exl_cli import engine_options, eval_options, options, output
from exl_cli.interrupt import exits_at_once
from exl_cli.model_options import ModelOptions
from exl_cli.option_groups import spread
from exl_core.errors import RequestError

if TYPE_CHECKING:
    from rich.table import Table

    from exl_eval.acceptance_result import AcceptanceResult, Estimate, SamplerFigures

EXAMPLES = (
    ("exl eval acceptance --ngram", "n-gram drafts, with the default model"),
    ("exl eval acceptance -m model --draft-model small --draft-tokens 6", "a draft model"),
    ("exl eval acceptance -m model --ngram -n 128 --json", "machine-readable output"),
)

Replies = Annotated[
    int,
    typer.Option("-n", "--max-tokens", metavar="N", min=2, help="Maximum tokens per reply."),
]
Prompts = Annotated[
    int,
    typer.Option("--prompts", metavar="N", min=1, max=4, help="Prompts per category."),
]


@spread
def acceptance(
    *,
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    draft_model: engine_options.DraftModel = None,
    ngram: engine_options.Ngram = False,
    mtp: engine_options.Mtp = False,
    draft_tokens: engine_options.DraftTokens = None,
    max_tokens: Replies = 64,
    prompts: Prompts = 4,
    seed: eval_options.Seed = 1,
    json: options.Json = False,
    quiet: options.Quiet = False,
    changes: ModelOptions,
    device: options.Device = "auto",
    threads: options.Threads = None,
    exact: options.Exact = False,
    batch_invariant: options.EvalBatchInvariant = True,
    cache_type: options.CacheType = "fp16",
) -> None:
    """Measure how many draft tokens are accepted, by kind of text, and the resulting speed-up.

    Built-in prompts of four categories are answered greedily and at temperature 1. Counts: rounds N
    (forward passes of the model), drafted tokens D, accepted tokens A, rounds that ended in a
    rejection R, emitted tokens E. alpha is the exact acceptance probability from both
    distributions; A/(A+R) estimates it. Speed-ups are of decoding. 'measured' uses drafts of the
    full length; 'as generated' drafts as generation does, with shorter drafts or none where they
    do not pay. 'best' is the draft length with the highest predicted speed-up.
    """
    spec = options.pick_model(model, model_option)
    choices = engine_options.choices_of(
        cache_type, None, draft_model, draft_tokens, ngram=ngram, mtp=mtp
    )
    if not choices.has_drafts:
        raise RequestError(
            "no drafter is selected", expected="--mtp, --ngram or --draft-model MODEL", got="none"
        )
    with exits_at_once():
        from exl_cli.load import load_with_draft
        from exl_cli.render import repeats_progress
        from exl_eval.acceptance import AcceptanceOptions, measure_acceptance
    loaded, draft = load_with_draft(
        spec,
        draft_model,
        device=device,
        threads=threads,
        is_quiet=quiet,
        exact=exact,
        batch_invariant=batch_invariant,
        options=replace(changes.load_options(), mtp=mtp, has_drafts=True),
    )
    measured = AcceptanceOptions(
        choices.longest_draft, max_tokens, prompts, seed, choices.kv_format
    )
    with repeats_progress(is_quiet=quiet) as on_reply:
        result = measure_acceptance(loaded, draft, measured, on_reply)
    if json:
        output.write_json(result.as_dict())
    else:
        _show(result)


def _show(result: AcceptanceResult) -> None:
    from exl_cli.render import facts_table, print_answer

    drafter = (
        result.draft_model or {"ngram": "n-grams", "mtp": "the model's own layer"}[result.kind]
    )
    facts = facts_table(
        {
            "model": eval_options.running_text(result),
            "drafts": f"{drafter}, at most {result.draft_tokens} tokens",
            "prompts": f"{result.prompts} of each category, replies of at most "
            f"{result.max_tokens} tokens, seed {result.seed}",
        }
    )
    print_answer(facts)
    for sampler in result.samplers:
        print_answer("", *_tables(sampler))


def _tables(sampler: SamplerFigures) -> tuple[str, Table, Table]:
    from exl_cli.render import columns_table

    counts = columns_table(
        *("", "N", "D", "A", "R", "E", "A/D", "tau", "A/N", "E/N(g+1)", "alpha", "A/(A+R)"),
        "by position",
    )
    speeds = columns_table(
        *("", "theory", "predicted", "measured", "as generated", "break-even tau", "best"),
    )
    groups = {**sampler.categories, "all": sampler.overall}
    for name, group in groups.items():
        stats = group.stats
        counts.add_row(
            name,
            *(f"{n}" for n in (stats.rounds, stats.drafted, stats.accepted)),
            *(f"{n}" for n in (stats.rejected, stats.emitted)),
            _number(stats.utilization),
            _estimate(group.tau),
            _number(stats.mean_accepted),
            _number(group.system_efficiency),
            _estimate(group.alpha),
            _estimate(group.alpha_estimate),
            " ".join(f"{rate:.2f}" for rate in stats.position_rates),
        )
        rates = group.speeds.as_dict()
        best = f"{group.best_length} ({group.best_speed_up:.2f})" if group.best_length else "none"
        speeds.add_row(
            name,
            *(_number(figure) for figure in (group.theory_speed_up, group.predicted_speed_up)),
            _number(rates["measured_speed_up"]),
            _number(rates["adaptive_speed_up"]),
            _number(group.break_even_tau),
            best,
        )
    costs = sampler.costs
    longest = len(costs.pass_s)
    title = (
        f"{sampler.name}: a plain pass {_ms(costs.plain_s)}, of {longest} rows "
        f"{_ms(costs.pass_s[-1])}, a drafted token {_ms(costs.draft_s)}"
    )
    return title, counts, speeds


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _estimate(value: Estimate) -> str:
    if value.mean is None:
        return "-"
    return f"{value.mean:.2f}" + ("" if value.stderr is None else f" ±{value.stderr:.2f}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
