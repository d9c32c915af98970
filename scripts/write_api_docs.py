"""Write docs/api.md: the public names of `exl_core` with their signatures. Usage: write_api_docs.py
[FILE].

Without FILE the page goes to stdout. A test compares the page with the code, so that no public name
or signature changes unnoticed.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import exl_core

HEAD = """# Python API

Public names of `exl_core`. `scripts/write_api_docs.py` generates this page; `nox -s docs` writes it
again. `from exl_core import NAME` imports a name. Names that are not listed here may change without
notice. [Generate from Python](python.md) shows them in use. The second part of the page has the
docstrings of their modules.
"""

LINE_CHARS = 80

DETAILS = (
    "exl_core.session.load",
    "exl_core.session.open",
    "exl_core.session.runtime",
    "exl_core.generate.base",
    "exl_core.generate.streaming",
    "exl_core.generate.dynamic",
    "exl_core.generate.asynchronous",
    "exl_core.sampling.params",
    "exl_core.engine.engine",
    "exl_core.engine.request",
    "exl_core.engine.events",
    "exl_core.cache.format",
    "exl_core.constrain.filter",
    "exl_core.constrain.json_schema",
    "exl_core.constrain.regex",
    "exl_core.constrain.grammar",
    "exl_core.constrain.choice",
    "exl_core.lora.adapter",
    "exl_core.speculate.ngram",
    "exl_core.speculate.draft_model",
    "exl_core.model.context",
    "exl_core.model.observe",
    "exl_core.tokenizer.base",
    "exl_core.prompt.template",
    "exl_core.prompt.formats",
    "exl_core.errors",
    "exl_eval.perplexity",
    "exl_eval.divergence",
    "exl_core.convert.plan",
    "exl_core.convert.job",
)


def page() -> str:
    lines = [HEAD.rstrip("\n")]
    for name in exl_core.__all__:
        if not name.startswith("__"):
            lines += ["", *entry(name, getattr(exl_core, name))]
    lines += ["", "## Docstrings by module", ""]
    lines += [f"::: {module}" for module in DETAILS]
    return "\n".join(lines) + "\n"


def entry(name: str, value: Any) -> Iterator[str]:
    yield f"## `{name}`"
    yield ""
    home = f"`{value.__module__}`"
    if value.__name__ != name:
        yield f"Another name of `{value.__name__}`, in {home}."
        return
    documented = inspect.cleandoc(value.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    if dataclasses.is_dataclass(value) and documented.startswith(f"{name}("):
        documented = ""
    yield f"{documented} In {home}." if documented else f"In {home}."
    yield ""
    yield "```text"
    if inspect.isclass(value):
        yield from members(name, value)
    else:
        yield f"{name}{signature(value)}"
    yield "```"


def members(name: str, value: type) -> Iterator[str]:
    """The constructor, and the public members that the class or a base class of ours defines."""
    if issubclass(value, enum.Enum):
        yield from (f"{name}.{one.name}" for one in value)
        return
    yield f"{name}{signature(value)}" if _is_ours(value.__init__) else name
    listed = {
        member: found
        for base in reversed(value.__mro__)
        if base.__module__.startswith("exl_core.")
        for member, found in vars(base).items()
        if not member.startswith("_")
    }
    fields = set(getattr(value, "__dataclass_fields__", ()))
    for member, found in sorted(listed.items()):
        if member in fields:
            continue
        if isinstance(found, property) or type(found).__name__ == "cached_property":
            yield f"    .{member}"
        elif isinstance(found, classmethod | staticmethod):
            yield f"    {name}.{member}{signature(found.__func__)}"
        elif inspect.isfunction(found):
            yield f"    .{member}{signature(found)}"


def signature(value: Any) -> str:
    """Parameters and result as one line, or one parameter per line where that is longer."""
    shown = inspect.signature(value)
    kept = [one for one in shown.parameters.values() if one.name not in ("self", "cls")]
    parts: list[str] = []
    for one in kept:
        if one.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        parts.append(_plain(str(one)))
    result = shown.return_annotation
    end = "" if result in ("None", None, inspect.Signature.empty) else f" -> {_plain(str(result))}"
    line = f"({', '.join(parts)}){end}"
    if len(line) <= LINE_CHARS:
        return line
    return "\n        ".join(["(", *(f"{part}," for part in parts), f"){end}"])


def _plain(text: str) -> str:
    """A parameter or an annotation as it is written in the source."""
    text = re.sub(r"^(\W*\w+): '([^']*)'", r"\1: \2", text)
    text = re.sub(r"<(?:built-in )?function (\w+)[^>]*>", r"\1", text)
    text = text.replace("<factory>", "...")
    return re.sub(r"<(\w+\.\w+): [^>]+>", r"\1", text)


def _is_ours(function: Any) -> bool:
    return getattr(function, "__qualname__", "").partition(".")[0] not in ("object", "Exception")


def main() -> None:
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())


if __name__ == "__main__":
    main()
