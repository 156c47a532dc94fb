"""Atomic loads and stores with acquire and release ordering, for memory shared by processes.

x86 keeps this order by itself. Arm does not: a reader could see a counter before the data that was written ahead of it.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

WORD_BYTES = 8


@intrinsic
def load_acquire(_context, array, index):
    """Load `array[index]` of a contiguous int64 array; later reads see all that was stored before it."""

    def generate(context, builder, signature, arguments):
        address = _address(context, builder, signature, arguments)
        return builder.load_atomic(address, "acquire", WORD_BYTES)

    return types.int64(array, types.int64), generate


@intrinsic
def store_release(_context, array, index, value):
    """Store `value` in `array[index]` of a contiguous int64 array, after all earlier writes."""

    def generate(context, builder, signature, arguments):
        address = _address(context, builder, signature, arguments)
        builder.store_atomic(arguments[2], address, "release", WORD_BYTES)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), generate


def _address(context, builder: ir.IRBuilder, signature, arguments):
    """Return the address of the element named by an intrinsic's first two arguments, array and index."""
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [arguments[1]])
