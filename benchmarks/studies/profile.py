"""Lists the kernels of a step: torch's profiler over one step, after its capture.

    python benchmarks/micro.py profile --model 7b --tokens 1 128 --dtype bfloat16

There is a row for each kernel, the most expensive first: its launches per step, and the microseconds of all launches
together. `a step` is the median of steps that are not profiled, from the first input to the last result on the host.
`all kernels` is the sum of the kernels, and `gaps` the rest of the step. On a CPU the rows are torch's operations.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import Results
from models import runner_of
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.lookahead.top_k import K
from lp_runtime.model.forward.step_inputs import StepInputs
from lp_runtime.model.runner import ModelRunner
from lp_runtime.replica.loading import choose_device
from lp_runtime.sampling.processors import TreeProcessors
from lp_runtime.sampling.sampler import Sampler
from studies.floor import NUM_WARM_UPS, drafted_tree, synchronize

MAX_NAME = 90  # shown characters of a kernel's name
NUM_STEPS = 5  # profiled steps


@dataclass(frozen=True)
class KernelTime:
    """Time of a kernel.

    Attributes:
        name: name of the kernel.
        launches: mean number of launches per profiled call.
        microseconds: mean time of all its launches of a call together.
    """

    name: str
    launches: float
    microseconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument("--model", default="demo", help="demo, a shape, experts, or a directory")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 128])
    parser.add_argument("--vocabulary", type=int, default=None, help="size to which embedding and head are padded")
    parser.add_argument("--compile", default="auto", choices=["off", "auto"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=512, help="committed tokens")
    parser.add_argument("--rows", type=int, default=25, help="kernels to show at each size")


def device_times(work: Callable[[], object], device: torch.device) -> list[KernelTime]:
    """Return the kernels of some work, the most expensive first.

    On a CPU those are torch's operations; empty for a GPU that torch's profiler does not see, such as a simulated one.

    Args:
        work: gives the device something to do; called several times.
        device: synchronized after each call.
    """
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    if activity not in torch.profiler.supported_activities():
        return []
    with profile(activities=list({ProfilerActivity.CPU, activity})) as profiler:
        for _ in range(NUM_STEPS):
            work()
            synchronize(device)
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    times = []
    for event in profiler.key_averages():
        total = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if event.device_type == kind and total > 0:
            times.append(KernelTime(event.key, event.count / NUM_STEPS, total / NUM_STEPS))
    return sorted(times, key=lambda each: -each.microseconds)


class OneStep:
    """Repeatable decoding step: forward pass, successors and candidates back on the host.

    Args:
        model: model that decodes.
        tokens: T.
        context: committed tokens.
    """

    def __init__(self, model: ModelRunner, tokens: int, context: int):
        self._model, self._tree = model, drafted_tree(tokens, model.vocabulary_size)
        self._text = [i % model.vocabulary_size for i in range(context)]
        self._sampler = Sampler(TreeProcessors([], model.device), None, num_top_k=K)
        self._slot = model.slots.acquire(context + 2 * tokens, self._text)
        model.begin(self._slot, context + 2 * tokens)
        model.prefill(self._slot, self._text)

    def __call__(self) -> None:
        """Run the step; its token is not committed."""
        tree = self._tree
        logits = self._model.forward(StepInputs.whole(self._slot, tree), commit=False)
        values, _ = self._sampler.sample(logits, tree, range(len(tree)), self._text)
        values.cpu()

    def close(self) -> None:
        """Release the slot."""
        self._model.slots.release(self._slot)


def median_us(step: OneStep, device: torch.device) -> float:
    """Return the median microseconds of a step without profiling."""
    times = []
    for number in range(NUM_WARM_UPS + 20):
        synchronize(device)
        started = time.perf_counter()
        step()
        if number >= NUM_WARM_UPS:
            times.append(1e6 * (time.perf_counter() - started))
    return statistics.median(times)


def run(args: argparse.Namespace) -> int:
    """Profile a step of every size."""
    device = choose_device("auto", 0)
    model = runner_of(args.model, RuntimeConfig(dtype=args.dtype, compile=args.compile), device, args.vocabulary)
    results = Results("profile", args.output, {"us": ".1f", "launches": ".1f", "share %": ".1f"})
    for tokens in args.tokens:
        step = OneStep(model, tokens, args.context)
        whole = median_us(step, device)
        kernels = device_times(step, device)
        step.close()
        busy = sum(each.microseconds for each in kernels)
        summary = {"a step": (1.0, whole)}
        if kernels:
            launches = sum(each.launches for each in kernels)
            summary |= {"all kernels": (launches, busy), "gaps": (0.0, whole - busy)}
        shown = {each.name[:MAX_NAME]: (each.launches, each.microseconds) for each in kernels[: args.rows]}
        for name, (launches, us) in (summary | shown).items():
            name = name.replace("|", "/")
            results.add({"tokens": tokens, "kernel": name, "launches": launches, "us": us, "share %": 100 * us / whole})
    captured = "captured" if model.graphs else "not captured"
    results.finish(f"{args.model}, {args.dtype}, compile={args.compile} ({captured}), {args.context} committed tokens")
    return 0
