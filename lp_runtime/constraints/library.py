"""The optional package xgrammar."""

from __future__ import annotations

import functools
from importlib.metadata import version
from types import ModuleType

from lp_runtime.errors import ConfigError

# Other versions read some grammars otherwise without an error: 0.2.9 allows the empty text for the regex [^c]+.
TESTED_VERSION = "0.2.8"


@functools.cache
def library() -> ModuleType:
    """Import xgrammar; raise ConfigError if it is not installed, or in another version than the tested one."""
    try:
        import xgrammar
    except ImportError as error:
        message = "constraints need the package xgrammar: pip install 'lp-runtime[constraints]'"
        raise ConfigError(message) from error
    if (installed := version("xgrammar")) != TESTED_VERSION:
        raise ConfigError(
            f"xgrammar {installed} is installed, and constraints are exact with {TESTED_VERSION} only:"
            f" pip install xgrammar=={TESTED_VERSION}"
        )
    return xgrammar
