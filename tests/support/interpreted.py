"""Make Triton interpret its kernels if there is no GPU; import this module before anything else.

Triton reads the setting when it is first imported, which parts of torch do.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
