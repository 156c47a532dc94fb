"""Checks of settings: each raises a ConfigError of one line that names the value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeGuard

from lp_runtime.errors import ConfigError

MAX_SECONDS = 1_000_000  # 11 days, more than any wait of a runtime


def require_int(name: str, value: object, low: int) -> None:
    """Refuse a value that is not an integer >= `low`.

    Raises:
        ConfigError: names the setting, the value and the range.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name}={value}: must be an integer >= {low}")


def require_port(name: str, value: object) -> None:
    """Refuse a value that is not a TCP port, 0 to 65535.

    Raises:
        ConfigError: names the setting, the value and the range.
    """
    require_int(name, value, 0)
    assert isinstance(value, int)
    if value > 65535:
        raise ConfigError(f"{name}={value}: must be 0 to 65535")


def require_seconds(name: str, value: object) -> None:
    """Refuse a value that is not a number of seconds, above 0 and at most MAX_SECONDS.

    Raises:
        ConfigError: names the setting, the value and the range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_SECONDS:
        raise ConfigError(f"{name}={value}: must be a number of seconds > 0 and <= {MAX_SECONDS}")


def require_number(name: str, value: object, allowed: str, is_allowed: Callable[[float], bool]) -> None:
    """Refuse a value that is neither None nor a finite number in a range.

    Args:
        name: the setting, for the message.
        value: its value.
        allowed: the range in words, for the message.
        is_allowed: whether a finite number is in the range.

    Raises:
        ConfigError: names the setting, the value and the range.
    """
    if value is None:
        return
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not is_allowed(value)
    ):
        raise ConfigError(f"{name}={value}: must be {allowed}")


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    """Whether a value is a sequence other than a string."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse a value that is none of the choices.

    Raises:
        ConfigError: names the setting, the value and the choices.
    """
    if value not in choices:
        raise ConfigError(f"{name}={value}: must be one of {', '.join(choices)}")
