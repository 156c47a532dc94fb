"""Launchers: start replicas in this process, as spawned processes, under torchrun, or as Ray actors."""

from __future__ import annotations

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.environment import started_by_torchrun
from lp_runtime.errors import ConfigError
from lp_runtime.launchers.base import Launcher
from lp_runtime.replica.process_start import kill_unused


def launch(config: RuntimeConfig) -> Launcher:
    """Start the replicas that `config` asks for, and return their launcher once all of them are ready.

    If that fails, no process is left running.
    """
    name = config.launcher.name
    if name == "auto":
        name = "torchrun" if started_by_torchrun() else "local"
    elif name != "torchrun" and started_by_torchrun():
        raise ConfigError(
            f"launcher={name}: torchrun started this process; leave launcher out, or start without torchrun"
        )
    if name == "torchrun":
        from lp_runtime.launchers.torchrun import launch_under_torchrun

        return launch_under_torchrun(config)
    if name == "ray":
        from lp_runtime.launchers.ray_launcher import RayLauncher

        return RayLauncher(config)
    try:
        return _launch_here(config)
    finally:
        kill_unused()


def _launch_here(config: RuntimeConfig) -> Launcher:
    """Start replicas on this machine, in this process or in child processes."""
    from lp_runtime.launchers.split import choose_split, free_of_this_machine, visible_on

    config = choose_split(config, visible_on(config.device), free_of_this_machine)
    if config.num_replicas == config.num_shards == 1 and not config.launcher.own_process:
        from lp_runtime.launchers.local import LocalLauncher

        return LocalLauncher(config)
    from lp_runtime.launchers.spawn import SpawnLauncher

    return SpawnLauncher(config)
