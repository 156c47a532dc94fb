"""Preparation of an engine: what its requests need is measured and compiled before they would have to wait for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lp_runtime.calibration.calibration import Calibration
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.decoder.draft_pool import DraftPool
from lp_runtime.distributed.exchange import compile_exchange, gather_rows
from lp_runtime.distributed.partition.chains import compile_chains
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.step_compilers import step_compilers
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.request import Request
from lp_runtime.utils.jit import compile_in_turns


class Preparation:
    """Measures and compiles for requests with some settings; while another process compiles, later."""

    def __init__(self, model: ModelRunner, group: Group, calibration: Calibration, draft_pool: DraftPool):
        self._model, self._group = model, group
        self._calibration, self._draft_pool = calibration, draft_pool
        self._settings: LookaheadConfig | None = None  # to prepare; None if that has been done

    def begin(self, settings: LookaheadConfig, is_later: bool) -> None:
        """Prepare for requests with `settings`, now, or when `finish` or `lacks_drafter` is called."""
        self._settings = settings
        if not is_later:
            self.finish()

    def lacks_drafter(self, request: Request, is_compiling: Callable[[], bool]) -> bool:
        """Return whether a request must begin without its drafter; equal on all replicas.

        If no replica's drafter `is_compiling` in another process, what is still missing is prepared.
        """
        if self._settings is None:
            return False
        compiles = is_compiling()  # for any request: when it becomes false, this process gets a core back
        if request.lookahead.drafter != "full":
            return False
        if gather_rows(np.array([compiles], np.int64), self._group).any():
            return True
        self.finish()
        return False

    def finish(self) -> None:
        """Measure and compile what is still missing."""
        settings, self._settings = self._settings, None
        if settings is None:
            return
        is_full, is_shared = settings.drafter == "full", not self._group.is_alone
        chains = [compile_chains] if self._model.feeds_chains else []
        exchange = [compile_exchange] if is_shared else []
        compile_in_turns([*chains, *exchange, *step_compilers(is_full, is_shared)])
        if is_full:
            if settings.is_auto:
                self._calibration.max_step_tokens()
            if settings.has_vocabulary_prior:
                self._calibration.vocabulary()
            self._draft_pool.release(self._draft_pool.acquire(settings.draft_tables_bytes))
