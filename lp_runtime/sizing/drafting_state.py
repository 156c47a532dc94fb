"""Drafting states of a request with automatic step sizes: when to draft at all.

| state | next step | becomes | when |
| --- | --- | --- | --- |
| TIMING | root alone | DRAFTING | NUM_TIMED steps of the root alone were timed, in requests of the same kind |
| DRAFTING | fitted tree | PROBING | PROBE_AFTER_STEPS trees in a row gained little |
| | | RESTING | REST_AFTER_STEPS trees in a row did not pay, and again after each further one in that row |
| PROBING | root alone | DRAFTING | PROBE_STEPS steps are over |
| RESTING | root alone | DRAFTING | 1, 3, 7 ... steps are over: each rest is about twice as long as the previous one |
"""

from __future__ import annotations

import enum

from lp_runtime.sizing.learned_costs import LearnedCosts

REST_AFTER_STEPS = 4  # consecutive trees that did not pay; one or two may be chance
MAX_REST_STEPS = 32  # from one fitted tree to the next, so that text that is easy again is noticed
NUM_TRIALS = 8  # trees that are fed and timed before any is left out: measured times may be those of a busy machine
PROBE_AFTER_STEPS = 24  # consecutive trees of little gain; a step of the root alone may have become cheaper meanwhile
PROBE_STEPS = 3  # the first one after larger steps is slow and is not counted


class DraftingState(enum.Enum):
    """Drafting state of a request: what the next step feeds, and why."""

    TIMING = "the root alone, because the time of such a step is not known"
    DRAFTING = "a tree, as large as pays"
    PROBING = "the root alone, because the time of such a step may have changed"
    RESTING = "the root alone, because no tree has paid lately"


class DraftingSchedule:
    """Decides from the worth of earlier trees whether the next step calls the drafter.

    `drafted`: whether the last finished step called the drafter; true before the first.
    """

    def __init__(self, learned: LearnedCosts):
        self.drafted = True
        self._learned = learned
        self._state = DraftingState.DRAFTING
        self._steps_left = 0  # until PROBING or RESTING ends, including the current step
        self._drafts = False  # whether the current step called the drafter
        self._num_unpaid = 0  # consecutive trees that did not pay
        self._rest_steps = 0  # length of the last rest; 0 since a tree paid
        self._num_little = 0  # consecutive trees that gained little

    @property
    def state(self) -> DraftingState:
        """State at the beginning of the next step."""
        return self._state if self._learned.is_timed else DraftingState.TIMING

    @property
    def is_resting(self) -> bool:
        """Whether the next step feeds the root alone, without calling the drafter."""
        return self.state is not DraftingState.DRAFTING

    @property
    def is_trial(self) -> bool:
        """Whether to feed the current step's tree even if it does not seem to pay, because its times may be wrong.

        Only a step that drafts shows what such steps take, so one that never runs would stay too slow forever.
        """
        return self._learned.passes.num_steps < NUM_TRIALS or self._rest_steps == MAX_REST_STEPS

    def tree_fitted(self, pays: bool, gains_little: bool) -> None:
        """Record whether the current step's tree pays (any guess is fed), and whether its gain is small."""
        self._drafts = True
        self._num_unpaid, self._rest_steps = (0, 0) if pays else (self._num_unpaid + 1, self._rest_steps)
        self._num_little = self._num_little + 1 if gains_little else 0
        if self._num_little >= PROBE_AFTER_STEPS:
            self._num_little = 0
            self._state, self._steps_left = DraftingState.PROBING, 1 + PROBE_STEPS
        if self._num_unpaid >= REST_AFTER_STEPS:
            self._rest_steps = min(1 << (self._num_unpaid - REST_AFTER_STEPS + 1), MAX_REST_STEPS)
            self._state, self._steps_left = DraftingState.RESTING, self._rest_steps

    def end_step(self) -> None:
        """Record the end of the current step; the last step of PROBING or RESTING ends that state."""
        self.drafted, self._drafts = self._drafts, False
        if self._steps_left:
            self._steps_left -= 1
            if not self._steps_left:
                self._state = DraftingState.DRAFTING
