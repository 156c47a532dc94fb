"""When to draft at all: the states of a request whose steps are sized.

| state | next step | becomes | when |
| --- | --- | --- | --- |
| TIMING | root alone | DRAFTING | NUM_TIMED steps of the root alone were timed, in requests of the same kind |
| DRAFTING | fitted tree | PROBING | PROBE_AFTER_STEPS trees in a row gained little |
| | | RESTING | REST_AFTER_STEPS trees in a row did not pay, and again with each further tree in that row |
| PROBING | root alone | DRAFTING | PROBE_STEPS steps are over |
| RESTING | root alone | DRAFTING | 1, 3, 7 ... steps are over: one rest is about twice as long as the one before |
"""

from __future__ import annotations

import enum

from lp_runtime.sizing.learned_costs import LearnedCosts

REST_AFTER_STEPS = 4  # in a row that were worth the root alone: one or two may be chance
MAX_REST_STEPS = 32  # from one tree that is fitted to the next, so that text that is easy again is noticed
PROBE_AFTER_STEPS = 24  # in a row of little gain: a step of the root alone may have become cheaper meanwhile
PROBE_STEPS = 3  # the first after larger steps is slow, and teaches nothing


class DraftingState(enum.Enum):
    """What the next step of a request feeds, and why."""

    TIMING = "the root alone, because the time of such a step is not known"
    DRAFTING = "a tree, as large as pays"
    PROBING = "the root alone, because the time of such a step may have changed"
    RESTING = "the root alone, because no tree has paid lately"


class DraftingSchedule:
    """Decides whether the next step asks the drafter for a tree, from what earlier trees were worth.

    Args:
        learned: What steps have shown; says whether steps of the root alone were timed.

    Attributes:
        drafted: Whether the last step that is over asked the drafter; true before the first.
    """

    def __init__(self, learned: LearnedCosts):
        self.drafted = True
        self._learned = learned
        self._state = DraftingState.DRAFTING
        self._steps_left = 0  # until PROBING or RESTING ends, the step under way included
        self._drafts = False  # whether the step under way asked the drafter
        self._num_unpaid = 0  # trees in a row that were worth the root alone
        self._num_little = 0  # trees in a row that gained little

    @property
    def state(self) -> DraftingState:
        """State in which the next step begins."""
        return self._state if self._learned.is_timed else DraftingState.TIMING

    @property
    def is_resting(self) -> bool:
        """Whether the next step feeds the root alone, without asking the drafter."""
        return self.state is not DraftingState.DRAFTING

    def tree_fitted(self, pays: bool, gains_little: bool) -> None:
        """Record what the tree of the step under way is worth.

        Args:
            pays: Whether any of its nodes below the root are fed.
            gains_little: Whether they are fed for a small gain.
        """
        self._drafts = True
        self._num_unpaid = 0 if pays else self._num_unpaid + 1
        self._num_little = self._num_little + 1 if gains_little else 0
        if self._num_little >= PROBE_AFTER_STEPS:
            self._begin_probing()
        if self._num_unpaid >= REST_AFTER_STEPS:
            self._begin_resting()

    def end_step(self) -> None:
        """Record that the step under way is over; the last step of PROBING or RESTING ends that state."""
        self.drafted, self._drafts = self._drafts, False
        if self._steps_left:
            self._steps_left -= 1
            if not self._steps_left:
                self._state = DraftingState.DRAFTING

    def _begin_probing(self) -> None:
        """Enter PROBING, after the step under way."""
        self._num_little = 0
        self._state, self._steps_left = DraftingState.PROBING, 1 + PROBE_STEPS

    def _begin_resting(self) -> None:
        """Enter RESTING, after the step under way; the longer, the more trees in a row did not pay."""
        num_steps = min(1 << (self._num_unpaid - REST_AFTER_STEPS + 1), MAX_REST_STEPS)
        self._state, self._steps_left = DraftingState.RESTING, num_steps
