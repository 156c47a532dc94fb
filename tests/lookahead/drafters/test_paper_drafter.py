"""The paper's drafter: sources of its nodes, trees that are fed in part, and the window if tokens are sampled."""

import numpy as np
import pytest

from lp_runtime.lookahead.drafter import VerificationResult
from lp_runtime.lookahead.drafters.paper.drafter import PaperDrafter
from lp_runtime.lookahead.top_k import ENTRY


class ForcingGuide:
    """A constraint that forces the tokens 1 and 2, and allows every token."""

    ends = np.zeros(0, np.int64)

    def allows(self, path, token) -> bool:
        return True

    def forced(self, max_tokens: int) -> list[int]:
        return [1, 2][:max_tokens]


def counted(drafter: PaperDrafter) -> dict[str, tuple[int, int]]:
    """Return (fed, accepted) nodes of each source that was fed."""
    counts = drafter.counts
    sums = zip(counts.sources, counts.fed.sum(1).tolist(), counts.accepted.sum(1).tolist(), strict=True)
    return {name: (fed, accepted) for name, fed, accepted in sums if fed}


@pytest.mark.parametrize(
    ("nodes", "fed"), [([0, 1, 2], {"guesses": (1, 1), "window": (1, 0)}), ([0, 2], {"guesses": (1, 1)})]
)
def test_guess_is_accepted_and_counted_in_a_whole_tree_and_in_part_of_it(nodes, fed):
    drafter = PaperDrafter((2, 2, 1), only_guesses=True)
    drafter.begin([5, 6, 8])
    drafter.advance_prefill([5, 6, 8, 5])
    drafter.window.levels = [[0, 3]]
    tree = drafter.propose([5, 6, 8, 5], 3, max_depth=9)
    assert tree.tokens == [5, 3, 6]  # the root, a node of the window, a guess
    tree = drafter.keep(tree, np.array(nodes))
    guess = len(nodes) - 1
    result = VerificationResult([6, 4, 9][:guess] + [9])
    assert drafter.accept(tree, result) == ([6, 9], [guess])
    drafter.advance([5, 6, 8, 5, 6, 9], tree, result, [6, 9], [guess])
    assert counted(drafter) == fed and drafter.counts.latest_sources() == ["guesses"]


def test_forced_token_that_is_not_fed_is_not_counted():
    drafter = PaperDrafter((0, 2, 2), pool_from_prompt=False)
    drafter.begin([5])
    drafter.advance_prefill([5, 6])
    tree = drafter.propose([5, 6], 1, max_depth=9, guide=ForcingGuide())
    assert tree.tokens == [6, 1]  # a step can commit two tokens
    drafter.advance([5, 6, 3], drafter.keep(tree, np.array([0])), VerificationResult([3]), [3], [])
    assert counted(drafter) == {}


def test_sampled_tokens_do_not_enter_the_window():
    """The window continues with the likeliest tokens: here 7 after the root 6, although 8 was sampled."""
    drafter = PaperDrafter((1, 2, 2), samples=True)
    drafter.begin([5])
    drafter.advance_prefill([5, 6])
    tree = drafter.propose([5, 6], 0, max_depth=9)
    assert tree.tokens == [5, 6]  # both are pending
    likeliest = np.full((1, ENTRY), 7, np.int32)
    drafter.advance([5, 6, 8], tree, VerificationResult([0, 8], likeliest), [8], [])
    assert drafter.pool.guesses(6) == [(8,), (7,)]


def test_node_that_no_token_may_follow_leaves_its_window_slot_to_a_first_guess():
    """Processors may forbid every token after a guess; its candidates are then missing, -1."""
    drafter = PaperDrafter((2, 2, 2), samples=True)
    drafter.begin([5])
    drafter.advance_prefill([5, 6])
    tree = drafter.propose([5, 6], 1, max_depth=9)
    assert tree.tokens == [6, 5]  # the root and a node of the window
    likeliest = np.full((2, ENTRY), -1, np.int32)
    likeliest[0] = 7
    drafter.advance([5, 6, 7], tree, VerificationResult([7, 0], likeliest), [7], [])
    assert drafter.window.levels == [[7, 5]] and drafter.pool.guesses(5) == [(6,)]
