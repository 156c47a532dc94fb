"""Where a request's time goes: a trace of torch's profiler over some steps, and a table."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from lp_runtime.engine.output import Event, Report
from lp_runtime.errors import ConfigError

NUM_STEPS = 16  # that are traced, from the first after the prefill on
NUM_ROWS = 12


def check_folder(folder: str) -> None:
    """Make the folder of traces.

    Raises:
        ConfigError: if it cannot be made.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"profile_dir={folder}: {error.strerror or error}") from error


def profiled(events: Iterator[Event], folder: str, rank: int, device: torch.device) -> Iterator[Event]:
    """A request's events, as they come; beside that, its first steps are traced.

    Args:
        events: of Engine.run.
        folder: gets rank<RANK>.json, of the latest request with a step after its prefill, for ui.perfetto.dev.
        rank: of this replica; the first one prints a table to stderr.
        device: the model's.
    """
    is_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    trace = profile(activities=activities)
    num_events = 0
    is_running = False
    try:
        for event in events:
            if is_running and (num_events == NUM_STEPS or isinstance(event, Report)):
                is_running = False
                trace.stop()
                if num_events > 1:  # there was a step after the prefill's
                    trace.export_chrome_trace(str(Path(folder) / f"rank{rank}.json"))
                    if rank == 0:
                        key = "self_cuda_time_total" if is_cuda else "self_cpu_time_total"
                        print(trace.key_averages().table(sort_by=key, row_limit=NUM_ROWS), file=sys.stderr)
            if isinstance(event, Report) and rank == 0 and event.num_steps > 1:
                print(_parts(event), file=sys.stderr)
            if num_events == 0 and not isinstance(event, Report):
                is_running = True
                trace.start()
            num_events += 1
            yield event
    finally:
        if is_running:
            trace.stop()


def _parts(report: Report) -> str:
    """Milliseconds a step of all that a step is made of."""
    num_steps = report.num_steps - 1
    parts = {name: 1000 * getattr(report.times, name) / num_steps for name in ("forward", "exchange", "other")}
    whole = sum(parts.values()) or 1.0
    shown = ", ".join(f"{name} {ms:.2f} ms ({100 * ms / whole:.0f}%)" for name, ms in parts.items())
    return f"a step after the prefill, mean of {num_steps}: {shown}"
