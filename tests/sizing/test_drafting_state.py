"""The states of drafting, and what leads from one to the next."""

from lp_runtime.sizing.drafting_state import (
    MAX_REST_STEPS,
    PROBE_AFTER_STEPS,
    PROBE_STEPS,
    REST_AFTER_STEPS,
    DraftingSchedule,
    DraftingState,
)
from lp_runtime.sizing.learned_costs import NUM_TIMED, LearnedCosts


def states(schedule: DraftingSchedule, num_steps: int, pays: bool = True, gains_little: bool = False) -> list[str]:
    """Return the name of the state in which each step begins; trees are fitted in DRAFTING alone."""
    names = []
    for _ in range(num_steps):
        names.append(schedule.state.name)
        if not schedule.is_resting:
            schedule.tree_fitted(pays, gains_little)
        schedule.end_step()
    return names


def timed() -> DraftingSchedule:
    return DraftingSchedule(LearnedCosts.initial(1, is_timed=True))


def test_steps_of_the_root_alone_are_timed_first():
    learned = LearnedCosts.initial(1)
    schedule = DraftingSchedule(learned)
    for learned.num_plain in range(NUM_TIMED):
        assert schedule.state is DraftingState.TIMING and schedule.is_resting
    learned.num_plain = NUM_TIMED
    assert schedule.state is DraftingState.DRAFTING and not schedule.is_resting


def test_trees_that_pay_go_on():
    assert set(states(timed(), 200)) == {"DRAFTING"}


def test_trees_that_gain_little_are_probed():
    expected = ["DRAFTING"] * PROBE_AFTER_STEPS + ["PROBING"] * PROBE_STEPS
    assert states(timed(), 2 * len(expected), gains_little=True) == 2 * expected


def test_trees_that_do_not_pay_rest_longer_and_longer():
    expected = ["DRAFTING"] * (REST_AFTER_STEPS - 1)
    for length in (2, 4, 8, 16, MAX_REST_STEPS, MAX_REST_STEPS):
        expected += ["DRAFTING", *["RESTING"] * (length - 1)]
    schedule = timed()
    assert states(schedule, len(expected), pays=False) == expected
    assert states(schedule, 2 * REST_AFTER_STEPS) == ["DRAFTING"] * 2 * REST_AFTER_STEPS  # one that pays ends the row
    assert states(schedule, REST_AFTER_STEPS + 2, pays=False) == ["DRAFTING"] * REST_AFTER_STEPS + [
        "RESTING",
        "DRAFTING",
    ]


def test_whether_the_last_step_drafted_is_known():
    schedule = timed()
    assert schedule.drafted
    schedule.end_step()
    assert not schedule.drafted
    schedule.tree_fitted(pays=False, gains_little=False)
    assert not schedule.drafted
    schedule.end_step()
    assert schedule.drafted
