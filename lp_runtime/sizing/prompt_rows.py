"""The number of prompt tokens to collect top-k candidates for, at the cost of a longer prefill.

Integers only.
"""

from __future__ import annotations

EXPECTED_NEW_TOKENS = 128  # assumed length of an answer whose limit is higher
TOKENS_A_STEP = 2  # assumed tokens per step without the prompt's candidates
GAIN_PERMILLE = 10  # steps saved by the candidates of a whole prompt, about (docs/decisions/drafters.md)


def num_paying(num_tokens: int, max_new_tokens: int, step_ns: int, harvest_ns: int, num_replicas: int) -> int:
    """Return how many trailing prompt tokens are worth collecting top-k candidates for.

    `step_ns` is the duration of a step of one token, and `harvest_ns` what collecting one token's candidates adds to
    the prefill of its replica. `num_replicas`, at least 1, share the tokens.
    """
    num_steps = min(max_new_tokens, EXPECTED_NEW_TOKENS) // TOKENS_A_STEP
    saved_ns = num_steps * step_ns * GAIN_PERMILLE // 1000
    return min(num_tokens, saved_ns * num_replicas // max(1, harvest_ns))
