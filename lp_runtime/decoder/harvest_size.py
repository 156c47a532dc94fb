"""Choice of the prompt tokens for which the prefill collects top-k candidates (lp_runtime/prefill/harvest.py)."""

from __future__ import annotations

from lp_runtime.calibration.calibration import Calibration
from lp_runtime.lookahead.drafter import Drafter
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.request import Request

MAX_HARVESTED = 1 << 13  # tokens: draft tables of the default size hold the candidates of that many
EXPECTED_NEW_TOKENS = 128  # assumed length of an answer whose limit is higher
TOKENS_A_STEP = 2  # assumed tokens per step without the prompt's candidates
GAIN_PERMILLE = 10  # steps saved by the candidates of a whole prompt, about (docs/decisions/drafters.md)


def num_to_harvest(
    request: Request, drafter: Drafter, model: ModelRunner, calibration: Calibration, num_replicas: int
) -> int:
    """Return how many trailing prompt tokens are worth collecting top-k candidates for.

    With exactness=strict it is 0: a head that runs on more tokens may round differently. If the step size is
    automatic, the calibration may measure and gather here, so all replicas must call this for the same request.
    """
    num_tokens = min(len(request.prompt_ids), MAX_HARVESTED) if request.lookahead.prompt_top_k else 0
    if not num_tokens or not drafter.learns_prompt or model.strict_tokens is not None or request.committed:
        return 0
    if not request.lookahead.is_auto:
        return num_tokens
    step_ns = int(calibration.times(1)[:, 1].min())
    return num_paying(num_tokens, request.max_new_tokens, step_ns, calibration.harvest_ns(), num_replicas)


def num_paying(num_tokens: int, max_new_tokens: int, step_ns: int, harvest_ns: int, num_replicas: int) -> int:
    """Return for how many tokens, at most `num_tokens`, candidates save more time than they take.

    `step_ns` is the duration of a step of one token, and `harvest_ns` what collecting one token's candidates adds to
    the prefill of its replica.
    """
    num_steps = min(max_new_tokens, EXPECTED_NEW_TOKENS) // TOKENS_A_STEP
    saved_ns = num_steps * step_ns * GAIN_PERMILLE // 1000
    return min(num_tokens, saved_ns * num_replicas // max(1, harvest_ns))
