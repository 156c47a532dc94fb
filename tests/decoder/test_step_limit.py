"""No settings make a step larger than the measured steps and the memory that is kept free for one."""

import numpy as np
import pytest
from support.ranks import CPU

from lp_runtime.calibration.calibration import Calibration, Measured, StepMeasurement
from lp_runtime.config.lookahead import UNMEASURED_STEP_TOKENS, LookaheadConfig
from lp_runtime.config.settings import ModelConfig
from lp_runtime.decoder.decoder_factory import step_limit
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.engine import Engine
from lp_runtime.model.kv_cache.slots import STEP_TOKENS
from lp_runtime.model.loading.loader import load_model
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.output import Report
from lp_runtime.request.request import Request

HUGE = {"W": 256, "N": 32, "G": 256, "prior": "none"}
PROMPT = tuple(range(5, 30))


class SizeRecorder:
    """A model, and the number of tokens that each step feeds."""

    def __init__(self, folder):
        self.model = ModelRunner(load_model(ModelConfig(path=str(folder)), CPU, "float32"), 2048)
        self.sizes: list[int] = []

    def observe(self, _nodes, step, _rank, _samples) -> None:
        self.sizes.append(max(step.shares.sizes))


@pytest.fixture(scope="module")
def recorder(demo_model_dir) -> SizeRecorder:
    return SizeRecorder(demo_model_dir)


def calibration(recorder: SizeRecorder, max_measured: int) -> Calibration:
    """Return a calibration that has measured steps up to a size."""
    none = np.array(0)
    known = Measured(
        StepMeasurement(np.array([1, max_measured]), 1_000_000 * np.array([1, 2]), none, none, np.zeros(2))
    )
    return Calibration(recorder.model, Group.alone(), None, known)


def tokens_and_largest_step(recorder: SizeRecorder, max_measured: int, lookahead: LookaheadConfig):
    """Return (new tokens, tokens of the largest step) with steps measured up to a size."""
    engine = Engine(recorder.model, Group.alone(), calibration(recorder, max_measured))
    recorder.sizes.clear()
    events = list(engine.run(Request(PROMPT, lookahead, 40), observe=recorder.observe))
    return [token for event in events if not isinstance(event, Report) for token in event.token_ids], max(
        recorder.sizes
    )


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["paper", "full"])
def test_huge_tree_is_cut_to_step_limit(recorder, drafter):
    plain, _ = tokens_and_largest_step(recorder, 16, LookaheadConfig(0, 2, 0, drafter="paper"))
    tokens, largest = tokens_and_largest_step(recorder, 16, LookaheadConfig(**HUGE, drafter=drafter))
    assert tokens == plain and largest <= UNMEASURED_STEP_TOKENS
    if drafter == "paper":  # its window fills all available nodes
        assert largest == UNMEASURED_STEP_TOKENS


@pytest.mark.parametrize(
    ("settings", "max_measured", "limit"),
    [
        (HUGE, 16, UNMEASURED_STEP_TOKENS),
        (HUGE, 200, 200),
        (HUGE, 100_000, STEP_TOKENS),
        (HUGE | {"budget": 4096}, 100_000, STEP_TOKENS),
        (HUGE | {"budget": 40}, 200, 40),
        ({"tokens": 200}, 16, UNMEASURED_STEP_TOKENS),
        ({"tokens": 40}, 16, 40),
        ({}, 24, 24),  # sized by measurements
        ({"budget": 4096}, 100_000, STEP_TOKENS),
        ({"W": 15, "N": 5, "G": 15}, 8, STEP_TOKENS),  # the paper's: 120 nodes at most, whatever was measured
        ({"drafter": "recycling"}, 8, STEP_TOKENS),  # its trees are small
    ],
)
def test_step_limit_follows_settings_measurements_and_memory(recorder, settings, max_measured, limit):
    assert step_limit(LookaheadConfig(**settings), calibration(recorder, max_measured)) == limit
