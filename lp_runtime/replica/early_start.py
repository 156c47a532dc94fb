"""Start of a replica while another process still compiles the drafter; see compile_ahead.py."""

from __future__ import annotations

import torch

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.replica.compile_ahead import is_command, is_compiling_ahead


class EarlyStart:
    """Leaves one of this process's cores to the one that compiles, until it has ended.

    Threads of a forward pass wait for each other. If one of them shares its core, a pass takes up to ten times as long.
    """

    def __init__(self, is_shared: bool):
        self._is_shared = is_shared
        self._num_threads = torch.get_num_threads()
        torch.set_num_threads(max(1, self._num_threads - 1))

    @classmethod
    def of(cls, config: RuntimeConfig, owns_process: bool) -> EarlyStart | None:
        """Return one if requests may begin before the drafter is compiled, and it is being compiled.

        In a process that is neither a command nor a replica's own, threads are the caller's.
        """
        is_shared = config.num_replicas > 1
        may_begin = (owns_process or is_command()) and config.exactness == "fast" and config.lookahead.drafter == "full"
        return cls(is_shared) if may_begin and is_compiling_ahead(is_shared) else None

    def is_compiling(self) -> bool:
        if is_compiling_ahead(self._is_shared):
            return True
        torch.set_num_threads(self._num_threads)
        return False
