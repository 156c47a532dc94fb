"""Encoding of dataclasses as bytes, derived from their fields. Reading runs no content as code.

A message is MAGIC, a CRC-32 of the rest, and JSON: an object for a dataclass, an array for tuples and sets, base64 for
bytes. Integers and floats keep their exact values.
"""

from __future__ import annotations

import base64
import json
import struct
import types
import zlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

T = TypeVar("T")
MAGIC = b"lp_runtime 1\n"
CHECKSUM = struct.Struct("<I")
SCALARS: dict[Any, Any] = {bool: bool, int: int, str: str, float: (int, float), types.NoneType: types.NoneType}


def encode(value: object) -> bytes:
    """Encode a dataclass of numbers, texts, bytes, dataclasses and collections, else raise TypeError."""
    body = json.dumps(value, default=_plain, separators=(",", ":")).encode()
    return MAGIC + CHECKSUM.pack(zlib.crc32(body)) + body


def _plain(value: object) -> object:
    """Return what JSON has in place of a value that it cannot represent."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, np.generic):  # of a caller that computes with numpy
        return value.item()
    if isinstance(value, Mapping):  # other than a dict
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a number, a text, bytes, a dataclass or a collection of them")


def decode(kind: type[T], data: bytes) -> T:
    """Return the dataclass of class `kind` that a message holds.

    Raises ValueError if the message is damaged, is not one of `encode`, or comes from another version of the class.
    """
    start = len(MAGIC) + CHECKSUM.size
    if len(data) < start or not data.startswith(MAGIC):
        raise ValueError("it is not a message of this version of lp_runtime")
    body = data[start:]
    if CHECKSUM.unpack(data[len(MAGIC) : start]) != (zlib.crc32(body),):
        raise ValueError("its checksum is wrong")
    try:
        value = json.loads(body)
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ValueError("it is not JSON") from error
    return _built(kind, value, kind.__name__)


def _built(kind: Any, value: Any, where: str) -> Any:
    """Return a value of type `kind` from its JSON; `where` names it in messages."""
    if kind is Any:  # JSON of a caller, such as a tool's schema
        return value
    if kind is bool and value in (0, 1):  # a caller may have set a flag to 1
        return bool(value)
    if kind in SCALARS:
        if not isinstance(value, SCALARS[kind]) or isinstance(value, bool):
            raise ValueError(f"{where} must be {kind.__name__}, not {type(value).__name__}")
        return value
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _optional(args, value, where)
    if kind is bytes:
        return base64.b64decode(_built(str, value, where), validate=True)
    if is_dataclass(kind) or origin in (dict, Mapping):
        return _of_object(kind, args, value, where)
    if not isinstance(value, list):
        raise ValueError(f"{where} must be a list, not {type(value).__name__}")
    return _of_list(kind, value, where)


def _optional(args: tuple[Any, ...], value: Any, where: str) -> Any:
    inner = [each for each in args if each is not types.NoneType]
    assert len(inner) == 1, f"{where}: the encoding has unions of one type and None only"
    return None if value is None and len(args) == 2 else _built(inner[0], value, where)


def _of_object(kind: Any, args: tuple[Any, ...], value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, not {type(value).__name__}")
    if get_origin(kind) in (dict, Mapping):
        make_key = int if args[0] is int else str
        return {make_key(key): _built(args[1], each, f"{where}[{key}]") for key, each in value.items()}
    hints = _hints(kind)
    for name in sorted(value.keys() ^ {field.name for field in fields(kind)}):
        raise ValueError(f"{where}.{name} is {'unknown' if name in value else 'missing'}: the versions differ")
    return kind(**{name: _built(hints[name], each, f"{where}.{name}") for name, each in value.items()})


def _of_list(kind: Any, value: list[Any], where: str) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    is_named = origin is None and issubclass(kind, tuple)
    if is_named:
        args = tuple(_hints(kind).values())
    elif origin is not tuple or args[1:] == (...,):
        args = args[:1] * len(value)
    if len(args) != len(value):
        raise ValueError(f"{where} must have {len(args)} items, not {len(value)}")
    items = (_built(each, item, where) for each, item in zip(args, value, strict=True))
    return kind(*items) if is_named else origin(items)


_hints = cache(get_type_hints)
