"""Replacements of a model's blocks that compute equal results in fewer operations."""
