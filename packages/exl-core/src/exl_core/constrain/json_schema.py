"""Constraint: the reply is a JSON document that satisfies a schema.

The llguidance library defines which keywords are supported. A keyword that is not supported is an
error, unless the schema is a best effort. Properties appear in the order of the schema. A schema
may contain settings of the library under `x-guidance`, which override those made here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exl_core.constrain.filter import Filter
from exl_core.constrain.guided import Source, guided_filter
from exl_core.constrain.limits import (
    CompileLimits,
    check_length,
    check_schema,
    without_unreachable,
)
from exl_core.constrain.loosened import loosened
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.errors import ConstraintError, ConstraintLimitError, printable

_LOG = logging.getLogger("exl.constrain")
_NAME = "the JSON schema"
# Bounded, because a small model may otherwise write white space until its tokens run out.
_SPACED: dict[str, object] = {"whitespace_pattern": r"[ \n\r\t]{1,40}"}
_COMPACT: dict[str, object] = {"whitespace_flexible": False}


@dataclass(frozen=True, init=False, slots=True)
class JsonSchema:
    """`schema` is JSON text or the parsed value.

    With `compact` there is no white space outside strings. Without it, up to 40 characters of white
    space may stand wherever JSON allows it.

    `loose` has the places of parts that are a best effort, such as `#` for the whole schema, or
    `#/$defs/a`. If the schema cannot be compiled, these parts lose the keywords that cannot be
    expressed (`loosened.py`). A warning in the log says so.
    """

    schema: str
    compact: bool
    loose: tuple[str, ...]

    def __init__(
        self,
        schema: str | Mapping[str, object] | bool,
        *,
        compact: bool = False,
        loose: Sequence[str] = (),
    ) -> None:
        object.__setattr__(self, "schema", schema if isinstance(schema, str) else text_of(schema))
        object.__setattr__(self, "compact", compact)
        object.__setattr__(self, "loose", tuple(loose))

    def filter(self, vocabulary: Vocabulary) -> Filter:
        return self.compiled(vocabulary)[0]

    def compiled(self, vocabulary: Vocabulary) -> tuple[Filter, str]:
        """The filter, and the schema that it follows: this one, or a looser one."""
        try:
            return self._compiled(self.schema, vocabulary)
        except ConstraintError as error:
            if not self.loose:
                raise
            fault = error
        forms = list(loosened(_parse(self.schema, _NAME), self.loose))
        if isinstance(fault, ConstraintLimitError):
            forms = forms[-1:]  # others would probably reach the limit too
        for form in forms:
            try:
                made = self._compiled(text_of(form), vocabulary)
            except ConstraintError:
                continue  # the next form has fewer keywords
            _LOG.warning("a schema that is not strict is loosened: %s", printable(str(fault)))
            return made
        raise fault

    def _compiled(self, text: str, vocabulary: Vocabulary) -> tuple[Filter, str]:
        schema = checked_schema(text, vocabulary.limits, _NAME, compact=self.compact)
        lark = f"start: %json {text_of(schema)}"
        return guided_filter(lark, vocabulary, Source(_NAME, schema=schema)), text


def checked_schema(text: str, limits: CompileLimits, name: str, *, compact: bool = False) -> object:
    """The schema in `text` with the settings of white space, ready for the library.

    Raises ConstraintError for a schema that explodes, under the given name.
    """
    check_length(text, limits, name)
    schema = without_unreachable(_parse(text, name))
    check_schema(schema, name)
    if schema is True:
        schema = {}
    if isinstance(schema, dict):
        own = schema.get("x-guidance", {})
        layout = _COMPACT if compact else _SPACED
        if isinstance(own, dict):
            schema = {**schema, "x-guidance": {**layout, **own}}
    return schema


def text_of(schema: object) -> str:
    """JSON text of a schema. Raises ConstraintError for what is no JSON value."""
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConstraintError(f"{_NAME} is not a JSON value: {error}") from error


def _parse(text: str, name: str) -> object:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"{name} is not JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise ConstraintError(f"{name} is neither an object nor true or false", got=text[:60])
    return schema
