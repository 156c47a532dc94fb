"""Functions that compile the code of steps. No torch is imported, so that a process can compile while others import."""

from __future__ import annotations

from collections.abc import Callable

from lp_runtime.distributed.partition.partition import compile_partition
from lp_runtime.kernels.numba_loops import compile_loops
from lp_runtime.lookahead.drafters.best_first.drafter import compile_drafter, compile_growth, compile_learning
from lp_runtime.model.attention.mask_rows import compile_masks
from lp_runtime.model.forward.inputs import compile_layout
from lp_runtime.sampling.packing import compile_sampler
from lp_runtime.sizing.budget import compile_budget, compile_capacity


def pass_compilers() -> list[Callable[[], None]]:
    """Return the compilers that a forward pass on a CPU needs."""
    return [compile_loops, compile_layout, compile_masks]


def step_compilers(is_full: bool, is_shared: bool) -> list[Callable[[], None]]:
    """Return the compilers that steps with drafter=full (`is_full`), or of several replicas (`is_shared`), need.

    The first one is needed even without drafts.
    """
    drafting = [compile_growth, compile_learning] if is_full else []
    sharing = [compile_capacity, compile_partition] if is_shared else []
    whole = [compile_drafter] if is_full else []  # the last one: it calls the first two
    return [compile_budget, *drafting, *sharing, compile_sampler, *whole]
