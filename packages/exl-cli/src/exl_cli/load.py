"""Loads models with a progress bar, and explains prompts that are too long in the options' words.

Imports torch; a command imports this module when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from exl_cli.model_options import print_warnings
from exl_cli.render import bytes_progress
from exl_core.errors import ContextLengthError, RequestError
from exl_core.session.hosts import load_on_hosts
from exl_core.session.load import LoadedModel, LoadOptions, load_model, resolve_device
from exl_core.session.open import ModelFiles, open_model
from exl_core.session.runtime import (
    Loader,
    Runtime,
    context_warning,
    fitted_to,
    load_draft,
    open_draft,
)


def load_quietly(
    model: ModelFiles | str | Path | None,
    *,
    device: str = "auto",
    threads: int | None,
    is_quiet: bool,
    exact: bool,
    batch_invariant: bool = False,
    options: LoadOptions | None = None,
    ctx: int | None = None,
) -> LoadedModel:
    """Load with a progress bar on a terminal. The keyword arguments replace fields of `options`.

    `batch_invariant` applies on the CPU. A context `ctx` beyond the model's own causes a warning.
    """
    chosen = replace(
        options or LoadOptions(),
        device=device,
        threads=threads,
        exact=exact,
        batch_invariant=batch_invariant and resolve_device(device, is_exact=exact) == "cpu",
    )
    if ctx is not None:
        model = model if isinstance(model, ModelFiles) else open_model(model)
        chosen = longer_context(ctx, model, chosen)
    return loader(is_quiet=is_quiet)(model, chosen)


def longer_context(ctx: int, files: ModelFiles, options: LoadOptions) -> LoadOptions:
    """Options for a context of `ctx` tokens, with a warning if it exceeds the model's own."""
    warning = context_warning(ctx, files.config, options)
    print_warnings(() if warning is None else (warning,))
    return fitted_to(ctx, files.config, options)


def load_with_draft(
    spec: str | None,
    draft_spec: str | None,
    *,
    device: str,
    threads: int | None,
    is_quiet: bool,
    exact: bool,
    batch_invariant: bool,
    options: LoadOptions | None = None,
) -> tuple[LoadedModel, LoadedModel | None]:
    """A model, and the draft model if one is named. Their vocabularies are compared before."""
    files = open_model(spec)
    draft_files = None if draft_spec is None else open_draft(draft_spec, files)
    loaded = load_quietly(
        files,
        device=device,
        threads=threads,
        is_quiet=is_quiet,
        exact=exact,
        batch_invariant=batch_invariant,
        options=options,
    )
    if draft_files is None:
        return loaded, None
    how, longest = LoadOptions(device=device, threads=threads), loaded.config.max_seq_len
    return loaded, load_draft(draft_files, longest, how, loader(is_quiet=is_quiet))


def loader(*, is_quiet: bool) -> Loader:
    """`load_model` with a progress bar on a terminal.

    Torch gets one thread. The kernels have their own threads, and the work left to torch is small:
    a second set of threads would only take cores from the first.
    """

    def load(model: ModelFiles | str | Path | None, options: LoadOptions) -> LoadedModel:
        torch.set_num_threads(1)
        with bytes_progress("loading", is_quiet=is_quiet) as progress:
            load_here = load_model if options.job is None else load_on_hosts
            loaded = load_here(model, options, progress)
        lines = [] if loaded.ranks is None else [str(loaded.ranks)]
        lines += ["; ".join(map(str, loaded.plan))] if loaded.plan else []
        lines += [] if loaded.link is None else [str(loaded.link)]
        if not is_quiet and sys.stderr is not None:
            for line in lines:
                print(f"exl: {line}", file=sys.stderr, flush=True)
        return loaded

    return load


@contextmanager
def explaining_long_prompts(runtime: Runtime) -> Iterator[None]:
    """Reports a prompt that leaves no room for a reply, with the option that gives more room."""
    try:
        yield
    except ContextLengthError as error:
        raise RequestError(
            f"the prompt has at least {error.num_tokens} tokens and leaves no room for a reply",
            expected=f"at most {runtime.max_prompt_tokens} tokens, for a context of "
            f"{runtime.ctx_size}",
            got=error.num_tokens,
            next_step=long_prompt_advice(runtime),
        ) from error


def long_prompt_advice(runtime: Runtime) -> str:
    """Next step for a prompt that does not fit into the context."""
    longest = runtime.loaded.config.max_seq_len
    if runtime.ctx_size >= longest:
        return "Shorten it; this is the model's own context."
    return f"Shorten it, or raise --ctx-size (the model's own context is {longest})."
