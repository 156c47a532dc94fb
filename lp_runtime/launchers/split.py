"""Choice of how many GPUs, P, each replica spans if the settings say "auto" or "fastest"."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

import numpy as np
import torch

from lp_runtime.calibration.files import CalibrationFiles
from lp_runtime.config.settings import ModelConfig, RuntimeConfig
from lp_runtime.distributed.devices import device_type, why_no_gpu
from lp_runtime.errors import ConfigError, LaunchError, ModelError
from lp_runtime.model.capacity import NCCL_BYTES
from lp_runtime.model.hf.config import config_json
from lp_runtime.model.loading.sizes import ModelSize, size_of_model

GIB = 1 << 30
# Run in a separate process: the query creates a CUDA context on every GPU, which occupies hundreds of MiB until exit.
SURVEY = """
import json, torch
print(json.dumps([torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]))
"""
SURVEY_SECONDS = 120.0  # limit for importing torch and creating the contexts
# The file of the speeds that lp-bench splits=auto has measured.
SPEEDS_VERSION = 1
SPEEDS_KEYS = ("gpus_per_replica", "tokens_per_second")

Survey = Callable[[], Sequence[int]]  # returns the free bytes of each GPU


def choose_split(
    config: RuntimeConfig, num_gpus: int, survey: Survey, num_local: int | None = None, has_pipelines: bool = True
) -> RuntimeConfig:
    """Return settings whose gpus_per_replica is a number: the given one, the fastest, or the smallest.

    Args:
        num_gpus: GPUs that the runtime may use; 0 on CPUs.
        survey: called only if more than one P is possible.
        num_local: GPUs of one machine, which P must divide, too; None if all GPUs are on this machine.
        has_pipelines: whether a process may use several GPUs, for pipeline parallelism.
    """
    if config.gpus_per_replica == "fastest":
        return _with_fastest(config, num_gpus, num_local, has_pipelines)
    if not has_pipelines:
        config = with_parallelism(config, "tensor")
    if config.is_split_chosen:
        return _with_parallelism(config, num_gpus > 0)
    return _with_fewest(config, num_gpus, survey, num_local)


def with_parallelism(config: RuntimeConfig, parallelism: str) -> RuntimeConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, parallelism=parallelism))


def _with_fastest(config: RuntimeConfig, num_gpus: int, num_local: int | None, has_pipelines: bool) -> RuntimeConfig:
    config = dataclasses.replace(config, gpus=config.gpus or num_gpus or 1)
    measured = _fastest_first(config)
    for number in measured:
        # Decided as for the measurement, which may have used pipelines.
        split = _with_parallelism(dataclasses.replace(config, gpus_per_replica=number), num_gpus > 0)
        if (num_local is None or num_local % number == 0) and (has_pipelines or split.num_stages == 1):
            return split
    raise ConfigError(
        f"gpus_per_replica=fastest: none of the measured ones ({', '.join(map(str, measured))}) is possible:"
        " a replica's GPUs must be on one machine, and torchrun starts no pipelines"
    )


def _with_fewest(config: RuntimeConfig, num_gpus: int, survey: Survey, num_local: int | None) -> RuntimeConfig:
    candidates = [each for each in _divisors(config.gpus, num_gpus) if num_local is None or num_local % each == 0]
    if config.model.device_map is not None or len(candidates) < 2:  # a model that does not fit fails when it is loaded
        return dataclasses.replace(config, gpus_per_replica=1)
    size = size_of_model(config.model, config.dtype, config.context_tokens)
    if size is None or config.model.quantization_config is not None:  # size unknown
        return dataclasses.replace(config, gpus_per_replica=1)
    free = min(list(survey())[: config.gpus or num_gpus])
    num_shards, parallelism = _fewest(size, candidates, free, config.model)
    return dataclasses.replace(with_parallelism(config, parallelism), gpus_per_replica=num_shards)


def _with_parallelism(config: RuntimeConfig, on_gpus: bool) -> RuntimeConfig:
    """Return settings with model.parallelism decided: tensor on CPUs and if the model can be sliced."""
    if config.model.parallelism != "auto" or config.replica_gpus == 1:
        return config
    parallelism = "tensor"
    if on_gpus:
        size = size_of_model(config.model, config.dtype)
        if config.model.quantization_config is not None or (size and _why_not_sliced(size, config.replica_gpus)):
            parallelism = "pipeline"
    return with_parallelism(config, parallelism)


def _why_not_sliced(size: ModelSize, num_shards: int) -> str:
    try:
        size.check_shards(num_shards)
        return ""
    except ModelError as error:
        return str(error)


def _divisors(gpus: int | None, num_gpus: int) -> list[int]:
    """Return the candidates for P, ascending: divisors of `gpus`, or any number if that is None."""
    if gpus is None:
        return list(range(1, num_gpus + 1))
    return [each for each in range(1, gpus + 1) if gpus % each == 0] if gpus <= num_gpus else [1]


def _fewest(size: ModelSize, candidates: Sequence[int], free: int, config: ModelConfig) -> tuple[int, str]:
    """Return (P, parallelism): the fewest GPUs that hold the weights, the KV cache and the passes' memory.

    Tensor parallelism is preferred; pipeline is the choice if tensor fits on no candidate. Candidates are possible P,
    ascending; `free` is the free bytes on every GPU. The message of a ModelError says why more GPUs are not possible.
    """
    # NCCL allocates buffers on every GPU, for the GPUs of a replica and for replicas among each other.
    exchange_bytes = NCCL_BYTES if candidates[-1] > 1 else 0
    needed: dict[int, int] = {}  # bytes per GPU, by P
    refusal = ""
    if config.parallelism != "pipeline":
        for num_gpus in candidates:
            if why := _why_not_sliced(size, num_gpus):
                refusal = refusal or f" ({why})"
                continue
            needed[num_gpus], refusal = size.needed_bytes(num_gpus, exchange_bytes), ""
            if needed[num_gpus] <= free:
                return num_gpus, "tensor"
    if config.parallelism != "tensor" and size.parts:
        for num_gpus in candidates:
            by_layers = size.needed_for_layers(num_gpus, exchange_bytes)
            needed[num_gpus], refusal = min(by_layers, needed.get(num_gpus, by_layers)), ""
            if by_layers <= free:
                return num_gpus, "pipeline"
    if not needed:  # its layers are not in one list: loading refuses it with the reason
        return candidates[0], "pipeline"
    largest = max(needed)
    raise ModelError(
        f"model.path={config.location}: does not fit: with {size.context_tokens} tokens of context it needs"
        f" {needed[largest] / GIB:.1f} GiB on {_gpus(largest)}, and {free / GIB:.1f} GiB are free{refusal}"
    )


def _gpus(number: int) -> str:
    return "a GPU" if number == 1 else f"each of {number} GPUs"


def free_of_this_machine() -> list[int]:
    """Return each visible GPU's free bytes, measured with a CUDA context on it; LaunchError if that fails."""
    if reason := why_no_gpu():
        raise LaunchError(f"gpus_per_replica=auto: {reason}")
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", SURVEY], capture_output=True, text=True, timeout=SURVEY_SECONDS, check=True
        )
        return [int(each) for each in json.loads(done.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise LaunchError(
            f"gpus_per_replica=auto: cannot read the GPUs' free memory ({type(error).__name__})"
        ) from error


def visible_on(device: str) -> int:
    """Return how many GPUs this process can use for replicas with a setting of `device`; 0 for "cpu"."""
    return 0 if device_type(device) == "cpu" or not torch.cuda.is_available() else torch.cuda.device_count()


def keep_speeds(config: RuntimeConfig, speeds: dict[int, float]) -> None:
    """Store tokens per second by GPUs per replica, measured for a model here, if a cache folder is set."""
    arrays = {SPEEDS_KEYS[0]: np.array(list(speeds)), SPEEDS_KEYS[1]: np.array(list(speeds.values()))}
    CalibrationFiles(config.cache_dir).store(_speeds_file(config), arrays)


def _fastest_first(config: RuntimeConfig) -> list[int]:
    """Return the measured numbers of GPUs per replica for `config.gpus` GPUs in total, the fastest first."""
    measured = CalibrationFiles(config.cache_dir).load(_speeds_file(config), SPEEDS_KEYS, _sorted_numbers)
    if measured is None:
        path = "" if config.model.path is None else f" model.path={config.model.path}"
        kept = "" if config.cache_dir is not None else " with a cache_dir"
        raise ConfigError(
            f"gpus_per_replica=fastest: nothing was measured of this model on {config.num_gpus} GPUs of this machine;"
            f" run lp-bench splits=auto gpus={config.num_gpus}{path}{kept}"
        )
    return measured


def _sorted_numbers(speeds: dict[str, np.ndarray]) -> list[int]:
    """Return the GPUs per replica in a file of speeds, the fastest first; ValueError if they do not fit."""
    numbers, tokens_per_second = (speeds[key] for key in SPEEDS_KEYS)
    if numbers.shape != tokens_per_second.shape or numbers.dtype.kind != "i" or not (numbers > 0).all():
        raise ValueError("the numbers do not fit")
    return [int(number) for number in numbers[(-tokens_per_second).argsort(kind="stable")]]


def _speeds_file(config: RuntimeConfig) -> str:
    model = config.model
    settings = [config.device, config.dtype, config.exactness, config.compile, model.location, model.parallelism]
    versions = [metadata.version(name) for name in ("torch", "transformers")]
    what = [SPEEDS_VERSION, config.num_gpus, platform.node(), *settings, *versions]
    what.append(config_json(model.location, model.revision))
    return f"splits-{hashlib.blake2b(repr(what).encode(), digest_size=12).hexdigest()}.npz"
