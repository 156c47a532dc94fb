"""Checks of settings: each raises a ConfigError of one line that names the value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lp_runtime.errors import ConfigError

MAX_SECONDS = 1_000_000


def require_int(name: str, value: object, low: int) -> None:
    """`value` is an integer, `low` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name}={value}: must be an integer >= {low}")


def require_seconds(name: str, value: object) -> None:
    """`value` is a number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_SECONDS:
        raise ConfigError(f"{name}={value}: must be a number of seconds > 0 and <= {MAX_SECONDS}")


def require_number(name: str, value: object, allowed: str, is_allowed: Callable[[float], bool]) -> None:
    """`value` is None, or a finite number for which `is_allowed` holds."""
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not is_allowed(value):
        raise ConfigError(f"{name}={value}: must be {allowed}")


def is_list(value: object) -> bool:
    """Whether `value` is a sequence other than a string."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """`value` is one of the choices."""
    if value not in choices:
        raise ConfigError(f"{name}={value}: must be one of {', '.join(choices)}")
