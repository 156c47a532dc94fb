"""Sampling of successors from logits: processors, Gumbel noise, top-k candidates."""
