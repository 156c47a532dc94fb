"""Whether a request with automatic step sizes drafts at all in its next step."""

from __future__ import annotations

from lp_runtime.sizing.learned_costs import LearnedCosts

REST_AFTER_STEPS = 4  # consecutive trees that did not pay; one or two may be chance
MAX_REST_STEPS = 32  # from one fitted tree to the next, so that text that is easy again is noticed
NUM_TRIALS = 8  # trees that are fed and timed before any is left out: measured times may be those of a busy machine


class DraftingSchedule:
    """Decides from the worth of earlier trees whether the next step calls the drafter.

    After REST_AFTER_STEPS trees in a row that did not pay, drafting rests for 1 step, and after each further one in
    that row for 3, 7 ... steps: each rest is about twice as long as the previous one.

    `drafted`: whether the last finished step called the drafter; true before the first.
    `drafted_before`: the same for the step before that one.
    """

    def __init__(self, learned: LearnedCosts):
        self.drafted = self.drafted_before = True
        self._learned = learned
        self._steps_left = 0  # until the rest ends, including the current step
        self._rest_steps = 0  # length of the last rest; 0 since a tree paid
        self._num_unpaid = 0  # consecutive trees that did not pay
        self._drafts = False  # whether the current step called the drafter

    @property
    def is_resting(self) -> bool:
        """Whether the next step feeds the root alone, without calling the drafter."""
        return self._steps_left > 0

    @property
    def is_trial(self) -> bool:
        """Whether to feed the current step's tree even if it does not seem to pay, because its times may be wrong.

        Only a step that drafts shows what such steps take, so one that never runs would stay too slow forever.
        """
        return self._learned.passes.num_steps < NUM_TRIALS or self._rest_steps == MAX_REST_STEPS

    def tree_fitted(self, pays: bool) -> bool:
        """Record whether the current step's tree seems to pay, in tokens per second; return whether to feed it."""
        is_fed = pays or self.is_trial
        self._drafts = True
        if pays:
            self._num_unpaid = self._rest_steps = 0
            return is_fed
        self._num_unpaid += 1
        if self._num_unpaid >= REST_AFTER_STEPS:
            self._rest_steps = min(1 << (self._num_unpaid - REST_AFTER_STEPS + 1), MAX_REST_STEPS)
            self._steps_left = self._rest_steps
        return is_fed

    def end_step(self) -> None:
        """Record the end of the current step; the last step of a rest ends it."""
        self.drafted_before = self.drafted
        self.drafted, self._drafts = self._drafts, False
        self._steps_left = max(0, self._steps_left - 1)
