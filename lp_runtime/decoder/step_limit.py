"""Upper bound on the tokens of a step: no settings may make a step that takes too long."""

from __future__ import annotations

from lp_runtime.calibration.calibration import Calibration
from lp_runtime.config.lookahead import UNMEASURED_STEP_TOKENS, LookaheadConfig
from lp_runtime.model.capacity import STEP_TOKENS


def step_limit(settings: LookaheadConfig, calibration: Calibration) -> int:
    """Return how many tokens a replica may feed in a step of a request.

    It is the minimum of the request's budget, the tokens for which memory is reserved, and the largest measured step;
    the last counts for automatic sizes and for trees of more than UNMEASURED_STEP_TOKENS nodes. Measuring stops at a
    fixed multiple of the time of a one-token step. Where the largest measured step counts, the calibration may measure
    and gather here, so all replicas must call this for the same request.
    """
    limit = min(settings.step_limit or STEP_TOKENS, STEP_TOKENS)
    if settings.is_auto:
        return min(limit, calibration.max_step_tokens())
    if settings.max_fixed_nodes > UNMEASURED_STEP_TOKENS:
        return min(limit, max(UNMEASURED_STEP_TOKENS, calibration.max_step_tokens()))
    return limit
