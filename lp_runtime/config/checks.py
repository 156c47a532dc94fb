"""Checks of settings; the ConfigError of each names the setting, its value and what is allowed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeGuard

from lp_runtime.errors import ConfigError

MAX_SECONDS = 1_000_000  # 11 days, longer than any sensible timeout


def plain(value: Any) -> Any:
    """Return a number or an array of numpy or torch as a plain number or list; other values as they are."""
    return value.tolist() if hasattr(value, "tolist") else value


def keep_plain_values(config: Any) -> None:
    """Replace the values of a dataclass by plain ones."""
    for each in fields(config):
        setattr(config, each.name, plain(getattr(config, each.name)))


def _shown(value: object, kind: type = float) -> str:
    """Return a value for a message; a text that reads as a number of a kind has quotes, since the number is allowed."""
    try:
        return repr(value) if isinstance(value, str) and kind(value) is not None else str(value)
    except ValueError:
        return str(value)


def require_int(name: str, value: object, low: int, or_none: bool = False) -> None:
    if or_none and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name}={_shown(value, int)}: must be an integer >= {low}")


def require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value}: must be true or false")


def require_port(name: str, value: object) -> None:
    require_int(name, value, 0)
    assert isinstance(value, int)
    if value > 65535:
        raise ConfigError(f"{name}={value}: must be 0 to 65535")


def require_seconds(name: str, value: object, or_none: bool = False) -> None:
    if or_none and value is None:
        return
    if not _is_number(value) or not 0 < value <= MAX_SECONDS:
        raise ConfigError(f"{name}={_shown(value)}: must be a number of seconds > 0 and <= {MAX_SECONDS}")


def require_number(name: str, value: object, allowed: str, is_allowed: Callable[[float], bool]) -> None:
    """Raise ConfigError, with the range `allowed`, unless a value is None or an allowed finite number."""
    if value is not None and not (_is_number(value) and is_allowed(value)):
        raise ConfigError(f"{name}={_shown(value)}: must be {allowed}")


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # math.isfinite would raise OverflowError for an integer above that


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def is_unicode(text: str) -> bool:
    """Whether a text has no surrogates, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def path_text(value: Any) -> Any:
    """Return a path as text, also if the caller gave a pathlib.Path; other values are returned as they are."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def home_path(name: str, value: Any) -> Any:
    """Return a path as text, with a home folder in place of a leading "~"; other values are returned as they are.

    Raises:
        ConfigError: the user whose home folder is meant has none here.
    """
    text = path_text(value)
    expanded = os.path.expanduser(text) if isinstance(text, str) else text
    if isinstance(text, str) and text.startswith("~") and expanded == text:
        home = text.partition("/")[0]
        raise ConfigError(f"{name}={text}: {home} is no home folder here; a relative path is written ./{text}")
    return expanded


def require_filled(name: str, value: object, allowed: str) -> None:
    if value == "":
        raise ConfigError(f"{name}: is empty; must be {allowed}")


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value}: must be one of {', '.join(choices)}")
