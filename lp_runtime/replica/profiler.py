"""Profiler of a request's first steps: a trace of torch's profiler and a table of the time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from lp_runtime.config.checks import home_path
from lp_runtime.errors import ConfigError
from lp_runtime.request.output import Event, Report

NUM_STEPS = 16  # traced steps after the prefill
NUM_ROWS = 12  # of the table


def check_folder(folder: str) -> None:
    """Create the folder for the traces."""
    try:
        Path(home_path("profile_dir", folder)).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"profile_dir={folder}: {error.strerror or error}") from error


def profiled(events: Iterator[Event], folder: str, rank: int, device: torch.device) -> Iterator[Event]:
    """Yield a request's events unchanged, and trace its first steps.

    Every request with a step after its prefill overwrites FOLDER/rank<RANK>.json, which ui.perfetto.dev shows. Rank 0
    also prints a table to stderr.
    """
    trace = _Trace(Path(home_path("profile_dir", folder)) / f"rank{rank}.json", rank == 0, device)
    try:
        for number, event in enumerate(events):
            is_report = isinstance(event, Report)
            if is_report or number == NUM_STEPS:
                trace.stop(has_steps=number > 1)
            if isinstance(event, Report) and rank == 0 and event.num_steps > 1:
                print(_parts(event), file=sys.stderr)
            if number == 0 and not is_report:
                trace.start()
            yield event
    finally:
        trace.stop(has_steps=False)


class _Trace:
    """One run of torch's profiler; writes its trace to a file and may print a table to stderr."""

    def __init__(self, path: Path, prints: bool, device: torch.device):
        self._path = path
        self._prints = prints
        self._is_cuda = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_cuda else [])]
        self._profile = profile(activities=activities)
        self._is_running = False

    def start(self) -> None:
        self._is_running = True
        self._profile.start()

    def stop(self, has_steps: bool) -> None:
        """Stop tracing, if running; write and print the trace if it has a step after the prefill."""
        if not self._is_running:
            return
        self._is_running = False
        self._profile.stop()
        if not has_steps:
            return
        self._profile.export_chrome_trace(str(self._path))
        if self._prints:
            key = "self_cuda_time_total" if self._is_cuda else "self_cpu_time_total"
            print(self._profile.key_averages().table(sort_by=key, row_limit=NUM_ROWS), file=sys.stderr)


def _parts(report: Report) -> str:
    num_steps = report.num_steps - 1
    parts = {name: 1000 * getattr(report.times, name) / num_steps for name in ("forward", "exchange", "other")}
    whole = sum(parts.values()) or 1.0
    shown = ", ".join(f"{name} {ms:.2f} ms ({100 * ms / whole:.0f}%)" for name, ms in parts.items())
    return f"a step after the prefill, mean of {num_steps}: {shown}"
