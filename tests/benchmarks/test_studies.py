"""Tests that every study runs at its smallest size; the measurements are not checked."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import shutil
from pathlib import Path

import psutil
import pytest
from support.benchmarks import command
from support.forked import forking, living_processes
from support.smallest_runs import PROMPT, STATUS, STUDIES

from lp_runtime.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "benchmarks"
SHORT = {  # not marked as slow: the studies of each command that take a second or two
    "correctness.py": ("transformers_tests", "text", "equality", "identity"),
    "speed.py": ("prediction", "kinds"),
    "micro.py": ("machine", "partition", "exchange", "kernels", "step", "masks", "floor"),
    "resilience.py": ("nccl", "kills"),
}
RUNS = [
    pytest.param(name, study, marks=() if study in SHORT[name] else pytest.mark.slow, id=f"{name} {study}")
    for name, studies in STUDIES.items()
    for study in studies
]
# transformers' test folder, reduced to one test of one model family.
MIXIN = """
import torch

class GenerationTesterMixin:
    all_generative_model_classes = ()

    def test_greedy(self):
        for model_class in self.all_generative_model_classes:
            config = model_class.config_class(
                vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
            )
            ids = torch.tensor([[3, 4, 5]])
            output = model_class(config).eval().generate(ids, do_sample=False, max_new_tokens=4, pad_token_id=0)
            self.assertGreater(output.shape[1], 3)
"""
FAMILY = """
import unittest
from transformers import LlamaForCausalLM
from tests.generation.test_utils import GenerationTesterMixin

class LlamaModelTest(GenerationTesterMixin, unittest.TestCase):
    all_generative_model_classes = (LlamaForCausalLM,)
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    """Return the values of the placeholders in STUDIES."""
    folder = tmp_path_factory.mktemp("studies")
    file = folder / "prompts.jsonl"
    file.write_text(json.dumps(PROMPT) + "\n")
    for name, text in (("generation/test_utils.py", MIXIN), ("models/llama/test_modeling_llama.py", FAMILY)):
        path = folder / "checkout" / "tests" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    for path in (folder / "checkout" / "tests").rglob("*"):
        if path.is_dir():
            (path / "__init__.py").touch()
    (folder / "checkout" / "tests" / "__init__.py").touch()
    return {"FILE:prompt": f"{file}:prompt", "CHECKOUT": str(folder / "checkout")}


@pytest.fixture
def quick_processes(monkeypatch) -> None:
    """Fork a study's processes from a process that has imported everything."""
    common = command("common.py")
    for name in ("kills", "load", "faults"):
        study = common.load_study(name)
        monkeypatch.setattr(study, "replica_processes", lambda: [psutil.Process(each) for each in living_processes()])
    get_context, quick = multiprocessing.get_context, forking()
    monkeypatch.setattr(
        multiprocessing, "get_context", lambda method=None: quick if method == "spawn" else get_context(method)
    )


@pytest.fixture
def one_rank_of_torchrun(monkeypatch) -> None:
    """Make this process the only rank of a torchrun."""
    from lp_runtime.distributed.store import host_store

    port = host_store("127.0.0.1", 0, 1.0).port
    variables = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    for name, value in (variables | {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none"}).items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(("name", "study"), RUNS)
def test_study_runs(name, study, places, one_layer_demo_dir, tmp_path, quick_processes, request):
    if study == "tensor_parallel":
        request.getfixturevalue("one_rank_of_torchrun")
    made = command(name)
    arguments = [places.get(each, each) for each in shlex.split(STUDIES[name][study])]
    if "--prompts" in arguments:
        arguments += ["--model", str(one_layer_demo_dir)]
    with pytest.raises(SystemExit) as ended:
        made.run_command(name, made.__doc__, made.STUDIES, [study, *arguments, "--output", str(tmp_path)])
    assert ended.value.code == STATUS.get((name, study), 0)
    results = [json.loads(file.read_text())["rows"] for file in tmp_path.glob("*.json")]
    assert results and all(results)


@pytest.mark.parametrize(
    ("name", "study"),
    [
        ("correctness.py", "equality"),
        pytest.param("correctness.py", "half_precision", marks=pytest.mark.slow),
        ("speed.py", "prediction"),
    ],
)
def test_greedy_studies_are_greedy_with_a_model_that_samples(name, study, places, tmp_path, one_layer_demo_dir):
    """Their outputs agree, and no stop string of the model ends them early."""
    folder = shutil.copytree(one_layer_demo_dir, tmp_path / "model")
    defaults = {"do_sample": True, "temperature": 5.0, "stop_strings": ["a", "e", " ", "\n"]}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    made = command(name)
    arguments = [places.get(each, each) for each in shlex.split(STUDIES[name][study])]
    with pytest.raises(SystemExit) as ended:
        made.run_command(name, made.__doc__, made.STUDIES, [study, *arguments, "--model", str(folder)])
    assert ended.value.code == 0


@pytest.mark.parametrize("num_studies", [2, pytest.param(None, marks=pytest.mark.slow)])
def test_drafting_studies_run(places, one_layer_demo_dir, tmp_path, num_studies):
    made = command("drafting.py")
    names = [each.__name__ for each in made.STUDIES][:num_studies]
    places_of_results = ["--prompts", places["FILE:prompt"], "records", "--output", str(tmp_path)]
    model = ["--model", str(one_layer_demo_dir)]
    made.main([*names, *places_of_results, *model, "--limit", "1", "--max-new-tokens", "2"])
    written = list(tmp_path.glob("*.json"))
    assert {file.stem for file in written} == set(names)
    assert all("2 prompts (prompts, records)" in json.loads(file.read_text())["about"] for file in written)


def test_file_of_prompts_is_looked_up_in_data(tmp_path):
    common = command("common.py")
    (tmp_path / "humaneval.jsonl").write_text(json.dumps(PROMPT) + "\n")

    def texts(name: str) -> list[str]:
        args = argparse.Namespace(prompts=[f"{name}:prompt"], data=tmp_path, limit=1, each=1)
        assert common.load_tasks(args)[0].messages[0]["content"] == common.load_prompts(args)[0].value
        return [prompt.value for prompt in common.load_prompts(args)]

    assert texts("humaneval.jsonl") == texts(f"{tmp_path}/humaneval.jsonl") == [PROMPT["prompt"]]
    with pytest.raises(ConfigError) as caught:
        texts("none.jsonl")
    assert str(caught.value) == f"--prompts none.jsonl: there is no such file in {Path.cwd()}, nor in --data {tmp_path}"


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_has_a_smallest_run(name):
    assert set(command(name).STUDIES) == set(STUDIES[name])


def test_every_study_belongs_to_a_command():
    known = {module for name in STUDIES for module in command(name).STUDIES.values()}
    actual = {path.stem for path in (FOLDER / "studies").glob("*.py") if "def add_arguments(" in path.read_text()}
    assert actual == known
