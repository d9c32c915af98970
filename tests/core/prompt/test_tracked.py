"""`TrackedText`: the same text as `str` gives, and trust that stays with its characters.

In these tests trusted characters are upper case and untrusted ones lower case, so that every
result shows by itself which of its characters must be trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl_core.prompt.template import ChatTemplate
from exl_core.prompt.tracked import TrackedText, concat, join, template_text, tracked

LETTERS = st.text("ABab \n,%é", max_size=12)
PART = st.sampled_from(["A", "a", " ", ",", "aB", "B ", "\n", ""])


def of(text: str) -> TrackedText:
    return TrackedText(text, bytes(char.isupper() for char in text))


def check(found: Any, expected: Any) -> None:
    if isinstance(expected, str):
        assert found == expected
        assert tracked(found).trusted == bytes(char.isupper() for char in expected)
    else:
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check(one, other)


# ruff: noqa: ARG005 - all operations take the same arguments
OPERATIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda t, a, b: t + a + b,
    "radd": lambda t, a, b: a + t,
    "times": lambda t, a, b: t * 3,
    "slice": lambda t, a, b: t[1:-1],
    "reversed": lambda t, a, b: t[::-1],
    "characters": lambda t, a, b: list(t),
    "last": lambda t, a, b: t[-1] if t else t,
    "strip": lambda t, a, b: t.strip(),
    "strip characters": lambda t, a, b: t.strip(str(a) + " "),
    "lstrip": lambda t, a, b: t.lstrip(),
    "rstrip": lambda t, a, b: t.rstrip(str(a) + "B"),
    "split": lambda t, a, b: t.split(),
    "split once": lambda t, a, b: t.split(None, 1),
    "split at": lambda t, a, b: t.split(a or "a"),
    "split once at": lambda t, a, b: t.split(a or "a", 1),
    "rsplit": lambda t, a, b: t.rsplit(None, 1),
    "rsplit at": lambda t, a, b: t.rsplit(a or "B", 1),
    "lines": lambda t, a, b: t.splitlines(),
    "whole lines": lambda t, a, b: t.splitlines(True),
    "partition": lambda t, a, b: t.partition(a or " "),
    "rpartition": lambda t, a, b: t.rpartition(a or " "),
    "replace": lambda t, a, b: t.replace(a or "A", b),
    "replace once": lambda t, a, b: t.replace(a or "A", b, 1),
    "remove prefix": lambda t, a, b: t.removeprefix(a),
    "remove suffix": lambda t, a, b: t.removesuffix(a),
    "join": lambda t, a, b: t.join([a, b, t, a]),
}


@pytest.mark.parametrize("name", OPERATIONS)
@given(text=LETTERS, a=PART, b=PART)
def test_text_equals_that_of_str_and_trust_follows_its_characters(
    name: str, text: str, a: str, b: str
) -> None:
    operation = OPERATIONS[name]
    check(operation(of(text), of(a), of(b)), operation(text, a, b))


@given(parts=st.lists(st.one_of(LETTERS, LETTERS.map(of)), max_size=6), separator=PART)
def test_joined_parts_keep_their_trust(parts: list[str], separator: str) -> None:
    def expected(items: Iterable[str]) -> bytes:
        return b"".join(tracked(one).trusted for one in items)

    assert tracked(concat(parts)).trusted == expected(parts)
    assert concat(parts) == "".join(parts)
    whole = [piece for part in parts for piece in (of(separator), part)][1:]
    assert tracked(join(of(separator), parts)).trusted == expected(whole)


@pytest.mark.parametrize(
    ("pattern", "values"),
    [
        ("A%sB%sC", ("x", template_text("Y"))),
        ("%s%%B", ("a",)),
        ("%(k)sB%(j)s", {"k": "x", "j": "y"}),
        ("%s", "abc"),
        ("B%5s|%-3sX", ("a", "b")),
        ("B%dA", (7,)),
    ],
)
def test_percent_keeps_trust_of_its_pattern_and_values(pattern: str, values: Any) -> None:
    found = template_text(pattern) % values
    assert found == pattern % values
    at = [found.trusted[index] for index, char in enumerate(found) if char in "ABC"]
    assert all(at)
    assert not any(found.trusted[found.index(char)] for char in "xyab" if char in found)


@pytest.mark.parametrize("method", ["upper", "lower", "title", "capitalize", "casefold"])
def test_another_case_keeps_trust_where_the_length_stays(method: str) -> None:
    text = TrackedText("<a>b", b"\1\1\1\0")
    assert getattr(text, method)().trusted == text.trusted
    longer = TrackedText("<ß>", b"\1\1\1")
    assert longer.upper() == "<SS>"
    assert tracked(longer.upper()).trusted == bytes(4)  # text is right, trust is lost


TEMPLATES = {
    "output": "<A>{{ c }}<B>",
    "sum": "{{ '<A>' + c + '<B>' }}",
    "tilde": "{{ '<A>' ~ c ~ '<B>' }}",
    "number in a mark": "<A{% for x in [1] %}{{ loop.index }}{% endfor %}>{{ c }}",
    "trim": "{{ ('<A>' + c + '<B>') | trim }}",
    "set": "{% set x = '<A>' %}{{ x }}{{ c }}{{ x }}",
    "block": "{% set x %}<A>{{ c }}<B>{% endset %}{{ x }}",
    "namespace": "{% set n = namespace(t='') %}{% for x in [1, 2] %}{% set n.t = n.t + '<A>' + c %}"
    "{% endfor %}{{ n.t }}",
    "macro": "{% macro f(x) %}<A>{{ x }}<B>{% endmacro %}{{ f(c) }}",
    "call": "{% macro f() %}<A>{{ caller() }}<B>{% endmacro %}{% call f() %}{{ c }}{% endcall %}",
    "table": "{% set marks = {'user': '<A>'} %}{{ marks['user'] }}{{ c }}",
    "folded table": "{{ {'user': '<A>'}.get(messages[0].role) }}{{ {'user': ['<B>']}.user[0] }}"
    "{{ ('<A>', '<B>')[1] }}{{ c }}",
    "join": "{{ ['<A>', c, '<B>'] | join('<C>') }}",
    "method join": "{{ '<C>'.join(['<A>', c]) }}",
    "replace in content": "{{ c | replace('o', '<O>') }}{{ c.replace('o', '<O>') }}",
    "format": "{{ '<A>{}<B>'.format(c) }}{{ '<A>%s' % c }}{{ '<B>%s' | format(c) }}",
    "role in a mark": "<{{ messages[0].role | upper }}>{{ messages[0]['role'].upper() }}{{ c }}",
    "choice": "{{ '<A>' if c else '<B>' }}{{ c }}",
    "default": "{{ missing | default('<A>') }}{{ c }}",
    "first": "{{ ['<A>', c] | first }}{{ ['<A>', c] | last }}",
    "filter block": "{% filter trim %} <A>{{ c }} {% endfilter %}",
    "string": "{{ 12 | string }}{{ ('<A>' + c) | string }}",
    "bos": "{{ bos_token }}{{ c }}",
    "generation": "{% generation %}<A>{{ c }}{% endgeneration %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_trusts_all_that_it_writes_and_nothing_else(name: str) -> None:
    source = "{% set c = messages[0].content %}" + TEMPLATES[name]
    template = ChatTemplate(source, bos_token="<S>", eos_token="", where=name)
    text = template.render([{"role": "user", "content": "yo yo"}])
    shown = [(char, flag) for char, flag in zip(text, text.trusted, strict=True) if char != " "]
    assert ("y", 0) in shown
    assert [flag for _, flag in shown] == [char in "<>ABCOSERU12" for char, _ in shown]


def test_content_that_equals_a_literal_is_not_trusted() -> None:
    template = ChatTemplate("<A>{{ messages[0].content }}", bos_token="", eos_token="", where="")
    text = template.render([{"role": "user", "content": "<A>"}])
    assert text == "<A><A>"
    assert text.trusted == b"\1\1\1\0\0\0"


def test_a_role_that_is_no_plain_name_is_not_trusted() -> None:
    template = ChatTemplate("{{ messages[0].role }}", bos_token="", eos_token="", where="")
    assert template.render([{"role": "user", "content": ""}]).trusted == b"\1\1\1\1"
    assert template.render([{"role": "<A>", "content": ""}]).trusted == bytes(3)


def test_templates_cannot_reach_the_record() -> None:
    template = ChatTemplate(
        "{{ 'a'.trusted }}{{ 'a'.plain }}", bos_token="", eos_token="", where=""
    )
    assert template.render([{"role": "user", "content": ""}]) == ""
