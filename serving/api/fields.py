"""Strict reading of JSON objects: every fault is a 400 that names the field.

Written by hand: the strictness wanted here (no "1" for 1, no true for 1, null means absent) is what a general library
would have to be talked into.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from serving.api.errors import ApiError, invalid, unsupported


def parse_json(raw: bytes, max_values: int) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        ApiError: 400: not UTF-8, not strict JSON (NaN and Infinity are not), not an object, text that UTF-8 cannot
            carry, or more than `max_values` commas, quotes and opening brackets and braces.
    """
    values = sum(map(raw.count, (b",", b'"', b"[", b"{")))
    if values > max_values:
        raise invalid(f"the body has {values} commas, quotes and brackets: the limit is {max_values}; send less")
    try:
        text = raw.decode("utf-8")
    except UnicodeError:
        raise invalid("the body is not valid UTF-8 text") from None
    return parse_object(text)


def parse_object(text: str, where: str | None = None) -> dict[str, Any]:
    """The object in a JSON text; `where` names the field that holds it, None is the body.

    Raises:
        ApiError: 400, as parse_json.
    """
    name = where or "the body"
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:  # only an escape can smuggle in half of a surrogate pair
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        raise invalid(f"{name} holds half of a surrogate pair, which is not text", where) from None
    except json.JSONDecodeError as error:
        raise invalid(f"{name} is not valid JSON: {error.msg} at character {error.pos}", where) from None
    except RecursionError:
        raise invalid(f"{name} is nested too deeply; flatten it", where) from None
    except ValueError:  # a number of thousands of digits, or one of the constants
        raise invalid(
            f"{name} holds a number that JSON does not allow (NaN, Infinity or too many digits)", where
        ) from None
    if not isinstance(value, dict):
        raise invalid(f"{name} must be a JSON object, not {kind(value)}", where)
    return value


class Fields:
    """Typed reading of one JSON object. Null counts as absent. `where` is put before names in errors."""

    def __init__(self, values: Mapping[str, Any], where: str = ""):
        self._values = values
        self._where = where

    def name(self, field: str) -> str:
        return f"{self._where}.{field}" if self._where else field

    def names(self) -> list[str]:
        return list(self._values)

    def get(self, field: str) -> Any:
        return self._values.get(field)

    def required(self, field: str) -> Any:
        value = self.get(field)
        if value is None:
            raise invalid(f"{self.name(field)} is missing", self.name(field))
        return value

    def integer(self, field: str) -> int | None:
        value = self.get(field)
        if value is not None and type(value) is not int:
            raise self._wrong(field, "an integer")
        return value

    def number(self, field: str, default: float) -> float:
        value = self.get(field)
        if value is None:
            return default
        if type(value) not in (int, float):
            raise self._wrong(field, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise invalid(f"{self.name(field)} is too large for a number", self.name(field))
        return number

    def boolean(self, field: str) -> bool:
        value = self.get(field)
        if value is None:
            return False
        if type(value) is not bool:
            raise self._wrong(field, "true or false")
        return value

    def text(self, field: str) -> str | None:
        value = self.get(field)
        if value is not None and not isinstance(value, str):
            raise self._wrong(field, "a string")
        return value

    def object(self, field: str) -> "Fields | None":
        value = self.get(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(field, "an object")
        return Fields(value, self.name(field))

    def refuse(self, refused: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise if a field of the list is there with a value that asks for something."""
        for field, harmless in refused.items():
            value = self.get(field)
            if value is not None and not any(same(value, accepted) for accepted in harmless):
                raise unsupported(self.name(field), f"{self.name(field)} is not supported by this server; leave it out")

    def _wrong(self, field: str, wanted: str) -> ApiError:
        return invalid(f"{self.name(field)} must be {wanted}, not {kind(self.get(field))}", self.name(field))


def same(value: Any, accepted: Any) -> bool:
    """Equal, where true is not 1, but 1.0 is."""
    return (type(value) is bool) == (type(accepted) is bool) and value == accepted


def kind(value: Any) -> str:
    """What JSON calls the type of a value."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _refuse_constant(name: str) -> float:
    raise ValueError(name)
