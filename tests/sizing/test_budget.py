"""The step budget: how many nodes a step feeds, and which replica feeds which."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.learned import NO_LIMIT, confirmed_costs

from lp_runtime.distributed.partition.partition import partition_by_times
from lp_runtime.lookahead.tree import PATH_PROBABILITY_BITS, TokenTree
from lp_runtime.sizing.budget import StepBudget
from lp_runtime.sizing.cost_model import assumed_times, interpolate
from lp_runtime.sizing.drafting_schedule import MAX_REST_STEPS
from lp_runtime.sizing.learned_costs import LearnedCosts

MILLISECOND = 1_000_000


def make_tree(num_nodes: int, num_pending: int = 1, rate: float = 0.7) -> TokenTree:
    """Return a tree like those of drafter `full`: two children per node, the likeliest nodes first."""
    root = num_pending - 1
    nodes = [(1.0, -1, 0)]
    open_nodes = [(rate, 0), (0.3 * rate, 0)]
    while len(nodes) < num_nodes - root:
        open_nodes.sort(reverse=True)
        path_probabilities, parent = open_nodes.pop(0)
        nodes.append((path_probabilities, parent, nodes[parent][2] + 1))
        open_nodes += [(path_probabilities * rate, len(nodes) - 1), (path_probabilities * 0.3 * rate, len(nodes) - 1)]
    path_probabilities = np.concatenate([np.full(root, 1.0), [node[0] for node in nodes]])
    parents = np.concatenate([np.arange(-1, root - 1), [root - 1], [root + node[1] for node in nodes[1:]]])
    depths = np.concatenate([np.arange(-root, 0), [node[2] for node in nodes]])
    tokens = np.arange(num_nodes)
    return TokenTree.from_arrays(
        tokens,
        parents.astype(np.int64),
        depths.astype(np.int64),
        (path_probabilities * 2**PATH_PROBABILITY_BITS).astype(np.int64),
        root,
        99,
    )


def lines(learned: LearnedCosts) -> tuple[list[int], list[int]]:
    """Return the learned slopes and offsets of forward passes."""
    return learned.passes.slopes.tolist(), learned.passes.offsets.tolist()


def chosen(budget: StepBudget, tree: TokenTree) -> TokenTree:
    """Return the tree of the nodes to feed."""
    nodes = budget.choose(tree)
    return tree.part(np.arange(nodes) if isinstance(nodes, int) else nodes)


def fitted(budget: StepBudget, tree: TokenTree) -> int:
    """Return how many nodes of the tree to feed."""
    return len(chosen(budget, tree))


def flat(num_tokens: int, free: int, slope: float) -> np.ndarray:
    """Return [1, num_tokens + 1] times: equal up to `free` tokens, then rising by `slope` with each token."""
    tokens = np.arange(num_tokens + 1)
    return (MILLISECOND * (1 + slope * np.maximum(0, tokens - free))).astype(np.int64)[None]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 150), st.integers(1, 6), st.integers(1, 60), st.integers(1, 5))
def test_replicas_never_feed_more_than_budget(size, num_replicas, budget, num_pending):
    num_pending = min(num_pending, budget)
    tree = make_tree(num_pending + size, num_pending)
    step = StepBudget(assumed_times(num_replicas, len(tree)), False, budget)
    part = chosen(step, tree)
    assert len(part) >= num_pending
    shares = step.shares(part)
    assert max(shares.sizes) <= budget
    assert (shares.owner[num_pending - 1 :] >= 0).all()


@pytest.mark.parametrize("is_auto", [True, False])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_pending_tokens_are_fed_even_if_they_exceed_the_budget(num_replicas, is_auto):
    step = StepBudget(assumed_times(num_replicas, 20), is_auto, 3)
    assert chosen(step, make_tree(12, num_pending=5)).tokens == list(range(5))


@pytest.mark.parametrize("num_replicas", [1, 2, 4, 8])
def test_budget_is_used_almost_fully(num_replicas):
    tree = make_tree(700)
    step = StepBudget(assumed_times(num_replicas, len(tree)), False, 40)
    part = chosen(step, tree)
    assert len(part) > 40 * num_replicas * 0.6
    assert sum(step.shares(part).sizes) > 0.9 * 40 * num_replicas


def test_free_tokens_are_fed_but_expensive_ones_are_not():
    tree = make_tree(200)
    for free in (1, 8, 30, 100):
        assert fitted(StepBudget(flat(200, free, 0.2), True, NO_LIMIT), tree) == pytest.approx(free, abs=6)
    times = flat(200, 1, 1.0)  # every token costs as much as the first
    assert fitted(StepBudget(times, True, NO_LIMIT, confirmed_costs(times)), tree) == 1
    assert fitted(StepBudget(flat(200, 200, 0), True, 50), tree) == 50


def test_tree_with_low_probabilities_is_not_fed():
    times = flat(200, 1, 0.05)
    assert fitted(StepBudget(times, True, NO_LIMIT), make_tree(200, rate=0.8)) > 3
    assert fitted(StepBudget(times, True, NO_LIMIT, confirmed_costs(times)), make_tree(200, rate=0.02)) == 1


def test_chosen_size_maximizes_expected_tokens_per_second():
    tree = make_tree(120, num_pending=3)
    times = np.maximum.accumulate(np.random.default_rng(0).integers(1, 9, 200).cumsum()[None] * 100_000 + MILLISECOND)
    size = fitted(StepBudget(times, True, NO_LIMIT), tree)
    expected = np.cumsum(tree.path_probabilities[tree.root :] / 2**PATH_PROBABILITY_BITS)
    rates = [expected[size - 3] / times[0, size] for size in range(3, 121)]
    assert rates[size - 3] == pytest.approx(max(rates), rel=1e-4)


def test_more_replicas_feed_larger_trees():
    tree = make_tree(400)
    curve = flat(400, 8, 0.1)
    sizes = [fitted(StepBudget(np.tile(curve, (num, 1)), True, NO_LIMIT), tree) for num in (1, 2, 4, 8)]
    assert sizes == sorted(sizes) and sizes[-1] >= 3 * sizes[0]


def test_tree_that_does_not_pay_is_fed_only_after_the_longest_rest():
    """Times may have changed during the rest. The lengths of rests are tested in test_drafting_schedule.py."""
    tree = make_tree(50, rate=0.04)
    budget = StepBudget(flat(50, 1, 0.5), True, NO_LIMIT, confirmed_costs(flat(50, 1, 0.5)))
    shares = partition_by_times(make_tree(1), flat(50, 1, 0.5))
    last, num_tried = 0, 0
    for step in range(300):
        if not budget.is_resting:
            is_trial = step - last == MAX_REST_STEPS
            assert (fitted(budget, tree) > 1) == is_trial
            last, num_tried = step, num_tried + is_trial
        budget.end_step()
        budget.observe(make_tree(1), shares, [MILLISECOND], [0], [])
    assert num_tried > 1
    # Drafting goes on when a tree pays.
    while budget.is_resting:
        budget.end_step()
        budget.observe(make_tree(1), shares, [MILLISECOND], [0], [])
    assert fitted(budget, make_tree(50, rate=0.9)) > 1
    assert not budget.is_resting


@pytest.mark.parametrize("slowdown", [2, 4])
def test_slow_replica_gets_smaller_share(slowdown):
    """The second of three replicas takes longer than measured; all finish at about the same time."""
    curves = flat(400, 1, 0.02).repeat(3, axis=0)
    actual = curves * np.array([[1], [slowdown], [1]])
    budget = StepBudget(curves, False, NO_LIMIT)
    tree = make_tree(200)
    first = None
    for _ in range(60):
        shares = budget.shares(tree)
        took = [int(actual[rank, len(share.nodes)]) for rank, share in enumerate(shares)]
        first = first or max(took)
        budget.end_step()
        budget.observe(tree, shares, took, [0, 0, 0], [])
    sizes = [len(share.nodes) for share in shares]
    assert sizes[1] < 0.7 * min(sizes[0], sizes[2])
    assert max(took) < 0.8 * first
    best = partition_by_times(tree, actual)
    assert max(took) <= 1.15 * max(actual[rank, size] for rank, size in enumerate(best.sizes))


def test_small_time_differences_do_not_change_shares():
    curves = flat(400, 1, 0.02).repeat(2, axis=0)
    budget = StepBudget(curves, False, NO_LIMIT)
    tree = make_tree(100)
    before = budget.shares(tree)
    for step in range(20):
        budget.end_step()
        budget.observe(tree, before, [MILLISECOND, MILLISECOND * (105 + step % 3) // 100], [0, 0], [])
    assert budget.shares(tree).owner.tolist() == before.owner.tolist()


@pytest.mark.parametrize("is_auto", [True, False])
@pytest.mark.parametrize("slow", [1, 3])
def test_budget_holds_even_if_more_tokens_would_be_as_fast(is_auto, slow):
    """The budget holds even if times have a plateau and replicas have different speeds."""
    times = np.concatenate([flat(400, 64, 0.1), slow * flat(400, 64, 0.1)])
    for size in (2, 40, 57, 200):
        budget = StepBudget(times, is_auto, 30)
        part = chosen(budget, make_tree(size))
        assert max(budget.shares(part).sizes) <= 30


def test_tree_size_follows_observed_acceptance():
    tree = make_tree(200, rate=0.6)
    times = flat(200, 1, 0.08)
    hopeful, doubtful = (StepBudget(times, True, NO_LIMIT, confirmed_costs(times)) for _ in range(2))
    for _ in range(60):
        for budget, is_kept in ((hopeful, True), (doubtful, False)):
            size = fitted(budget, tree)
            cut = make_tree(size, rate=0.6)
            accepted = list(range(1, size)) if is_kept else []
            budget.end_step()
            budget.observe(cut, budget.shares(cut), [int(times[0, size])], [0], accepted)
    fresh = fitted(StepBudget(times, True, NO_LIMIT, confirmed_costs(times)), tree)
    assert fitted(doubtful, tree) < fresh <= fitted(hopeful, tree)


def test_first_trees_are_fed_despite_unfavorable_measurements():
    """On a busy machine each token was measured to cost as much as the first; steps show they are free."""
    tree, measured, real = make_tree(50), flat(50, 1, 1.0), flat(50, 50, 0)
    budget, sizes = StepBudget(measured, True, NO_LIMIT, LearnedCosts(1)), []
    for _ in range(20):
        part = chosen(budget, tree)
        sizes.append(len(part))
        budget.end_step()
        budget.observe(part, budget.shares(part), [int(real[0, len(part)])], [0], [1])
    assert min(sizes) > 1


@pytest.mark.parametrize("is_auto", [True, False])
def test_times_reported_one_step_late_teach_same_costs(is_auto):
    times = np.tile(flat(64, 8, 0.05), (2, 1))
    learned_late, learned = confirmed_costs(times), confirmed_costs(times)
    late = StepBudget(times, is_auto, NO_LIMIT, learned_late, times_are_late=True)
    prompt = StepBudget(times, is_auto, NO_LIMIT, learned)
    tree = make_tree(40)
    nanoseconds = [[0, 0], *([MILLISECOND * (10 + step), MILLISECOND * (40 - step)] for step in range(12))]
    fed = [tree, make_tree(12), make_tree(25)]
    for step in range(12):
        part, shares = fed[step % 3], []
        for budget in (late, prompt):
            budget.select(part)
            shares.append(partition_by_times(part, times))
        prompt.end_step()
        prompt.observe(part, shares[0], nanoseconds[step + 1], [0, 0], [1, 2])
        late.end_step()
        late.observe(part, shares[1], nanoseconds[step], [0, 0], [1, 2])
    assert lines(learned_late) != lines(learned)
    late.end_step()
    late.observe(part, shares[1], nanoseconds[12], [0, 0], [1, 2])
    assert lines(learned_late) == lines(learned) != lines(confirmed_costs(times))


def test_step_with_an_unknown_time_teaches_nothing():
    times = np.tile(flat(64, 8, 0.05), (2, 1))
    learned, tree = confirmed_costs(times), make_tree(20)
    budget = StepBudget(times, False, None, learned)
    before = lines(learned)
    for forward in ([5 * MILLISECOND, 0], [5 * MILLISECOND] * 2):
        assert lines(learned) == before
        budget.end_step()
        budget.observe(tree, budget.shares(tree), forward, [0, 0], [])
    assert lines(learned) != before


def test_late_times_are_attributed_to_batch_size_of_their_step():
    """Its times may arrive when the next step already shares its batch with another request."""
    times = flat(64, 8, 0.05)
    learned = [confirmed_costs(times) for _ in range(2)]
    tree = make_tree(20)
    for each, next_size in zip(learned, (1, 2), strict=True):
        budget = StepBudget(times, True, NO_LIMIT, each)
        budget.choose(tree)
        budget.end_step()
        budget.set_batch_size(next_size)
        budget.observe(tree, budget.shares(tree), [3 * MILLISECOND], [0], [1])
    assert lines(learned[0]) == lines(learned[1]) != lines(confirmed_costs(times))


def settled(times: np.ndarray, overhead) -> tuple[StepBudget, LearnedCosts]:
    """Return a budget and its learned costs after 60 steps with trees of 100 to 400 nodes.

    Args:
        times: [1, M + 1] nanoseconds of the forward pass.
        overhead: Maps the number of nodes below the root to the host's nanoseconds.
    """
    learned = confirmed_costs(times)
    budget = StepBudget(times, True, NO_LIMIT, learned)
    learned.host.observe_plain(overhead(0))
    host_ns = 0
    for step in range(60):
        part = make_tree((400, 250, 100)[step % 3])
        part.truncate(size := fitted(budget, part))
        budget.end_step()
        budget.observe(part, budget.shares(part), [MILLISECOND], [host_ns], [1, 2, 3])
        host_ns = overhead(size - 1)  # known with the next step
    return budget, learned


def test_host_time_per_node_limits_tree_size():
    """The host takes longer for a step with more nodes, whatever the device takes."""
    tree, times = make_tree(400), flat(400, 400, 0)
    free, _ = settled(times, lambda num: MILLISECOND // 10)
    slow, _ = settled(times, lambda num: MILLISECOND // 10 + 10_000 * num)
    assert fitted(free, tree) > 300
    assert 4 < fitted(slow, tree) < 60


def test_fixed_host_time_does_not_limit_tree_size():
    """The host grows trees of 2 and of 30 nodes equally fast, so its time is no reason to feed only 2."""
    times = flat(400, 1, 0.001)
    learned = confirmed_costs(times)
    for overhead in (lambda num: 20_000 + 60_000 * (num > 0), lambda num: 20_000):
        budget = StepBudget(times, True, NO_LIMIT, learned)
        host_ns = 0
        for _ in range(400):  # unlikely chains: two nodes pay, or none
            part = make_tree(3, rate=0.3)
            part.truncate(size := fitted(budget, part))
            budget.end_step()
            budget.observe(part, budget.shares(part), [MILLISECOND], [host_ns], [1] if size > 1 else [])
            host_ns = overhead(size - 1)
        assert fitted(budget, make_tree(400)) > 80


def test_steps_without_drafts_do_not_raise_cost_per_node():
    times = flat(400, 1, 0.001)
    budget, learned = settled(times, lambda num: 100_000 + 2_500 * num)
    per_node_ns = learned.host.per_node_ns
    for _ in range(2000):
        assert budget.is_resting or fitted(budget, make_tree(1)) == 1
        budget.end_step()
        budget.observe(make_tree(1), budget.shares(make_tree(1)), [MILLISECOND], [160_000], [])
    assert learned.host.per_node_ns < 2 * per_node_ns
    assert fitted(budget, make_tree(400)) > 30


def chain_and_siblings(num_siblings: int, in_chain: float, of_siblings: float) -> TokenTree:
    """Return a tree of a chain of 30 nodes and siblings of its first node, with these path probabilities."""
    tree = TokenTree([0], max_depth=30)
    tree.add_branch(list(range(1, 31)))
    for token in range(31, 31 + num_siblings):
        tree.add(0, token)
    probabilities = [1.0, *[in_chain] * 30, *[of_siblings] * num_siblings]
    tree.path_probabilities = (np.array(probabilities) * 2**PATH_PROBABILITY_BITS).astype(np.int64)
    return tree


def test_chain_counts_as_work_of_one_replica_and_siblings_as_shared():
    """Three of four replicas get no node of a chain, so a chain pays only as much as on one replica.

    Its siblings pay as much as on all four.
    """
    times = np.tile(flat(100, 1, 0.2), (4, 1))
    certain = StepBudget(times, True, NO_LIMIT, confirmed_costs(times)).select(chain_and_siblings(0, 0.95, 0))
    assert certain.tolist() == list(range(31))  # each node costs a fifth of a step
    doubtful = (
        StepBudget(times, True, NO_LIMIT, confirmed_costs(times)).select(chain_and_siblings(40, 0.3, 0.1)).tolist()
    )
    in_chain = sum(node <= 30 for node in doubtful)
    assert in_chain < 15 and len(doubtful) - in_chain > 2 * in_chain


def rough(seed: int) -> np.ndarray:
    """Return [1, 201] times that rise unevenly."""
    steps = np.random.default_rng(seed).integers(1, 9, 201).cumsum()
    return np.maximum.accumulate(steps[None] * 100_000 + MILLISECOND)


@pytest.mark.parametrize(
    ("times", "most"),
    [
        (np.concatenate([rough(1), rough(1) + 200_000, rough(1)]), 60),
        # The first replica feeds as much as it may at no cost; the others are nonetheless useful.
        (np.concatenate([flat(200, 64, 0.1), *[(1.2 * flat(200, 1, 0.002)).astype(np.int64)] * 3]), 30),
        (np.concatenate([flat(200, 64, 0.1), flat(200, 8, 0.02), 3 * flat(200, 8, 0.02)]), 16),
    ],
)
def test_choice_for_several_replicas_is_near_best_capacity(times, most):
    tree = make_tree(300, num_pending=2, rate=0.8)

    def rate(budget: StepBudget) -> float:
        part = chosen(budget, tree)
        sizes = budget.shares(part).sizes
        tokens = part.path_probabilities[part.root :].sum() / 2**PATH_PROBABILITY_BITS
        return tokens / max(times[rank, size] for rank, size in enumerate(sizes))

    best = max(rate(StepBudget(times, False, limit)) for limit in range(2, most + 1))
    assert rate(StepBudget(times, True, most)) > 0.93 * best


@pytest.mark.parametrize(("odds", "between", "padded"), [(64, 17, 16), (4, 24, 24)])
def test_cost_of_node_includes_padding(odds, between, padded):
    """17 tokens cost as much as 24, so even a certain 17th node pays only if others fill the pass, too."""
    tree = TokenTree([0], max_depth=64)
    tree.add_branch(list(range(1, 40)))
    probabilities = np.full(40, (1 << PATH_PROBABILITY_BITS) // odds, dtype=np.int64)
    probabilities[:17] = 1 << PATH_PROBABILITY_BITS
    sizes = []
    for num_padded in (0, 24):
        times = interpolate([1, 16, 24, 32], [900, 1000, 1100, 9000], 48, num_padded)[None] * 1000
        sizes.append(StepBudget(times, True, NO_LIMIT, LearnedCosts(1)).fit(tree, probabilities))
    assert sizes == [between, padded]
