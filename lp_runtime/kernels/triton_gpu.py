"""All Triton kernels in one module, and the kernel that gates the MLP.

triton_cache.py has the kernels that rotate queries and keys and write the caches; triton_attention.py and
triton_strict.py have attention; triton_norm.py, triton_sampling.py and triton_cut.py the rest. All need Triton (tests
run them in its interpreter).

Letters: F the MLP's inner size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from lp_runtime.kernels.early_launch import early_launch
from lp_runtime.kernels.triton_attention import attend as attend  # `as` marks a re-export
from lp_runtime.kernels.triton_cache import rotate_and_write as rotate_and_write
from lp_runtime.kernels.triton_cache import write as write
from lp_runtime.kernels.triton_cut import can_cut as can_cut
from lp_runtime.kernels.triton_cut import cut_scores as cut_scores
from lp_runtime.kernels.triton_cut import find_cut as find_cut
from lp_runtime.kernels.triton_norm import add_and_norm as add_and_norm
from lp_runtime.kernels.triton_norm import can_add_and_norm as can_add_and_norm
from lp_runtime.kernels.triton_sampling import find_in_slice as find_in_slice
from lp_runtime.kernels.triton_sampling import pack_found as pack_found
from lp_runtime.kernels.triton_sampling import sample_and_pack as sample_and_pack
from lp_runtime.kernels.triton_strict import attend_strictly as attend_strictly

GATE_BLOCK = 1024  # elements that a program computes


@triton.jit
def _gate(gate_up, output, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Gate one block of one token's inner dimension; one program per token and block."""
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    if EARLY:
        gdc_wait()
    gate = tl.load(gate_up + token * 2 * size + places, mask=inside).to(tl.float32)
    up = tl.load(gate_up + token * 2 * size + size + places, mask=inside).to(tl.float32)
    tl.store(output + token * size + places, gate * tl.sigmoid(gate) * up, mask=inside)


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) * second half of contiguous `gate_up`: [..., 2 F] to [..., F]."""
    size = gate_up.shape[-1] // 2
    output = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    grid = (output.numel() // size, triton.cdiv(size, GATE_BLOCK))
    _gate[grid](gate_up, output, size, BLOCK=GATE_BLOCK, **early_launch(gate_up.device))
    return output
