"""Checks that a model computes a token tree as it computes plain text."""
