"""`exl eval tasks`: task accuracy through lm-evaluation-harness, in this process.

`exl_eval/harness.py` adapts the model. This module reports a missing harness and prints the
metrics.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl_cli import eval_options, options, output
from exl_cli.interrupt import exits_at_once
from exl_cli.model_options import ModelOptions
from exl_cli.option_groups import spread
from exl_core.cache.format import parse_cache_type
from exl_core.errors import ExlError, RequestError

if TYPE_CHECKING:
    from exl_eval.harness import TasksResult

EXAMPLES = (
    ("exl eval tasks --tasks arc_easy,piqa -m model --limit 200", "two tasks, 200 documents each"),
    ("exl eval tasks --tasks mine --include my_tasks", "your own task file, without network"),
    ("exl eval tasks --tasks gsm8k -m model --chat --json", "with the chat template, as JSON"),
)
INSTALL = "pip install 'lm-eval>=0.4.13'"

Tasks = Annotated[
    str, typer.Option("--tasks", metavar="NAME[,NAME...]", help="lm-eval tasks or task groups.")
]
Include = Annotated[
    Path | None,
    typer.Option("--include", metavar="DIR", help="Directory with your own YAML task files."),
]
Fewshot = Annotated[
    int | None,
    typer.Option(
        "--fewshot",
        metavar="N",
        min=0,
        help="Examples in the prompt. Default: the task's own setting.",
    ),
]
Limit = Annotated[
    int | None,
    typer.Option("--limit", metavar="N", min=1, help="Only the first N documents of each task."),
]
Replicas = Annotated[
    int | None,
    typer.Option(
        "--replicas",
        metavar="N",
        min=1,
        max=1024,
        help="Score and generate with N processes that have the whole model each: on the GPUs of "
        "this machine, or with shares of its CPUs. On the CPU the figures stay the same.",
    ),
]
Chat = Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")]


@spread
def tasks(
    *,
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    names: Tasks,
    include: Include = None,
    fewshot: Fewshot = None,
    limit: Limit = None,
    chat: Chat = False,
    seed: eval_options.Seed = 1234,
    replicas: Replicas = None,
    ray: eval_options.Ray = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    changes: ModelOptions,
    device: options.Device = "auto",
    threads: options.Threads = None,
    exact: options.Exact = False,
    batch_invariant: options.EvalBatchInvariant = True,
    cache_type: options.CacheType = "fp16",
) -> None:
    """Measure task accuracy with lm-evaluation-harness (install it with pip install lm-eval).

    The harness runs in this process and provides tasks, prompts, metrics and standard errors. Most
    tasks download their data from the hub once. Compare figures only if the versions of the harness
    and of the task, the number of examples and the chat template agree.
    """
    spec = options.pick_model(model, model_option)
    kv_format = parse_cache_type(cache_type)
    listed = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if not listed:
        raise RequestError("no task is named", expected="--tasks NAME[,NAME...]", got=repr(names))
    if include is not None and not include.is_dir():
        raise RequestError("is no directory", where=include, next_step="Check --include.")
    with exits_at_once():
        try:
            from exl_eval.harness import TaskOptions, run_tasks
        except ModuleNotFoundError as error:
            raise ExlError(
                "lm-eval is not installed",
                got=f"no module {error.name!r}",
                next_step=f"Install it with: {INSTALL}",
            ) from error
        from exl_cli.render import is_watched
    loading = eval_options.Loading(device, threads, quiet, exact, batch_invariant, changes=changes)
    choices = TaskOptions(
        listed, fewshot, limit, include, chat=chat, kv_format=kv_format, seed=seed
    )
    where = eval_options.Where.of(replicas, ray)
    if where is None:
        result = run_tasks(loading.load(spec), choices, is_watched=is_watched(is_quiet=quiet))
    else:
        from exl_cli.commands.eval.replicated_tasks import TaskJob, run_by_replicas

        job = TaskJob(loading, spec, choices)
        result = run_by_replicas(job, where, is_watched=is_watched(is_quiet=quiet))
    if json:
        output.write_json(result.as_dict())
    else:
        _show(result)


def _show(result: TasksResult) -> None:
    from exl_cli.render import columns_table, facts_table, from_file, print_answer

    facts = facts_table(
        {
            "model": f"{result.model}, {result.kv_format} cache{', exact' * result.exact}"
            f"{', chat template' * result.chat}",
            "harness": f"lm-eval {result.lm_eval_version}, seed {result.seed}",
        }
    )
    table = columns_table("task", "version", "examples", "documents", "metric", "value", "stderr")
    for task in result.tasks:
        for key, value in task.metrics.items():
            metric, _, kind = key.partition(",")
            if metric.endswith("_stderr"):
                continue
            stderr = task.metrics.get(f"{metric}_stderr,{kind}")
            table.add_row(
                from_file(task.name),
                from_file(task.version),
                f"{task.fewshot}",
                f"{task.documents}",
                from_file(metric if kind == "none" else f"{metric} ({kind})"),
                "-" if value is None else f"{value:.4f}",
                "-" if stderr is None else f"{stderr:.4f}",
            )
    print_answer(facts, "", table)
