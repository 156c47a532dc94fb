"""The examples run, and the paper's algorithm in 150 lines takes the same steps as the engine."""

from __future__ import annotations

import ast
import json
import re
import runpy
from pathlib import Path

import jsonschema
import pytest
from support.examples import EXAMPLES, load_example
from support.serving import served
from transformers import AutoModelForCausalLM

from lp_runtime import LookaheadConfig, LookaheadRuntime
from lp_runtime.config import settings

PROMPTS = ([5, 17, 3, 5, 17, 9, 5, 17], list(range(20, 40)), [7, 8] * 10)


@pytest.fixture
def small_demo(one_layer_demo_dir, monkeypatch) -> None:
    """Let examples decode with a small demo model by default."""
    monkeypatch.setattr(settings, "DEMO_MODEL", one_layer_demo_dir)


@pytest.mark.parametrize(
    ("W", "N", "G"),
    [
        (7, 5, 7),
        (1, 2, 1),
        pytest.param(5, 3, 5, marks=pytest.mark.slow),
        pytest.param(15, 5, 15, marks=pytest.mark.slow),
    ],
)
def test_lookahead_in_150_lines_takes_same_steps_as_engine(tiny_model_dir, W, N, G):
    example = load_example("lookahead_in_150_lines")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    forward = example.make_forward(model)
    lookahead = LookaheadConfig(W, N, G, drafter="paper", acceptance="guesses")
    with LookaheadRuntime(str(tiny_model_dir), lookahead=lookahead, device="cpu", dtype="float32") as runtime:
        for prompt in PROMPTS:
            ours = example.Lookahead(forward, prompt, W, N, G)
            tokens = ours.generate(20)
            generation = runtime.generate(prompt, max_new_tokens=20, eos=False)
            assert (tokens, ours.num_steps) == (generation.token_ids, generation.steps)


def test_minimal_example_reports_64_tokens(capsys):
    load_example("minimal").main(1)
    assert "64 tokens in " in capsys.readouterr().err


def test_lookahead_in_150_lines_reports_64_tokens_of_demo_model(capsys):
    runpy.run_path(str(EXAMPLES / "lookahead_in_150_lines.py"), run_name="__main__")
    assert "64 tokens in " in capsys.readouterr().out


def test_streaming_example_prints_all_prompts_and_cancels_one(capsys, small_demo):
    example = load_example("streaming")
    example.main()
    out = capsys.readouterr().out
    assert all(prompt in out for prompt in example.PROMPTS) and out.count("(cancelled)") == 1


def test_drop_in_example_reports_same_tokens_as_generate(capsys, one_layer_demo_dir):
    load_example("drop_in").main(str(one_layer_demo_dir))
    assert "the same tokens: yes" in capsys.readouterr().err


def test_structured_output_example_follows_schema_and_choice(capsys, small_demo):
    example = load_example("structured_output")
    example.main()
    in_json, word = capsys.readouterr().out.splitlines()
    jsonschema.validate(ast.literal_eval(in_json), example.SCHEMA)
    assert word in ("yes", "no")


def test_server_client_example_reports_tokens_and_statistics(capsys, one_layer_demo_dir):
    with LookaheadRuntime(one_layer_demo_dir, device="cpu", dtype="float32") as runtime, served(runtime) as (url, _):
        load_example("server_client").main(url)
    err = capsys.readouterr().err
    assert "48 tokens" in err and "'mean_acceptance_length': " in err


def test_batch_with_resume_example_completes_truncated_output(capsys, small_demo, tmp_path):
    example, prompts, output = load_example("batch_with_resume"), tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("def f(", "class A", "import ")))
    example.main(prompts, output)
    whole = output.read_text()
    first, second, _ = whole.splitlines(keepends=True)
    output.write_text(first + second[:9])  # as if the process had been killed while writing
    example.main(prompts, output)
    assert output.read_text() == whole
    assert [json.loads(line)["index"] for line in whole.splitlines()] == [0, 1, 2]
    assert capsys.readouterr().err.count("2 of 3 prompts to decode") == 1


def test_every_example_is_tested():
    """Examples of launchers are run in tests/launchers/test_torchrun.py and test_ray_launcher.py."""
    tests = Path(__file__).parent
    files = (Path(__file__), tests / "launchers" / "test_torchrun.py", tests / "launchers" / "test_ray_launcher.py")
    run = {name for path in files for name in re.findall(r'load_example\("(\w+)"\)|"(\w+)\.py"', path.read_text())}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= {name for names in run for name in names}
