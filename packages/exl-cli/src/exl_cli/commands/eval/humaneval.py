"""`exl eval humaneval`: functions that the model writes, checked by running their tests."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl_cli import eval_options, options, output
from exl_cli.interrupt import exits_at_once
from exl_cli.model_options import ModelOptions
from exl_cli.option_groups import spread
from exl_core.errors import RequestError, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exl_cli.commands.eval.replicated import CompletionJob
    from exl_cli.replicas import Worker
    from exl_eval.humaneval import HumanEvalResult

EXAMPLES = (
    ("exl eval humaneval HumanEval.jsonl -m model --allow-code-execution", "pass@1, greedy"),
    (
        "exl eval humaneval HumanEval.jsonl -m model --allow-code-execution --samples 5 --temp 0.2",
        "pass@1 from five completions of each problem",
    ),
)

File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="Problems in HumanEval's schema, one JSON object per line: task_id, prompt, "
        "entry_point, test.",
        show_default=False,
    ),
]
Consent = Annotated[
    bool,
    typer.Option(
        "--allow-code-execution",
        help="Run the code that the model writes. Without it, the command refuses to start.",
    ),
]
Samples = Annotated[
    int, typer.Option("--samples", metavar="N", min=1, max=200, help="Completions per problem.")
]
Temp = Annotated[float, typer.Option("--temp", metavar="T", min=0.0, help="0: likeliest tokens.")]
Limit = Annotated[
    int | None, typer.Option("--limit", metavar="N", min=1, help="Only the first N problems.")
]
TimeLimit = Annotated[
    float,
    typer.Option("--time-limit", metavar="S", min=0.5, max=600, help="Seconds of each program."),
]
Memory = Annotated[str, typer.Option("--memory", metavar="SIZE", help="Memory of each program.")]
Replicas = Annotated[
    int | None,
    typer.Option(
        "--replicas",
        metavar="N",
        min=1,
        max=1024,
        help="Complete the problems with N processes that have the whole model each: on the GPUs "
        "of this machine, or with shares of its CPUs. On the CPU the completions stay the same.",
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="FILE",
        help="Save the completions of each finished problem to FILE, and skip problems that FILE "
        "already has. All programs are run again.",
    ),
]
MaxTokens = Annotated[
    int, typer.Option("-n", "--max-tokens", metavar="N", min=1, help="Tokens of a completion.")
]


@spread
def humaneval(
    file: File,
    *,
    model: options.ModelOption = None,
    allow_code_execution: Consent = False,
    samples: Samples = 1,
    temp: Temp = 0.0,
    max_tokens: MaxTokens = 512,
    limit: Limit = None,
    time_limit: TimeLimit = 10.0,
    memory: Memory = "1GB",
    seed: eval_options.Seed = 1234,
    replicas: Replicas = None,
    ray: eval_options.Ray = None,
    resume: Resume = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    changes: ModelOptions,
    device: options.Device = "auto",
    threads: options.Threads = None,
    batch_invariant: options.EvalBatchInvariant = True,
    exact: options.Exact = False,
) -> None:
    """Measure pass@1 on HumanEval: the model completes functions, and their tests are run.

    Runs code that the model writes, in a child process with limits on time, memory and files. Where
    the kernel allows it, the code has no network and sees no files but a temporary folder and the
    interpreter's. A warning says what the kernel does not allow: run models that you do not trust
    in a container then.
    """
    if not allow_code_execution:
        raise RequestError(
            "HumanEval runs code that the model writes",
            expected="--allow-code-execution",
            next_step="Add it if you agree; --help says how the code is confined.",
        )
    memory_bytes = options.parse_size(memory, "--memory", example="1GB")
    with exits_at_once():
        from exl_cli.commands.eval.replicated import CompletionJob
        from exl_eval.humaneval import HumanEvalOptions, read_problems
        from exl_eval.sandbox import Limits
    problems = read_problems(file, limit)
    loading = eval_options.Loading(device, threads, quiet, exact, batch_invariant, changes=changes)
    spec = options.pick_model(None, model)
    choices = HumanEvalOptions(
        samples=samples,
        temperature=temp,
        max_tokens=max_tokens,
        seed=seed,
        limits=Limits(time_s=time_limit, memory_bytes=memory_bytes),
    )
    job = CompletionJob(loading, spec, tuple(problems), choices)
    result = _result(job, eval_options.Where.of(replicas, ray), resume)
    _warn(result)
    if json:
        output.write_json(result.as_dict())
    else:
        _show(result)


def _result(
    job: CompletionJob, where: eval_options.Where | None, resume: Path | None
) -> HumanEvalResult:
    """Completions by this process or by replicas, in parts if they are kept, checked here."""
    from exl_cli.commands.eval.replicated import Completions
    from exl_cli.replicas import opened
    from exl_eval.humaneval import check_completions, run_humaneval
    from exl_eval.window_file import opened as opened_file

    if where is None and resume is None:
        return run_humaneval(job.loading.load(job.spec), list(job.problems), job.choices)
    units, is_quiet = -(-len(job.problems) // job.unit), job.loading.is_quiet
    with ExitStack() as stack:
        workers: Sequence[Worker]
        if where is None:
            workers = [job.worker(is_quiet=is_quiet)]
        else:
            workers = stack.enter_context(opened(job, *where, units=units, is_quiet=is_quiet))
        found = Completions(job, workers)
        stack.enter_context(eval_options.report_kept_file(resume))
        file = stack.enter_context(opened_file(resume, found.header()))
        return check_completions(found.model.model, found.in_order(file), job.choices)


def _warn(result: HumanEvalResult) -> None:
    missing = []
    if not result.is_isolated:
        missing.append("the kernel gave no namespaces, so the programs could use the network")
    if not result.is_confined:
        missing.append("the kernel has no Landlock, so the programs could use your files")
    for what in missing if sys.stderr is not None else ():
        print(f"exl: warning: {what}", file=sys.stderr, flush=True)


def _show(result: HumanEvalResult) -> None:
    from exl_cli.render import facts_table, print_answer

    print_answer(
        facts_table(
            {
                "model": printable(result.model),
                "pass@1": f"{result.pass_at_1:.4f} ± {result.stderr:.4f}",
                "problems": f"{result.problems}, {result.samples} completions of each, "
                f"temperature {result.temperature:g}",
                "programs": ", ".join(f"{n} {name}" for name, n in result.verdicts.items()),
                "network": "none" if result.is_isolated else "not confined",
                "files": "a temporary folder" if result.is_confined else "not confined",
            }
        )
    )
