"""Commands that measure compile first; commands that print an answer compile the rest last."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lp_runtime.config.commands import BenchConfig, GenerateConfig
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.serving import ServeConfig
from lp_runtime.config.settings import LauncherConfig, RuntimeConfig
from lp_runtime.entrypoints import commands

RAY = LauncherConfig(name="ray")


class RecordedRuntime:
    """A runtime that notes when it is started and used."""

    def __init__(self, done: list[str]):
        self._done = done

    def __enter__(self) -> RecordedRuntime:
        self._done.append("start")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._done.append("end")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GenerateConfig(prompt="a"), ["start", "end", "compile"]),
        (GenerateConfig(prompt="a", compare=True), ["compile", "start", "end"]),
        (BenchConfig(), ["compile", "start", "end"]),
        (BenchConfig(splits="auto", gpus=2), ["compile", "splits"]),
        (ServeConfig(), ["start", "end"]),
        (GenerateConfig(prompt="a", launcher=RAY), ["start", "end"]),
        (GenerateConfig(prompt="a", lookahead=LookaheadConfig(drafter="recycling")), ["start", "end"]),
    ],
)
def test_what_is_not_compiled_is_compiled_in_time(monkeypatch, config: RuntimeConfig, expected):
    done: list[str] = []
    is_compiled = iter([False, True])
    monkeypatch.setattr(commands, "is_compiled", lambda is_shared: next(is_compiled))
    monkeypatch.setattr(commands, "compile_steps", lambda is_shared: done.append("compile"))
    monkeypatch.setattr(commands, "LookaheadRuntime", SimpleNamespace(from_config=lambda _: RecordedRuntime(done)))
    monkeypatch.setattr(commands, "_prepare", lambda _: None)
    monkeypatch.setattr(commands, "check_bench", lambda _: None)
    monkeypatch.setattr(commands, "measure_splits", lambda _: done.append("splits"))
    commands.run_command(config, is_leader=True)
    assert done == expected
