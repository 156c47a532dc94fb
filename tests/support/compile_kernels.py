"""Compile our Triton kernels for GPUs that this machine need not have; print a line for each kernel.

A line has bytes of shared memory, registers, bytes of stack (spilled registers) and fused multiply-adds in float32.

    python tests/support/compile_kernels.py 80 90

Letters as in triton_gpu.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lp_runtime.kernels import triton_attention as attention
from lp_runtime.kernels import triton_cache as cache
from lp_runtime.kernels import triton_cut, triton_router, triton_sampling
from lp_runtime.kernels import triton_experts as experts
from lp_runtime.kernels import triton_gpu as kernels
from lp_runtime.kernels import triton_strict as strict

TYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
POINTERS = (
    "query key value states output total outputs totals merged rotated cos sin gate_up added weight normed logits sinks"
)
INTEGERS = "owners table lowest positions words paths"
STRIDES = "token_stride head_stride query_stride key_stride value_stride"
WHOLE = f"num_tokens num_words num_parts num_found num_rows column size {STRIDES}"
ALIGNED = f"{STRIDES} size"  # multiples of 16, as in real passes
EXACT = {"enable_fp_fusion": False}
SAMPLING = dict.fromkeys(["values", "thresholds", "best_values"], "*fp32")
SAMPLING |= dict.fromkeys(["ids", "first_ids", "best_ids"], "*i32") | {"packed": "*i64", "positions": "*i64"}
SAMPLING |= dict.fromkeys(["key_low", "key_high", "sample", "first", "stride", "num_chunks", "top_k"], "i32")
SAMPLING |= dict.fromkeys(["inverse_temperature", "cut_mass", "reach", "mass_unit"], "fp32")


def compile_kernel(kernel, capability: int, dtype: str, others: dict[str, str], constants: dict, **options: int) -> str:
    """Compile a kernel for arguments of these types; return the line about it."""
    types = dict.fromkeys(POINTERS.split(), f"*{dtype}") | dict.fromkeys(WHOLE.split(), "i32")
    types |= (
        {"num_used": "*i32"}
        | dict.fromkeys(["scale", "epsilon"], "fp32")
        | dict.fromkeys(INTEGERS.split(), "*i64")
        | others
    )
    if "EARLY" in kernel.arg_names:
        constants = constants | {"EARLY": capability >= 90}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name not in constants and (types[name].startswith("*") or name in ALIGNED.split())
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stack, registers = (int(re.search(rf"{what}:(\d+)", used)[1]) for what in ("STACK", "REG"))
    what = f"{kernel.__name__.lstrip('_')} sm_{capability} {dtype} {constants}"
    fused = len(re.findall(r"\bfma\.rn(\.ftz)?\.f32", compiled.asm["ptx"]))
    return f"{what} shared={compiled.metadata.shared} registers={registers} stack={stack} fused={fused}"


def print_strict(capability: int, dtype: str, size: int, groups: int) -> None:
    """Print lines for both kernels of exactness=strict."""
    blocks = attention.blocks(strict.MANY_ROWS, size, TYPES[dtype])
    shared = {"GROUPS": groups, "SIZE": size, "PARTS": strict.NUM_PARTS, "POSITIONS": 64, "WIDTH": 68, **blocks}
    head = shared | {"NUM_ROWS": 17, "BLOCK_TABLE": 32}
    others = dict.fromkeys(["output", "total", "outputs", "totals"], "*fp32")
    num_warps = attention.num_warps(TYPES[dtype])
    print(compile_kernel(strict._attend_head, capability, dtype, others, head, num_stages=2, num_warps=num_warps))
    rows = max(attention.MIN_BLOCK, triton.next_power_of_2(groups))
    tail = shared | {"HAS_SINKS": True, "BLOCK_ROWS": rows}
    num_warps = attention.num_warps(TYPES[dtype])
    print(compile_kernel(strict._attend_tail, capability, dtype, others, tail, num_stages=2, num_warps=num_warps))


def print_experts(capability: int) -> None:
    """Print lines for the kernels of a mixture of experts: of few and of many pairs, dense and stored as gpt-oss's."""
    others = dict.fromkeys(["states", "weights", "bias", "output"], "*{}") | {"experts": "*i64"}
    others |= dict.fromkeys(["num_pairs", "num_outputs", "num_experts"], "i32") | {"alpha": "fp32", "limit": "fp32"}
    cases = [("bf16", 16, 2, False), ("bf16", 16, 512, False), ("bf16", 64, 512, False)]
    cases += [("bf16", 16, 64, True), ("bf16", 32, 512, True), ("fp32", 32, 512, True)]
    for dtype, rows, num_pairs, is_transposed in cases:
        for is_gated in (True, False):
            tile = experts.tile_of(rows, num_pairs, 2048, TYPES[dtype], is_transposed and is_gated)
            constants = {"CHOICES": 4, "BY_EXPERT": rows > 16, "ROWS": rows, "SEARCH": experts.SEARCH_BLOCK}
            constants |= {"OUTPUTS": tile.outputs, "BLOCK": tile.block, "IS_TRANSPOSED": is_transposed}
            constants |= {"HAS_BIAS": is_transposed, "IS_EVEN": not is_transposed}
            constants |= {"IS_GATED": is_gated, "IS_INTERLEAVED": is_gated and is_transposed}
            constants |= {"ACTIVATION": "clamped" if is_transposed else "silu"}
            types = {name: each.format(dtype) for name, each in others.items()}
            options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
            print(compile_kernel(experts._expert_product, capability, dtype, types, constants, **options))
    choices = {"CHOICES": 8, "BLOCK": experts.SUM_BLOCK}
    print(compile_kernel(experts._sum_choices, capability, "bf16", {"scores": "*bf16"}, choices))
    types = {"correction": "*fp32", "scores": "*bf16", "experts": "*i64", "num_experts": "i32", "scale": "fp32"}
    for scores, num_experts, num_groups in (("softmax", 128, 1), ("sigmoid", 256, 8)):
        choose = {"CHOICES": 8, "PLACES": 8, "SCORES": scores, "NORMALIZES": True, "BLOCK": num_experts}
        choose |= {"HAS_CORRECTION": num_groups > 1, "GROUPS": num_groups, "KEPT": num_groups // 2}
        print(compile_kernel(triton_router._choose, capability, "bf16", types, choose, num_warps=1))


def main(capabilities: list[int]) -> None:
    """Print a line for each kernel and compute capability."""
    for capability in capabilities:
        for dtype, size, tokens, groups in (
            ("bf16", 128, 1, 1),
            ("bf16", 128, 64, 4),
            ("bf16", 128, 1024, 8),
            ("fp16", 64, 8, 2),
            ("bf16", 96, 32, 1),
            ("bf16", 256, 64, 1),
            ("fp32", 128, 16, 4),
            ("fp32", 64, 16, 4),
        ):
            blocks = attention.blocks(tokens * groups, size, TYPES[dtype])
            for num_parts, num_rows in ((8, 2), (1, 2)) if tokens == 1 else ((8, 2), (8, 17)):
                constants = {"GROUPS": groups, "SIZE": size, "HAS_PARTS": num_parts > 1, "HAS_SINKS": tokens == 64}
                constants |= {**blocks, "WIDTH": 68}
                constants |= {"NUM_ROWS": num_rows, "BLOCK_TABLE": 32 if num_rows > 2 else 2}
                others = {"output": "*fp32" if num_parts > 1 else f"*{dtype}", "total": "*fp32"}
                print(
                    compile_kernel(
                        attention._attend_part,
                        capability,
                        dtype,
                        others,
                        constants,
                        num_stages=attention.num_stages(blocks, TYPES[dtype]),
                        num_warps=attention.num_warps(TYPES[dtype]),
                    )
                )
        merged = {"QUERY_HEADS": 32, "SIZE": 128, "HAS_SINKS": True, "BLOCK_PARTS": 64, "BLOCK_SIZE": 128}
        others = {"outputs": "*fp32", "totals": "*fp32"}
        print(compile_kernel(attention._merge_parts, capability, "bf16", others, merged, num_warps=4))
        for dtype, size, groups in (
            ("bf16", 128, 4),
            ("bf16", 128, 1),
            ("fp16", 64, 8),
            ("bf16", 256, 2),
            ("fp32", 128, 4),
            ("fp32", 64, 4),
        ):
            print_strict(capability, dtype, size, groups)
        for half, num_rotated, has_norm, neighbors, step, num_angles in (
            (64, 128, False, False, 1, 128),
            (64, 128, True, False, 1, 128),
            (128, 256, True, False, 1, 256),
            (32, 64, False, False, 1, 32),  # gpt-oss
            (64, 96, True, False, 1, 96),  # a part of each head
            (64, 64, False, True, 1, 64),  # GLM 4
            (64, 128, False, True, 2, 128),  # Cohere
        ):
            heads = {"WIDTH": 68, "QUERY_HEADS": 32, "KEY_HEADS": 8, "SIZE": 2 * half, "HALF": num_rotated // 2}
            heads |= {"BLOCK": half, "NEIGHBORS": neighbors, "ANGLE_STEP": step}
            heads |= {"BLOCK_HEADS": 1024 // half, "NUM_ANGLES": num_angles, "HAS_NORM": has_norm}
            others = {"query_weight": "*fp32", "key_weight": "*fp32"}
            print(compile_kernel(cache._rotate_and_write, capability, "bf16", others, heads, num_warps=4))
        head = {"WIDTH": 68, "SIZE": 128, "BLOCK": 128}
        print(compile_kernel(cache._write, capability, "bf16", {}, head, num_warps=1))
        for activation in ("silu", "gelu_tanh"):
            gate = {"ACTIVATION": activation, "BLOCK": kernels.GATE_BLOCK}
            print(compile_kernel(kernels._gate, capability, "bf16", {}, gate))
        for size in (4096, 8192, kernels.MAX_NORM_SIZE):
            block = {"BLOCK": size, "HAS_ADDED": True, "NORMS_ADDED": size == kernels.MAX_NORM_SIZE}
            num_warps, others = kernels.num_norm_warps(size), {"added_weight": "*bf16"}
            print(compile_kernel(kernels._add_and_norm, capability, "bf16", others, block, num_warps=num_warps))
        one = {"NUM": 8}
        for dtype, shift, draws in (("bf16", 16, True), ("bf16", 16, False), ("fp32", 0, True)):
            for is_odd in (False, True):
                chunk = {**one, "DRAWS": draws, "HAS_CUT": draws and not is_odd, "SHIFT": shift, "IS_ODD": is_odd}
                chunk["BLOCK"] = triton_sampling.CHUNK
                print(compile_kernel(triton_sampling._scan_chunks, capability, dtype, SAMPLING, chunk, **EXACT))
        packing = {"WIDTH": 5, "BLOCK": 512, "BLOCK_CHUNKS": 64}
        row = {**one, **packing, "HAS_BEST": True}
        print(compile_kernel(triton_sampling._pack_rows, capability, "fp32", SAMPLING, row))
        for dtype, shift in (("bf16", 16), ("fp32", 0)):
            cut = {"HAS_TOP_K": True, "HAS_TOP_P": True, "SHIFT": shift, "BLOCK": triton_cut.CUT_BLOCK}
            num_warps = triton_cut.CUT_WARPS
            print(compile_kernel(triton_cut._find_cut, capability, dtype, SAMPLING, cut, num_warps=num_warps, **EXACT))
        print_experts(capability)


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]])
