"""Lookahead parallelism: several GPUs share every decoding step of one LLM request.

from lp_runtime import LookaheadConfig, LookaheadRuntime

with LookaheadRuntime(model="path/or/id", gpus=2, lookahead=LookaheadConfig(W=15, N=5, G=15)) as runtime:
    print(runtime.generate("def fib(n):", max_new_tokens=128).text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lp_runtime.config.constraint import ConstraintConfig
    from lp_runtime.config.lookahead import LookaheadConfig
    from lp_runtime.config.sampling import SamplingConfig
    from lp_runtime.config.settings import FailureConfig, LauncherConfig, ModelConfig, RuntimeConfig
    from lp_runtime.dropin.lookahead_generate import lookahead_generate
    from lp_runtime.errors import (
        BusyError,
        ConfigError,
        ConstraintError,
        DeadlineError,
        LaunchError,
        LookaheadError,
        ModelError,
        ReplicaError,
        RequestError,
        StateMismatchError,
    )
    from lp_runtime.request.generation import Delta, Generation, GenerationStream
    from lp_runtime.request.request_options import RequestOptions
    from lp_runtime.runtime import LookaheadRuntime
    from lp_runtime.scheduler.job import Job
    from lp_runtime.scheduler.scheduler import Scheduler

__version__ = "0.2.0"

# Module of each public name, imported when the name is first used: importing torch and transformers takes seconds, for
# which a command that only refuses its settings should not wait.
_HOMES = {
    "BusyError": "errors",
    "ConfigError": "errors",
    "ConstraintConfig": "config.constraint",
    "ConstraintError": "errors",
    "DeadlineError": "errors",
    "Delta": "request.generation",
    "FailureConfig": "config.settings",
    "Generation": "request.generation",
    "GenerationStream": "request.generation",
    "Job": "scheduler.job",
    "LaunchError": "errors",
    "LauncherConfig": "config.settings",
    "LookaheadConfig": "config.lookahead",
    "LookaheadError": "errors",
    "LookaheadRuntime": "runtime",
    "ModelConfig": "config.settings",
    "ModelError": "errors",
    "ReplicaError": "errors",
    "RequestError": "errors",
    "RequestOptions": "request.request_options",
    "RuntimeConfig": "config.settings",
    "SamplingConfig": "config.sampling",
    "Scheduler": "scheduler.scheduler",
    "StateMismatchError": "errors",
    "lookahead_generate": "dropin.lookahead_generate",
}

__all__ = [
    "__version__",
    "BusyError",
    "ConfigError",
    "ConstraintConfig",
    "ConstraintError",
    "DeadlineError",
    "Delta",
    "FailureConfig",
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
    "ReplicaError",
    "RequestError",
    "RequestOptions",
    "RuntimeConfig",
    "SamplingConfig",
    "Scheduler",
    "StateMismatchError",
    "lookahead_generate",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
