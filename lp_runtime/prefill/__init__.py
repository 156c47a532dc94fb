"""Prefill of a prompt: reuse of cached prefixes, prompt log-probabilities, resuming after a failure."""
