"""lp-doctor: a one-screen report on this machine and on what will not work."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from lp_runtime.config.checks import home_path
from lp_runtime.config.commands import DoctorConfig
from lp_runtime.distributed.devices import why_no_gpu
from lp_runtime.distributed.transport.shared_memory import FOLDER, why_unavailable
from lp_runtime.errors import ConfigError, LookaheadError, first_line
from lp_runtime.kernels.dispatch import why_no_kernels
from lp_runtime.launchers.split import choose_split, free_of_this_machine, visible_on
from lp_runtime.model.capacity import free_bytes
from lp_runtime.model.loading.sizes import size_of_model
from lp_runtime.utils.jit import cache_root
from lp_runtime.utils.limits import num_cores

PACKAGES = ("lp_runtime", "torch", "transformers", "numba", "hydra-core", "triton", "ray", "xgrammar", "fastapi")
GIB = 2**30
BLOCK_BYTES = 1 << 16  # at least one block of any file system
REPLICAS_OF_A_BOX = 8  # replicas of a typical machine, for which shared memory is tested
Finding = tuple[str, str, bool]  # subject, description, whether it is a problem


def examine(config: DoctorConfig) -> None:
    """Print the report; exit with status 1 if something that the settings need will not work."""
    is_well = True
    parts: list[Callable[[DoctorConfig], Iterator[Finding]]] = [_versions, _machine, _gpus, _memory, _caches, _model]
    for part in parts:
        for what, finding, is_wrong in part(config):
            print(f"{what:<14}{'PROBLEM: ' if is_wrong else ''}{finding}")
            is_well &= not is_wrong
    if not is_well:
        sys.exit(1)


def _versions(config: DoctorConfig) -> Iterator[Finding]:
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"no {name}")
    yield "packages", ", ".join(versions), False
    yield "python", f"{platform.python_version()}, {platform.platform()}, CUDA of torch: {torch.version.cuda}", False


def _machine(config: DoctorConfig) -> Iterator[Finding]:
    cores, free = num_cores(), free_bytes(torch.device("cpu"))
    memory = "unknown memory" if free is None else f"{free / GIB:.1f} GiB free"
    yield "CPU", f"{torch.backends.cpu.get_cpu_capability()}, {cores} cores for this process, {memory}", False


def _gpus(config: DoctorConfig) -> Iterator[Finding]:
    reason = why_no_gpu()
    if reason is not None:
        yield "GPUs", reason, config.device != "cpu"
    elif not torch.cuda.is_available():
        yield "GPUs", "none", config.device == "cuda"
    for index in range(torch.cuda.device_count() if reason is None else 0):
        device = torch.device("cuda", index)
        free, total = torch.cuda.mem_get_info(device)
        major, minor = torch.cuda.get_device_capability(device)
        name = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
        yield f"GPU {index}", f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free", False
        missing = why_no_kernels(device)
        captured = "Triton runs, passes can be captured"
        yield "", captured if missing is None else f"passes will not be captured: {missing}", missing is not None


def _memory(config: DoctorConfig) -> Iterator[Finding]:
    reason = why_unavailable(REPLICAS_OF_A_BOX)
    if reason is None:
        yield "shared memory", f"{FOLDER}: {shutil.disk_usage(FOLDER).free / GIB:.1f} GiB free", False
    else:
        yield "shared memory", f"{reason}; replicas exchange over TCP, which is slower", (config.gpus or 1) > 1


def _caches(config: DoctorConfig) -> Iterator[Finding]:
    folders = {}
    try:
        folders["compiled code"] = cache_root()
    except RuntimeError as error:  # this user has no home folder
        yield "compiled code", f"cannot be kept, so each start compiles it again: {first_line(error)}", True
    try:
        if config.cache_dir is not None:
            folders["measurements"] = Path(home_path("cache_dir", config.cache_dir))
    except ConfigError as error:
        yield "measurements", f"cannot be kept, so each start measures again: {error}", True
    for what, folder in folders.items():
        try:
            _write_a_block(next(each for each in (folder, *folder.parents) if os.path.exists(each)))
        except OSError as error:
            reason = error.strerror or first_line(error)
            yield what, f"{folder}: cannot be written, so its content is computed again at every start: {reason}", True
        else:
            num_files = sum(1 for each in folder.rglob("*") if each.is_file()) if folder.exists() else 0
            yield what, f"{folder}: {num_files} files", False


def _write_a_block(folder: Path) -> None:
    """Raise OSError unless a file with content can be written into a folder; the file is removed."""
    with tempfile.TemporaryFile(dir=folder) as file:  # even a full file system has space for an empty file
        file.write(bytes(BLOCK_BYTES))
        file.flush()


def _model(config: DoctorConfig) -> Iterator[Finding]:
    try:
        num_gpus = visible_on(config.device)
        chosen = choose_split(config, num_gpus, free_of_this_machine)
        size = size_of_model(config.model, config.dtype, config.context_tokens)
    except LookaheadError as error:
        yield "model", str(error), True
        return
    where = f", gpus_per_replica={chosen.replica_gpus}" if num_gpus else " on CPUs"
    yield "model", f"{config.model.location}: gpus={chosen.num_gpus}{where}", False
    if num_gpus and chosen.num_gpus > num_gpus:
        yield "", f"gpus={chosen.num_gpus}: this machine has {num_gpus}", True
    free = free_bytes(torch.device("cpu"))
    if size is not None and not num_gpus and free is not None:
        needed = chosen.num_replicas * size.weight_bytes(1)
        yield "", f"weights: {needed / GIB:.1f} GiB of {free / GIB:.1f} GiB of free memory", needed > free
