"""Helpers that any module may import: compiled functions, files, tensors, generators."""
