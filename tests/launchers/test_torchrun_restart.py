"""Tests of a killed torchrun rank: the agent restarts all ranks, and a file of prompts is resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import PATIENCE, Marked, marked, wait_until

from lp_runtime.entrypoints.cli import main

NUM_PROMPTS = 16


def ranks(mark: Marked) -> dict[tuple[int, int], int]:
    """Return the process ids of the ranks by (number of the restart, rank)."""
    results = {}
    for pid in mark.alive():
        try:
            pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
        except OSError:
            continue
        values = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        if "TORCHELASTIC_RUN_ID" in values:
            results[int(values["TORCHELASTIC_RESTART_COUNT"]), int(values["RANK"])] = pid
    return results


@pytest.mark.slow
def test_torchrun_restarts_all_ranks_and_the_output_is_resumed(tiny_model_dir, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": [1, 2, index]}) + "\n" for index in range(NUM_PROMPTS)))
    overrides = [f"model.path={tiny_model_dir}", f"prompts={source}", "ids=true", "max_new_tokens=200", "device=cpu"]
    overrides += ["lookahead.W=5", "lookahead.N=4", "lookahead.G=5", "lookahead.prior=none"]
    main([*overrides, f"output={tmp_path}/undisturbed.jsonl"])
    expected = [json.loads(line) for line in (tmp_path / "undisturbed.jsonl").read_text().splitlines()]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    with marked() as mark:
        agent = subprocess.Popen(
            [*command, "-m", "lp_runtime", *overrides, f"output={output}"],
            cwd=tmp_path,
            env=mark.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_until(lambda: agent.poll() is not None or (output.exists() and output.read_bytes().count(b"\n") >= 2))
        os.kill(ranks(mark)[0, 1], signal.SIGKILL)
        wait_until(lambda: agent.poll() is not None or {(1, 0), (1, 1)} <= ranks(mark).keys())
        kept = output.read_bytes()
        kept = kept[: kept.rindex(b"\n") + 1]
        assert 2 <= (num_kept := kept.count(b"\n")) < NUM_PROMPTS
        _, errors = agent.communicate(timeout=PATIENCE)
        assert agent.returncode == 0, errors
        mark.assert_gone()
    assert output.read_bytes().startswith(kept)
    results = [json.loads(line) for line in output.read_text().splitlines()]
    assert [result["index"] for result in results] == list(range(NUM_PROMPTS))
    assert [result["token_ids"] for result in results] == [result["token_ids"] for result in expected]
    assert f"{num_kept}/{NUM_PROMPTS} prompts were decoded before\n" in errors
