"""Sandboxed jinja2 environment for chat templates: immutable, without file access, and bounded.

This module connects a template with its budget (`budget.py`). A jinja2 environment can intercept
operators, calls, filters and output. It cannot intercept loop iterations and the lists and texts
that the syntax itself builds: for these, `Metered` adds calls to the syntax tree before it is
compiled. Filters with checks of their own are in `filters.py`.
"""

# ruff: noqa: N802 - jinja2 finds visitor methods by the names of its node classes

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from exl_core.prompt.budget import check_bits, current_budget, refusal
from exl_core.prompt.filters import bounded_filters
from exl_core.prompt.formatting import (
    LIST_METHODS,
    MAPPING_METHODS,
    TEXT_METHODS,
    BoundedFormatter,
    check_percent,
    check_text_method,
)
from exl_core.prompt.tracked import TrackedText, as_text, concat, template_text, tracked

_MAX_DATE_PATTERN = 256
_METHODS = (
    (str, TEXT_METHODS),
    (Mapping, MAPPING_METHODS),
    (list | tuple, LIST_METHODS),
    (int | float | bytes | range, frozenset[str]()),
)


class _TrackingGenerator(CodeGenerator):
    """Makes literals trusted text, and calls the environment's own methods without its checks."""

    def visit_Const(self, node: nodes.Const, frame: Any) -> None:
        if isinstance(node.value, str | list | tuple | dict):  # folded, if not a text
            self.write(_literal(node.value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Any) -> None:  # noqa: ARG002 - jinja2's
        self.write(_literal(node.data))

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return _literal("".join(group))

    def visit_Call(self, node: nodes.Call, frame: Any, forward_caller: bool = False) -> None:
        if not isinstance(node.node, nodes.EnvironmentAttribute):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        self.visit(node.node, frame)
        self.write("(")
        for argument in node.args:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")


class Sandbox(ImmutableSandboxedEnvironment):
    """Environment that reports all work to the current budget, without `**` and rare methods."""

    code_generator_class = _TrackingGenerator
    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_count_output,
            extensions=[GenerationTag, loopcontrols],
        )
        self.concat = _concat_output  # type: ignore[method-assign]  # joins blocks and macros
        self._literals: dict[str, TrackedText] = {}
        self.filters = bounded_filters(self.filters)
        del self.globals["lipsum"]
        self.globals["dict"] = _make_dict  # the class gives access to objects outside the sandbox
        self.globals["namespace"] = SafeNamespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        Metered().visit(tree)
        tree.set_environment(self)
        return tree

    # Methods that `Metered` adds calls of.

    def count_step(self, cost: int) -> bool:
        current_budget().step(cost)
        return True

    def checked(self, value: Any) -> Any:
        return current_budget().made(value)

    def concatenate(self, *values: Any) -> Any:
        """The `~` operator."""
        budget = current_budget()
        budget.expect(sum(map(budget.weigh, values)))
        if any(hasattr(value, "__html__") for value in values):
            from jinja2.runtime import markup_join

            return budget.made(markup_join(values))
        return budget.made(concat(map(as_text, values)))

    def literal(self, text: str) -> TrackedText:
        """Literal of the template. One object for all its uses, which may be a million."""
        found = self._literals.get(text)
        if found is None:
            found = self._literals[text] = template_text(text)
        return found

    # Hooks of jinja2.

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("a chat template cannot use **")
        budget = current_budget()
        if operator == "%" and isinstance(left, str):
            check_percent(left, right)
        elif operator == "*":
            if isinstance(left, int) and isinstance(right, int):
                check_bits(left.bit_length() + right.bit_length())
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | bytes | list | tuple) and isinstance(times, int):
                    budget.expect(budget.weigh(value) * times)
        result = super().call_binop(context, operator, left, right)
        if operator == "+" and isinstance(result, list | tuple):
            budget.set_weight(result, budget.weigh(left) + budget.weigh(right))
        return budget.made(result)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = current_budget()
        is_method = isinstance(obj, types.BuiltinMethodType | types.MethodType)
        if is_method and isinstance(obj.__self__, str):
            args = tuple(check_text_method(obj.__self__, obj.__name__, args))
            obj = _tracking_method(obj, args)
        elif args or kwargs:  # a macro may collect its arguments in a list
            budget.expect(sum(map(budget.weigh, args)) + sum(map(budget.weigh, kwargs.values())))
        return budget.made(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Any:
        if super().wrap_str_format(value) is None:
            return None
        text: str = value.__self__
        takes_mapping = value.__name__ == "format_map"

        def format_text(*args: Any, **kwargs: Any) -> str:
            current_budget().step(len(text))
            formatter = BoundedFormatter(self)
            # `str` drops the markup type of jinja2, because no text here is HTML.
            if not takes_mapping:
                return formatter.vformat(str(text), args, kwargs)
            if len(args) != 1 or kwargs:
                raise TypeError("format_map() takes exactly one argument")
            return formatter.vformat(str(text), (), args[0])

        return format_text

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, methods in _METHODS:
            if isinstance(obj, kind):
                return attr in methods or attr in getattr(obj, "_fields", ())  # `groupby` tuples
        return bool(super().is_safe_attribute(obj, attr, value))


class Metered(NodeTransformer):
    """Adds calls to a syntax tree that report iterations, macros and values built by the syntax."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, self._count_step(node, node.body))
        if node.test is not None:
            node.test = nodes.And(
                _method_call("count_step", node, nodes.Const(0)), node.test, lineno=node.lineno
            )
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, self._count_step(node, node.body))
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, self._count_step(node, node.body))
        return node

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, self._count_step(node, node.body))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _method_call("concatenate", node, *node.nodes)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._checked(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._checked(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._checked(node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        if isinstance(node.arg, nodes.Slice):
            return self._checked(node)
        self.generic_visit(node)
        return node

    def _checked(self, node: nodes.Expr) -> nodes.Expr:
        if not list(node.find_all((nodes.Name, nodes.Call, nodes.Filter))):
            return node  # a constant is no larger than the source
        self.generic_visit(node)
        return _method_call("checked", node, node)

    def _count_step(self, node: nodes.Node, body: list[nodes.Node]) -> nodes.Node:
        """Call that counts one iteration, whose cost is all text in the body."""
        texts = (text for part in body for text in part.find_all(nodes.TemplateData))
        cost = sum(len(text.data) for text in texts)
        return nodes.ExprStmt(
            _method_call("count_step", node, nodes.Const(cost)), lineno=node.lineno
        )


def _concat_output(parts: Iterable[str]) -> str:
    """Text of a block or macro."""
    parts = list(parts)
    current_budget().expect(sum(map(len, parts)))
    return concat(parts)


def _literal(value: Any) -> str:
    """Python source of a constant whose texts are trusted."""
    if isinstance(value, str):
        return f"environment.literal({value!r})"
    if isinstance(value, dict):
        pairs = (f"{_literal(key)}: {_literal(one)}" for key, one in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        parts = "".join(f"{_literal(one)}, " for one in value)
        return f"[{parts}]" if isinstance(value, list) else f"({parts})"
    return repr(value)


def _method_call(name: str, node: nodes.Node, *arguments: nodes.Expr) -> nodes.Expr:
    """Node that calls a method of the environment."""
    method = nodes.EnvironmentAttribute(name, lineno=node.lineno)
    return nodes.Call(method, list(arguments), [], None, None, lineno=node.lineno)


class GenerationTag(Extension):
    """`{% generation %}` marks training targets; here its body is rendered like any other text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class SafeNamespace(Namespace):
    """jinja2's namespace without names that give access to Python's internals.

    It is the only mutable value. It therefore weighs nothing, and its contents are not part of its
    text.
    """

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a key
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_attribute(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_attribute(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a chat template cannot set {name!r}")


def _tracking_method(method: Any, args: tuple[Any, ...]) -> Any:
    """The method, bound to tracked text if an argument is, so that the result is tracked."""
    text = method.__self__
    if type(text) is not str or not any(isinstance(one, TrackedText) for one in args):
        return method
    return getattr(tracked(text), method.__name__)


def _count_output(value: Any) -> Any:
    """Count the text of a `{{ ... }}`, also inside a block or macro whose text is captured."""
    if isinstance(value, str):
        current_budget().step(len(value))
        return value
    text = as_text(value)
    current_budget().step(len(text))
    return text


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> NoReturn:
    raise JinjaError(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > _MAX_DATE_PATTERN or any(character.isdigit() for character in pattern):
        raise refusal("asks for a date in a strange format")  # digits set field widths
    return datetime.now().strftime(pattern)
