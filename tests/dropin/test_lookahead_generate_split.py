"""The drop-in on a model that transformers has made tensor-parallel: its ranks are one replica."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from support.processes import PATIENCE, marked

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.errors import ConfigError, ModelError
from lp_runtime.model.tensor_parallel import tp_plan

SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from lp_runtime import ConfigError, LookaheadConfig, lookahead_generate

torch.set_num_threads(1)
folder, output = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tp_plan="auto")
prompt = torch.arange(300, 330)[None]

def generate(**settings):
    return model.generate(prompt, max_new_tokens=32, **settings)[0, 30:].tolist()

found = {"ranks": model.tp_size, "greedy": generate(do_sample=False), "ours": {}}
for name, settings in {
    "auto": {},
    "window": {"W": 5, "N": 3, "G": 5},
    "each its own prompt": {"share_ranks": False},
    "paper": {"lookahead": LookaheadConfig(W=5, N=4, G=5, drafter="paper")},
    "strict": {"exactness": "strict"},
}.items():
    found["ours"][name] = generate(do_sample=False, custom_generate=lookahead_generate, **settings)
torch.manual_seed(dist.get_rank())
found["sampled"] = generate(do_sample=True, custom_generate=lookahead_generate)
try:
    generate(do_sample=False, max_time=60.0, custom_generate=lookahead_generate)
except ConfigError as error:
    found["refusal"] = str(error)
with open(f"{output}/{dist.get_rank()}.json", "w") as file:
    json.dump(found, file)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_tensor_parallel_ranks_match_generate(demo_model_dir, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py"]
    with marked() as mark:
        done = subprocess.run(
            [*command, str(demo_model_dir), str(tmp_path)],
            cwd=tmp_path,
            env=mark.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second and first["ranks"] == 2  # samples, too, although the ranks' seeds differ
    assert all(tokens == first["greedy"] for tokens in first["ours"].values()), first
    assert first["refusal"].startswith("max_time: cannot be kept by a model that is split over ranks")


def test_lockstep_settings_are_fixed_and_refuse_max_time():
    auto = tp_plan.lockstep_settings(LookaheadConfig(), None)
    assert not auto.is_auto and auto.max_fixed_nodes == 32 and not auto.has_vocabulary_prior
    given = LookaheadConfig(W=5, N=3, G=5, budget=16)
    assert tp_plan.lockstep_settings(given, None).window == given.window
    with pytest.raises(ConfigError, match="max_time"):
        tp_plan.lockstep_settings(given, 3.0)


@pytest.mark.parametrize(
    ("tp_size", "mesh_size", "world", "complaint"),
    [
        (None, None, 4, None),
        (4, 4, 4, None),
        (2, 2, 4, "split over 2 ranks; load it whole, or with tp_plan='auto' over all 4 ranks"),
        (None, 4, 4, "split over 4 ranks, and not by a tp_plan; load it whole"),
        (2, 4, 4, "split over 4 ranks, and not by a tp_plan"),
    ],
)
def test_model_must_be_whole_or_split_by_tp_plan_over_all_ranks(monkeypatch, tp_size, mesh_size, world, complaint):
    monkeypatch.setattr(tp_plan, "num_processes", lambda: world)
    model = torch.nn.Linear(2, 2)
    if mesh_size:
        model.weight.device_mesh = SimpleNamespace(size=lambda: mesh_size)
    model.tp_size, model.config = tp_size, SimpleNamespace(model_type="llama")
    if complaint is None:
        assert tp_plan.tp_size_of(model) == (tp_size or 1)
    else:
        with pytest.raises(ModelError) as caught:
            tp_plan.tp_size_of(model)
        assert complaint in str(caught.value) and "\n" not in str(caught.value)
