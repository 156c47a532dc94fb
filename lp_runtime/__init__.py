"""lp_runtime: lookahead parallelism. One request of a large language model, shared by several GPUs.

from lp_runtime import LookaheadConfig, LookaheadRuntime

with LookaheadRuntime(model="path/or/id", gpus=2, lookahead=LookaheadConfig(W=15, N=5, G=15)) as runtime:
    print(runtime.generate("def fib(n):", max_new_tokens=128).text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lp_runtime.api import LookaheadRuntime
    from lp_runtime.config import LauncherConfig, LookaheadConfig, ModelConfig, SamplingConfig
    from lp_runtime.drop_in import lookahead_generate
    from lp_runtime.errors import (
        BusyError,
        ConfigError,
        DeadlineError,
        LaunchError,
        LookaheadError,
        ModelError,
        ReplicaError,
        RequestError,
        StateMismatchError,
    )
    from lp_runtime.generation import Generation, GenerationStream, Piece
    from lp_runtime.jobs import Job
    from lp_runtime.request import RequestOptions
    from lp_runtime.scheduler import Scheduler

# Where the public names live. They are imported when first used: torch and transformers take seconds, which a
# command that only refuses its settings, or a replica that needs half of this, should not wait for.
_HOMES = {
    "api": ("LookaheadRuntime",),
    "config": ("LauncherConfig", "LookaheadConfig", "ModelConfig", "SamplingConfig"),
    "drop_in": ("lookahead_generate",),
    "errors": (
        "BusyError",
        "ConfigError",
        "DeadlineError",
        "LaunchError",
        "LookaheadError",
        "ModelError",
        "ReplicaError",
        "RequestError",
        "StateMismatchError",
    ),
    "generation": ("Generation", "GenerationStream", "Piece"),
    "jobs": ("Job",),
    "request": ("RequestOptions",),
    "scheduler": ("Scheduler",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BusyError",
    "ConfigError",
    "DeadlineError",
    "Generation",
    "GenerationStream",
    "Job",
    "LaunchError",
    "LauncherConfig",
    "LookaheadConfig",
    "LookaheadError",
    "LookaheadRuntime",
    "ModelConfig",
    "ModelError",
    "Piece",
    "ReplicaError",
    "RequestError",
    "RequestOptions",
    "SamplingConfig",
    "Scheduler",
    "StateMismatchError",
    "lookahead_generate",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
