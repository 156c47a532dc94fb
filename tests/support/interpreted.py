"""Imported before anything else is: without a GPU Triton's kernels are interpreted, if that is said when Triton is
first imported, as parts of torch do."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
