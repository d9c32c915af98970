"""Twenty JSON schemas of increasing difficulty, to which tests constrain replies."""

from __future__ import annotations

Schema = dict[str, object]

_POINT: Schema = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
_TREE: Schema = {
    "type": "object",
    "properties": {
        "value": {"type": "integer", "minimum": 0, "maximum": 99},
        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
    },
    "required": ["value", "children"],
    "additionalProperties": False,
}
_EXPRESSION: Schema = {
    "anyOf": [
        {"type": "integer"},
        {
            "type": "object",
            "properties": {
                "op": {"enum": ["+", "-", "*"]},
                "left": {"$ref": "#/$defs/expression"},
                "right": {"$ref": "#/$defs/expression"},
            },
            "required": ["op", "left", "right"],
            "additionalProperties": False,
        },
    ]
}


def _closed(properties: Schema, *optional: str) -> Schema:
    """Schema of an object with these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


SCHEMAS: dict[str, Schema] = {
    "boolean": {"type": "boolean"},
    "range": {"type": "integer", "minimum": -20, "maximum": 150},
    "enum": {"enum": ["red", "green", "blue", 7, None, True]},
    "short_string": {"type": "string", "minLength": 1, "maxLength": 12},
    "person": _closed(
        {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
        }
    ),
    "optional": _closed(
        {"id": {"type": "integer"}, "note": {"type": "string"}, "done": {"type": "boolean"}},
        "note",
        "done",
    ),
    "limited_array": {
        "type": "array",
        "items": {"type": "integer", "minimum": 1, "maximum": 6},
        "minItems": 2,
        "maxItems": 5,
    },
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "string", "maxLength": 8}, {"type": "integer"}, {"const": "end"}],
        "items": False,
        "minItems": 3,
    },
    "nested": _closed(
        {
            "user": _closed(
                {"name": {"type": "string", "maxLength": 20}, "address": _closed({"zip": {}})}
            ),
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 3},
        }
    ),
    "numbers": _closed(
        {
            "ratio": {"type": "number", "minimum": 0, "maximum": 1},
            "above": {"type": "number", "exclusiveMinimum": 2.5},
            "dozens": {"type": "integer", "multipleOf": 12, "minimum": 0, "maximum": 600},
        }
    ),
    "formats": _closed(
        {
            "id": {"type": "string", "format": "uuid"},
            "host": {"type": "string", "format": "ipv4"},
            "mail": {"type": "string", "format": "email", "maxLength": 30},
            "day": {"type": "string", "format": "date"},
        }
    ),
    "patterns": _closed(
        {
            "plate": {"type": "string", "pattern": "^[A-Z]{1,3}-[0-9]{2,4}$"},
            "color": {"type": "string", "pattern": "^#([0-9a-f]{3}|[0-9a-f]{6})$"},
        }
    ),
    "unicode": _closed(
        {
            "größe": {"enum": ["klein", "mittel", "groß"]},
            "名前": {"const": 'naïve ☕ \U0001f600 "quoted" \\ \n'},
            "text": {"type": "string", "maxLength": 15},
        }
    ),
    "any_of": {
        "anyOf": [
            {"type": "string", "maxLength": 5},
            {"type": "array", "items": {"type": "null"}, "maxItems": 3},
            _POINT,
        ]
    },
    "tagged": {
        "oneOf": [
            _closed({"kind": {"const": "circle"}, "radius": {"type": "number", "minimum": 0}}),
            _closed({"kind": {"const": "square"}, "side": {"type": "number", "minimum": 0}}),
        ]
    },
    "all_of": {
        "allOf": [
            {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 3}},
                "required": ["a"],
            },
            {
                "type": "object",
                "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"type": "boolean"}},
                "required": ["b"],
                "additionalProperties": False,
            },
        ]
    },
    "open_object": {
        "type": "object",
        "properties": {"first": {"type": "boolean"}},
        "patternProperties": {"^n_": {"type": "integer"}},
        "additionalProperties": {"type": "string", "maxLength": 6},
        "required": ["first"],
    },
    "references": {
        "$defs": {"point": _POINT, "line": {"type": "array", "items": {"$ref": "#/$defs/point"}}},
        **_closed({"start": {"$ref": "#/$defs/point"}, "path": {"$ref": "#/$defs/line"}}),
    },
    "tree": {"$defs": {"tree": _TREE}, "$ref": "#/$defs/tree"},
    "expression": {
        "$defs": {"expression": _EXPRESSION},
        **_closed(
            {"formula": {"$ref": "#/$defs/expression"}, "unit": {"type": ["string", "null"]}}
        ),
    },
}

SLOW_SCHEMA: Schema = {
    "type": "object",
    "properties": {f"p{i}": {"type": "integer", "multipleOf": 65500 + i} for i in range(60)},
}
"""Takes about 20 s and 500 MB to compile, although none of its numbers exceeds its limit."""
