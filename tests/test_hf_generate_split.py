"""The drop-in on a model that transformers has split over ranks: refused in one line, before any collective."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.processes import PATIENCE, marked

# Rank 1 ends after its first call: were rank 0 to wait for it in a collective, its second call would not return.
SCRIPT = """
import json, os, sys
import torch
from transformers import AutoModelForCausalLM
from lp_runtime import ModelError, lookahead_generate

torch.set_num_threads(1)
folder, output = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tp_plan="auto")
refusals = []
for share_ranks in (False, True)[: 2 - int(os.environ["RANK"])]:
    try:
        model.generate(
            torch.tensor([[300, 301, 302]]),
            custom_generate=lookahead_generate,
            share_ranks=share_ranks,
            do_sample=False,
            max_new_tokens=4,
        )
    except ModelError as error:
        refusals.append(str(error))
with open(f"{output}/{os.environ['RANK']}.json", "w") as file:
    json.dump(refusals, file)
"""


@pytest.mark.slow
def test_a_model_that_is_split_over_ranks(demo_model_dir, tmp_path):
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
    refusals = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert refusals == [[refusals[1][0]] * 2, [refusals[1][0]]]
    assert refusals[1][0].startswith("llama: its weights are split over 2 ranks") and "\n" not in refusals[1][0]
