"""Cache of the fastest split of a machine's GPUs for a model, as measured by lp-bench splits=auto."""

from __future__ import annotations

import hashlib
import platform
from importlib import metadata

import numpy as np

from lp_runtime.calibration.files import CalibrationFiles
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.errors import ConfigError
from lp_runtime.model.hf.config import config_json

FORMAT_VERSION = 1
KEYS = ("gpus_per_replica", "tokens_per_second")


def keep_speeds(config: RuntimeConfig, speeds: dict[int, float]) -> None:
    """Store tokens per second by GPUs per replica, measured for a model here; no effect without a cache folder."""
    arrays = {KEYS[0]: np.array(list(speeds)), KEYS[1]: np.array(list(speeds.values()))}
    CalibrationFiles(config.cache_dir).store(_name(config, config.num_gpus), arrays)


def fastest_split(config: RuntimeConfig, gpus: int) -> int:
    """Return the number of GPUs per replica that was measured to be fastest with `gpus` GPUs in total."""
    found = CalibrationFiles(config.cache_dir).load(_name(config, gpus), KEYS)
    if found is None:
        path = "" if config.model.path is None else f" model.path={config.model.path}"
        kept = "" if config.cache_dir is not None else " with a cache_dir"
        raise ConfigError(
            f"gpus_per_replica=fastest: nothing was measured of this model on {gpus} GPUs of this machine;"
            f" run lp-bench splits=auto gpus={gpus}{path}{kept}"
        )
    return int(found[KEYS[0]][found[KEYS[1]].argmax()])


def _name(config: RuntimeConfig, gpus: int) -> str:
    model = config.model
    settings = [config.device, config.dtype, config.exactness, config.compile, model.location, model.parallelism]
    versions = [metadata.version(name) for name in ("torch", "transformers")]
    what = [FORMAT_VERSION, gpus, platform.node(), *settings, *versions]
    what.append(config_json(model.location, model.revision))
    return f"splits-{hashlib.blake2b(repr(what).encode(), digest_size=12).hexdigest()}.npz"
