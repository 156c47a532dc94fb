"""How many tokens a replica may feed in a step, whoever asks: no settings make a step that nobody can wait for."""

from __future__ import annotations

from lp_runtime.calibration.calibration import Calibration
from lp_runtime.config.lookahead import UNMEASURED_STEP_TOKENS, LookaheadConfig
from lp_runtime.model.capacity import STEP_TOKENS


def step_limit(settings: LookaheadConfig, calibration: Calibration) -> int:
    """Return how many tokens a replica may feed in a step of a request.

    The limit is the request's budget, the tokens that memory is kept free for, and, for trees of more than
    UNMEASURED_STEP_TOKENS nodes, the largest step that was measured. Measuring ends where a step takes a fixed multiple
    of the time of one token.

    Args:
        settings: the request's.
        calibration: what was measured of the model; asked, on all replicas alike, where the answer matters.
    """
    limit = min(settings.budget or STEP_TOKENS, STEP_TOKENS)
    if settings.is_auto:
        return min(limit, calibration.max_step_tokens())
    if settings.max_fixed_nodes > UNMEASURED_STEP_TOKENS:
        return min(limit, max(UNMEASURED_STEP_TOKENS, calibration.max_step_tokens()))
    return limit
