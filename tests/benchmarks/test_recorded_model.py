"""Tests of recorded model outputs: drafters take the same steps as live, and only new nodes are fed."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from racer import RacerDrafter

from lp_runtime.calibration import vocabulary_prior
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.engine import Engine
from lp_runtime.request.output import Report
from lp_runtime.request.request import Request

FOLDER = Path(__file__).parents[2] / "benchmarks"
FULL = LookaheadConfig(W=5, N=5, G=0, budget=16, prior="none")


@pytest.fixture
def make_bench(one_layer_demo_dir, tmp_path, monkeypatch):
    """Return a function that makes a Bench of two prompts and records model outputs in one folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    from studies.drafting_bench import Bench

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("def add(a, b):\n", "import os\n")))

    def make(prior_of_trees: bool = False) -> Bench:
        args = {
            "model": str(one_layer_demo_dir),
            "prompts": [f"{prompts}:text"],
            "data": tmp_path,
            "limit": 9,
            "each": 9,
            "max_new_tokens": 24,
        }
        args |= {"eos": False, "chat": False, "prior_of_trees": prior_of_trees, "record": tmp_path / "kept"}
        return Bench(argparse.Namespace(**args))

    yield make
    for name in [name for name in sys.modules if name == "common" or name.split(".")[0] == "studies"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, pytest.param({"temperature": 1.0}, marks=pytest.mark.slow)],
    ids=["greedy", "sampled"],
)
def test_recorded_steps_match_the_engine(make_bench, sampling):
    bench = make_bench()
    runs = bench.decode_all(FULL, sampling=sampling)
    model, calibration = bench.model, bench.calibration
    for number, (run, (_, prompt)) in enumerate(zip(runs, bench.prompts, strict=True)):
        config = SamplingConfig(**sampling, seed=number if sampling["temperature"] else None)
        request = Request(tuple(prompt), FULL, 24, sampling=config)
        *outputs, report = Engine(model, Group.alone(), calibration).run(request)
        assert isinstance(report, Report)
        assert run.tokens == [token for output in outputs for token in output.token_ids]
        assert run.num_steps == report.num_steps
        assert run.num_fed / (run.num_steps - 1) == pytest.approx(report.step_tokens)


def test_recorded_outputs_are_not_computed_again(make_bench):
    bench = make_bench()
    first = bench.decode_all(FULL)
    num_fed = bench.num_fed
    again = bench.decode_all(FULL)
    assert bench.num_fed == num_fed  # everything was recorded
    peer = bench.decode_all(lambda: RacerDrafter(16))
    assert num_fed < bench.num_fed  # the peer's other nodes are new
    assert [run.tokens for run in peer] == [run.tokens for run in again] == [run.tokens for run in first]
    assert [run.num_steps for run in again] == [run.num_steps for run in first]
    later = make_bench()  # like another process that reads the same files
    assert [run.num_steps for run in later.decode_all(lambda: RacerDrafter(16))] == [run.num_steps for run in peer]
    assert later.num_fed == 0


def test_study_ends_if_output_differs_from_the_recorded_text(make_bench):
    bench = make_bench()
    bench.decode_all(FULL)
    recording = bench.recording(0)
    recording.text = [*recording.text[:-1], recording.text[-1] + 1]
    with pytest.raises(SystemExit, match="prompt 0: the output is not that of one token a step"):
        bench.decode_all(FULL)


@pytest.mark.parametrize("prior_of_trees", [True, False])
def test_prior_is_asked_for_after_all_tokens_of_the_trees(make_bench, monkeypatch, prior_of_trees):
    monkeypatch.setattr(
        vocabulary_prior, "ASKING_SECONDS", 0.0
    )  # of the 4,096 tokens a start asks about the first ones
    bench = make_bench(prior_of_trees)
    runs = bench.decode_all(replace(FULL, prior="vocabulary"))
    fed = [token for run in runs for token in run.tokens[:-1]]
    assert bool(bench.calibration.ask_about(np.array(fed))) is not prior_of_trees
