"""JSON schema of a line of records.jsonl, generated from the dataclasses that are written there."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from meshmark.records.record import SCHEMA, Record
from meshmark.records.record_file import FIELDS, Session
from meshmark.serial import Written

Json = dict[str, Any]

MAY_CHANGE = (
    f"Format {SCHEMA}, the value of `schema` in every line. Within a format, fields with defaults may be added, "
    "texts for people (messages, summaries, remarks, what `evidence` of a verdict holds) may be worded otherwise, and "
    "more statuses, tasks and kinds may appear: readers pass over what they do not know. What is renamed, removed or "
    "means something else raises the number; Meshmark reads all formats since 1."
)
_NUMBER = {"type": ["number", "null"]}
"""Schema of a float. null stands for a value that is not finite."""
_PLAIN: dict[Any, Json] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: _NUMBER,
    type(None): {"type": "null"},
    Path: {"type": "string"},
}


def schema() -> Json:
    """Return the schema, in draft 2020-12. A line is a record or a session of pytest."""
    definitions: Json = {}
    lines = [_of(kind, definitions) for kind in (Record, Session)]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:meshmark:records:{SCHEMA}",
        "title": "A line of Meshmark's records.jsonl",
        "description": MAY_CHANGE,
        "anyOf": lines,
        "$defs": definitions,
    }


def _of(kind: Any, definitions: Json) -> Json:  # noqa: ANN401
    """Return the schema of an annotation. Dataclasses go to `definitions`, because they may be recursive."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    if dataclasses.is_dataclass(kind):
        return _of_dataclass(typing.cast(type, kind), definitions)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return {"enum": [str(value) for value in kind]}
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_of(one, definitions) for one in inner]}
    if origin is list:
        return {"type": "array", "items": _of(inner[0], definitions)}
    if origin is tuple:
        if inner[-1] is Ellipsis:
            return {"type": "array", "items": _of(inner[0], definitions)}
        each = [_of(one, definitions) for one in inner]
        return {"type": "array", "prefixItems": each, "minItems": len(each), "maxItems": len(each)}
    assert origin in (dict, Mapping), f"nothing is known of how {kind} is written"
    return {"type": "object", "additionalProperties": _of(inner[1], definitions)}


def _of_dataclass(kind: type, definitions: Json) -> Json:
    if issubclass(kind, Written):
        return {"type": "string", "description": _first_line(kind)}
    if tag := getattr(kind, "TAG", ""):  # its subclasses have fields of their own
        properties = {tag: {"type": "string"}}
        return {"type": "object", "description": _first_line(kind), "properties": properties, "required": [tag]}
    name, presets = kind.__name__, getattr(kind, "PRESETS", {})
    reference: Json = {"$ref": f"#/$defs/{name}"}
    if name not in definitions:
        definitions[name] = {}
        definitions[name] = _fields(kind, definitions)
    return {"anyOf": [{"type": "string", "examples": list(presets)}, reference]} if presets else reference


def _fields(kind: type, definitions: Json) -> Json:
    hints, told = typing.get_type_hints(kind), _docstrings(kind)
    own = dataclasses.fields(typing.cast(Any, kind))
    properties = {field.name: _of(hints[field.name], definitions) for field in own}
    for field in properties.keys() & FIELDS.keys():
        aside = {"type": "string", "pattern": r"^evidence/[0-9a-f]{64}\.json\.gz$"}
        properties[field] = {"anyOf": [properties[field], aside]}
    for field in properties.keys() & told.keys():
        properties[field] = {**properties[field], "description": told[field]}
    missing = dataclasses.MISSING
    required = [f.name for f in own if f.default is missing and f.default_factory is missing]
    return {"type": "object", "description": _first_line(kind), "properties": properties, "required": required}


def _first_line(kind: type) -> str:
    return (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")


def _docstrings(kind: type) -> dict[str, str]:
    """Return the docstring under each field."""
    body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]).body
    found = {}
    for field, under in zip(body, body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(under, ast.Expr):
            if isinstance(under.value, ast.Constant):
                found[field.target.id] = " ".join(str(under.value.value).split())
    return found
