"""A command on several hosts: what torchrun's processes do besides rank 0, and how all of them end.

Imports torch only where a model is opened.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from exl_cli.interrupt import exits_at_once
from exl_cli.output import write_error
from exl_core.errors import RankError, RequestError
from exl_core.settings import Launched, launched

if TYPE_CHECKING:
    from exl_cli.option_groups import RunningOptions
    from exl_core.session.load import LoadOptions
    from exl_core.session.open import ModelFiles
    from exl_core.session.runtime import Runtime

_LAST_ANSWERS_S = 0.5
"""Time between a failure and the end of the process, for answers to its clients."""


def join_job(running: RunningOptions, spec: str | None, *, trusts_network: bool) -> Launched | None:
    """The processes of torchrun, if it has started this one, rank 0, and others. Does not return in
    the others, which follow rank 0."""
    job = launched()
    if job is None or job.world_size == 1:
        if trusts_network:
            raise RequestError(
                "a single process does not connect to others",
                expected="--trust-network with torchrun",
            )
        return None
    job = replace(job, trusts_network=trusts_network)
    if job.rank > 0:
        _follow(job, running, spec)
    return job


def check_options(job: Launched | None, given: Mapping[str, object]) -> None:
    """RequestError if there are other processes, and one of these options, which need the whole
    model in this one."""
    for option, value in given.items():
        if job is not None and value:
            raise RequestError(
                "the processes of torchrun serve one model", got=f"torchrun and {option}"
            )


def _follow(job: Launched, running: RunningOptions, spec: str | None) -> NoReturn:
    """Does what rank 0 says, as another process of the job. It prints nothing, except on rank 1 if
    rank 0 ends without a word."""
    with exits_at_once():
        from exl_core.session.follower import follow_job
        from exl_core.session.open import open_model
        from exl_core.session.runtime import fitted_to, settle_ctx_size

    adapters = [folder for folder, _ in running.choices().loras]

    def options_of() -> tuple[ModelFiles, LoadOptions]:
        files = open_model(spec)
        ctx = settle_ctx_size(running.ctx_size, files.config.max_seq_len)
        return files, fitted_to(ctx, files.config, running.loading())

    def on_loss(what: str) -> None:
        if job.rank == 1:
            write_error(f"rank 0 of {job.world_size} {what}")

    try:
        follow_job(job, options_of, adapters, on_loss)
    except RankError as error:
        os._exit(error.exit_code)  # rank 0, or torchrun, says why


def end_with_job(job: Launched | None, runtime: Runtime) -> None:
    """Ends this process, rank 0, with one line if another process of the job fails."""
    if job is None:
        return
    from exl_core.parallel.leader import LeadingTransformer

    model = runtime.loaded.model
    assert isinstance(model, LeadingTransformer), "a job has several processes"
    group = model.followers

    def watch() -> None:
        failure = group.wait_for_end()
        if failure is not None:
            write_error(str(failure))
            time.sleep(_LAST_ANSWERS_S)
            os._exit(failure.exit_code)

    threading.Thread(target=watch, name="exl-job", daemon=True).start()
