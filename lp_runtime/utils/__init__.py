"""Helpers that any module may import: Numba compilation, files, tensors, generators, warnings."""
