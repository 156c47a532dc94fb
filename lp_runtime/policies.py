"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lp_runtime.config import MAX_DEPTH, NUM_COPIED, RECYCLING_DEPTH, LookaheadConfig
from lp_runtime.lookahead.best_first import BestFirstPolicy, compile_kernels
from lp_runtime.lookahead.drafts import Memory
from lp_runtime.lookahead.paper import PaperPolicy
from lp_runtime.lookahead.policy import Policy
from lp_runtime.lookahead.prompt_lookup import PromptLookupPolicy
from lp_runtime.lookahead.recycling import RecyclingPolicy


def make_policy(
    settings: LookaheadConfig,
    noise: tuple[int, int] | None,
    num_nodes: int,
    memory: Callable[[], Memory],
    vocabulary: Callable[[], np.ndarray],
) -> Policy:
    """The policy that a request asks for.

    Args:
        settings: the request's.
        noise: (seed, sample) where successors are sampled, else None.
        num_nodes: nodes of a tree that all replicas together can feed.
        memory, vocabulary: called by the policy `full` alone.
    """
    W, N, G = settings.window
    if settings.policy == "full":
        compile_kernels()
        limit = num_nodes if settings.is_auto else min(num_nodes, max(1, (W + G) * (N - 1)))
        prior = vocabulary() if settings.prior == "vocabulary" else None
        return BestFirstPolicy(limit, memory(), prior, noise, MAX_DEPTH)
    if settings.policy == "prompt_lookup":
        return PromptLookupPolicy(NUM_COPIED, settings.budget)
    if settings.policy == "recycling":
        policy = RecyclingPolicy(settings.budget)
        assert policy.max_run == RECYCLING_DEPTH + 1
        return policy
    return PaperPolicy(
        W,
        N,
        G,
        settings.pool_from_prompt,
        settings.window_seed,
        only_guesses=settings.acceptance == "guesses",
        samples=noise is not None,
        budget=settings.budget,
    )
