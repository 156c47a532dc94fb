"""What a step takes the host for, learned from steps."""

import random

import pytest

from lp_runtime.sizing.cost_model import UNIT
from lp_runtime.sizing.host_cost import ASSUMED_NODE, HostCost


def seen(line, sizes, plain: int = 100_000, disturb=lambda step: 0) -> HostCost:
    price = HostCost()
    price.observe_plain(plain)
    for step, size in enumerate(sizes):
        price.observe(size, line(size) + disturb(step))
    return price


@pytest.mark.parametrize(("fixed", "per_node"), [(150_000, 300), (150_000, 5_000), (2_000_000, 20_000)])
def test_a_line_is_found(fixed, per_node):
    numbers = random.Random(0)
    price = seen(lambda size: fixed + per_node * size, [numbers.randint(1, 300) for _ in range(200)])
    assert price.per_node / UNIT == pytest.approx(per_node, rel=0.35)
    assert price.drafting + 150 * price.per_node // UNIT == pytest.approx(fixed + 150 * per_node, rel=0.05)


def test_where_all_trees_are_of_a_size_something_is_assumed_of_a_node():
    price = seen(lambda size: 500_000, [64] * 50)
    assert price.per_node / UNIT == pytest.approx(ASSUMED_NODE, rel=0.01)
    assert price.drafting + 64 * price.per_node // UNIT == pytest.approx(500_000, rel=0.01)
    price = seen(lambda size: 101_000, [64] * 50)  # nodes cannot take more than steps do
    assert price.per_node * 64 / UNIT <= 1_001
    price = HostCost()
    assert (price.plain, price.drafting, price.per_node) == (0, 0, 0)
    price.observe_plain(70_000)
    assert (price.drafting, price.per_node) == (70_000, ASSUMED_NODE * UNIT)


@pytest.mark.parametrize("when", [0, 1, 20])
def test_a_step_that_was_disturbed_is_not_believed(when):
    """The first time that something is called may take a hundred times as long."""
    numbers = random.Random(1)
    sizes = [numbers.randint(0, 40) for _ in range(when + 8)]
    price = seen(lambda size: 200_000 + 1000 * size, sizes, disturb=lambda step: 50_000_000 * (step == when))
    assert price.per_node < 8_000 * UNIT
    assert price.drafting < 500_000
