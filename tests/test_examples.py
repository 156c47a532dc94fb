"""The examples: they run, and the paper's algorithm in 150 lines decodes as the engine does."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from lp_runtime import LookaheadConfig, LookaheadRuntime

EXAMPLES = Path(__file__).parents[1] / "examples"
PROMPTS = ([5, 17, 3, 5, 17, 9, 5, 17], list(range(20, 40)), [7, 8] * 10)


def load_example(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("W", "N", "G"), [(5, 3, 5), (7, 5, 7), (1, 2, 1), (15, 5, 15)])
def test_lookahead_in_150_lines_takes_the_steps_of_the_engine(tiny_model_dir, W, N, G):
    example = load_example("lookahead_in_150_lines")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    forward = example.make_forward(model)
    settings = LookaheadConfig(W, N, G, drafter="paper", acceptance="guesses")
    with LookaheadRuntime(str(tiny_model_dir), lookahead=settings, device="cpu", dtype="float32") as runtime:
        for prompt in PROMPTS:
            lookahead = example.Lookahead(forward, prompt, W, N, G)
            tokens = lookahead.generate(40)
            generation = runtime.generate(prompt, max_new_tokens=40, eos=False)
            assert (tokens, lookahead.num_steps) == (generation.token_ids, generation.steps)


@pytest.mark.parametrize("name", ["minimal", "lookahead_in_150_lines"])
def test_an_example_runs(name):
    done = subprocess.run([sys.executable, EXAMPLES / f"{name}.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "64 tokens in " in done.stdout + done.stderr
