"""The host cost: fixed time and time per node, learned from steps, and single slow steps ignored."""

import random

import pytest

from lp_runtime.sizing.host_cost import ASSUMED_NODE_NS, HostCost
from lp_runtime.sizing.pass_times import FIXED_POINT_ONE


def learned_from(line, sizes, plain: int = 100_000, disturb=lambda step: 0) -> HostCost:
    """Return the host cost after a step that does not draft, and steps of these sizes.

    Args:
        line: Maps a step's number of nodes to its nanoseconds.
        sizes: Number of nodes of each step.
        plain: Nanoseconds of the step that does not draft.
        disturb: Maps a step's index to its additional nanoseconds.
    """
    cost = HostCost()
    cost.observe_plain(plain)
    for step, size in enumerate(sizes):
        cost.observe(size, line(size) + disturb(step))
    return cost


@pytest.mark.parametrize(("fixed", "per_node"), [(150_000, 300), (150_000, 5_000), (2_000_000, 20_000)])
def test_host_cost_learns_fixed_and_per_node_time(fixed, per_node):
    numbers = random.Random(0)
    cost = learned_from(lambda size: fixed + per_node * size, [numbers.randint(1, 300) for _ in range(200)])
    assert cost.per_node_ns / FIXED_POINT_ONE == pytest.approx(per_node, rel=0.35)
    assert cost.drafting_ns + 150 * cost.per_node_ns // FIXED_POINT_ONE == pytest.approx(
        fixed + 150 * per_node, rel=0.05
    )


def test_cost_per_node_is_assumed_if_all_trees_have_same_size():
    cost = learned_from(lambda size: 500_000, [64] * 50)
    assert cost.per_node_ns / FIXED_POINT_ONE == pytest.approx(ASSUMED_NODE_NS, rel=0.01)
    assert cost.drafting_ns + 64 * cost.per_node_ns // FIXED_POINT_ONE == pytest.approx(500_000, rel=0.01)
    cost = learned_from(lambda size: 101_000, [64] * 50)  # nodes cannot take longer than their step
    assert cost.per_node_ns * 64 / FIXED_POINT_ONE <= 1_001
    cost = HostCost()
    assert (cost.plain_ns, cost.drafting_ns, cost.per_node_ns) == (0, 0, 0)
    cost.observe_plain(70_000)
    assert (cost.drafting_ns, cost.per_node_ns) == (70_000, ASSUMED_NODE_NS * FIXED_POINT_ONE)


@pytest.mark.parametrize("when", [0, 1, 3, 20])
def test_outlier_among_steps_without_drafts_is_ignored(when):
    """If all later steps draft, nothing would correct it."""
    cost = HostCost()
    for step in range(30):
        cost.observe_plain(100_000 + 500_000_000 * (step == when))
        assert step == 0 or cost.plain_ns <= 150_000
    for _ in range(40):
        cost.observe_plain(300_000)
    assert cost.plain_ns > 250_000  # a lasting change is learned


def test_drafting_steps_correct_outlier_of_step_without_drafts():
    """A step that does not draft takes no longer than one that does, even if it was the only one."""
    cost = HostCost()
    cost.observe_plain(500_000_000)
    for _ in range(10):
        cost.observe(8, 120_000)
    assert cost.plain_ns <= 120_000 and cost.drafting_ns <= 150_000


@pytest.mark.parametrize("when", [0, 1, 20])
def test_outlier_among_drafting_steps_is_ignored(when):
    """The first call of a function may take a hundred times as long as later calls."""
    numbers = random.Random(1)
    sizes = [numbers.randint(0, 40) for _ in range(when + 8)]
    cost = learned_from(lambda size: 200_000 + 1000 * size, sizes, disturb=lambda step: 50_000_000 * (step == when))
    assert cost.per_node_ns < 8_000 * FIXED_POINT_ONE
    assert cost.drafting_ns < 500_000
