"""Tests of requests that run out of memory: they fail or succeed when retried, and no replica is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import reference
from support.faults import LacksMemory
from support.processes import own_replicas

from lp_runtime import LookaheadConfig, LookaheadRuntime, RequestError
from lp_runtime.config.settings import FailureConfig, LauncherConfig, ModelConfig, RuntimeConfig
from lp_runtime.launchers.wire.lease import ReplicaLease
from lp_runtime.request.output import Report

FIXED = LookaheadConfig(7, 5, 7, prior="none")
LENGTH = 40
MIDDLE = 15  # new tokens after which memory runs out


@pytest.fixture(scope="module")
def runtime(one_layer_demo_dir) -> Iterator[LookaheadRuntime]:
    """Yield a runtime of three replicas that are not restarted if they are lost."""
    failure = FailureConfig(timeout=60.0, restarts=0)
    model = ModelConfig(str(one_layer_demo_dir))
    config = RuntimeConfig(model, gpus=3, device="cpu", dtype="float32", lookahead=FIXED, failure=failure)
    with LookaheadRuntime.from_config(config) as runtime:
        yield runtime


def decode(runtime: LookaheadRuntime, members: set[int], **options) -> tuple[list[int], Report]:
    """Return the tokens and the report of a request on some of the replicas."""
    request = runtime.request(reference.PROMPTS[1], LENGTH, eos=False, **options)
    *outputs, report = runtime.launcher.run_on(request, ReplicaLease(members))
    return [token for output in outputs for token in output.token_ids], report


@pytest.fixture(scope="module")
def expected(runtime) -> list[int]:
    return decode(runtime, {0})[0]


@pytest.fixture
def replicas(runtime) -> Iterator[dict[int, int]]:
    """Yield process ids by index, and check after the test that the same processes are running."""
    before = dict(runtime.launcher.process_ids)
    yield before
    assert runtime.launcher.process_ids == before and set(before.values()) <= set(own_replicas())
    assert runtime.num_ready == 3 and not any(runtime.launcher.pool.num_restarts.values())


SLOW = pytest.mark.slow
ONE, SECOND, BOTH, FIRST, ALL = ({0}, {0}), ({0, 1}, {1}), ({0, 1}, {0, 1}), ({0, 1, 2}, {0}), ({0, 1, 2}, {0, 1, 2})


@pytest.mark.parametrize(
    ("members", "short", "num_new"),
    [
        (*ONE, 0),
        (*ONE, MIDDLE),
        pytest.param(*SECOND, 0, marks=SLOW),
        (*SECOND, MIDDLE),
        pytest.param(*BOTH, 0, marks=SLOW),
        (*BOTH, MIDDLE),
        (*FIRST, 0),
        pytest.param(*FIRST, MIDDLE, marks=SLOW),
        pytest.param(*ALL, 0, marks=SLOW),
        pytest.param(*ALL, MIDDLE, marks=SLOW),
    ],
)
def test_request_continues_after_an_out_of_memory_error(runtime, replicas, expected, members, short, num_new, tmp_path):
    pids = {replicas[index] for index in short}
    num_prompt = len(runtime.request(reference.PROMPTS[1], 1).prompt_ids)
    lacking = LacksMemory(tmp_path, num_prompt + num_new, pids, times=1)
    tokens, report = decode(runtime, members, processors=[lacking])
    assert tokens == expected and report.finish_reason == "length" and report.losses == 0
    assert {int(name) for name in os.listdir(tmp_path)} & pids


@pytest.mark.parametrize(
    ("members", "short"), [ONE, pytest.param(*SECOND, marks=SLOW), BOTH, FIRST, pytest.param(*ALL, marks=SLOW)]
)
def test_request_that_never_fits_is_refused_and_the_next_succeeds(
    runtime, replicas, expected, members, short, tmp_path
):
    pids = {replicas[index] for index in short}
    num_prompt = len(runtime.request(reference.PROMPTS[1], 1).prompt_ids)
    lacking = LacksMemory(tmp_path, num_prompt + MIDDLE, pids)
    with pytest.raises(RequestError) as caught:
        decode(runtime, members, processors=[lacking])
    message = str(caught.value)
    assert message.startswith(f"not enough memory on cpu for this request: a prompt of {num_prompt} tokens and ")
    assert message.endswith(" GiB free") and "\n" not in message
    assert decode(runtime, members)[0] == expected


def test_request_that_never_fits_does_not_affect_its_batch(runtime, replicas, expected, tmp_path):
    lacking = LacksMemory(tmp_path, len(runtime.request(reference.PROMPTS[1], 1).prompt_ids) + MIDDLE)
    with ThreadPoolExecutor(3) as threads:
        others = [threads.submit(decode, runtime, {0}) for _ in range(2)]
        refused = threads.submit(decode, runtime, {0}, processors=[lacking])
        assert isinstance(refused.exception(), RequestError)
        assert [each.result()[0] for each in others] == [expected] * 2


HARM = """
import sys
if "replica_process" in " ".join(sys.orig_argv):
    import torch
    from lp_runtime.distributed.exchange import Exchange
    from lp_runtime.model.runner import ModelRunner

    def harmed(method, is_harmed):
        calls = iter(range(1 << 20))
        def call(self, *args):
            if is_harmed(next(calls), self, *args):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return method(self, *args)
        return call

    {harm}
"""
LONG_PROMPTS = (
    "ModelRunner.feed_prompt = harmed(ModelRunner.feed_prompt, lambda _, self, slot, chunk, *rest: len(chunk) > 300)"
)
EXCHANGE = "Exchange.start = harmed(Exchange.start, lambda call, self, *rest: call == 6 and self.group.rank == 1)"


@contextmanager
def harmed(model_dir: Path, harm: str, folder: Path, gpus: int) -> Iterator[LookaheadRuntime]:
    """Yield a runtime whose replicas have a fault, and check that none is lost or restarted."""
    (folder / "sitecustomize.py").write_text(HARM.format(harm=harm))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        launcher = LauncherConfig(own_process=True)
        model = ModelConfig(str(model_dir))
        config = RuntimeConfig(model, gpus=gpus, device="cpu", dtype="float32", lookahead=FIXED, launcher=launcher)
        with LookaheadRuntime.from_config(config) as runtime:
            before = dict(runtime.launcher.process_ids)
            yield runtime
            assert runtime.launcher.process_ids == before and runtime.num_ready == gpus
            assert not any(runtime.launcher.pool.num_restarts.values())


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 2])
def test_out_of_memory_in_prefill_uses_up_no_restarts(one_layer_demo_dir, expected, gpus, tmp_path, started_replicas):
    with harmed(one_layer_demo_dir, LONG_PROMPTS, tmp_path, gpus) as runtime:
        for _ in range(5):
            with pytest.raises(RequestError, match=r"not enough memory on cpu for this request: a prompt of \d{3} "):
                runtime.generate("one two three four five " * 80, 8)
        assert runtime.generate(reference.PROMPTS[1], LENGTH, eos=False).token_ids == expected


@pytest.mark.slow
def test_request_continues_after_out_of_memory_in_the_exchange(
    one_layer_demo_dir, expected, tmp_path, started_replicas
):
    """The group breaks, and a new group of the same replicas continues the request."""
    with harmed(one_layer_demo_dir, EXCHANGE, tmp_path, 2) as runtime:
        out = runtime.generate(reference.PROMPTS[1], LENGTH, eos=False)
        assert (out.token_ids, out.losses) == (expected, 0)
