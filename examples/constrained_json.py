"""Constrains replies to a JSON schema and to a regular expression.

Usage: constrained_json.py [MODEL]
"""

from __future__ import annotations

import json
import sys

from exl_core import BaseGenerator, JsonSchema, Regex, SamplerParams, load_model

PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "continent": {"enum": ["Africa", "America", "Asia", "Europe", "Oceania"]},
    },
    "required": ["city", "continent"],
    "additionalProperties": False,
}
generator = BaseGenerator(load_model(sys.argv[1] if len(sys.argv) > 1 else None))
for constraint in (JsonSchema(PLACE, compact=True), Regex("[0-9]{3}-[0-9]{4}")):
    # The reply ends where its constraint allows no further token.
    text = generator.generate_simple(
        "The Eiffel Tower: ",
        num_tokens=120,
        sampler=SamplerParams(temperature=0),
        completion_only=True,
        constraints=constraint,
    )
    print(text)
    if isinstance(constraint, JsonSchema):
        print("continent:", json.loads(text)["continent"])
