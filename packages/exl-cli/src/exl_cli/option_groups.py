"""Groups of options. A command takes a whole group, so that two commands never differ in it.

A group is a dataclass whose fields are options. `spread` replaces a parameter of such a type by the
options of the group. Imports no torch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, get_type_hints

from exl_cli import engine_options, options
from exl_cli.engine_options import EngineChoices
from exl_cli.interrupt import exits_at_once
from exl_cli.model_options import ModelOptions, print_warnings
from exl_cli.prompts import check_encodable
from exl_core.errors import RequestError, printable
from exl_core.parallel.plan import AUTO, check_alternatives, parse_exchange, parse_ranks
from exl_core.parallel.processes import start_ahead
from exl_core.prompt.formats import PromptFormat, find_format
from exl_core.session.resolve import resolve_model
from exl_core.session.split import parse_experts_on, parse_reserve, parse_split

if TYPE_CHECKING:
    from exl_cli.chat.prompt_style import PromptStyle
    from exl_core.cache.format import KVFormat
    from exl_core.session.load import LoadedModel, LoadOptions
    from exl_core.session.open import ModelFiles
    from exl_core.session.runtime import Runtime, RuntimeOptions
    from exl_core.settings import Launched


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningOptions(ModelOptions):
    """How a model is run: changes to it, context size, device, cache, adapters, drafts."""

    ctx_size: options.CtxSize = None
    device: options.Device = "auto"
    threads: options.Threads = None
    exact: options.Exact = False
    held_memory: options.HeldMemory = None
    split: options.Split = "auto"
    cpu_layers: options.CpuLayers = None
    experts_on: options.ExpertsOn = "auto"
    tensor_parallel: options.TensorParallel = "1"
    exchange: options.Exchange = "auto"
    batch_invariant: options.BatchInvariant = False
    cache_type: options.CacheType = "fp16"
    lora: engine_options.Lora = None
    draft_model: engine_options.DraftModel = None
    draft_tokens: engine_options.DraftTokens = None
    ngram: engine_options.Ngram = False
    mtp: engine_options.Mtp = False

    def choices(self) -> EngineChoices:
        # Report bad values before anything is loaded.
        options.held_bytes(self.held_memory)
        parse_split(self.split)
        parse_ranks(self.tensor_parallel)
        parse_exchange(self.exchange)
        parse_experts_on(self.experts_on)
        parse_reserve(self.reserve)
        return engine_options.choices_of(
            *(self.cache_type, self.lora, self.draft_model, self.draft_tokens),
            ngram=self.ngram,
            mtp=self.mtp,
        )

    def loading(self) -> LoadOptions:
        """How the model is loaded."""
        return replace(
            self.load_options(),
            device=self.device,
            threads=self.threads,
            exact=self.exact,
            held_bytes=options.held_bytes(self.held_memory),
            split=self.split,
            cpu_layers=self.cpu_layers,
            experts_on=self.experts_on,
            tensor_parallel=parse_ranks(self.tensor_parallel),
            exchange=parse_exchange(self.exchange),
            batch_invariant=self.batch_invariant,
        )

    def runtime_options(
        self,
        choices: EngineChoices,
        *,
        has_guidance: bool = False,
        max_batch: int = 1,
        cache_tokens: int | None = None,
        job: Launched | None = None,
    ) -> RuntimeOptions:
        """The options as `open_runtime` takes them. Imports torch."""
        from exl_core.session.runtime import DraftOptions, RuntimeOptions

        draft = None
        if choices.has_drafts:
            draft = DraftOptions(choices.draft_model, choices.draft_tokens, choices.mtp)
        return RuntimeOptions(
            load=replace(self.loading(), job=job),
            ctx_size=self.ctx_size,
            cache_tokens=cache_tokens,
            max_batch=max_batch,
            kv_format=choices.kv_format,
            adapters=choices.loras,
            draft=draft,
            has_guidance=has_guidance,
        )

    def open(
        self,
        model: ModelFiles | str | None,
        choices: EngineChoices,
        *,
        is_quiet: bool,
        has_guidance: bool = False,
        max_batch: int = 1,
        cache_tokens: int | None = None,
        job: Launched | None = None,
    ) -> Runtime:
        """Load the model. `cache_tokens`: size of the cache that all requests share; None: one
        context. `job`: the processes that the model is divided among, seen from rank 0."""
        # `resolve_model` reports an unknown name before torch is imported.
        found = resolve_model(model) if model is None or isinstance(model, str) else model
        num_ranks = parse_ranks(self.tensor_parallel)
        if job is None and num_ranks not in (1, AUTO):
            has_limit = self.held_memory is not None
            check_alternatives(self.split, self.cpu_layers, self.experts_on, has_limit=has_limit)
            may_use_gpu = not self.exact and self.device not in ("cpu", "reference")
            start_ahead(num_ranks, may_use_gpu=may_use_gpu)
        with exits_at_once():
            from exl_cli.load import loader
            from exl_core.session.runtime import open_runtime
        runtime_options = self.runtime_options(
            choices,
            has_guidance=has_guidance,
            max_batch=max_batch,
            cache_tokens=cache_tokens,
            job=job,
        )
        runtime = open_runtime(found, runtime_options, loader(is_quiet=is_quiet))
        print_warnings(runtime.warnings)
        return runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Where and how a model computes."""

    device: options.Device = "auto"
    threads: options.Threads = None
    exact: options.Exact = False
    batch_invariant: options.BatchInvariant = False
    split: options.Split = "auto"
    cpu_layers: options.CpuLayers = None
    experts_on: options.ExpertsOn = "auto"

    def applied(
        self, to: LoadOptions, cache_tokens: int, kv_format: KVFormat, max_batch: int
    ) -> LoadOptions:
        """`to` with these devices. A split leaves memory for a cache of `cache_tokens` tokens, and
        for the states of `max_batch` sequences."""
        return replace(
            to,
            device=self.device,
            threads=self.threads,
            exact=self.exact,
            batch_invariant=self.batch_invariant,
            split=self.split,
            cpu_layers=self.cpu_layers,
            experts_on=self.experts_on,
            cache_tokens=cache_tokens,
            kv_format=kv_format,
            max_batch=max_batch,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """How a conversation is rendered: system prompt and prompt format."""

    system: options.System = None
    no_system: options.NoSystem = False
    format: options.Format = None
    allow_special: options.AllowSpecial = False

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the options that were given."""
        named = {
            "--system": self.system is not None,
            "--no-system": self.no_system,
            "--format": self.format is not None,
            "--allow-special": self.allow_special,
        }
        return tuple(name for name, is_given in named.items() if is_given)

    @property
    def uses_default_system(self) -> bool:
        return self.system is None and not self.no_system

    def checked_format(self) -> PromptFormat | None:
        """The selected format. Raises RequestError for invalid values, before anything is
        loaded."""
        if self.system is not None:
            check_encodable(self.system, "the system prompt")
            if self.no_system:
                raise RequestError(
                    "a system prompt and no system prompt", got="--system and --no-system"
                )
        return None if self.format is None else find_format(self.format)

    def style(self, loaded: LoadedModel) -> tuple[PromptStyle, str | None]:
        """The prompt style and its system prompt. Warns where format and template disagree."""
        with exits_at_once():
            from exl_cli.chat.prompt_style import PromptStyle
        style = PromptStyle(loaded, self.checked_format(), allow_special=self.allow_special)
        disagreement = style.disagreement(uses_default=self.uses_default_system)
        if disagreement is not None and sys.stderr is not None:
            print(f"exl: warning: {printable(disagreement)}", file=sys.stderr, flush=True)
        if self.uses_default_system:
            return style, style.default_system()
        return style, style.no_system() if self.system is None else style.usable(self.system)


def spread(verb: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command whose parameters are option groups. The wrapper has one parameter per option,
    which typer needs, and builds the groups from their values. An option that a caller leaves out
    has its default."""
    groups: dict[str, type] = {}
    shown: list[inspect.Parameter] = []
    for parameter in inspect.signature(verb, eval_str=True).parameters.values():
        group = parameter.annotation
        if not (isinstance(group, type) and is_dataclass(group)):
            shown.append(parameter)
            continue
        groups[parameter.name] = group
        hints = get_type_hints(group, include_extras=True)
        shown += [
            parameter.replace(name=field.name, default=field.default, annotation=hints[field.name])
            for field in fields(group)
        ]

    def command(**given: Any) -> None:
        for name, group in groups.items():
            names = [field.name for field in fields(group) if field.name in given]
            given[name] = group(**{option: given.pop(option) for option in names})
        verb(**given)

    command.__name__, command.__doc__, command.__module__ = (
        verb.__name__,
        verb.__doc__,
        verb.__module__,
    )
    command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return command
