"""Handling of TF32, which NVIDIA's images enable for float32 by TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1."""

from __future__ import annotations

import functools
import logging
import warnings

import torch

log = logging.getLogger(__name__)


def turn_off_tf32() -> None:
    """Compute float32 products in full precision in this process.

    16-bit models need it, too: they compute rotary factors in float32. The setting is global to the process, so
    call this only in processes that we started.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32", UserWarning)
        # Set by the older API: torch.compile reads it, and fails if only `fp32_precision` is set.
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False


@functools.cache
def warn_of_tf32() -> None:
    """Warn once if float32 products use TF32. For the caller's process, whose settings we leave alone."""
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        log.warning(
            "float32 products are TF32 in this process (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1, or torch's settings), which"
            " may change the output: call torch.set_float32_matmul_precision('highest')"
        )
