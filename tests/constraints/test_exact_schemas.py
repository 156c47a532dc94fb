"""Texts under a JSON schema satisfy it, also for schemas where xgrammar by itself allows more."""

from __future__ import annotations

import json

import jsonschema
import pytest
from support.bytewise import allows

from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.errors import ConstraintError

NAMES = ["é", "éa", "", 'a"b', "日本", "日", "a", "^]-"]
KEYS = {"type": "object", "properties": {name: {"type": "null"} for name in NAMES}}
LETTER = {"maxLength": 1}
NO_STRINGS = ["{83: 1}", "{true: 1}", "{null: 1}", "{[]: 1}", "{{}: 1}"]
ESCAPED = 'a\n\0"\\/\x1f\x7f\u2028\U0001f600é1'


def is_valid(schema: dict, text: str) -> bool:
    """Return whether a text is JSON that satisfies a schema, according to jsonschema."""
    try:
        return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    except ValueError:
        return False


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"type": "string", "maxLength": 2}, ['"é😀"', '""', '"\x7f\u2028"'], ['"\t"', '"\x00"', '"abc"']),
        ({"type": "string", "maxLength": 101}, ['"é😀"', f'"{"é" * 101}"'], ['"\t"', f'"{"é" * 102}"']),
        ({"type": "string", "minLength": 2}, ['"é😀"', f'"{"ß" * 300}"'], ['"é"', '"\x1f\x1f"']),
        ({"minLength": 1, "maxLength": 1}, ['"é"', "1", "null"], ['""', '"\n"']),
        ({"pattern": "^é1$"}, ['"é1"', "[]"], ['"é"']),
        ({"minimum": 5}, ['"é"', "5"], ["4"]),
        ({"type": "string", "pattern": "^é[^a]$"}, ['"éb"', '"éé"', '"é😀"'], ['"éa"', '"é""', '"é\\"', '"é\t"']),
        ({"type": "string", "pattern": "^é.*$"}, ['"é"', '"éa,b"'], ['"é", "x"', '"é\n"']),
        ({"type": "string", "pattern": "^(ab+)?$"}, ['""', '"abb"'], ['"b"', '"bb"']),
        ({"type": "string", "pattern": r"^\[.*]$"}, ['"[é]"'], ['"[""]"']),
        ({**KEYS, "additionalProperties": {"type": "integer"}}, ['{"é": null, "éb": 5}', '{"日本x": 1}'], []),
        ({**KEYS, "unevaluatedProperties": {"type": "integer"}}, ['{"^]-": null}', '{"^]": 1}'], ['{"^]-": 1}']),
        ({**KEYS, "additionalProperties": True}, ['{"日": null, "本": "é"}'], ['{"日": "é"}']),
        ({"const": ESCAPED}, [json.dumps(ESCAPED, ensure_ascii=False).replace("\x7f", "\\u007f")], []),
        ({"properties": {ESCAPED: {"enum": ["ß\u0085f"]}}, "required": [ESCAPED], "type": "object"}, [], ["{}"]),
        ({"$ref": "#/$defs/größe1", "$defs": {"größe1": {"const": "ÿ0"}}}, ['"ÿ0"'], ['"ÿ"']),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"const": 1}}}, ["1"], ["2"]),
        ({"$ref": "#/$defs/a~0b", "$defs": {"a~b": {"const": 1}}}, ["1"], ["2"]),
        ({"$ref": "#/$defs/a~01b", "$defs": {"a~1b": {"const": 1}, "a/b": {}}}, ["1"], ["2"]),
        ({"$ref": "#/$defs/a%20b%7e1", "$defs": {"a b/": {"const": 1}}}, ["1"], ["2"]),
        ({"$ref": "#/$defs/g/x", "$defs": {"g": {"x": {"const": 1}}, "reference_0": {}}}, ["1"], ["2"]),
        (
            {"$ref": "#/$defs/g/x", "$defs": {"g": {"x": {"$ref": "#/$defs/g/y/1"}, "y": [{}, {"const": 1}]}}},
            ["1"],
            ["2"],
        ),
        (
            {"$ref": "#/$defs/g/x", "$defs": {"g": {"x": {"type": "array", "items": {"$ref": "#/$defs/g/x"}}}}},
            ["[[], [[]]]"],
            ["[1]"],
        ),
        ({"const": {"$ref": "#/$defs/a~1b"}, "$defs": {"a/b": {}}}, ['{"$ref":"#/$defs/a~1b"}'], ["{}"]),
        (
            {"type": "array", "prefixItems": [{"const": 1}], "minItems": 2},
            ["[1, 5]", "[1, null, 2]"],
            ["[1]", "[2, 1]"],
        ),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 2}, ['{"a": 1, "b": 2}'], ['{"a": 1}']),
        ({"type": "string", "pattern": "^https?://"}, ['"http://é.b"', '"https://"'], ['"xhttp://"', '"http:/"']),
        ({"type": "string", "pattern": r"\S"}, ['"é"', '" ab "'], ['""', '" "']),
        ({"type": "string", "pattern": "^a|b$"}, ['"ax"', '"xb"'], ['"xa"', '"bx"', '"c"']),
        ({"type": "string", "pattern": "(^|,)a($|,)"}, ['"a"', '"é,a"', '"a,é"'], ['"éa"', '"ab"']),
        ({"type": "string", "pattern": "^$"}, ['""'], ['"a"']),
        ({"type": "string", "pattern": "a.{30}é{30}"}, [f'"aa{"b" * 30}{"é" * 31}"'], [f'"a{"b" * 30}{"é" * 29}"']),
        ({"type": "string", "pattern": "a|é{200000}"}, ['"bab"'], ['"b"', '"éb"']),
        (
            {"type": "object", "patternProperties": {"^x-": {"const": "ß"}, "^x$": {"type": "null"}, "^[yz]": {}}},
            ['{"x-é": "ß", "x": null, "z1": 5}', '{"x-": "ß"}'],
            ['{"x-é": 5}', '{"x": 5}'],
        ),
        ({"propertyNames": {"pattern": "é"}, "type": "object"}, ['{"aéb": 1}'], ['{"a": 1}']),
        ({"patternProperties": {"^é[0-9]?$": {"const": "ß"}}, "type": "object"}, ['{"é1": "ß"}', "{}"], ['{"é": 1}']),
        ({"propertyNames": LETTER, "type": "object"}, ['{"é": 1}'], ['{"\t": 1}', '{"ab": 1}', *NO_STRINGS]),
        (
            {"propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "integer"}},
            ['{"a": 1}', "{}"],
            ['{"a": "x"}', *NO_STRINGS],
        ),
        ({"type": "object", "propertyNames": {}}, ['{"a": 1}'], NO_STRINGS),
        ({"type": "object", "propertyNames": True}, ['{"a": 1}'], NO_STRINGS),
        ({"type": "object", "propertyNames": False}, ["{}"], ['{"a": 1}', *NO_STRINGS]),
        ({"type": "object", "propertyNames": {"type": "integer"}}, ["{}"], ['{"a": 1}', *NO_STRINGS]),
        ({"type": "object", "propertyNames": {"enum": ["a", 83]}}, ['{"a": 1}'], ['{"b": 1}', *NO_STRINGS]),
        ({"type": "object", "propertyNames": {"enum": [83, True]}}, ["{}"], ['{"b": 1}', *NO_STRINGS]),
        ({"type": "object", "propertyNames": {"const": 83}}, ["{}"], ['{"b": 1}', *NO_STRINGS]),
        ({"type": "object", "propertyNames": LETTER, "additionalProperties": False}, ["{}"], ['{"a": 1}']),
        ({"type": "object", "propertyNames": LETTER, "unevaluatedProperties": False}, ["{}"], ['{"a": 1}']),
        (
            {
                "type": "object",
                "propertyNames": {"anyOf": [{"type": "null"}, False, {"$ref": "#/$defs/a"}, {"const": "ß"}]},
            }
            | {"$defs": {"a": {"allOf": [LETTER]}}},
            ['{"a": 1}', '{"ß": 1}'],
            ['{"ab": 1}', *NO_STRINGS],
        ),
        (
            {"type": "object", "propertyNames": {"$ref": "#/$defs/a"}, "additionalProperties": {"$ref": "#/$defs/a"}}
            | {"$defs": {"a": LETTER}},
            ['{"a": 1}', '{"a": "b"}'],
            ['{"ab": 1}', '{"a": "bc"}', *NO_STRINGS],
        ),
        ({"minItems": 1}, ["[1]", '["a", 2]', "1", "{}"], ["[]"]),
        ({"maxItems": 1}, ["[]", "[{}]", "null"], ["[1, 2]"]),
        ({"minProperties": 1}, ['{"a": 1}', "[]", '"a"'], ["{}"]),
        ({"maxProperties": 0}, ["{}", "[1]"], ['{"a": 1}']),
        ({"patternProperties": {"^a": {"type": "integer"}}}, ['{"a": 1}', "[1]", "true"], ['{"a": "x"}']),
        ({"propertyNames": {"maxLength": 1}}, ['{"é": "q"}', "[1]", "5"], ['{"zz": "q"}', *NO_STRINGS]),
        ({"anyOf": [{"type": "null"}, {"minItems": 2}]}, ["null", "[1, 2]", "3"], ["[1]"]),
        ({"allOf": [{"minItems": 2}]}, ["[1, 2]"], ["[1]"]),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"minItems": 2}}}, ["[1, 2]"], ["[1]"]),
        ({"properties": {"a": {"maxItems": 0}}, "type": "object"}, ['{"a": []}', '{"a": {}}'], ['{"a": [1]}']),
        ({"items": {"type": "integer"}, "minItems": 1}, ["[1]"], ["[]", '["a"]']),
        ({"minItems": 1, "minLength": 2}, ["[1]", '"ab"', '{"a": []}'], ["[]", '"a"']),
        ({"type": "array", "maxItems": 2}, ["[]", "[1]", '["a", null]'], ["[1, 2, 3]", "{}"]),
        ({"type": ["array", "null"], "minItems": 1}, ["[{}]", "null"], ["[]", "{}"]),
        ({"type": "object", "maxProperties": 2}, ["{}", '{"a": [1]}'], ['{"a": 1, "b": 2, "c": 3}']),
        ({"type": "object", "maxProperties": 1, "patternProperties": {}}, ["{}", '{"a": [1]}'], ['{"a": 1, "b": 2}']),
        (
            {"type": "object", "properties": {"a": {}}, "patternProperties": {}, "additionalProperties": True},
            ["{}", '{"a": 1, "b": 2}'],
            ["[]"],
        ),
        ({"type": ["object", "array"], "minProperties": 1}, ['{"a": 1}', "[]"], ["{}"]),
        ({"type": "object", "required": []}, ["{}", '{"a": 1}'], ["[]"]),
        ({"type": "string", "format": "json-pointer"}, ['""', '"/é~0/"'], ['"/a"b"', '"/\x1f"']),
        ({"format": "relative-json-pointer", "type": "string"}, ['"0#"', '"12/é"'], ['"1/""', '"1/\\"']),
        (
            {"type": "integer", "multipleOf": 10, "minimum": 1, "exclusiveMaximum": 10000},
            ["10", "9990"],
            ["0", "11", "10000"],
        ),
        (
            {"$ref": "#/components/schemas/a", "components": {"schemas": {"a": {"minLength": 2}}}},
            ['"ab"', "1"],
            ['"a"'],
        ),
        ({"$ref": "#/$defs/a", "$defs": {"a": True}}, ['"ab"'], ["ab"]),
        ({"$ref": "#/$defs/a%20%C3%A9~0b", "$defs": {"a é~b": {"const": 1}}}, ["1"], ["2"]),
    ],
)
def test_schema_allows_and_refuses_the_same_texts_as_jsonschema(schema, allowed, refused):
    is_allowed = allows(ConstraintConfig(json_schema=schema))
    for text in allowed:
        assert is_allowed(text) and is_valid(schema, text), text
    for text in refused:
        assert not is_allowed(text) and not is_valid(schema, text), text


NUMBERS = [3.14, 0.1, 1e-7, 1e22, 1.0, -0.0, 5e-324, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 12345678901234567890]
MEMBERS = {"type": "object", "properties": {"a": {"type": "number", "enum": NUMBERS}}, "required": ["a"]}


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("schema", "form"),
    [
        ({"type": "number", "const": ...}, "%s"),
        ({"const": {"é1": [..., "x"]}}, '{"é1":[%s,"x"]}'),
        ({"anyOf": [{"enum": ["\x81f", ..., None]}, {"type": "array"}]}, "%s"),
        (MEMBERS, '{"a": %s}'),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"const": ...}}}, "%s"),
    ],
)
def test_numbers_of_constants_are_spelled_as_python_does(schema, form, number):
    def fill(value: object) -> object:
        if isinstance(value, dict):
            return {key: fill(each) for key, each in value.items()}
        return [*map(fill, value)] if isinstance(value, list) else number if value is ... else value

    part = {"type": "json_schema", "json_schema": fill(schema)}
    constraints = [ConstraintConfig(json_schema=fill(schema))]
    tag = {"type": "structural_tag", "format": part}
    constraints += [ConstraintConfig(structural_tag=tag, whitespace=each) for each in ("fixed", "any")]
    for is_allowed in map(allows, constraints):
        assert is_allowed(form % json.dumps(number))
        for other in (f"{number:.17g}", f'"{number}"', "1.2345678901234567e+19", "7"):
            assert is_allowed(form % other) == (other == json.dumps(number)), other


def test_numbers_in_xml_and_in_names_of_keys():
    schema = {
        "type": "object",
        "properties": {"p": {"enum": ["s", 0.5]}, "q": {"const": [0.1]}},
        "required": ["p", "q"],
    }
    part = {"type": "json_schema", "json_schema": schema, "style": "qwen_xml"}
    is_allowed = allows(ConstraintConfig(structural_tag={"type": "structural_tag", "format": part}))
    assert is_allowed("<parameter=p>0.5</parameter><parameter=q>[0.1]</parameter>")
    assert is_allowed("<parameter=p>s</parameter><parameter=q>[0.1]</parameter>")
    assert not is_allowed('<parameter=p>"0.5"</parameter><parameter=q>[0.1]</parameter>')
    is_allowed = allows(ConstraintConfig(json_schema={"type": "object", "propertyNames": {"enum": ["a", 0.5]}}))
    assert is_allowed('{"a": 0.5}') and not is_allowed('{"0.5": 1}') and not is_allowed("{0.5: 1}")


def test_declared_name_is_refused_as_additional_property():
    is_allowed = allows(ConstraintConfig(json_schema={**KEYS, "additionalProperties": {"type": "integer"}}))
    for name in NAMES:
        assert is_allowed(f"{{{json.dumps(name, ensure_ascii=False)}: null}}")
        for written in (json.dumps(name, ensure_ascii=False), json.dumps(name), f'"{name}"'):
            assert not is_allowed(f"{{{written}: 5}}"), written
    assert not is_allowed('{"\\u00e9": 5}') and not is_allowed('{"é": null, "é": 5}')


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"properties": {"é": {}}, "patternProperties": {"^é": {}}}, "applies to the property 'é', too"),
        ({"properties": {"é": {}}, "patternProperties": {r"\u{e9}": {}}}, "applies to the property 'é', too"),
        ({"properties": {"é": {}}, "propertyNames": {"maxLength": 3}}, "not supported together with properties"),
        ({"patternProperties": {"a": {}}, "propertyNames": {"maxLength": 3}}, "together with patternProperties"),
        ({"patternProperties": {"^a": {"const": 1}, "b": {"const": 2}}}, "/b: may apply to keys of '^a', too"),
        ({"patternProperties": {"^a$": {"const": 1}, "^[ab]$": {"const": 2}}}, "may apply to keys of '^a$', too"),
        ({"type": "string", "pattern": "a$b"}, "$ is supported only where a text begins or ends"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
        ({"type": "integer", "minimum": 3, "multipleOf": 2}, "is supported for integers, with limits"),
        ({"type": "integer", "minimum": 0, "maximum": 10000, "multipleOf": 2}, "less than 10000 apart"),
        ({"type": "number", "multipleOf": 0.5}, "#/multipleOf"),
        ({"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": None}, "#/maximum: None is not a number"),
        ({"type": "string", "format": ["date"]}, "#/format: ['date'] is not a string"),
        ({"type": []}, "#/type: [] is not one or more of string, integer, number"),
        ({"propertyNames": {"type": ["string", 5]}}, "#/propertyNames/type: ['string', 5] is not"),
        ({"propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/a"}}}, "refers to itself"),
        (
            {"propertyNames": {"$ref": "#/$defs/a", "maxLength": 1}, "$defs": {"a": {}}},
            "not supported together with $ref",
        ),
        ({"$ref": "#a", "$defs": {"a": {"$anchor": "a"}}}, "#/$ref: '#a' is not the place of a schema in this one"),
        ({"items": {"$ref": "https://a/b"}}, "#/items/$ref: 'https://a/b' is not the place"),
        ({"items": {"$ref": "#/x/a"}, "x": {"b": {"minLength": 2}}}, "#/items/$ref: '#/x/a' is not the place"),
        ({"items": {"$ref": "#/x/a"}, "x": {"a": {"not": {}}}}, "#/$defs/reference_0/not: is not supported"),
        ({"minItems": 3, "maxItems": 2}, "#/minItems: 3 is more than maxItems=2"),
        ({"type": "integer", "minimum": 3, "maximum": 2.5}, "#/minimum: 3 is more than maximum=2.5"),
        ({"maxLength": -1}, "#/maxLength: -1 is not an integer of at least 0"),
        ({"minProperties": "x"}, "#/minProperties: 'x' is not an integer of at least 0"),
        ({"prefixItems": [{}], "items": False, "minItems": 2}, "#/minItems: 2 is more than the 1 that prefixItems and"),
        (
            {"properties": {"a": {}}, "additionalProperties": False, "minProperties": 2},
            "#/minProperties: 2 is more than the 1 that properties and additionalProperties allow",
        ),
        (
            {"properties": {"a": {}, "b": {}}, "required": ["a", "b"], "maxProperties": 1},
            "#/maxProperties: 1 is less than the 2 properties that are required",
        ),
        ({"$ref": 5}, "#/$ref: 5 is not the place"),
        ({"$ref": "#/components/schemas/a", "components": {"schemas": {"a": {"not": {}}}}}, "schemas/a/not: is not"),
    ],
)
def test_unsupported_schema_is_refused_in_one_line(schema, reason):
    with pytest.raises(ConstraintError, match="^constraint.json_schema: ") as refused:
        allows(ConstraintConfig(json_schema=schema))
    assert reason in str(refused.value) and "\n" not in str(refused.value)
