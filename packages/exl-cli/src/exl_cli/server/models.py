"""The models of a server, and the one that is loaded.

One model is resident at a time. Requests for another model wait until the resident one is idle.
Then the headers of the other model are checked, the resident one is unloaded, and the other is
loaded. A model that fails the check leaves the resident one loaded. After a failure of the load
itself, the former model is loaded again, unless a request waits for another one.

Waiting requests are served in order of arrival, except that all requests for a newly loaded model
start together. So no request waits forever, and the server does not swap models for each request.
Everything here runs on the event loop, except the work of the opener.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from exl_cli.server.errors import ApiError, api_error_of
from exl_cli.server.pooling import Pooling
from exl_cli.server.prompt_style import PromptStyle
from exl_cli.server.record import LOG
from exl_core.errors import ExlError, ModelNotFoundError, RequestError, printable
from exl_core.generate.asynchronous import AsyncGenerator
from exl_core.generate.dynamic import DynamicGenerator
from exl_core.model.adapters import AdapterUse
from exl_core.prompt.formats import PromptFormat
from exl_core.session.load import LoadedModel
from exl_core.session.open import model_name
from exl_core.session.runtime import Runtime


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model that clients read. `template`: source of its chat template, or ""."""

    path: Path
    architecture: str
    ctx_size: int
    template: str

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix.lower() == ".gguf"


_LATEST = ":latest"
"""Tag that ollama's clients add to names without one."""


class Opener(Protocol):
    """Opens the models that a server can change to. All methods run on another thread."""

    def describe(self, path: Path) -> ModelFacts:
        """Facts from the headers of a model, without its weights."""

    def prepare(self, path: Path, replaced: Runtime | None) -> Callable[[], Runtime]:
        """Checks a model by its headers, and returns the function that loads it.

        `replaced` is unloaded in between. Its memory counts as free.
        """


@dataclass(eq=False)
class Resident:
    """The loaded model with its generator.

    adapters   LoRA adapters by name, with their scales
    defaults   sampler settings of requests that do not choose
    style      how its conversations become prompts
    """

    name: str
    runtime: Runtime
    defaults: Mapping[str, Any] = field(default_factory=dict)
    prompt_format: PromptFormat | None = None
    style: PromptStyle = field(init=False)
    jobs: AsyncGenerator = field(init=False)
    adapters: dict[str, AdapterUse] = field(init=False)

    def __post_init__(self) -> None:
        self.style = PromptStyle(self.runtime.loaded, self.prompt_format)
        self.adapters = {}
        for number, use in enumerate(self.runtime.adapters):
            name = str(getattr(use.adapter, "name", number))
            self.adapters[name if name not in self.adapters else f"{name}-{number}"] = use
        loaded, engine = self.runtime.loaded, self.runtime.engine
        self.jobs = AsyncGenerator(DynamicGenerator(loaded, engine=engine))

    @property
    def max_batch(self) -> int:
        return self.runtime.engine.options.max_batch

    @property
    def facts(self) -> ModelFacts:
        loaded, template = self.runtime.loaded, ""
        if self.style.has_template:
            template = self.style.source
        architecture = str(about(loaded)["architecture"])
        return ModelFacts(loaded.path, architecture, self.runtime.ctx_size, template)


@dataclass(frozen=True, slots=True)
class Prompting:
    """Choices of the server that hold for every model.

    defaults       sampler settings of the model at a path, for requests that do not choose
    prompt_format  used instead of the model's chat template
    """

    defaults: Callable[[Path], Mapping[str, Any]] = lambda _: {}
    prompt_format: PromptFormat | None = None

    def resident(self, name: str, runtime: Runtime) -> Resident:
        return Resident(name, runtime, self.defaults(runtime.loaded.path), self.prompt_format)


@dataclass(frozen=True, slots=True)
class Embedder:
    """A model for vectors of texts, beside the model for replies."""

    resident: Resident
    pooling: Pooling


@dataclass(eq=False)
class _Waiter:
    name: str
    granted: asyncio.Future[Resident]


class ModelHost:
    """Owns the resident model.

    others     models by name that `opener` can load instead of the first, which need not be listed
    aliases    further names of models
    is_strict  a server of one model refuses other names too
    embedder   model for vectors of texts; None: the loaded one
    prompting  sampler defaults and prompt format of a loaded model
    """

    def __init__(
        self,
        first: Runtime,
        *,
        name: str | None = None,
        others: Mapping[str, Path] | None = None,
        opener: Opener | None = None,
        aliases: Mapping[str, str] | None = None,
        is_strict: bool = False,
        prompting: Prompting | None = None,
    ) -> None:
        self.embedder: Embedder | None = None
        self._prompting = prompting or Prompting()
        self.aliases = dict(aliases or {})
        self._is_strict = is_strict
        self.created = int(time.time())
        self.default = name or first.name
        self.others = dict(others or {})
        if self.others:
            self.others.setdefault(self.default, first.loaded.path)
        self._opener = opener
        self._resident: Resident | None = self._prompting.resident(self.default, first)
        self._in_use = 0
        self._waiting: deque[_Waiter] = deque()
        self._swap: asyncio.Task[None] | None = None
        self._next: str | None = None  # the model that a swap loads
        self._is_closing = False

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys((self.default, *self.others)))

    @property
    def resident(self) -> Resident | None:
        """None while another model is loaded."""
        return self._resident

    @property
    def is_loading(self) -> bool:
        return self._swap is not None

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[Resident]:
        """Keep the model of this name resident during the block. None: the resident one, or the
        one that a swap loads."""
        resident = await self._acquire(self._known(name))
        try:
            yield resident
        finally:
            self._in_use -= 1
            self._pump()

    async def describe(self, name: str) -> tuple[ModelFacts, Mapping[str, Any]]:
        """Facts about the model of this name, and its sampler defaults. Loads no model."""
        name, resident = self._known(name), self._resident
        if resident is not None and resident.name == name:
            return resident.facts, resident.defaults

        def read() -> tuple[ModelFacts, Mapping[str, Any]]:
            assert self._opener is not None, "`others` needs an opener"
            path, style = self.others[name], self._prompting.prompt_format
            facts = self._opener.describe(path)
            if style is not None:
                facts = replace(facts, template=style.source)
            return facts, self._prompting.defaults(path)

        return await asyncio.to_thread(read)

    async def unload(self) -> None:
        """Free the loaded model. The next request loads one again."""
        if not self.others:
            raise ApiError(400, "the only model of a server cannot be unloaded")
        if self._in_use or self._swap is not None:
            raise ApiError(409, "the model is in use", code="model_in_use")
        self._swap = asyncio.get_running_loop().create_task(self._unload())
        await asyncio.shield(self._swap)

    async def _unload(self) -> None:
        await self._free_resident()
        self._swap = None
        self._pump()

    async def _free_resident(self) -> None:
        old, self._resident = self._resident, None
        if old is not None:
            await old.jobs.close()
            del old
        await asyncio.to_thread(_free_memory)

    async def close(self) -> None:
        self._is_closing = True
        while self._swap is not None:
            await asyncio.wait({self._swap})
        for one in (self._resident, None if self.embedder is None else self.embedder.resident):
            if one is not None:
                await one.jobs.close()

    def _known(self, name: str | None) -> str:
        """The model that a request names. A server of one model serves every name. Among several,
        a unique beginning of a name suffices. ollama's tag `:latest` may be left out or added."""
        if name is None:
            resident = self._next if self._resident is None else self._resident.name
            return resident or self.default
        if name in self.aliases:
            return self.aliases[name]
        if name in self.others or name == self.default:
            return name
        if not self.others and not self._is_strict:
            return self.default
        if name.endswith(_LATEST):
            return self._known(name.removesuffix(_LATEST))
        begun = [one for one in self.names if name and one.startswith(name)]
        if len(begun) == 1:
            return begun[0]
        said = (
            f"{len(begun)} models begin with {name[:200]!r}"
            if begun
            else f"no model {name[:200]!r}"
        )
        raise ApiError(
            404,
            f"{said}; /v1/models lists the models",
            param="model",
            code="model_not_found",
        )

    async def _acquire(self, name: str) -> Resident:
        waiter = _Waiter(name, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._pump()
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif _was_granted(waiter):
                self._in_use -= 1
            self._pump()
            raise

    def _pump(self) -> None:
        """Admit waiting requests for the resident model, or begin a swap."""
        while self._waiting and self._swap is None:
            first = self._waiting[0]
            if self._resident is not None and first.name == self._resident.name:
                self._grant(self._waiting.popleft(), self._resident)
            elif self._in_use == 0:
                self._begin_swap(first.name)
            else:
                return

    def _grant(self, waiter: _Waiter, resident: Resident) -> None:
        if not waiter.granted.done():
            self._in_use += 1
            waiter.granted.set_result(resident)

    async def _change_to(self, name: str) -> None:
        former = None if self._resident is None else self._resident.name
        error: Exception | None = None
        try:
            load = await asyncio.to_thread(self._prepare, name, self._resident)
            await self._free_resident()
            runtime = await asyncio.to_thread(load)
            self._resident = self._prompting.resident(name, runtime)
        except ExlError as failure:
            error = api_error_of(failure)
        except Exception as failure:  # noqa: BLE001 - raised in the waiting requests
            error = failure
        self._swap = self._next = None
        served = [waiter for waiter in self._waiting if waiter.name == name]
        if error is not None and not served:  # no request reports it
            LOG.error("%s was not loaded: %s", printable(name), printable(str(error)))
        self._waiting = deque(waiter for waiter in self._waiting if waiter.name != name)
        for waiter in served:
            if self._resident is not None and error is None:
                self._grant(waiter, self._resident)
            elif error is not None and not waiter.granted.done():
                waiter.granted.set_exception(error)
        self._pump()
        if self._resident is None and self._swap is None and former not in (None, name):
            self._load_again(former)

    def _load_again(self, former: str) -> None:
        """Begin to load the model that was resident before a load that failed."""
        if not self._is_closing:
            self._begin_swap(former)

    def _begin_swap(self, name: str) -> None:
        self._next = name
        self._swap = asyncio.get_running_loop().create_task(self._change_to(name))

    def _prepare(self, name: str, replaced: Resident | None) -> Callable[[], Runtime]:
        """Checks a model. Returns the function that loads it."""
        assert self._opener is not None, "`others` needs an opener"
        path = self.others[name]
        self._prompting.defaults(path)  # raises for a wrong generation_config.json
        return self._opener.prepare(path, None if replaced is None else replaced.runtime)


def _was_granted(waiter: _Waiter) -> bool:
    granted = waiter.granted
    return granted.done() and not granted.cancelled() and granted.exception() is None


def about(loaded: LoadedModel) -> dict[str, object]:
    """Facts about a loaded model, for lists of models."""
    architecture = getattr(getattr(loaded.config, "arch", None), "name", "")
    return {
        "architecture": str(architecture),
        "weights_bytes": loaded.weights_bytes,
        "device": loaded.model.ops.device.type,
    }


def models_in(folder: Path) -> dict[str, Path]:
    """Models of a folder by name: directories with a config.json, and .gguf files.

    A model in a subfolder, as the hub's owners have them, is named `owner/name`.
    """
    if not folder.is_dir():
        raise ModelNotFoundError("no such folder of models", where=folder)
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        inner = [path] if _is_model(path) or not path.is_dir() else sorted(path.iterdir())
        for one in inner:
            if not _is_model(one):
                continue
            name = one.name if one.is_dir() else model_name(one)
            if one is not path:
                name = f"{path.name}/{name}"
            if name in found:
                raise RequestError("two models have one name", where=folder, got=name)
            found[name] = one
    if not found:
        raise ModelNotFoundError(
            "no models in this folder",
            where=folder,
            expected=".gguf files, or directories with a config.json",
        )
    return found


def _is_model(path: Path) -> bool:
    is_file = path.suffix.lower() == ".gguf" and path.is_file()
    return is_file or (path / "config.json").is_file()


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
