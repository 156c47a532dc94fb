"""Fixtures for all tests. Models are tiny and random, made by transformers itself; only the demo model is trained."""

from __future__ import annotations

from support import interpreted  # noqa: F401

# isort: split
import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
import torch
from support import small_models
from support.forked import ForkedCompiler, ForkedReplica, join_server, server_of_controller, wait_for_server

from lp_runtime.config.settings import DEMO_MODEL
from lp_runtime.constraints import compile_process
from lp_runtime.launchers import spawn
from lp_runtime.utils.jit import cache_root

START_PROCESS = spawn.start_process
FORKS_REPLICAS = not torch.cuda.is_available()  # a driver of CUDA does not survive a fork
os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_root()))  # a test's cache_dir is not that of the tests after it
# Files that take a minute or more. They begin first: whoever begins one last is waited for.
LONG_FILES = ("test_simulated_gpu.py", "test_ray_launcher.py", "test_scheduler.py", "test_triton_gpu.py", "test_cli.py")

torch.set_num_threads(1)
gc.disable()
hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine breaks any deadline
hypothesis.settings.load_profile("untimed")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """All workers fork from one process, which imports while they collect."""
    if FORKS_REPLICAS:
        node.workerinput["fork_server"] = server_of_controller()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported is kept out of garbage collections: see lp_runtime/utils/startup.py."""
    gc.freeze()
    gc.enable()
    if "fork_server" in getattr(session.config, "workerinput", {}):
        join_server(*session.config.workerinput["fork_server"])
        wait_for_server()  # workers would compile what it compiles, each by itself


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of long files first; the others stay in order."""
    items.sort(key=lambda item: item.path.name not in LONG_FILES)


@pytest.fixture(scope="session", autouse=True)
def forked_replicas() -> Iterator[None]:
    """Replicas and compilers of constraints are forked from a process that has imported everything.

    But see `started_replicas` and `started_compilers`.
    """
    with pytest.MonkeyPatch.context() as patch:
        if FORKS_REPLICAS:
            patch.setattr(spawn, "start_process", ForkedReplica)
            forking = SimpleNamespace(Popen=ForkedCompiler, DEVNULL=subprocess.DEVNULL)
            patch.setattr(compile_process, "subprocess", forking)
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A rank of torchrun's that a test is takes all cores: the next tests would share them with the other process's."""
    yield
    torch.set_num_threads(1)


@pytest.fixture
def started_replicas(monkeypatch) -> None:
    """Replicas of this test are started as they are for users; they find the processors of tests/support."""
    monkeypatch.setattr(spawn, "start_process", START_PROCESS)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


@pytest.fixture
def started_compilers(monkeypatch) -> None:
    """Compilers of constraints of this test are started as they are for users."""
    monkeypatch.setattr(compile_process, "subprocess", subprocess)


@pytest.fixture(scope="session")
def random_model() -> Callable:
    """Factory: a tiny random causal LM, float32, `name` as in LlamaConfig, `settings` for its config."""
    return small_models.random_model


@pytest.fixture(scope="session")
def make_model_dir(tmp_path_factory) -> Callable[..., Path]:
    """Factory: saves a tiny random model (arguments as `random_model`), without a tokenizer; returns its directory."""

    def make(name: str = "Llama", seed: int = 0, **settings) -> Path:
        path = tmp_path_factory.mktemp(name.lower())
        small_models.random_model(name, seed, **settings).save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="session")
def tiny_model_dir(make_model_dir) -> Path:
    """A tiny random Llama: 64 token ids, a context of 256, no tokenizer, no end-of-sequence token."""
    return make_model_dir()


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The trained model that comes with the package, tokenizer included."""
    return DEMO_MODEL
