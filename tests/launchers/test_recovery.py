"""Tests of lost replicas: the others finish the request with the same tokens; the lost one restarts."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from support import reference
from support.gate import Gate
from support.processes import own_replicas, wait_until
from transformers import LogitsProcessor, SuppressTokensLogitsProcessor

from lp_runtime import (
    ConfigError,
    ConstraintConfig,
    LookaheadConfig,
    LookaheadRuntime,
    ReplicaError,
    RequestError,
    SamplingConfig,
)
from lp_runtime.config.lookahead import PLAIN
from lp_runtime.config.settings import FailureConfig, LauncherConfig, ModelConfig, RuntimeConfig
from lp_runtime.launchers.wire.lease import ReplicaLease
from lp_runtime.launchers.wire.messages import Decode
from lp_runtime.request.output import Report

FIXED = LookaheadConfig(7, 5, 7, prior="none", draft_tables="request")
SAMPLINGS = {"greedy": None, "sampled": SamplingConfig(temperature=0.8, seed=3)}
LENGTH = 80
GATED = 40  # new tokens; eight steps of these prompts commit fewer


def start(model_dir: Path, gpus: int, timeout: float = 60.0, restarts: int = 3) -> LookaheadRuntime:
    failure = FailureConfig(timeout=timeout, restarts=restarts)
    model = ModelConfig(str(model_dir))
    config = RuntimeConfig(model, gpus=gpus, device="cpu", dtype="float32", lookahead=FIXED, failure=failure)
    return LookaheadRuntime.from_config(config)


def replicas_of(runtime: LookaheadRuntime) -> list[int]:
    """Return the process ids, ordered by index."""
    return list(runtime.launcher.process_ids.values())


@contextmanager
def gate(num_prompt: int) -> Iterator[Gate]:
    """Yield a gate at GATED new tokens, so that a request is still running when a slow caller acts."""
    with tempfile.TemporaryDirectory() as folder:
        held = Gate(Path(folder), num_prompt + GATED)
        try:
            yield held
        finally:
            held.open()


def decode(runtime: LookaheadRuntime, action: Callable | None = None, at: int = 3, **options):
    """Return the generation of a prompt; call the action after delta number `at`, counted from 0."""
    if action is None:
        return runtime.generate(reference.PROMPTS[1], LENGTH, eos=False, **options)
    with gate(num_prompt(runtime)) as held:
        stream = runtime.stream(reference.PROMPTS[1], LENGTH, eos=False, processors=[held], **options)
        for number, _ in enumerate(stream):
            if number == at:
                action()
                held.open()
        return stream.generation


def num_prompt(runtime: LookaheadRuntime) -> int:
    """Return the number of tokens of the prompt that `decode` uses."""
    return len(runtime.request(reference.PROMPTS[1], LENGTH).prompt_ids)


def kill(*pids: int) -> None:
    """Kill these processes."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(one_layer_demo_dir) -> dict:
    """Return generations without a loss, with log-probabilities, greedy and sampled."""
    with start(one_layer_demo_dir, 1) as runtime:
        return {name: decode(runtime, sampling=each, logprobs=True) for name, each in SAMPLINGS.items()}


def poll(runtime: LookaheadRuntime) -> bool:
    """Return whether all restarted replicas are ready."""
    return not runtime.launcher.num_loading


def assert_same(out, expected) -> None:
    assert out.token_ids == expected.token_ids and out.text == expected.text
    if out.logprobs:
        assert out.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
    assert out.finish_reason == "length" and out.steps < LENGTH


@pytest.fixture(scope="module")
def shared_runtime(one_layer_demo_dir):
    """Yield a runtime with three replicas that tests may kill."""
    with start(one_layer_demo_dir, 3, timeout=4.0, restarts=100) as runtime:
        yield runtime


@pytest.fixture
def runtime(shared_runtime):
    """Return the shared runtime once all its replicas are ready."""
    wait_until(lambda: poll(shared_runtime))
    return shared_runtime


@pytest.mark.parametrize(
    ("victim", "at", "name"),
    [
        (0, 4, "sampled"),
        pytest.param(0, 1, "sampled", marks=pytest.mark.slow),
        pytest.param(2, 6, "sampled", marks=pytest.mark.slow),
        pytest.param(0, 4, "greedy", marks=pytest.mark.slow),
    ],
)
def test_request_continues_after_a_replica_is_killed(undisturbed, runtime, victim, at, name, caplog):
    options = {"sampling": SAMPLINGS[name], "logprobs": True, "request_id": "mine"}
    out = decode(runtime, lambda: kill(replicas_of(runtime)[victim]), at, **options)
    assert_same(out, undisturbed[name])
    assert out.losses == 1
    log = [line for line in caplog.messages if line.startswith("request mine: ")]
    assert log and log[0].startswith(f"request mine: replicas [{victim}] were lost after ")
    wait_until(lambda: poll(runtime))
    assert_same(decode(runtime), undisturbed["greedy"])
    assert [runtime.launcher.pool.group_of(index) for index in range(3)] == [(0, 1, 2)] * 3


WORDS = {"type": "array", "items": {"type": "string", "minLength": 4, "maxLength": 12}, "minItems": 12, "maxItems": 12}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "at", "name"), [pytest.param(0, 1, "greedy", marks=pytest.mark.slow), (2, 7, "sampled")]
)
def test_constrained_request_continues_after_a_replica_is_killed(runtime, victim, at, name):
    """The others continue the text of one token per step: their constraints are at the same token."""
    options = {"constraint": ConstraintConfig(json_schema=WORDS), "sampling": SAMPLINGS[name]}
    prompt = reference.PROMPTS[1]
    expected = runtime.generate(prompt, 3 * LENGTH, lookahead=PLAIN, **options)
    assert len(json.loads(expected.text)) == 12
    assert len(expected.token_ids) > GATED
    with gate(num_prompt(runtime)) as held:
        stream = runtime.stream(prompt, 3 * LENGTH, processors=[held], **options)
        for number, _ in enumerate(stream):
            if number == at:
                kill(replicas_of(runtime)[victim])
                held.open()
    assert (stream.generation.token_ids, stream.generation.losses) == (expected.token_ids, 1)
    assert stream.generation.finish_reason == "eos"


@pytest.mark.parametrize("how", ["forked", pytest.param("started", marks=pytest.mark.slow)])
def test_last_replica_finishes_the_request_after_a_kill(undisturbed, one_layer_demo_dir, how, request):
    if how == "started":
        request.getfixturevalue("started_replicas")
    before = own_replicas()
    with start(one_layer_demo_dir, 2, restarts=0) as runtime:
        out = decode(runtime, lambda: kill(replicas_of(runtime)[0]))
        assert_same(out, undisturbed["greedy"])
        assert_same(decode(runtime), undisturbed["greedy"])
    assert own_replicas() == before


def test_request_fails_after_all_replicas_are_lost_one_by_one(undisturbed, one_layer_demo_dir):
    before = own_replicas()
    with start(one_layer_demo_dir, 2, restarts=0) as runtime:
        pids = replicas_of(runtime)
        tokens = []
        with pytest.raises(ReplicaError) as caught, gate(num_prompt(runtime)) as held:
            stream = runtime.stream(reference.PROMPTS[1], LENGTH, eos=False, processors=[held])
            for number, delta in enumerate(stream):
                tokens += delta.token_ids
                if number in (2, 4):
                    kill(pids[(number - 2) // 2])
        assert "all replicas were lost while decoding, after" in str(caught.value)
        assert "replica 1: its process ended (signal 9)" in str(caught.value)
        assert len(tokens) > 4 and tokens == undisturbed["greedy"].token_ids[: len(tokens)]
        with pytest.raises(ReplicaError, match="no replica is left"):
            runtime.generate("x", 4)
    assert own_replicas() == before


@pytest.mark.slow
def test_replicas_restart_after_two_or_all_are_lost_at_once(undisturbed, runtime):
    pids = replicas_of(runtime)
    out = decode(runtime, lambda: kill(*pids[:2]))
    assert_same(out, undisturbed["greedy"])
    assert out.losses == 2
    wait_until(lambda: poll(runtime))
    pids = replicas_of(runtime)
    with pytest.raises(ReplicaError, match="all replicas were lost while decoding"):
        decode(runtime, lambda: kill(*pids))
    assert_same(decode(runtime), undisturbed["greedy"])


def test_request_succeeds_after_a_replica_is_killed_while_idle(undisturbed, runtime):
    assert_same(decode(runtime), undisturbed["greedy"])
    kill(replicas_of(runtime)[0])
    assert_same(decode(runtime), undisturbed["greedy"])


@pytest.mark.slow
def test_restarted_lone_replica_needs_neither_corpus_nor_draft_file(one_layer_demo_dir, tmp_path):
    """They are read at the start; what has become of them since ends no request."""
    corpus, drafts = tmp_path / "text.py", tmp_path / "drafts.npz"
    corpus.write_text("def train(model):\n")
    lookahead = LookaheadConfig(7, 5, 7, prior="none", corpus=str(corpus), draft_tables=str(drafts))
    config = RuntimeConfig(
        ModelConfig(str(one_layer_demo_dir)),
        device="cpu",
        dtype="float32",
        lookahead=lookahead,
        launcher=LauncherConfig(own_process=True),
        cache_dir=str(tmp_path / "cache"),
    )
    with LookaheadRuntime.from_config(config) as runtime:
        expected = decode(runtime)
        for file in (corpus, *(tmp_path / "cache").glob("corpus-*")):
            file.unlink()
        drafts.write_bytes(b"damaged")
        kill(*replicas_of(runtime))
        wait_until(lambda: runtime.launcher.pool.num_restarts[0] and poll(runtime))
        for _ in range(2):
            assert_same(decode(runtime), expected)


def test_request_continues_after_a_replica_hangs(undisturbed, runtime):
    pid = replicas_of(runtime)[0]
    out = decode(runtime, lambda: os.kill(pid, signal.SIGSTOP))
    assert_same(out, undisturbed["greedy"])
    assert out.losses >= 1  # on a busy machine another one may be too slow to answer
    assert pid not in own_replicas()


@pytest.mark.slow
def test_request_succeeds_if_a_replica_hangs_while_the_group_forms(undisturbed, runtime):
    pids = replicas_of(runtime)
    kill(pids[2])  # so that a new group must be formed
    os.kill(pids[1], signal.SIGSTOP)  # and this replica does not join it
    out = decode(runtime)
    assert_same(out, undisturbed["greedy"])
    assert out.steps < LENGTH


def test_request_continues_after_a_loss_during_the_prefill(undisturbed, runtime):
    prompt = reference.PROMPTS[1] * 10
    expected = runtime.generate(prompt, 8, eos=False).token_ids
    stream = runtime.stream(prompt, 8, eos=False)
    host = runtime.launcher.host
    send = host.send

    def send_and_kill(index: int, message: object) -> None:
        send(index, message)
        if isinstance(message, Decode) and index == 1:
            host.send = send
            kill(replicas_of(runtime)[1])

    host.send = send_and_kill
    tokens = [token for delta in stream for token in delta.token_ids]
    assert tokens == expected and stream.generation.losses == 1


def test_stream_can_be_closed_while_a_replica_is_lost(undisturbed, runtime):
    stream = runtime.stream(reference.PROMPTS[1], LENGTH, eos=False)
    next(stream)
    kill(replicas_of(runtime)[1])
    stream.close()
    assert_same(decode(runtime), undisturbed["greedy"])


def test_request_moves_to_the_replicas_that_its_lease_wants(undisturbed, runtime):
    """A request that was asked to pause continues on the replicas that are wanted once it has paused."""
    request = runtime.request(reference.PROMPTS[1], LENGTH, eos=False)
    wanted = {2: {0}, 3: {0, 1, 2}, 6: {0, 1}, 9: {2, 0}}  # by the number of the delta after which they are wanted
    lease = ReplicaLease({0, 1, 2})
    tokens, sizes = [], []
    for number, event in enumerate(runtime.launcher.run_on(request, lease)):
        if isinstance(event, Report):
            break
        tokens += event.token_ids
        sizes.append(len(runtime.launcher.pool.group_of(0)))
        if number in wanted:
            lease.wanted = frozenset(wanted[number])
    assert tokens == undisturbed["greedy"].token_ids
    assert event.finish_reason == "length" and event.losses == 0 and {2, 3} <= set(sizes)


HARM = """
import os, sys
if "replica_process" in " ".join(sys.orig_argv):
    import torch
    from lp_runtime.distributed.exchange import Exchange

    start, steps = Exchange.start, [0]

    def harmed(self, shares, values, digest, control, clock=0):
        steps[0] += 1
        if steps[0] == {step} and self.group.rank == {rank} and self.group.size == {gpus}:
            {harm}
        return start(self, shares, values, digest, control, clock)

    Exchange.start = harmed
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "rank", "gpus", "reason"),
    [
        pytest.param(
            "raise torch.AcceleratorError('an illegal memory access was encountered')",
            0,
            2,
            "AcceleratorError: an illegal memory access was encountered",
            marks=pytest.mark.slow,
        ),
        ("digest ^= 1", 1, 3, "its state diverged from the others'"),
    ],
)
def test_replica_with_a_failed_or_diverged_step_is_lost(
    undisturbed, one_layer_demo_dir, harm, rank, gpus, reason, tmp_path, monkeypatch, started_replicas
):
    (tmp_path / "sitecustomize.py").write_text(HARM.format(step=6, rank=rank, gpus=gpus, harm=harm))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with start(one_layer_demo_dir, gpus) as runtime:
        out = decode(runtime, logprobs=True)
        assert_same(out, undisturbed["greedy"])
        assert out.losses == 1
        assert list(runtime.launcher.pool.losses.values()) == [reason]


class Unheard(LogitsProcessor):
    """A processor from a module that replicas do not have; the test names the module."""

    prefix_only = True

    def __call__(self, input_ids, scores):
        return scores


def test_refused_requests_lose_no_replica(undisturbed, runtime, monkeypatch):
    pids = replicas_of(runtime)
    with pytest.raises(ConfigError):
        runtime.generate("x", 8, sampling=SamplingConfig(temperature=0, bad_words_ids=[[-1]]))
    for module in ("__main__", "only_the_callers"):
        monkeypatch.setitem(sys.modules, module, sys.modules.get(module) or ModuleType(module))
        monkeypatch.setattr(sys.modules[module], "Unheard", Unheard, raising=False)
        monkeypatch.setattr(Unheard, "__module__", module)
        for lease in (ReplicaLease({0, 1, 2}), ReplicaLease({1})):  # a group, and one replica that decodes batches
            with pytest.raises(RequestError, match=f"^processors: {module}.Unheard: replicas cannot import it "):
                list(runtime.launcher.run_on(runtime.request(reference.PROMPTS[1], 8, processors=[Unheard()]), lease))
    assert_same(decode(runtime), undisturbed["greedy"])
    assert replicas_of(runtime) == pids


@pytest.mark.slow
def test_processor_with_a_tensor_reaches_the_replicas(one_layer_demo_dir, started_replicas):
    """The tensor is sent by value, as a replica cannot access the memory of the caller's process."""
    with start(one_layer_demo_dir, 2, restarts=0) as runtime:
        first = runtime.generate(reference.PROMPTS[1], 4, eos=False)
        processors = [SuppressTokensLogitsProcessor(first.token_ids[:1])]
        out = runtime.generate(reference.PROMPTS[1], 4, eos=False, processors=processors)
        assert out.token_ids[0] != first.token_ids[0] and runtime.num_ready == 2
