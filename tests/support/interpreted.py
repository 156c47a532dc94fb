"""Make Triton interpret its kernels if there is no GPU; import this module before anything else.

Triton reads the setting when it is first imported, which parts of torch do.
"""

from __future__ import annotations

import contextlib
import functools
import os
from types import SimpleNamespace

import torch


def _patch_once() -> None:
    """Make Triton's interpreter replace the functions of `triton.language` once per process.

    It does so in each launch and in each call of a device function, and restores them after the launch. That takes 40%
    of the time of small kernels. NumPy's dtypes are looked up once, too.
    """
    from triton.runtime import interpreter

    find = interpreter._get_np_dtype
    find_scalar = functools.cache(find)
    plain = interpreter.tl.dtype
    interpreter._get_np_dtype = lambda dtype: (find_scalar if type(dtype) is plain else find)(dtype)

    patch = interpreter._patch_lang
    languages = (interpreter.tl, interpreter.tl.core)
    patched: set[str] = set()  # modules of kernels
    applied: set[tuple[bool, ...]] = set()
    kept = SimpleNamespace(restore=lambda: None)

    def patch_lang(function):
        if function.__module__ not in patched:
            names = function.__globals__.values()
            seen = tuple(any(each is language for each in names) for language in languages)
            if seen not in applied:
                patch(function)
                applied.add(seen)
            patched.add(function.__module__)
        return kept

    interpreter._patch_lang = patch_lang


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError, AttributeError):  # no Triton, or another interpreter, which is slower
        _patch_once()
