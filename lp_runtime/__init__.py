"""lp_runtime: lookahead parallelism. One request of a large language model, shared by several GPUs.

from lp_runtime import LookaheadConfig, LookaheadRuntime

with LookaheadRuntime(model="path/or/id", gpus=2, lookahead=LookaheadConfig(W=15, N=5, G=15)) as runtime:
    print(runtime.generate("def fib(n):", max_new_tokens=128).text)
"""

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
from lp_runtime.request import RequestOptions
from lp_runtime.scheduler import Job, Scheduler

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
