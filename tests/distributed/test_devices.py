"""The device that replicas run on, and the message for a machine whose GPUs torch cannot use."""

from __future__ import annotations

import os

import pytest
import torch

from lp_runtime.distributed import devices
from lp_runtime.distributed.devices import check_one_each, device_type, must_sleep, warn_of_few_cores, why_no_gpu
from lp_runtime.errors import ConfigError, LaunchError
from lp_runtime.launchers.split import free_of_this_machine, visible_on
from lp_runtime.replica.loading import choose_device
from lp_runtime.utils import limits

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: 12\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@host)\n"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Simulate a machine whose NVIDIA devices torch does not see.

    Return a function that sets the driver, torch's CUDA version and the control device.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "DRIVER_VERSION", tmp_path / "version")
    monkeypatch.setattr(devices, "DRIVER_CONTROL", tmp_path / "nvidiactl")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(driver: str | None, cuda: str | None, has_control: bool = True) -> None:
        if driver is not None:
            (tmp_path / "version").write_text(driver)
        if has_control:
            (tmp_path / "nvidiactl").touch()
        monkeypatch.setattr(torch.version, "cuda", cuda)

    return make


def test_too_old_driver_is_refused(machine):
    machine(CLOSED, "13.0")
    reason = why_no_gpu()
    assert "driver is 550.54.15" in reason and "CUDA 13.0 needs 580 or newer" in reason
    assert "update the driver, or install a torch built for an older CUDA" in reason
    for device in ("auto", "cuda"):
        for refuse in (device_type, visible_on, lambda each: choose_device(each, 0)):
            with pytest.raises(ConfigError) as refusal:
                refuse(device)
            assert str(refusal.value) == f"device={device}: {reason} (on CPUs: device=cpu)"
    assert device_type("cpu") == "cpu" and visible_on("cpu") == 0 and choose_device("cpu", 0).type == "cpu"
    with pytest.raises(LaunchError, match="driver is 550"):
        free_of_this_machine()


@pytest.mark.parametrize(("driver", "cuda"), [(CLOSED, "12.6"), (OPEN, "13.0"), (CLOSED, "14.1"), ("?", "13.0")])
def test_sufficient_or_unknown_driver_suggests_nvidia_smi(machine, driver, cuda):
    machine(driver, cuda)
    assert "torch sees no GPU" in why_no_gpu() and "run nvidia-smi" in why_no_gpu()


def test_torch_without_cuda_is_reported(machine):
    machine(OPEN, None)
    assert "is built without CUDA" in why_no_gpu() and "install a CUDA build" in why_no_gpu()


def test_container_without_gpu_access_falls_back_to_cpu(machine, caplog):
    machine(OPEN, "13.0", has_control=False)
    assert "580.65.06" in why_no_gpu() and "--gpus all" in why_no_gpu()
    with pytest.raises(ConfigError, match="device=cuda: torch sees no GPU"):
        device_type("cuda")
    assert device_type("auto") == "cpu" and "going on with CPUs" in caplog.text


def test_container_with_cpu_build_reports_no_missing_gpu(machine):
    machine(OPEN, None, has_control=False)
    assert why_no_gpu() is None


def test_machine_without_gpus_uses_the_cpu(machine):
    machine(None, "13.0", has_control=False)
    assert why_no_gpu() is None and device_type("auto") == "cpu" and device_type("cuda") == "cuda"


@pytest.mark.parametrize("visible", ["", "-1", "-1,0", "NoDevFiles"])
def test_gpus_hidden_by_the_environment_are_not_reported(machine, monkeypatch, visible):
    machine(CLOSED, "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert why_no_gpu() is None and device_type("auto") == "cpu"


def test_wrong_cuda_visible_devices_is_reported(machine, monkeypatch):
    machine(OPEN, "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "CUDA_VISIBLE_DEVICES=7" in why_no_gpu()


def test_two_replicas_on_one_gpu_are_refused():
    check_one_each([0, 0, 5, 6, 7])
    with pytest.raises(ConfigError, match="replicas 1 and 3 have the same GPU.*--gpus-per-task=1"):
        check_one_each([0, 5, 6, 5])


@pytest.mark.parametrize(
    ("affinity", "quota", "num_local", "owns_device", "expected"),
    [
        (16, None, 8, False, False),
        (15, None, 8, False, True),
        (16, "max 100000", 8, False, False),
        (16, "1550000 100000", 8, False, True),
        (16, None, 8, True, False),  # assigned by Ray, which lets every process use all cores
        (15, None, 8, True, False),  # pinned to its own cores
        (1, None, 1, True, True),
    ],
)
def test_replicas_must_sleep_if_cores_do_not_suffice_for_polling(
    monkeypatch, tmp_path, affinity, quota, num_local, owns_device, expected
):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(affinity)))
    monkeypatch.setattr(limits, "ROOT", tmp_path)
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert must_sleep(num_local, owns_device) is expected


@pytest.mark.parametrize(("num_cores", "num_local", "warns"), [(7, 8, True), (8, 8, False), (1, 1, False)])
def test_fewer_cores_than_replicas_logs_a_warning(monkeypatch, caplog, num_cores, num_local, warns):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(num_cores)))
    warn_of_few_cores(num_local)
    assert [record.message.startswith("7 cores for 8 processes") for record in caplog.records] == [True] * warns
