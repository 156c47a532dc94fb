"""Import commands of benchmarks/, scripts/ and experiments/, with the sys.path that running them has."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def command(name: str) -> ModuleType:
    """Import a file of benchmarks/, scripts/ or experiments/; return the module."""
    for folder in (ROOT / "benchmarks", ROOT / "scripts", ROOT / "experiments"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    return importlib.import_module(name.removesuffix(".py"))
