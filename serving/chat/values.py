"""Arguments that come as bare text, made JSON by the tool's own parameter schema.

The Qwen XML and the GLM format write `007` for the string "007" and for the number alike; only the schema tells.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

_PYTHON_SPELLING = {"True": "true", "False": "false", "None": "null"}
_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})


class Schema:
    """The parameters of one tool, as JSON schema. Anything malformed in it counts as "nothing known"."""

    def __init__(self, parameters: object):
        self._root: Mapping[str, Any] = parameters if isinstance(parameters, dict) else {}

    def types(self, key: str) -> frozenset[str]:
        """JSON types that a parameter may have; empty when nothing is known."""
        found = [self._types(schema) for schema in self._properties(key)]
        return frozenset().union(*found) & _TYPES

    def encode(self, key: str, raw: str, *, guess: bool) -> str:
        """`raw` as JSON text: as it is where it is JSON of a type that the parameter may have, else as a string.

        Numbers keep their digits, and nothing is ever evaluated. `guess`: where nothing is known of the parameter, take
        what reads as JSON for JSON.
        """
        types = self.types(key)
        if types == {"string"} or (not types and not guess):
            return "null" if raw == "null" and not types else dumps(raw)
        if raw == "null" and not guess:
            return raw
        if "string" in types and raw in self._listed(key):
            return dumps(raw)
        text = raw.strip()
        text = _PYTHON_SPELLING.get(text, text)
        kinds = kinds_of(text)
        if kinds and (not types or kinds & types):
            return text
        return dumps(raw)

    def _listed(self, key: str) -> set[str]:
        listed: set[str] = set()
        for schema in self._properties(key):
            for branch in self._branches(schema):
                listed.update(value for value in _allowed(branch) if isinstance(value, str))
        return listed

    def _properties(self, key: str) -> Iterator[object]:
        for branch in self._branches(self._root):
            properties = branch.get("properties")
            if isinstance(properties, dict) and key in properties:
                yield properties[key]

    def _branches(self, schema: object) -> Iterator[Mapping[str, Any]]:
        """A schema and what it refers to or is a union of, each once: references may go round in circles."""
        waiting, seen = [schema], set[int]()
        while waiting:
            branch = waiting.pop()
            if not isinstance(branch, dict) or id(branch) in seen:
                continue
            seen.add(id(branch))
            yield branch
            reference = branch.get("$ref")
            if isinstance(reference, str):
                waiting.append(self._resolve(reference))
            for union in ("anyOf", "oneOf", "allOf"):
                branches = branch.get(union)
                waiting += branches if isinstance(branches, list) else []

    def _resolve(self, reference: str) -> object:
        if not reference.startswith("#"):
            return None
        found: object = self._root
        for step in reference[1:].split("/")[1:]:
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        return found

    def _types(self, schema: object) -> set[str]:
        types: set[str] = set()
        for branch in self._branches(schema):
            named = branch.get("type")
            types.update(t for t in (named if isinstance(named, list) else [named]) if isinstance(t, str))
            if named is None:
                types.update(*map(_kinds, _allowed(branch)))
        return types


def _allowed(schema: Mapping[str, Any]) -> list[object]:
    """Values that `enum` and `const` name."""
    values = schema.get("enum")
    return [*(values if isinstance(values, list) else ()), *([schema["const"]] if "const" in schema else ())]


def dumps(text: str) -> str:
    """A JSON string."""
    return json.dumps(text, ensure_ascii=False)


def kinds_of(text: str) -> set[str]:
    """The schema types that a JSON text satisfies; none when it is not strict JSON."""
    try:
        return _kinds(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return set()


def _kinds(value: object) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"integer", "number"} if math.isfinite(value) and value.is_integer() else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case dict():
            return {"object"}
    return set()


def _refuse(name: str) -> float:
    raise ValueError(name)


def decoded(inside: str) -> str | None:
    """The text of a JSON string, given what stands between its quotes; None when that is not valid."""
    try:
        text = json.loads(f'"{inside}"', strict=False)
        text.encode("utf-8")
    except ValueError:
        return None
    return text
