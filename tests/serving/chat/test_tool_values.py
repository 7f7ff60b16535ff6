"""Arguments that come as bare text get the JSON type that the tool's schema allows."""

import pytest

from serving.chat.values import Schema

LOOP = {"anyOf": [{"$ref": "#"}, {"$ref": "#"}, {"properties": {"a": {"$ref": "#/$defs/day"}}}]}
LOOP |= {"$defs": {"day": {"type": "integer", "anyOf": [{"$ref": "#/$defs/day"}]}}}


@pytest.mark.parametrize(
    ("schema", "raw", "encoded"),
    [
        ({"type": "string"}, "007", '"007"'),
        ({"type": "string"}, "true", '"true"'),
        ({"type": "string"}, "null", '"null"'),
        ({"type": "string"}, ' "a" ', '" \\"a\\" "'),
        ({"type": "integer"}, "12", "12"),
        ({"type": "integer"}, " 12 ", "12"),
        ({"type": "integer"}, "1.0", "1.0"),
        ({"type": "integer"}, "1.5", '"1.5"'),
        ({"type": "integer"}, "123_456", '"123_456"'),
        ({"type": "integer"}, "9" * 30, "9" * 30),
        ({"type": "integer"}, "9" * 5000, '"' + "9" * 5000 + '"'),
        ({"type": "number"}, "1.10", "1.10"),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "number"}, "-Infinity", '"-Infinity"'),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "boolean"}, "yes", '"yes"'),
        ({"type": "boolean"}, "1", '"1"'),
        ({"type": "array"}, "[1, {}]", "[1, {}]"),
        ({"type": "object"}, "{'a': 1}", "\"{'a': 1}\""),
        ({"type": "object"}, "[" * 5000, '"' + "[" * 5000 + '"'),
        ({"type": ["string", "integer"]}, "12", "12"),
        ({"type": ["string", "integer"]}, "1.5", '"1.5"'),
        ({"type": ["string", "null"]}, "None", "null"),
        ({"enum": ["12", "x"], "type": ["string", "integer"]}, "12", '"12"'),
        ({"enum": [1, 2]}, "2", "2"),
        ({"const": "2"}, "2", '"2"'),
        ({"anyOf": [{"type": "boolean"}, {"type": "array"}]}, "[]", "[]"),
        ({"allOf": [{"$ref": "#/$defs/day"}]}, "3", "3"),
        ({"$ref": "#/nowhere"}, "3", "3"),
        ({"$ref": "https://example.com/schema"}, "x", '"x"'),
        ({"type": 5, "enum": "no list", "anyOf": {}}, "x", '"x"'),
        ("no schema", "[1]", "[1]"),
    ],
)
def test_a_value_is_json_where_its_type_allows_and_a_string_otherwise(schema: object, raw: str, encoded: str):
    parameters = {"properties": {"a": schema}, "$defs": {"day": {"type": "integer"}}}
    assert Schema(parameters).encode("a", raw, guess=True) == encoded


@pytest.mark.parametrize(
    ("raw", "guessed", "plain"), [("3", "3", '"3"'), ("x", '"x"', '"x"'), ("null", "null", "null")]
)
def test_what_no_schema_knows_is_guessed_only_where_the_format_does(raw: str, guessed: str, plain: str):
    for parameters in (None, 5, {}, {"properties": {"b": {}}}, {"properties": []}):
        assert Schema(parameters).encode("a", raw, guess=True) == guessed
        assert Schema(parameters).encode("a", raw, guess=False) == plain


def test_null_is_null_in_formats_without_quotes_unless_only_a_string_will_do():
    schema = Schema({"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}})
    assert schema.encode("n", "null", guess=False) == "null"
    assert schema.encode("s", "null", guess=False) == '"null"'


def test_schemas_that_refer_to_themselves_are_walked_once():
    assert Schema(LOOP).types("a") == {"integer"}
    wide = {"anyOf": [{"$ref": "#"}] * 1000, "properties": {"a": {"type": "null"}}}
    assert Schema(wide).types("a") == {"null"}
