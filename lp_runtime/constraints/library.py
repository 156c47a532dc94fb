"""The optional package xgrammar."""

from __future__ import annotations

import functools
from types import ModuleType

from lp_runtime.errors import ConfigError


@functools.cache
def library() -> ModuleType:
    """Import xgrammar; raise ConfigError if it is not installed."""
    try:
        import xgrammar
    except ImportError as error:
        message = "constraints need the package xgrammar: pip install 'lp-runtime[constraints]'"
        raise ConfigError(message) from error
    return xgrammar
