"""A hook of mkdocs: docs/records.md gets a table a type of a record, from what `meshmark schema` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshmark.records.schema import Json, schema

MARK = "<!-- the tables of `meshmark schema` -->"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Where the page asks for them."""
    return markdown.replace(MARK, tables(schema())) if MARK in markdown else markdown


def tables(said: Json) -> str:
    """Return the tables of all types, those of whole lines first."""
    definitions: Mapping[str, Json] = said["$defs"]
    lines = [_name(one) for one in said["anyOf"]]
    order = [*lines, *(name for name in definitions if name not in lines)]
    return "\n\n".join(_table(name, definitions[name]) for name in order)


def _table(name: str, said: Json) -> str:
    rows = [_row(field, value, field in said["required"]) for field, value in said["properties"].items()]
    head = "| field | what | always there | |\n|:------|:-----|:-------------|:-|"
    return "\n".join([f"### {name}", "", said["description"], "", head, *rows])


def _row(field: str, said: Json, required: bool) -> str:
    return f"| `{field}` | {_kind(said)} | {'yes' if required else ''} | {said.get('description', '')} |"


def _kind(said: Json) -> str:
    """In words, with a link to another table."""
    if "$ref" in said:
        return f"[{_name(said)}](#{_name(said).lower()})"
    if "anyOf" in said:
        return " or ".join(dict.fromkeys(_kind(one) for one in said["anyOf"]))
    if "enum" in said:
        return "one of " + ", ".join(f"`{value}`" for value in said["enum"])
    if "items" in said:
        return f"list of {_kind(said['items'])}"
    if "additionalProperties" in said:
        return f"by name: {_kind(said['additionalProperties'])}"
    if "prefixItems" in said:
        return ", ".join(_kind(one) for one in said["prefixItems"])
    kinds: Any = said.get("type", "anything")
    return " or ".join(kinds) if isinstance(kinds, list) else str(kinds)


def _name(said: Json) -> str:
    return str(said["$ref"]).rpartition("/")[2]
