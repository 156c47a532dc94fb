"""A lone replica starts while another process compiles the drafter, and leaves it a core meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from support.processes import wait_until

from lp_runtime import LookaheadConfig, LookaheadRuntime
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.entrypoints.generate import summary
from lp_runtime.replica import compile_ahead, early_start
from lp_runtime.utils.files import is_locked, locked

PROMPT = [3, 5, 7, 11, 3, 5, 7]


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """Path of the lock that the process holds while it compiles; nothing seems to be cached."""
    monkeypatch.setattr(compile_ahead, "cache_root", lambda: tmp_path)
    monkeypatch.setattr(compile_ahead, "is_cached", lambda function: False)
    monkeypatch.setattr(early_start, "is_command", lambda: True)
    return compile_ahead._lock_file()


@pytest.fixture
def compiling(lock):
    """A function that ends the other process; it seems to compile until then."""
    end, begun = threading.Event(), threading.Event()

    def hold() -> None:
        with locked(lock):
            begun.set()
            end.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    begun.wait()
    yield lambda: (end.set(), holder.join())
    end.set()
    holder.join()


def test_requests_begin_before_the_drafter_is_compiled(compiling, tiny_model_dir):
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with LookaheadRuntime(tiny_model_dir) as runtime:
            assert torch.get_num_threads() == 2
            first = runtime.generate(PROMPT, 12)
            compiling()
            again = runtime.generate(PROMPT, 12)
            assert torch.get_num_threads() == 3
            shown = summary(runtime, LookaheadConfig(), [("lookahead", first)], compare=False)
    finally:
        torch.set_num_threads(num_threads)
    assert first.token_ids == again.token_ids
    assert first.steps_without_drafter == first.steps == 12
    assert again.steps_without_drafter == 0 and again.steps < 12
    assert shown.endswith("\nthe drafter was still being compiled in 12 of these steps, once per machine")


def test_programs_that_use_the_api_compile_first(compiling, tiny_model_dir, monkeypatch):
    """Their process is not ours: its threads stay as they are."""
    monkeypatch.setattr(early_start, "is_command", lambda: False)
    num_threads = torch.get_num_threads()
    with LookaheadRuntime(tiny_model_dir) as runtime:
        assert torch.get_num_threads() == num_threads
        assert runtime.generate(PROMPT, 12).steps_without_drafter == 0


@pytest.mark.parametrize("settings", [{"exactness": "strict"}, {"lookahead": LookaheadConfig(drafter="recycling")}])
def test_other_starts_compile_first(compiling, tiny_model_dir, settings):
    """exactness=strict needs the same number of threads in all passes; other drafters take little to compile."""
    with LookaheadRuntime(tiny_model_dir, **settings) as runtime:
        assert runtime.generate(PROMPT, 12).steps_without_drafter == 0


def test_one_process_per_machine_compiles_and_is_ended(lock):
    with compile_ahead.compiling_ahead(RuntimeConfig()):
        assert is_locked(lock) and compile_ahead.is_compiling_ahead(is_shared=False)
        with compile_ahead.compiling_ahead(RuntimeConfig()):
            pass
        assert is_locked(lock)  # by the first one
    assert not is_locked(lock) and not compile_ahead.is_compiling_ahead(is_shared=False)


def test_lock_is_released_when_the_command_is_killed(lock):
    code = """
import sys
from pathlib import Path
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.replica import compile_ahead, early_start
compile_ahead.cache_root, compile_ahead.is_cached = lambda: Path(sys.argv[1]), lambda function: False
with compile_ahead.compiling_ahead(RuntimeConfig()):
    print("started", flush=True)
    sys.stdin.read()
"""
    command = subprocess.Popen(
        [sys.executable, "-c", code, str(lock.parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert command.stdout.readline() == b"started\n" and is_locked(lock)
    command.kill()
    command.communicate()
    wait_until(lambda: not is_locked(lock))
