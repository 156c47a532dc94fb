"""The step size with the most expected tokens per nanosecond, from path probabilities and step times.

All arithmetic is on integers, so all replicas decide equally. Times are of whole steps, host time included.

Letters: T nodes in the tree, R replicas, M tokens of the largest step with a known time, L levels of path probability.
"""

from __future__ import annotations

import numpy as np

from lp_runtime.distributed.partition.capacity_fill import feed_pending, fill
from lp_runtime.sizing.acceptance import EXPECTED_BITS, correct
from lp_runtime.sizing.pass_times import FIXED_POINT_ONE
from lp_runtime.utils.jit import compiled, inlined

RATE_BITS = 32  # fixed point of tokens per nanosecond, in addition to EXPECTED_BITS
MAX_EXPECTED = (1 << 31) - 1  # so that rates fit into 64 bits
# Minimum worth of a node, in tokens. The model's predictions after a wrong guess go into the draft tables and save
# steps later: the first nodes of a step are worth at least that. Low estimates of the others are too rough to rely on.
NUM_TEACHING = 24
TEACHING_WORTH = (1 << EXPECTED_BITS) // 30
MIN_WORTH = (1 << EXPECTED_BITS) // 500


@inlined
def rate_of(expected, nanoseconds):
    """Return tokens per nanosecond, fixed point of EXPECTED_BITS + RATE_BITS.

    `expected` tokens are fixed point of EXPECTED_BITS, at most MAX_EXPECTED; `nanoseconds` > 0.
    """
    return (np.int64(expected) << RATE_BITS) // nanoseconds


@inlined
def _worth(expected, num_before):
    """Return a node's worth in tokens, fixed point of EXPECTED_BITS, after `num_before` likelier ones."""
    return max(expected, np.int64(TEACHING_WORTH if num_before < NUM_TEACHING else MIN_WORTH))


@compiled
def best_size(path_probabilities, num_pending, times, kept, drafted, plain_ns, drafting_ns, per_node_ns):
    """Return how many of the tree's first nodes a lone replica should feed if it drafts; of equal sizes the smallest.

    Returns the number of nodes, its rate (0 without nodes below the root), and the rate of a step that does not draft,
    rates as of `rate_of`.

    Args:
        path_probabilities: [T] see `StepBudget.fit`.
        times: [m + 1] nanoseconds of a forward pass of 0, 1, 2 ... tokens; at most m nodes are fed.
        kept, drafted: [L], see AcceptanceCalibration.
        plain_ns: duration of a step that does not draft.
        drafting_ns, per_node_ns: see HostCost.
    """
    expected = np.int64(1) << EXPECTED_BITS
    plain_rate = rate_of(expected, plain_ns)
    best, best_rate = np.int64(num_pending), np.int64(0)
    for node in range(num_pending, min(len(path_probabilities), len(times) - 1)):
        num = node + 1 - num_pending
        expected += _worth(correct(path_probabilities[node], kept, drafted), num - 1)
        host_ns = drafting_ns + per_node_ns * num // FIXED_POINT_ONE
        rate = rate_of(min(expected, MAX_EXPECTED), times[node + 1] + host_ns)
        if rate > best_rate:
            best, best_rate = np.int64(node + 1), rate
    return best, best_rate, plain_rate


@inlined
def _add_capacity(times, num_pending, max_tokens, capacity):
    """Raise one replica's capacity by about a quarter, and the others' to what they feed in that time.

    `times` is [R, M + 1], in nanoseconds; `capacity`, [R] nodes in addition to the pending tokens, is updated in place.
    Returns the time in which all replicas finish, in nanoseconds; 0 if no capacity can be raised.
    """
    limit, most = max_tokens - num_pending, np.int64(-1)
    for rank in range(len(times)):
        if capacity[rank] < limit:  # faster replicas may have reached the limit before slower ones
            most = max(most, capacity[rank])
    if most < 0:
        return np.int64(0)
    size = min(max(most + 1, most * 5 // 4), limit)
    time, plain_time = np.int64(-1), np.int64(0)
    for rank in range(len(times)):
        plain_time = max(plain_time, times[rank, num_pending])  # all replicas feed the pending tokens
        if capacity[rank] < limit and (time < 0 or times[rank, num_pending + size] < time):
            time = times[rank, num_pending + size]
    time = max(time, plain_time)
    for rank in range(len(times)):
        while capacity[rank] < limit and times[rank, num_pending + capacity[rank] + 1] <= time:
            capacity[rank] += 1
    return time


@inlined
def copy_into(target, source):
    """Copy an array; Numba takes 3 s to compile `target[:] = source`, because it supports broadcasting."""
    for index in range(len(source)):
        target[index] = source[index]


@compiled(makes_arrays=True)
def best_capacity(parents, path_probabilities, root, times, limit, kept, drafted, plain_ns, drafting_ns, per_node_ns):
    """Return how many nodes each of several replicas should feed in addition to the pending tokens if they draft.

    The capacity is raised again and again, and each time more nodes are fed, because what fits depends on the tree's
    shape: one replica must feed a whole chain, while siblings can be divided. Returns the [R] capacity, its rate (0
    without nodes below the root), and the rate of a step that does not draft, rates as of `rate_of`.

    Args:
        times: [R, M + 1] nanoseconds of each replica's forward pass of 0, 1, 2 ... tokens.
        limit: largest number of tokens that a replica feeds, at most M.
        others: see `best_size`.
    """
    num_replicas, num_nodes, num_pending = len(times), len(parents), root + 1
    expected = np.empty(num_nodes, np.int64)
    most = np.int64(1) << EXPECTED_BITS  # expected tokens of a step that feeds all nodes: an upper bound
    for node in range(num_pending, num_nodes):
        expected[node] = correct(path_probabilities[node], kept, drafted)
        most += _worth(expected[node], node - num_pending)
    owner, feeds = np.empty(num_nodes, np.int64), np.empty((num_replicas, num_nodes), np.bool_)
    feed_pending(root, owner, feeds)
    capacity, left = np.zeros(num_replicas, np.int64), np.zeros(num_replicas, np.int64)
    before, best = capacity.copy(), capacity.copy()
    plain_rate = rate_of(np.int64(1) << EXPECTED_BITS, plain_ns)
    best_rate = np.int64(0)
    num_fed = np.int64(0)
    while num_fed < num_nodes - num_pending:
        copy_into(before, capacity)
        time = _add_capacity(times, num_pending, min(limit, num_nodes), capacity)
        if time == 0 or rate_of(min(most, MAX_EXPECTED), time + drafting_ns) <= best_rate:
            break
        for rank in range(num_replicas):
            left[rank] += capacity[rank] - before[rank]
        num_fed += fill(parents, root, owner, feeds, left)
        tokens, num_counted, node = np.int64(1) << EXPECTED_BITS, np.int64(0), num_pending
        while num_counted < num_fed:
            if owner[node] >= 0:
                tokens += _worth(expected[node], num_counted)
                num_counted += 1
            node += 1
        time = np.int64(0)
        for rank in range(num_replicas):
            time = max(time, times[rank, num_pending + capacity[rank] - left[rank]])
        host_ns = drafting_ns + per_node_ns * num_fed // FIXED_POINT_ONE
        rate = rate_of(min(tokens, MAX_EXPECTED), time + host_ns)
        if rate > best_rate:
            copy_into(best, capacity)
            best_rate = rate
    return best, best_rate, plain_rate
