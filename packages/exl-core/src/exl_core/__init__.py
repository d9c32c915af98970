"""Formats, models, cache, engine, sampler, generators and conversion of exl.

The public names are here: `from exl_core import load_model, Generator, SamplerParams`. A name is
imported from its module when it is first used, so that `import exl_core` does not load torch.
Modules of this package import each other, never these names.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exl_core.cache.format import KVFormat
    from exl_core.constrain.choice import OneOf, StartsWith
    from exl_core.constrain.grammar import Grammar
    from exl_core.constrain.json_schema import JsonSchema
    from exl_core.constrain.regex import Regex
    from exl_core.engine.engine import EngineOptions
    from exl_core.engine.events import FinishEvent, FinishReason, SampledToken
    from exl_core.engine.request import Report, Request
    from exl_core.errors import (
        DeviceError,
        ExlError,
        ModelError,
        ModelNotFoundError,
        OutOfMemoryError,
        RequestError,
    )
    from exl_core.generate.asynchronous import AsyncGenerator, AsyncJob
    from exl_core.generate.base import BaseGenerator
    from exl_core.generate.dynamic import DynamicGenerator, Job, Result
    from exl_core.generate.dynamic import DynamicGenerator as Generator
    from exl_core.generate.streaming import StreamingGenerator, StreamResult
    from exl_core.lora.adapter import load_adapter
    from exl_core.model.adapters import AdapterUse
    from exl_core.model.context import Context
    from exl_core.model.observe import Observer, StateRecorder
    from exl_core.model.segment import LogitRows
    from exl_core.sampling.params import SamplerParams
    from exl_core.session.load import LoadedModel, LoadOptions, load_model
    from exl_core.session.open import ModelFiles, open_model
    from exl_core.session.resolve import resolve_model
    from exl_core.session.runtime import DraftOptions, Runtime, RuntimeOptions, open_runtime
    from exl_core.speculate.draft_model import ModelDrafter
    from exl_core.speculate.ngram import NgramDrafter

    __version__: str

_MODULES = {
    "session.load": ("load_model", "LoadedModel", "LoadOptions"),
    "session.open": ("open_model", "ModelFiles"),
    "session.resolve": ("resolve_model",),
    "session.runtime": ("open_runtime", "Runtime", "RuntimeOptions", "DraftOptions"),
    "generate.base": ("BaseGenerator",),
    "generate.streaming": ("StreamingGenerator", "StreamResult"),
    "generate.dynamic": ("DynamicGenerator", "Generator", "Job", "Result"),
    "generate.asynchronous": ("AsyncGenerator", "AsyncJob"),
    "sampling.params": ("SamplerParams",),
    "engine.engine": ("EngineOptions",),
    "engine.request": ("Request", "Report"),
    "engine.events": ("FinishEvent", "FinishReason", "SampledToken"),
    "cache.format": ("KVFormat",),
    "constrain.json_schema": ("JsonSchema",),
    "constrain.regex": ("Regex",),
    "constrain.grammar": ("Grammar",),
    "constrain.choice": ("OneOf", "StartsWith"),
    "lora.adapter": ("load_adapter",),
    "model.adapters": ("AdapterUse",),
    "speculate.ngram": ("NgramDrafter",),
    "speculate.draft_model": ("ModelDrafter",),
    "model.context": ("Context",),
    "model.segment": ("LogitRows",),
    "model.observe": ("Observer", "StateRecorder"),
    "errors": (
        *("ExlError", "RequestError", "ModelError", "ModelNotFoundError"),
        *("OutOfMemoryError", "DeviceError"),
    ),
}
_ALIASES = {"Generator": "DynamicGenerator"}  # the one that fits most programs
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AdapterUse",
    "AsyncGenerator",
    "AsyncJob",
    "BaseGenerator",
    "Context",
    "DeviceError",
    "DraftOptions",
    "DynamicGenerator",
    "EngineOptions",
    "ExlError",
    "FinishEvent",
    "FinishReason",
    "Generator",
    "Grammar",
    "Job",
    "JsonSchema",
    "KVFormat",
    "LoadOptions",
    "LoadedModel",
    "LogitRows",
    "ModelDrafter",
    "ModelError",
    "ModelFiles",
    "ModelNotFoundError",
    "NgramDrafter",
    "Observer",
    "OneOf",
    "OutOfMemoryError",
    "Regex",
    "Report",
    "Request",
    "RequestError",
    "Result",
    "Runtime",
    "RuntimeOptions",
    "SampledToken",
    "SamplerParams",
    "StartsWith",
    "StateRecorder",
    "StreamResult",
    "StreamingGenerator",
    "__version__",
    "load_adapter",
    "load_model",
    "open_model",
    "open_runtime",
    "resolve_model",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Imports a public name, or reads the version of the distribution, at its first use."""
        if name == "__version__":
            from importlib.metadata import version

            return version("exl-core")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), _ALIASES.get(name, name))
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
