"""Of how many tokens of a prompt the top-k candidates are worth the time that they take of the prefill.

Pure integers.
"""

from __future__ import annotations

EXPECTED_NEW_TOKENS = 128  # that a request is taken to generate, if it may generate more
TOKENS_A_STEP = 2  # that drafting is taken to commit without them
GAIN_PERMILLE = 10  # of steps that the candidates behind a whole prompt save, about (docs/decisions/drafters.md)


def num_paying(num_tokens: int, max_new_tokens: int, step_ns: int, harvest_ns: int, num_replicas: int) -> int:
    """Return of how many of a prompt's last tokens to find the top-k candidates.

    Args:
        num_tokens: tokens of the prompt that could be harvested.
        max_new_tokens: tokens that the request may generate.
        step_ns: nanoseconds of a step of one token.
        harvest_ns: nanoseconds that one token adds to the prefill of the replica that harvests it.
        num_replicas: replicas that share the tokens, >= 1.
    """
    num_steps = min(max_new_tokens, EXPECTED_NEW_TOKENS) // TOKENS_A_STEP
    saved_ns = num_steps * step_ns * GAIN_PERMILLE // 1000
    return min(num_tokens, saved_ns * num_replicas // max(1, harvest_ns))
