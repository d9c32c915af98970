"""`exl eval divergence`: Kullback-Leibler divergence of a model from its reference model.

`exl_eval` computes the figures. This module decides which model is loaded when.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl_cli import eval_options, options, output
from exl_cli.interrupt import exits_at_once
from exl_cli.model_options import ModelOptions
from exl_cli.option_groups import spread
from exl_core.cache.format import parse_cache_type
from exl_core.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from exl_core.cache.format import KVFormat
    from exl_core.session.open import ModelFiles
    from exl_eval.divergence import ComparisonFacts, Reference
    from exl_eval.result import DivergenceResult
    from exl_eval.styles import Layout

EXAMPLES = (
    ("exl eval divergence q4.gguf --reference f16 --text wiki.txt --windows 20", "20 windows"),
    ("exl eval divergence a --reference f16 --text wiki.txt --json", "machine-readable output"),
    (
        "exl eval divergence a --reference f16 --text wiki.txt --cache-reference f16.ref",
        "one model in memory at a time; the reference runs once",
    ),
)


Candidate = Annotated[
    str, typer.Argument(metavar="CANDIDATE", help=options.MODEL_HELP, show_default=False)
]
ReferenceModel = Annotated[
    str,
    typer.Option(
        "--reference", metavar="MODEL", help="Reference model, usually the unquantized one."
    ),
]
CacheReference = Annotated[
    Path | None,
    typer.Option(
        "--cache-reference",
        metavar="FILE",
        help="Store the reference's predictions in FILE, 2.6 kB per token, and load one model at a "
        "time. If FILE has them already, the reference is not loaded.",
    ),
]


@spread
def divergence(
    candidate: Candidate,
    *,
    reference: ReferenceModel,
    source: eval_options.TextOptions,
    ctx: eval_options.StyleCtx = None,
    windows: eval_options.Windows = None,
    bos: eval_options.Bos = "default",
    cache_reference: CacheReference = None,
    resume: eval_options.Resume = None,
    replicas: eval_options.Replicas = None,
    ray: eval_options.Ray = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    changes: ModelOptions,
    device: options.Device = "auto",
    threads: options.Threads = None,
    cache_type: options.CacheType = "fp16",
    exact: options.Exact = False,
    batch_invariant: options.EvalBatchInvariant = True,
) -> None:
    """Measure the Kullback-Leibler divergence of a model from its reference.

    Prints KL(reference || candidate) in nats per token, the share of positions where both have the
    same most likely token, the change in the true token's probability, and the ratio of the
    perplexities, all on the same windows. Both models must have the same tokenizer. --cache-type
    applies to the candidate. A figure that does not exist, such as the standard error of a single
    token, is null in the output of --json.
    """
    kv_format = parse_cache_type(cache_type)
    where = _where(replicas, ray, cache_reference)
    content = source.read()
    with exits_at_once():
        from exl_core.session.open import open_model
        from exl_eval.divergence import DivergenceOptions, lay_out_for_both
    theirs, ours = open_model(reference), open_model(candidate)
    choices = DivergenceOptions("paper", ctx, None, windows, bos, source.special_text, kv_format)
    longest = max(min(theirs.config.max_seq_len, ours.config.max_seq_len), ctx or 0)
    layout = lay_out_for_both(theirs.tokenizer, ours.tokenizer, content, choices, longest)
    run = _Run(
        eval_options.Loading(
            device, threads, quiet, exact, batch_invariant, changes=changes, ctx=ctx
        ),
        layout,
        theirs,
        ours,
        kv_format,
        resume,
    )
    if where is not None:
        result = run.measure_by_replicas(where, reference, candidate)
    elif cache_reference is None:
        result = run.measure_both()
    else:
        result = run.measure_by_file(cache_reference)
    if json:
        output.write_json(result.as_dict())
    else:
        _show(result)


def _where(
    replicas: int | None, ray: str | None, cache_reference: Path | None
) -> eval_options.Where | None:
    """Number and place of the replicas; None for one process."""
    where = eval_options.Where.of(replicas, ray)
    if where is not None and cache_reference is not None:
        raise RequestError(
            "a replica has both models at the same time",
            expected="--cache-reference, or --replicas and --ray",
            got="both",
        )
    return where


@dataclass(frozen=True, slots=True)
class _Run:
    """A reference model, a candidate model and the text windows that both score."""

    loading: eval_options.Loading
    layout: Layout
    reference: ModelFiles
    candidate: ModelFiles
    kv_format: KVFormat
    resume: Path | None

    def measure_both(self) -> DivergenceResult:
        """Measure with both models in memory."""
        from exl_eval.divergence import RunningReference

        loaded = self.loading.load(self.reference)
        reference = RunningReference(loaded, self.layout, self.candidate.config.vocab_size)
        return self.measure(reference)

    def measure(self, reference: Reference) -> DivergenceResult:
        from exl_eval.divergence import WindowComparer

        loaded = self.loading.load(self.candidate)
        comparer = WindowComparer(reference, loaded, self.layout, self.kv_format)
        return self._gathered(comparer.facts, comparer.compare)

    def measure_by_replicas(
        self, where: eval_options.Where, reference: str, candidate: str
    ) -> DivergenceResult:
        """Measure with processes that load both models, by these names."""
        from exl_cli.commands.eval.replicated import ComparisonJob, replicated

        job = ComparisonJob(self.loading, candidate, reference, self.layout, self.kv_format)
        with replicated(job, where, len(self.layout.windows)) as windows:
            return self._gathered(windows.facts, windows.find)

    def _gathered(
        self, facts: ComparisonFacts, find: Callable[[int], Mapping[str, Tensor]]
    ) -> DivergenceResult:
        from exl_cli.render import windows_progress
        from exl_eval.divergence import gather_positions

        with (
            eval_options.report_kept_file(self.resume),
            windows_progress("divergence", is_quiet=self.loading.is_quiet) as on_window,
        ):
            return gather_positions(self.layout, facts, find, on_window, resume=self.resume)

    def measure_by_file(self, path: Path) -> DivergenceResult:
        """Measure with the reference's predictions in a file.

        The reference is loaded only to compute windows that the file lacks, and freed before the
        candidate is loaded.
        """
        from exl_cli.render import windows_progress
        from exl_eval.reference_file import KeptReference, keep_reference, reference_header
        from exl_eval.result import ReferenceFacts
        from exl_eval.window_file import WindowFile

        layout, vocab_size = self.layout, self.reference.tokenizer.vocab_size
        facts = ReferenceFacts(self.reference.name, self.loading.exact)
        header = reference_header(layout, facts, vocab_size, self.reference.stored_bytes)
        with WindowFile(path, header) as file:
            if len(file) < len(layout.windows):
                loaded = self.loading.load(self.reference)
                with (
                    eval_options.report_kept_file(path),
                    windows_progress(
                        "reference's perplexity", is_quiet=self.loading.is_quiet
                    ) as on_window,
                ):
                    keep_reference(loaded, layout, vocab_size, file, on_window)
                del loaded
            return self.measure(KeptReference(file, layout, facts, vocab_size))


def _show(result: DivergenceResult) -> None:
    from exl_cli.render import columns_table, facts_table, print_answer

    kld, delta_p, reference = result.kld, result.delta_p, result.reference
    bands = columns_table("reference's confidence", "tokens", "KL", "same top")
    for band in result.by_confidence:
        shown = ("", "") if band.kld is None else (f"{band.kld:.6f}", f"{band.same_top:.2%}")
        bands.add_row(f"{band.above:g} to {band.up_to:g}", str(band.tokens), *shown)
    with_error = eval_options.with_error
    facts = {
        "KL": f"{with_error(result.mean_kld, kld['stderr'], '.6f')} nats, "
        "KL(reference || candidate)",
        "percentiles": "  ".join(
            f"{name} {kld[name]:.5f}" for name in ("median", "p90", "p95", "p99", "p99.9", "max")
        ),
        "same top": f"{result.same_top:.3%} ± {result.same_top_stderr:.3%}",
        "delta p": f"mean {delta_p['mean']:+.4%}, RMS {delta_p['rms']:.3%}; "
        + "  ".join(f"{name} {delta_p[name]:+.2%}" for name in ("p1", "p5", "p95", "p99")),
        "ln ratio": f"{with_error(result.ln_ppl_ratio, result.ln_ppl_ratio_stderr, '+.6f')}, "
        f"paired: perplexity {result.perplexity:.4f} to {result.reference_perplexity:.4f}",
        "scored": f"{result.tokens} tokens in {eval_options.windows_text(result.text)}",
        "candidate": eval_options.model_text(result.model),
        "reference": reference.reference + ", exact" * reference.reference_exact,
    }
    if reference.cache_stderr is not None:
        facts["from a file"] = f"which adds an error of {reference.cache_stderr:.2g} to the mean KL"
    if result.kept_windows:
        facts["kept"] = f"{result.kept_windows} windows of an earlier run"
    facts["time"] = f"{result.seconds:.1f} s"
    print_answer(facts_table({**facts, **eval_options.text_facts(result.text)}), "", bands)
