"""Decode requests alone and in batches, on an engine of one replica."""

from __future__ import annotations

from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.engine.batch import Arrival
from lp_runtime.engine.engine import Engine
from lp_runtime.errors import LookaheadError
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.output import Report
from lp_runtime.request.request import Request
from support.engines import engine_of

FIXED = LookaheadConfig(7, 5, 7, prior="none")
KEEPING = LookaheadConfig(5, 4, 5, prior="none", draft_tables="runtime")


def decode_batch(loop: Engine, arriving: dict[int, list[Arrival]]):
    """Decode `arriving`, requests by poll number; return (tokens, logprobs, report or error) by key."""
    actual = {each.key: ([], [], None) for arrivals in arriving.values() for each in arrivals}
    num_asked = 0

    def arrivals() -> list[Arrival]:
        nonlocal num_asked
        num_asked += 1
        return arriving.get(num_asked, [])

    for key, event in loop.run_batch(arrivals):
        tokens, logprobs, end = actual[key]
        assert end is None, "nothing comes after the end"
        if isinstance(event, Report | LookaheadError):
            actual[key] = (tokens, logprobs, event)
        else:
            tokens += event.token_ids
            logprobs += event.logprobs or ()
    return actual


def decode_alone(model: ModelRunner, request: Request, stop=None):
    *runs, report = engine_of(model).run(request, stop=stop)
    return [token for run in runs for token in run.token_ids], [p for run in runs for p in run.logprobs or ()], report
