"""Fixtures for all tests. Models are tiny, random, from transformers; only the demo model is trained."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import site
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest

# Measurements of a run are shortened, so all its processes keep them in a home folder that ends with it. Compiled code
# is shared with other runs. Numba and workers read these variables at start; torch.distributed.run reads PET_*.
if "PYTEST_XDIST_WORKER" not in os.environ:
    for library in ("numba", "triton"):
        os.environ.setdefault(f"{library.upper()}_CACHE_DIR", os.path.expanduser(f"~/.cache/lp_runtime/{library}"))
    os.environ.setdefault("PYTHONUSERBASE", site.getuserbase())  # packages of `pip install --user`
    HOME = tempfile.TemporaryDirectory(prefix="lp_runtime_tests_", ignore_cleanup_errors=True)
    os.environ |= {"HOME": HOME.name, "PET_LOG_DIR": f"{HOME.name}/torchelastic"}

# Torch and modules that import it are imported inside functions: the controller of a run does not need them.
from support.forked import ForkedCompiler, ForkedReplica, join_server, server_of_controller, wait_for_server

from lp_runtime.config.settings import DEMO_MODEL

# Files that take a minute or more. They start first, so that no worker ends a run alone with one of them.
LONG_FILES = ("test_simulated_gpu.py", "test_ray_launcher.py", "test_scheduler.py", "test_triton_gpu.py")

gc.disable()
hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine breaks any deadline
hypothesis.settings.load_profile("untimed")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Pass a worker the fork server: all workers fork from one process, which imports while they collect."""
    node.workerinput["fork_server"] = server_of_controller()


def pytest_configure(config: pytest.Config) -> None:
    """Set up a process that runs tests: a worker or the only process, not the controller of workers."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        from support import interpreted  # noqa: F401, I001  # before anything that imports Triton

        import torch
        from support import calibration

        torch.set_num_threads(1)
        calibration.shorten()


def forks_replicas() -> bool:
    """Whether tests fork their replicas: only without a GPU, since CUDA's driver does not survive a fork."""
    import torch

    return not torch.cuda.is_available()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude imported objects from garbage collection: see lp_runtime/utils/startup.py."""
    gc.freeze()
    gc.enable()
    # In each phase of each test, pytest adds its handlers to every logger that does not propagate: 57 of them.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True
    if hasattr(session.config, "workerinput") and forks_replicas():
        join_server(*session.config.workerinput["fork_server"])
        wait_for_server()  # otherwise each worker would compile the same code


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of long files first; the others stay in order."""
    items.sort(key=lambda item: item.path.name not in LONG_FILES)


@pytest.fixture(scope="session", autouse=True)
def forked_replicas() -> Iterator[Callable]:
    """Fork replicas and compilers of constraints from a process that has imported everything.

    `started_replicas` and `started_compilers` undo this. Yields the function that starts a replica for users.
    """
    from lp_runtime.constraints import compile_process
    from lp_runtime.replica import process_start

    start_process = process_start.start_process
    with pytest.MonkeyPatch.context() as patch:
        if forks_replicas():
            patch.setattr(process_start, "start_process", ForkedReplica)
            forking = SimpleNamespace(Popen=ForkedCompiler, DEVNULL=subprocess.DEVNULL)
            patch.setattr(compile_process, "subprocess", forking)
        yield start_process


@pytest.fixture(autouse=True)
def fresh_torch() -> Iterator[None]:
    """Begin each test with one seed, whatever ran before, and end it with one thread.

    A test that acts as a torchrun rank uses all cores.
    """
    import torch

    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def started_replicas(monkeypatch, forked_replicas) -> None:
    """Start replicas as for users, without forking; they can import the processors of tests/support."""
    from lp_runtime.replica import process_start

    monkeypatch.setattr(process_start, "start_process", forked_replicas)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


@pytest.fixture
def started_compilers(monkeypatch) -> None:
    """Start compilers of constraints as for users, without forking."""
    from lp_runtime.constraints import compile_process

    monkeypatch.setattr(compile_process, "subprocess", subprocess)


@pytest.fixture(scope="session")
def random_model() -> Callable:
    """Factory of tiny random causal LMs in float32: `name` as in LlamaConfig, `settings` for the config."""
    from support import small_models

    return small_models.random_model


@pytest.fixture(scope="session")
def make_model_dir(tmp_path_factory, random_model) -> Callable[..., Path]:
    """Factory that saves a `random_model(...)` without a tokenizer and returns its directory."""

    def make(name: str = "Llama", seed: int = 0, **settings) -> Path:
        path = tmp_path_factory.mktemp(name.lower())
        random_model(name, seed, **settings).save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="session")
def tiny_model_dir(make_model_dir) -> Path:
    """A tiny random Llama: 64 token ids, a context of 256, no tokenizer, no end-of-sequence token."""
    return make_model_dir()


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The trained model that comes with the package, with its tokenizer."""
    return DEMO_MODEL


@pytest.fixture(scope="session")
def shallow_demo(demo_model_dir, tmp_path_factory) -> Callable[[int], Path]:
    """Return a function that writes the demo model with the last of its six layers and returns its folder.

    A step takes half the time or less. Texts of the last layers are as varied as the whole model's; those of the first
    layers consist of two to four tokens, so that a test would not see a wrong order.
    """

    def write(num_layers: int) -> Path:
        from transformers import AutoModelForCausalLM

        folder = shutil.copytree(demo_model_dir, tmp_path_factory.mktemp("shallow") / "model")
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.model.layers = model.model.layers[-num_layers:]
        model.config.num_hidden_layers = num_layers
        model.save_pretrained(folder)
        return folder

    return write


@pytest.fixture(scope="session")
def small_demo_dir(shallow_demo) -> Path:
    """The demo model with the last two of its six layers."""
    return shallow_demo(2)


@pytest.fixture(scope="session")
def one_layer_demo_dir(shallow_demo) -> Path:
    """The demo model with the last one of its six layers, for tests of processes and messages."""
    return shallow_demo(1)


# Outputs that every launcher must reproduce. They are here because pytest imports a folder's own conftest.py before
# `pytest_configure` when it is given the folder, and Triton must not be imported before that.


@pytest.fixture(scope="session")
def greedy(demo_model_dir) -> list[list[int]]:
    """Return transformers' greedy outputs for reference.PROMPTS on the demo model."""
    from support import reference

    return reference.greedy(demo_model_dir)


@pytest.fixture(scope="session")
def sampled(demo_model_dir) -> list[int]:
    """Return new tokens of the first prompt, sampled by one replica with reference.SAMPLING, one token per step."""
    from support import reference

    from lp_runtime import LookaheadRuntime
    from lp_runtime.config.lookahead import PLAIN

    with LookaheadRuntime(demo_model_dir, device="cpu", dtype="float32") as runtime:
        out = runtime.generate(
            reference.PROMPTS[0], reference.MAX_NEW_TOKENS, eos=False, sampling=reference.SAMPLING, lookahead=PLAIN
        )
    return out.token_ids
