"""Attention over a token tree, its masks, and the strict variant."""
