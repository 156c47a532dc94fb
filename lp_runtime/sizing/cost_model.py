"""How long steps of so many tokens take, in nanoseconds: curves, measured or assumed, and what follows from them.

Letters: R replicas, M tokens that a replica's time is known for at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lp_runtime.utils.jit import compiled

# Where nothing was measured: so many tokens cost twice what one does.
ASSUMED_FREE_TOKENS = 64
ASSUMED_NANOSECONDS = 1_000_000
UNIT = 1 << 10  # one, in fixed point: of scales, and of prices of a node
NEVER = 1 << 52


def assumed_times(num_replicas: int, num_tokens: int) -> np.ndarray:
    """[R, num_tokens + 1] curves where nothing was measured."""
    tokens = np.arange(num_tokens + 1)
    curve = ASSUMED_NANOSECONDS * (ASSUMED_FREE_TOKENS + tokens) // (ASSUMED_FREE_TOKENS + 1)
    return np.tile(curve, (num_replicas, 1))


def interpolate(tokens: Sequence[int], nanoseconds: Sequence[int], num_tokens: int) -> np.ndarray:
    """[num_tokens + 1] a curve that does not fall, through measured points; behind the last two it goes on straight."""
    # In integers, so that all replicas have the same curves to the last bit.
    known = np.maximum.accumulate(np.asarray(nanoseconds, dtype=np.int64))
    curve = np.full(num_tokens + 1, known[0], dtype=np.int64)
    for i in range(len(tokens) - 1):
        end = tokens[i + 1] if i + 2 < len(tokens) else max(tokens[i + 1], num_tokens)
        places = np.arange(tokens[i], min(end, num_tokens) + 1)
        curve[places] = known[i] + (known[i + 1] - known[i]) * (places - tokens[i]) // (tokens[i + 1] - tokens[i])
    return curve


def shared_times(times: np.ndarray, batch_size: int) -> np.ndarray:
    """[R, M + 1] what a request answers for of steps in which so many, all of as many tokens, are fed together.

    Args:
        times: [R, M + 1] of a request alone.
        batch_size: how many.
    """
    places = np.arange(times.shape[1]) * batch_size
    known = np.minimum(places, times.shape[1] - 1)
    slopes = times[:, -1:] - times[:, -2:-1] if times.shape[1] > 1 else 0
    return np.ascontiguousarray((times[:, known] + (places - known) * slopes) // batch_size)


@compiled(makes_arrays=True)
def finishing_times(times, num_pending, limit, repeated, overhead, per_node, finishing):
    """About when a step of the pending tokens and of 0, 1, 2 ... nodes more is over.

    Args:
        times: [R, M + 1] of each replica.
        limit: tokens that a replica feeds at most.
        repeated: tokens that all replicas together feed for each node, of UNIT.
        overhead: nanoseconds of what else a step takes, and
        per_node: for each node, of UNIT.
        finishing: [n] written.
    """
    fed = np.zeros(len(times), np.int64)
    time, num_fed = np.int64(0), np.int64(0)
    for rank in range(len(times)):
        time = max(time, times[rank, num_pending])
    for num_nodes in range(len(finishing)):
        while num_fed * UNIT < num_nodes * repeated:
            next_rank, next_time = -1, np.int64(0)
            for rank in range(len(times)):  # whoever is the first to be done with one token more feeds it
                if num_pending + fed[rank] < limit:
                    later = times[rank, num_pending + fed[rank] + 1]
                    if next_rank < 0 or later < next_time:
                        next_rank, next_time = rank, later
            if next_rank < 0:  # nobody may
                time = NEVER
                break
            time = max(time, next_time)
            fed[next_rank] += 1
            num_fed += 1
        finishing[num_nodes] = time + overhead + per_node * num_nodes // UNIT
