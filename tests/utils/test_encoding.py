"""Tests of encoded messages: values arrive unchanged, and damaged or foreign data is refused."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest

from lp_runtime.utils.encoding import MAGIC, decode, encode


class Pair(NamedTuple):
    name: str | None
    number: float


@dataclass(frozen=True)
class Inner:
    flags: dict[int, bool]
    words: list[list[int]] | None


@dataclass(frozen=True)
class Outer:
    inner: Inner | None
    pair: Pair
    data: bytes
    ids: frozenset[int]
    mixed: tuple[str, int]
    numbers: tuple[float, ...]


VALUE = Outer(
    Inner({3: True, -1: False}, [[], [2**70]]),
    Pair("\ud800\n", 0.1),
    bytes(range(256)),
    frozenset({5, 2}),
    ("a", 7),
    (1.5, -0.0, float("inf"), 5e-324, 2),
)


@pytest.mark.parametrize("value", [VALUE, Outer(None, Pair(None, 1), b"", frozenset(), ("", 0), ())])
def test_values_are_decoded_unchanged(value):
    actual = decode(Outer, encode(value))
    assert actual == value
    assert repr(actual) == repr(value)  # an integer stays one, and a zero keeps its sign


def test_numpy_scalars_become_python_values():
    actual = decode(Inner, encode(Inner({1: np.bool_(True), 2: 1}, [[np.int64(4)]])))
    assert repr(actual) == "Inner(flags={1: True, 2: True}, words=[[4]])"


def test_damaged_or_truncated_message_raises():
    data = encode(VALUE)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 4
        with pytest.raises(ValueError, match=r"^its checksum is wrong$|^it is not a message of this version"):
            decode(Outer, bytes(changed))
    for length in range(len(data)):
        with pytest.raises(ValueError, match=r"^its checksum is wrong$|^it is not a message of this version"):
            decode(Outer, data[:length])


class Harmful:
    """An object whose pickle runs code."""

    def __reduce__(self):
        return pytest.fail, ("a message was unpickled",)


@pytest.mark.parametrize("data", [b"", b"ping", MAGIC, pickle.dumps(Harmful())])
def test_foreign_bytes_are_refused_without_unpickling(data):
    with pytest.raises(ValueError, match="it is not a message of this version of lp_runtime"):
        decode(Outer, data)


@dataclass(frozen=True)
class Newer:
    flags: dict[int, bool]
    words: list[list[int]] | None
    added: int


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        (Inner, Newer({}, None, 0), "Inner.added is unknown: the versions differ"),
        (Newer, Inner({}, None), "Newer.added is missing: the versions differ"),
        (Inner, Inner({}, [["a"]]), "Inner.words must be int, not str"),
        (Inner, Inner([], None), "Inner.flags must be an object, not list"),
        (Inner, Inner({}, {}), "Inner.words must be a list, not dict"),
        (Outer, Outer(None, (1,), b"", frozenset(), ("", 0), ()), "Outer.pair must have 2 items, not 1"),
        (Outer, Outer(None, Pair(None, True), b"", frozenset(), ("", 0), ()), "Outer.pair must be float, not bool"),
    ],
)
def test_mismatched_message_names_the_field(kind, value, reason):
    with pytest.raises(ValueError) as caught:
        decode(kind, encode(value))
    assert str(caught.value) == reason


def test_unsupported_object_is_refused_when_encoded():
    with pytest.raises(TypeError, match="object is not a number, a text, bytes, a dataclass"):
        encode(Inner({}, object()))
