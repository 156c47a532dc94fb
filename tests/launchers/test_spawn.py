"""Tests of launcher=local: in-process and spawned replicas decode as transformers does."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import psutil
import pytest
from support import reference
from support.processes import PATIENCE, marked, own_replicas, wait_until
from support.ranks import interfaces
from support.ray_head import free_ports

from lp_runtime import LauncherConfig, LookaheadConfig, LookaheadRuntime
from lp_runtime.config.lookahead import PLAIN
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.store import address_of
from lp_runtime.distributed.transport import shared_memory
from lp_runtime.launchers.spawn import LOOPBACK, ReplicaPipe, SpawnHost

# The step budget is fixed, so no step depends on measured times and nothing is measured at start.
FIXED = LookaheadConfig(7, 5, 7)
SETTINGS = [FIXED, LookaheadConfig(0, 4, 6), LookaheadConfig(7, 5, 7, drafter="paper"), LookaheadConfig(budget=12)]


@pytest.fixture(scope="module")
def expected(one_layer_demo_dir) -> list[list[int]]:
    return reference.greedy(one_layer_demo_dir)


@pytest.mark.parametrize("gpus", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_output_matches_transformers_generate(one_layer_demo_dir, expected, gpus):
    options = {"launcher": "local", "device": "cpu", "dtype": "float32"}
    with LookaheadRuntime(str(one_layer_demo_dir), gpus=gpus, lookahead=FIXED, **options) as runtime:
        assert runtime.num_replicas == gpus
        assert not any(psutil.Process(each).net_connections("tcp") for each in own_replicas())  # memory is shared
        fewest = reference.MAX_NEW_TOKENS
        for number, setting in enumerate(SETTINGS):
            prompt = reference.PROMPTS[number % 3]
            out = runtime.generate(prompt, reference.MAX_NEW_TOKENS, eos=False, lookahead=setting)
            assert out.token_ids == expected[number % 3], (setting, prompt)
            assert out.exchange_bytes > 0 or gpus == 1
            fewest = min(fewest, out.steps)
        assert fewest < reference.MAX_NEW_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [2])
def test_sampling_matches_one_token_per_step(demo_model_dir, sampled, gpus):
    interface = interfaces()[-1]
    launcher = LauncherConfig(backend="gloo", interface=interface)
    options = {"launcher": launcher, "device": "cpu", "dtype": "float32"}
    with LookaheadRuntime(demo_model_dir, gpus=gpus, lookahead=FIXED, **options) as runtime:
        used = [c.laddr.ip for pid in own_replicas() for c in psutil.Process(pid).net_connections("tcp")]
        assert {address.removeprefix("::ffff:") for address in used} == {address_of(interface)}
        out = runtime.generate(reference.PROMPTS[0], reference.MAX_NEW_TOKENS, eos=False, sampling=reference.SAMPLING)
        assert out.token_ids == sampled
        assert out.steps < len(sampled)
        text = out.text[:20]
        stopped = runtime.generate(reference.PROMPTS[0], 48, eos=False, sampling=reference.SAMPLING, stop=[text])
        assert (stopped.text, stopped.finish_reason) == (text, "stop")


def test_replica_leaves_sigterm_to_the_driver(forked_replicas):
    def ignores(number: int) -> bool:
        status = Path(f"/proc/{process.pid}/status").read_text()
        return bool(int(re.findall(r"SigIgn:\s*(\w+)", status)[0], 16) >> (number - 1) & 1)

    ours, theirs = Pipe()
    with theirs:
        process = forked_replicas(theirs)
    wait_until(lambda: ignores(signal.SIGTERM))
    process.terminate()
    ours.close()  # the driver has ended
    assert process.wait(60) == 0


def test_port_of_a_closed_runtime_is_free_again():
    (port,) = free_ports(1)
    launcher = LauncherConfig(backend="gloo", port=port)
    config = RuntimeConfig(gpus=2, device="cpu", launcher=launcher)
    host = SpawnHost(config)
    with pytest.raises(OSError, match="Address already in use"):
        socket.create_server((LOOPBACK, port))
    host.close()
    socket.create_server((LOOPBACK, port)).close()


def test_replicas_meet_in_a_store_while_memory_cannot_be_shared(tmp_path, monkeypatch):
    """The file system of the shared memory is full for a while; the runtime runs since before."""
    host = SpawnHost(RuntimeConfig(gpus=2, device="cpu"))
    assert host.rendezvous((0, 1)).segment
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "FOLDER", tmp_path / "missing")
        meetings = [host.rendezvous((0, 1)) for _ in range(2)]
        assert meetings[0].port and not meetings[0].segment and meetings[0] == meetings[1]
    assert host.rendezvous((0, 1)).segment
    host.close()


def test_interrupted_close_leaves_no_hanging_process(monkeypatch):
    host = SpawnHost(RuntimeConfig(device="cpu", launcher=LauncherConfig(own_process=True)))
    host.start_process(0)
    process = host.processes[0]
    os.kill(process.pid, signal.SIGSTOP)

    def interrupt(timeout: float) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        host.close()
    assert process.wait(PATIENCE) == -signal.SIGKILL


def test_dropped_runtime_ends_its_replicas(one_layer_demo_dir):
    before = own_replicas()
    launcher = LauncherConfig(own_process=True)
    runtime = LookaheadRuntime(str(one_layer_demo_dir), launcher=launcher, device="cpu", lookahead=PLAIN)
    assert len(own_replicas()) == len(before) + 1 and runtime.generate([1, 2], 2).num_tokens == 2
    del runtime
    gc.collect()
    wait_until(lambda: own_replicas() == before)


@pytest.mark.slow
def test_strict_output_does_not_depend_on_lookahead_or_replicas(demo_model_dir):
    options = {"device": "cpu", "dtype": "bfloat16", "exactness": "strict", "strict_tokens": 16}
    texts = []
    for gpus in (1, 2):
        with LookaheadRuntime(demo_model_dir, gpus=gpus, lookahead=FIXED, **options) as runtime:
            for lookahead in (PLAIN, LookaheadConfig(3, 5, 3, prior="none")):
                out = runtime.generate(reference.PROMPTS[0], 8, eos=False, lookahead=lookahead, logprobs=True)
                texts.append((out.token_ids, out.logprobs))
    assert texts == texts[:1] * 4


@pytest.mark.slow
def test_unread_messages_of_closed_stream_do_not_affect_next_request(one_layer_demo_dir, expected):
    """Messages of the replicas, rank 1's last one among them, are still unread when the stream is closed."""
    with LookaheadRuntime(str(one_layer_demo_dir), gpus=2, device="cpu", dtype="float32") as runtime:
        stream = runtime.stream(reference.PROMPTS[0], reference.MAX_NEW_TOKENS, eos=False)
        next(stream)
        wait_until(lambda: sum(inbox.messages.qsize() for inbox in runtime.launcher.pool.inboxes.open.values()) > 4)
        stream.close()
        out = runtime.generate(reference.PROMPTS[1], reference.MAX_NEW_TOKENS, eos=False)
        assert out.token_ids == expected[1]


def test_replica_sees_the_end_of_its_pipe_although_a_forked_process_holds_a_copy():
    ours, theirs = Pipe()
    copy = Connection(os.dup(ours.fileno()))
    ReplicaPipe(ours).close()
    with pytest.raises(EOFError):
        theirs.recv_bytes()
    copy.close()


ORPHANED = """
import os, signal, time
from multiprocessing.connection import Pipe
from lp_runtime.replica.process_start import start_process

ours, theirs = Pipe()
with theirs:
    print(start_process(theirs).pid, flush=True)
if os.fork() == 0:
    time.sleep(300)  # holds a copy of the pipe's end
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_replica_ends_with_its_driver_although_a_forked_process_holds_the_pipe():
    with marked() as mark:
        driver = subprocess.Popen([sys.executable, "-c", ORPHANED], env=mark.environment, stdout=subprocess.PIPE)
        replica = int(driver.stdout.readline())
        assert driver.wait(PATIENCE) == -signal.SIGKILL
        wait_until(lambda: replica not in mark.alive())
        assert len(mark.alive()) == 1
        driver.stdout.close()


def test_send_to_hanging_replica_does_not_block():
    ours, theirs = Pipe()
    pipe = ReplicaPipe(ours)
    for _ in range(3):
        pipe.send(bytes(1 << 20))  # more than a pipe's buffer holds
    pipe.close(timeout=0.1)
    assert not ours.closed
    assert theirs.recv_bytes() == bytes(1 << 20)
    theirs.close()
    pipe.close()
    assert ours.closed
