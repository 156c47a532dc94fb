"""TF32, to which TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 in NVIDIA's images rounds the products of float32."""

from __future__ import annotations

import functools
import logging
import warnings

import torch

log = logging.getLogger(__name__)


def turn_off_tf32() -> None:
    """Compute float32 as float32 in this process, which must be ours. 16-bit models compute rotary factors so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32", UserWarning)
        # By the older names: torch.compile reads them, and fails where `fp32_precision` alone was set.
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False


@functools.cache
def warn_of_tf32() -> None:
    """Warn, once, if products of float32 are TF32 in this process, which is the caller's."""
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        log.warning(
            "float32 products are TF32 in this process (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1, or torch's settings), which"
            " output may depend on: call torch.set_float32_matmul_precision('highest')"
        )
