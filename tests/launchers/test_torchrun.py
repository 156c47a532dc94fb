"""Tests of launcher=torchrun: the command line on three ranks, scripts on two, and no import of ray."""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support import reference
from support.examples import EXAMPLES
from support.forked import start_forked
from support.processes import PATIENCE, Marked, marked

from lp_runtime import LookaheadConfig, LookaheadRuntime, ReplicaError
from lp_runtime.distributed.environment import ReplicaContext
from lp_runtime.distributed.store import host_store
from lp_runtime.errors import ConfigError

SCRIPT = """
import json, sys
import torch
from lp_runtime import LookaheadConfig, LookaheadRuntime, SamplingConfig
sys.path.insert(0, sys.argv[3])
from support import reference

torch.set_num_threads(1)
with LookaheadRuntime(sys.argv[1], dtype="float32", device="cpu") as runtime:
    before = runtime.generate(reference.PROMPTS[0], reference.MAX_NEW_TOKENS, eos=False).token_ids

# A second group of the same processes.
with LookaheadRuntime(sys.argv[1], dtype="float32", device="cpu", lookahead=LookaheadConfig(5, 3, 5)) as runtime:
    outs = [runtime.generate(prompt, reference.MAX_NEW_TOKENS, eos=False).token_ids for prompt in reference.PROMPTS]
    seed = runtime.generate(reference.PROMPTS[0], 4, sampling=SamplingConfig(temperature=1.0)).seed
    sampled = runtime.generate(
        reference.PROMPTS[0], reference.MAX_NEW_TOKENS, eos=False, sampling=reference.SAMPLING
    ).token_ids
    stream = runtime.stream(reference.PROMPTS[0], 2000, eos=False)
    first = [next(stream).token_ids, next(stream).token_ids]
    stream.close()
    outs.append(runtime.generate(reference.PROMPTS[0], reference.MAX_NEW_TOKENS, eos=False).token_ids)
    last = runtime.stream(reference.PROMPTS[0], 2000, eos=False)
    next(last)  # left open: the runtime's end must not hang on it
    result = {"leader": runtime.is_leader, "replicas": runtime.num_replicas, "outs": outs}
    result |= {"first": first, "before": before, "sampled": sampled, "seed": seed}
    with open(f"{sys.argv[2]}/{int(not runtime.is_leader)}.json", "w") as file:
        json.dump(result, file)
"""

FAILING = """
import json, sys
import torch
from transformers import LogitsProcessor
from lp_runtime import ConstraintConfig, LookaheadRuntime
from lp_runtime.constraints.grammar_guide import GrammarGuide
from lp_runtime.errors import ConstraintError
sys.path.insert(0, sys.argv[3])
from support import reference

def advance(guide, committed):  # the same on all ranks
    raise ConstraintError("a dead end")

GrammarGuide.advance = advance

class Fails(LogitsProcessor):  # at its third call, on the one rank where it is called
    def __init__(self):
        self.num_calls = 0

    def __call__(self, input_ids, scores):
        self.num_calls += 1
        if self.num_calls == 3:
            raise ValueError("no more")
        return scores

def harm(runtime):
    errors = []
    for options in (
        {"constraint": ConstraintConfig(regex="[ab]{9}")},
        {"processors": [Fails()]},
        {"processors": [Fails()], "max_new_tokens": 2},
    ):
        try:
            runtime.generate(**{"prompt": reference.PROMPTS[0], "max_new_tokens": 8} | options)
            errors.append("")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors, runtime.generate(reference.PROMPTS[0], reference.MAX_NEW_TOKENS, eos=False).token_ids

torch.set_num_threads(1)
with LookaheadRuntime(sys.argv[1], dtype="float32", device="cpu") as runtime:
    found = [harm(runtime)]
    if runtime.is_leader:  # the other rank serves what comes now
        found.append(harm(runtime))
    with open(f"{sys.argv[2]}/{int(not runtime.is_leader)}.json", "w") as file:
        json.dump(found, file)
"""


@pytest.fixture
def environment(tmp_path):
    """Yield an environment in which importing ray is an error."""
    (tmp_path / "fake" / "ray").mkdir(parents=True)
    (tmp_path / "fake" / "ray" / "__init__.py").write_text("raise RuntimeError('ray was imported')\n")
    with marked() as mark:
        old = mark.environment.get("PYTHONPATH")
        mark.environment["PYTHONPATH"] = f"{tmp_path / 'fake'}" + (f":{old}" if old else "")
        yield mark


def torchrun(mark: Marked, ranks: int, *arguments: str, cwd) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *arguments]
    return subprocess.run(
        command,
        cwd=cwd,
        env=mark.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        stdin=subprocess.DEVNULL,
    )


def be_rank(rank: int, main: Callable[..., None], *arguments: object) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    main(*arguments)


def run_two_ranks(cwd: Path, main: Callable[..., None], *arguments: object) -> list[subprocess.CompletedProcess]:
    """Run `main` on two forked ranks; this process hosts the store, as torchrun does."""
    store = host_store("127.0.0.1", 0, PATIENCE)
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    torchruns = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none"}
    options = {"cwd": cwd, "environment": os.environ | place | torchruns}
    with (
        start_forked(be_rank, 0, main, *arguments, **options) as first,
        start_forked(be_rank, 1, main, *arguments, **options) as second,
    ):
        results = [first(), second()]
    assert [result.returncode for result in results] == [0, 0], results
    return results


def run_example() -> None:
    runpy.run_path(str(EXAMPLES / "torchrun_job.py"), run_name="__main__")


def test_example_runs_on_forked_ranks(tmp_path):
    results = run_two_ranks(tmp_path, run_example)
    assert results[0].stdout.splitlines()[-1].endswith(" steps on 2 replicas") and not results[1].stdout


def close_while_generating(model: str, gpus_per_replica: int) -> None:
    lookahead = LookaheadConfig(0, 2, 0, prior="none")
    with LookaheadRuntime(model, device="cpu", gpus_per_replica=gpus_per_replica, lookahead=lookahead) as runtime:
        if not runtime.is_leader:
            return
        has_begun = threading.Event()

        def generate() -> None:
            try:
                for _ in runtime.stream([1, 2, 3], 200, eos=False):
                    has_begun.set()
            except ReplicaError as error:
                print(error)

        thread = threading.Thread(target=generate)
        thread.start()
        has_begun.wait()
    thread.join()


@pytest.mark.parametrize("gpus_per_replica", [1, 2])
def test_all_ranks_end_if_rank_0_closes_while_another_thread_generates(tiny_model_dir, tmp_path, gpus_per_replica):
    results = run_two_ranks(tmp_path, close_while_generating, str(tiny_model_dir), gpus_per_replica)
    assert [result.stdout for result in results] == ["the runtime is closed\n", ""]


@pytest.mark.slow
def test_example_runs_on_two_ranks(environment, tmp_path):
    result = torchrun(environment, 2, str(EXAMPLES / "torchrun_job.py"), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].endswith(" steps on 2 replicas")


@pytest.mark.slow
def test_command_line_runs_on_three_ranks(environment, demo_model_dir, greedy, tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in reference.PROMPTS))
    overrides = [
        f"model.path={demo_model_dir}",
        f"prompts={tmp_path}/in.jsonl",
        f"output={tmp_path}/out.jsonl",
        f"max_new_tokens={reference.MAX_NEW_TOKENS}",
        "eos=false",
        "device=cpu",
        "launcher.interface=lo",
        "dtype=float32",
    ]
    result = torchrun(environment, 3, "-m", "lp_runtime", *overrides, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["token_ids"] for line in lines] == greedy
    assert json.loads((tmp_path / "out.jsonl.settings").read_text())["gpus"] == 3
    assert "ray was imported" not in result.stderr
    assert result.stdout == ""
    environment.assert_gone()


@pytest.mark.slow
def test_script_on_two_ranks_matches_transformers_generate(environment, demo_model_dir, greedy, sampled, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    tests = str(Path(reference.__file__).parents[1])
    result = torchrun(environment, 2, "script.py", str(demo_model_dir), str(tmp_path), tests, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [result["leader"] for result in results] == [True, False]
    assert len({result["seed"] for result in results}) == 1  # rank 0's, which all use
    for result in results:
        assert result["replicas"] == 2
        assert result["before"] == greedy[0]
        assert result["sampled"] == sampled
        assert result["outs"] == [*greedy, greedy[0]]
        first = [token for tokens in result["first"] for token in tokens]
        assert first == greedy[0][: len(first)]
    environment.assert_gone()


@pytest.mark.slow
@pytest.mark.parametrize("split", ["", ", gpus_per_replica=2"])
def test_failed_request_does_not_affect_later_requests(environment, demo_model_dir, greedy, tmp_path, split):
    """The error may occur on all ranks or on one, with two replicas or with the two shards of one."""
    (tmp_path / "script.py").write_text(FAILING.replace('device="cpu"', f'device="cpu"{split}'))
    tests = str(Path(reference.__file__).parents[1])
    result = torchrun(environment, 2, "script.py", str(demo_model_dir), str(tmp_path), tests, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    leader, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert leader == [leader[0]] * 2 and other == leader[:1]
    errors, tokens = leader[0]
    assert errors == ["ConstraintError: a dead end", "RequestError: Fails failed: ValueError: no more", ""]
    assert tokens == greedy[0]
    environment.assert_gone()


@pytest.mark.slow
def test_script_on_two_shards_matches_transformers_generate(environment, demo_model_dir, greedy, tmp_path):
    """Both ranks yield the same results, with streams read to the end, closed early or left open."""
    (tmp_path / "script.py").write_text(SCRIPT.replace('device="cpu"', 'device="cpu", gpus_per_replica=2'))
    tests = str(Path(reference.__file__).parents[1])
    result = torchrun(environment, 2, "script.py", str(demo_model_dir), str(tmp_path), tests, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [result.pop("leader") for result in results] == [True, False]
    assert results[0] == results[1]
    assert results[0]["replicas"] == 1
    assert results[0]["outs"] == [*greedy, greedy[0]]
    environment.assert_gone()


def test_rank_count_must_be_a_multiple_of_gpus_per_replica():
    """A rank detects this from torchrun's variables, before anything is started."""
    context = ReplicaContext(rank=3, num_replicas=4, device_index=1, num_local=2)
    replica, shard = context.divided(2)
    assert (replica.rank, replica.num_replicas, replica.device_index, shard) == (1, 2, 1, 1)
    with pytest.raises(ConfigError, match="gpus_per_replica=3: torchrun has started 4 processes; must be a multiple"):
        context.divided(3)
    with pytest.raises(ConfigError, match="gpus_per_replica=4: torchrun has started 2 processes on this machine"):
        context.divided(4)


@pytest.mark.slow
def test_rank_0_opens_a_store_if_torchrun_did_not(environment, demo_model_dir, greedy, tmp_path):
    """The ranks have torchrun's variables but not its store, so rank 0 opens one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    tests = str(Path(reference.__file__).parents[1])
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    script = SCRIPT.replace("LookaheadRuntime(sys.argv[1],", "LookaheadRuntime(sys.argv[1], launcher='torchrun',")
    (tmp_path / "script.py").write_text(script)
    ranks = [
        subprocess.Popen(
            [sys.executable, "script.py", str(demo_model_dir), str(tmp_path), tests],
            cwd=tmp_path,
            env=environment.environment | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert [process.wait(PATIENCE) for process in ranks] == [0, 0]
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [result["outs"] for result in results] == [[*greedy, greedy[0]]] * 2
    environment.assert_gone()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"), [("model.path=/no/where", "error: model.path=/no/where: no such directory")]
)
def test_bad_input_is_reported_once(environment, tmp_path, override, message):
    result = torchrun(environment, 2, "-m", "lp_runtime", "prompt=x", override, cwd=tmp_path)
    assert result.returncode != 0
    assert result.stderr.count(message) == 1
    assert "error: rank" not in result.stderr
    assert result.stdout == ""
    environment.assert_gone()


@pytest.mark.slow
def test_local_launcher_under_torchrun_is_refused(environment, demo_model_dir, tmp_path):
    arguments = ["-m", "lp_runtime", f"model.path={demo_model_dir}", "prompt=x", "launcher=local"]
    result = torchrun(environment, 2, *arguments, cwd=tmp_path)
    assert result.returncode != 0
    assert "launcher=local: torchrun started this process" in result.stderr
    environment.assert_gone()
