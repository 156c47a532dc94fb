"""Partition of a token tree into one share per replica."""
