"""Measures the machine: versions, copy bandwidth, matrix products, kernel launches.

    python benchmarks/micro.py machine

Bandwidth counts bytes read and written. `product` is a square product of random numbers in bfloat16. `launch` is the
time from giving a kernel of one element to an idle device until its end is known; `in a graph` is the time of each of
1,000 such kernels in a replayed CUDA graph.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib import metadata

import torch
from common import Results

from lp_runtime.replica.loading import choose_device

PACKAGES = ("torch", "triton", "transformers", "numba", "numpy", "hydra-core", "pytest")
NUM_TIMES = 10
NUM_KERNELS = 1000  # in the graph


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's arguments."""
    parser.add_argument("--copy-mib", type=int, default=4096, help="size of the copy, larger than any cache")
    parser.add_argument("--product", type=int, default=8192, help="rows and columns of the product")


def versions() -> dict[str, str]:
    """Return the versions of the packages that results depend on, and of the driver."""
    versions = {"Python": platform.python_version(), "CUDA": torch.version.cuda or "none"}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "none"
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm", "--format=csv,noheader"]
    try:
        versions["GPU"] = (
            subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().replace(",", ";")
        )
    except (OSError, subprocess.CalledProcessError):
        versions["GPU"] = "no nvidia-smi"
    return versions


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds from giving work to an idle device until it is done."""
    times = []
    for _ in range(NUM_TIMES + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def copy_rate(num_bytes: int, device: torch.device) -> float:
    """Return the bytes per second, read and written, of a copy on the device."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source), device)


def product_rate(size: int, device: torch.device) -> float:
    """Return the operations per second of a square product of random numbers in bfloat16."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: a @ b, device)


def replay_of_small_kernels(device: torch.device) -> Callable[[], None]:
    """Return a function that replays a captured graph of NUM_KERNELS kernels of one element."""
    one = torch.zeros(1, device=device)
    one.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(NUM_KERNELS):
            one.add_(1)
    return graph.replay


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    device = choose_device("auto", 0)
    results = Results("machine", args.output)
    for name, version in versions().items():
        results.add({"what": name, "value": version})
    results.add({"what": "copy", "value": f"{copy_rate(args.copy_mib << 20, device) / 1e9:.0f} GB/s"})
    results.add({"what": "product", "value": f"{product_rate(args.product, device) / 1e12:.1f} TFLOP/s"})
    one = torch.zeros(1, device=device)
    results.add({"what": "launch", "value": f"{1e6 * seconds_of(lambda: one.add_(1), device):.1f} us"})
    if device.type == "cuda":
        seconds = seconds_of(replay_of_small_kernels(device), device)
        results.add({"what": "in a graph", "value": f"{1e6 * seconds / NUM_KERNELS:.2f} us"})
    results.finish(f"{args.copy_mib} MiB copied, products of {args.product}")
    return 0
