"""torch's GPU allocator uses expandable segments unless the user has set its variables."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lp_runtime.distributed.environment import ALLOCATOR_VARIABLES, use_expandable_segments

# Prints the allocator settings that torch will use on a GPU, in a process that has already imported torch.
READ = """
import torch
from lp_runtime.distributed.environment import use_expandable_segments
use_expandable_segments()
print(torch._C._accelerator_getAllocatorSettings())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [{}, pytest.param({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, marks=pytest.mark.slow)]
)
def test_allocator_setting_takes_effect_after_importing_torch(given):
    others = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_VARIABLES}
    done = subprocess.run([sys.executable, "-c", READ], env=others | given, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == given.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_user_allocator_setting_is_kept(name, monkeypatch):
    for each in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "backend:cudaMallocAsync")
    use_expandable_segments()
    assert {each: os.environ.get(each) for each in ALLOCATOR_VARIABLES} == dict.fromkeys(ALLOCATOR_VARIABLES) | {
        name: "backend:cudaMallocAsync"
    }
