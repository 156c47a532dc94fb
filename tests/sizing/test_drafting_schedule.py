"""The drafting schedule of a request: rests and trials."""

import numpy as np

from lp_runtime.sizing.drafting_schedule import MAX_REST_STEPS, NUM_TRIALS, REST_AFTER_STEPS, DraftingSchedule
from lp_runtime.sizing.learned_costs import LearnedCosts


def steps_that_draft(schedule: DraftingSchedule, num_steps: int, pays: bool) -> str:
    """Return a letter for each step: d for one that drafts, t for a trial, r for rest."""
    letters = ""
    for _ in range(num_steps):
        letters += "r" if schedule.is_resting else "t" if schedule.is_trial else "d"
        if not schedule.is_resting:
            is_trial = schedule.is_trial
            assert schedule.tree_fitted(pays) == (pays or is_trial)
        schedule.end_step()
    return letters


def learned_from(num_steps: int) -> LearnedCosts:
    learned, times = LearnedCosts(1), np.full((1, 3), 1000)
    for _ in range(num_steps):
        learned.passes.observe(times, np.array([2]), np.array([1000]))
    return learned


def test_first_trees_are_trials():
    for num_steps in range(NUM_TRIALS):
        assert DraftingSchedule(learned_from(num_steps)).is_trial
    assert not DraftingSchedule(learned_from(NUM_TRIALS)).is_trial


def test_drafting_continues_while_trees_pay():
    assert steps_that_draft(DraftingSchedule(learned_from(NUM_TRIALS)), 200, pays=True) == "d" * 200


def test_drafting_rests_longer_and_longer_if_trees_do_not_pay():
    """After each rest of the maximum length, one tree is tried, because times may have changed."""
    expected = "d" * (REST_AFTER_STEPS - 1)
    for length in (2, 4, 8, 16, MAX_REST_STEPS):
        expected += "d" + "r" * (length - 1)
    expected += 2 * ("t" + "r" * (MAX_REST_STEPS - 1))
    schedule = DraftingSchedule(learned_from(NUM_TRIALS))
    assert steps_that_draft(schedule, len(expected), pays=False) == expected
    assert steps_that_draft(schedule, 8, pays=True) == "t" + "d" * 7  # a tree that pays resets the schedule
    assert steps_that_draft(schedule, REST_AFTER_STEPS + 2, pays=False) == "d" * REST_AFTER_STEPS + "rd"


def test_drafted_reports_whether_last_step_drafted():
    schedule = DraftingSchedule(learned_from(NUM_TRIALS))
    assert schedule.drafted
    schedule.end_step()
    assert not schedule.drafted
    schedule.tree_fitted(pays=False)
    assert not schedule.drafted
    schedule.end_step()
    assert schedule.drafted
