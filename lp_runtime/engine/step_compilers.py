"""Functions that compile the code of steps. No torch is imported, so that a process can compile while others import."""

from __future__ import annotations

from collections.abc import Callable

from lp_runtime.distributed.partition.partition import compile_partition
from lp_runtime.kernels.numba_loops import compile_loops
from lp_runtime.lookahead.drafters.best_first.drafter import (
    compile_drafter,
    compile_growth,
    compile_learning,
    compile_pruning,
)
from lp_runtime.model.attention.mask_rows import compile_masks
from lp_runtime.model.forward.inputs import compile_layout
from lp_runtime.sampling.packing import compile_sampler
from lp_runtime.sizing.budget import compile_budget, compile_capacity


def first_compilers(is_shared: bool) -> list[Callable[[], None]]:
    """Return the compilers that a step needs even without drafts, on a CPU, of several replicas if `is_shared`."""
    return [compile_loops, compile_layout, compile_masks, compile_budget, *([compile_partition] if is_shared else [])]


def step_compilers(is_full: bool, is_shared: bool) -> list[Callable[[], None]]:
    """Return the compilers that steps with drafter=full (`is_full`), or of several replicas (`is_shared`), need."""
    drafting = [compile_growth, compile_learning] if is_full else []
    sharing = [compile_capacity, compile_partition] if is_shared else []
    pruning = [compile_pruning] if is_full and is_shared else []
    whole = [compile_drafter] if is_full else []  # the last one: it calls the first two
    return [compile_budget, *drafting, *sharing, *pruning, compile_sampler, *whole]
