"""A chat template: from a list of messages to the text that the model was trained on.

A template is a program from a stranger. It runs in jinja2's immutable sandbox, without file access,
and with a limit on what it may write; whatever it raises is a `TemplateError`. The settings and the
few extra functions are those that templates on the hub are written against. This module knows
nothing of files (`detect.py`) and nothing of tokens: its text is encoded with special tokens
allowed, and it brings its own BOS.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from exl_core.errors import TemplateError

if TYPE_CHECKING:
    from jinja2 import Template

# No conversation comes near it; a template that writes more is broken or hostile.
MAX_CHARACTERS = 64 * 1024 * 1024

Message = Mapping[str, object]


class ChatTemplate:
    """A compiled template with the texts of its model's BOS and EOS tokens."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str, where: str) -> None:
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.where = where
        self._template = _compile(source, where)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **kwargs: object,
    ) -> str:
        """The conversation as text; with `add_generation_prompt`, up to where the model replies.

        `kwargs` become variables of the template (`enable_thinking`, `documents`, ...).
        """
        _check_messages(messages, self.where)
        variables = {"bos_token": self.bos_token, "eos_token": self.eos_token, **kwargs}
        try:
            pieces = self._template.generate(
                messages=[dict(message) for message in messages],
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
            return _join(pieces, self.where)
        except TemplateError:
            raise
        # A template can raise anything that Python can: it divides, indexes and recurses.
        except Exception as error:
            raise TemplateError(
                "the chat template refused the conversation",
                where=self.where,
                got=_reason(error),
                next_step="Check the roles and their order, or leave the template out",
            ) from error


def _reason(error: Exception) -> str:
    """What a template says through `raise_exception` speaks for itself; the rest needs its kind."""
    from jinja2 import TemplateError as JinjaError

    return str(error) if type(error) is JinjaError else f"{type(error).__name__}: {error}"


def _join(pieces: Iterable[str], where: str) -> str:
    parts: list[str] = []
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise TemplateError(
                "the chat template writes without end",
                where=where,
                expected=f"at most {MAX_CHARACTERS} characters",
            )
        parts.append(piece)
    return "".join(parts)


def _check_messages(messages: Sequence[Message], where: str) -> None:
    for index, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise TemplateError(
                f"message {index} has no role", where=where, expected="a text", got=repr(role)
            )
    if not messages:
        raise TemplateError("the conversation has no messages", where=where)


def _compile(source: str, where: str) -> Template:
    from jinja2 import TemplateError as JinjaError

    try:
        template: Template = _environment().from_string(source)
    except (JinjaError, RecursionError, SyntaxError) as error:
        line = getattr(error, "lineno", None)
        raise TemplateError(
            "the chat template is not valid" + ("" if line is None else f", line {line}"),
            where=where,
            got=str(error),
            next_step="Fix the template, or leave it out",
        ) from error
    return template


def _environment() -> Any:
    import jinja2.ext

    environment = _sandbox_class()(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_generation_tag(), jinja2.ext.loopcontrols],
    )
    environment.globals["dict"] = _make_dict  # the class itself would lead out of the sandbox
    environment.globals["namespace"] = _namespace_class()
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _sandbox_class() -> Any:
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        """Also refuses to build one huge value, which the limit on output would see too late."""

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**":
                raise SecurityError("a chat template cannot use **")
            for value, times in ((left, right), (right, left)):
                if hasattr(value, "__len__") and len(value) * times > MAX_CHARACTERS:
                    raise SecurityError("a chat template cannot build a value of this size")
            return super().call_binop(context, operator, left, right)

    return Sandbox


def _namespace_class() -> Any:
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    def check(name: object) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a chat template cannot set {name!r}")

    class SafeNamespace(Namespace):
        """jinja2's, without the names through which Python's own objects are reached."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be one of the keys
            values = dict(*args[1:], **kwargs)
            for name in values:
                check(name)
            Namespace.__init__(args[0], values)

        def __setitem__(self, name: str, value: Any) -> None:
            check(name)
            super().__setitem__(name, value)

    return SafeNamespace


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _generation_tag() -> Any:
    """`{% generation %}` marks what is trained on; here its body is text like any other."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationTag


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without jinja2's HTML escapes, which models have never seen."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError as JinjaError

    raise JinjaError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
