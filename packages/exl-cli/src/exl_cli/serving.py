"""Opens the models of `exl serve` with the options of its command line.

Imports torch; the command imports this module when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from exl_cli.engine_options import EngineChoices
from exl_cli.option_groups import RunningOptions
from exl_cli.server.models import ModelFacts
from exl_core.cache.format import PAGE_SIZE
from exl_core.cache.need import CacheNeed
from exl_core.prompt.template import ChatTemplate
from exl_core.session.open import ModelFiles, open_model
from exl_core.session.runtime import Runtime, RuntimeOptions, check_runtime, settle_ctx_size
from exl_core.settings import Launched
from exl_core.tokenizer.base import Tokenizer


@dataclass(frozen=True, slots=True)
class FileOpener:
    """Opener (`server/models.py`) of models on disk.

    max_batch     most requests that run at the same time
    cache_tokens  size of the cache that all requests share
    template      chat template instead of the model's, and its place for messages
    job           the processes that the model is divided among
    """

    running: RunningOptions
    choices: EngineChoices
    max_batch: int
    cache_tokens: int
    template: tuple[str, str] | None = None
    job: Launched | None = None

    def describe(self, path: Path) -> ModelFacts:
        files = open_model(path)
        template = files.template
        source = "" if template is None else template.source
        return ModelFacts(
            path,
            files.config.arch.name,
            settle_ctx_size(self.running.ctx_size, files.config.max_seq_len),
            source if self.template is None else self.template[0],
        )

    def prepare(self, path: Path, replaced: Runtime | None) -> Callable[[], Runtime]:
        files = open_model(path)
        freed_bytes = 0 if replaced is None else _bytes_of(replaced)
        check_runtime(files, self._options(), freed_bytes=freed_bytes)
        if self.template is not None:
            self._made_template(files.tokenizer)
        return lambda: self.load(files)

    def load(self, model: ModelFiles | str | None, *, is_quiet: bool = True) -> Runtime:
        """Load a model, and prepare work that would delay the first replies."""
        runtime = self.running.open(
            model,
            self.choices,
            is_quiet=is_quiet,
            max_batch=self.max_batch,
            cache_tokens=self.cache_tokens,
            job=self.job,
        )
        if self.template is not None:
            made = self._made_template(runtime.loaded.tokenizer)
            runtime.loaded = replace(runtime.loaded, template=made)
        runtime.engine.vocabulary.prepare()
        if runtime.loaded.template is not None:
            runtime.loaded.tokenizer.prepare_trust(runtime.loaded.template.source)
        return runtime

    def _options(self) -> RuntimeOptions:
        return self.running.runtime_options(
            self.choices,
            max_batch=self.max_batch,
            cache_tokens=self.cache_tokens,
            job=self.job,
        )

    def _made_template(self, tokenizer: Tokenizer) -> ChatTemplate:
        assert self.template is not None, "the callers check it"
        source, where = self.template
        bos, eos = tokenizer.bos_id, next(iter(tokenizer.eos_ids), None)
        return ChatTemplate(
            source,
            bos_token="" if bos is None else tokenizer.token_text(bos),
            eos_token="" if eos is None else tokenizer.token_text(eos),
            where=where,
        )


def _bytes_of(runtime: Runtime) -> int:
    """Upper bound of the memory that a running model frees: weights and cache."""
    loaded, engine = runtime.loaded, runtime.engine
    tokens, options = engine.pool.num_pages * PAGE_SIZE, engine.options
    need = CacheNeed(tokens, options.kv_format, options.max_batch, has_drafts=True)
    has_spare = loaded.model.ops.device.type == "cuda"
    return loaded.weights_bytes + need.total_bytes(loaded.config, has_spare=has_spare)
