"""Attention over a token tree, its masks, and the bit-exact variant for exactness=strict."""
