"""Replacements of a model's blocks that compute the same in fewer operations."""
