"""The manifest's records as tables, from its published schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from linexport.manifest.options import ConvertOptions, declared
from pages import ROOT, table

SCHEMA = ROOT / "exporter" / "manifest" / "schema.json"

_ATTRIBUTE = re.compile(
    r"^    (\w+(?:, \w+)*): (.*?)(?=\n    \w+(?:, \w+)*: |\n\n|\Z)", re.MULTILINE | re.DOTALL
)


def manifest() -> str:
    """Return the table of ``manifest.json`` and one of each record in it."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    parts = [_record(schema)]
    for name, record in sorted(schema["$defs"].items()):
        described = _options() if name == ConvertOptions.__name__ else {}
        parts.append(f"### {_shown(name)}\n\n{_summary(record)}\n\n{_record(record, described)}")
    return "\n\n".join(parts)


def _shown(name: str) -> str:
    """Return the name of a record, with its module's where two have the same."""
    return name.removeprefix("linexport__manifest__").replace("__", ".")


def _summary(record: dict[str, Any]) -> str:
    return " ".join(record.get("description", "").partition("\n\n")[0].split())


def _options() -> dict[str, str]:
    """Return the meanings of options, as the help of the command line says them."""
    return {name: f"`{option.flag}`: {option.help}" for name, option in declared().items()}


def _record(record: dict[str, Any], described: Mapping[str, str] = MappingProxyType({})) -> str:
    attributes = _ATTRIBUTE.findall(record.get("description", ""))
    meanings = {name: text for names, text in attributes for name in names.split(", ")} | {
        **described
    }
    rows = [
        [f"`{name}`", _type(field), " ".join(meanings.get(name, "").split())]
        for name, field in record.get("properties", {}).items()
    ]
    columns = 3 if any(meaning for *_, meaning in rows) else 2  # names may say it all
    return table(["key", "type", "meaning"][:columns], [row[:columns] for row in rows])


def _type(field: dict[str, Any]) -> str:
    if "$ref" in field:
        name = _shown(field["$ref"].rpartition("/")[2])
        return f"[{name}](#{name.lower().replace('.', '')})"
    if "anyOf" in field:
        return " or ".join(_type(one) for one in field["anyOf"])
    if "const" in field or "enum" in field:
        values = field.get("enum", [field.get("const")])
        return ", ".join(f"`{json.dumps(value)}`" for value in values)
    if field.get("type") == "array":
        inner = field.get("items")
        return f"list of {_type(inner)}" if isinstance(inner, dict) and inner else "list"
    if field.get("type") == "object":
        inner = field.get("additionalProperties")
        return f"object of {_type(inner)}" if isinstance(inner, dict) else "object"
    return str(field.get("type", "any"))


PARTS = {"manifest": manifest}
