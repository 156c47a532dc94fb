"""Loads and stores of memory that processes share, in the order in which the program makes them.

x86 keeps that order by itself, Arm does not: there a reader may see a counter before the data that was written first.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

WORD_BYTES = 8


@intrinsic
def load_acquire(_context, array, index):
    """Return an element of a contiguous int64 array; what is read later was written before that element's value was."""

    def generate(context, builder, signature, arguments):
        address = _address(context, builder, signature, arguments)
        return builder.load_atomic(address, "acquire", WORD_BYTES)

    return types.int64(array, types.int64), generate


@intrinsic
def store_release(_context, array, index, value):
    """Write an element of a contiguous int64 array after everything that was written before."""

    def generate(context, builder, signature, arguments):
        address = _address(context, builder, signature, arguments)
        builder.store_atomic(arguments[2], address, "release", WORD_BYTES)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), generate


def _address(context, builder: ir.IRBuilder, signature, arguments):
    """Return the address of the element that an intrinsic's first two arguments name."""
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [arguments[1]])
