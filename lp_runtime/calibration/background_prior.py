"""Asks a replica's model about the vocabulary between requests."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from lp_runtime.calibration.calibration import Calibration
from lp_runtime.calibration.idle_worker import IdleWorker
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.distributed.transport.group import Group


class BackgroundPrior:
    """Completes the vocabulary prior while no request uses the model, where the replica's settings want the prior.

    Args:
        calibration: gradual; has been prepared.
        group: the replicas that share the prior.
        settings: the replica's own.
        after_use: whether to begin after the next request: slots may hold what a request goes on with.
    """

    def __init__(self, calibration: Calibration, group: Group, settings: LookaheadConfig, after_use: bool):
        self._calibration, self._group = calibration, group
        self._worker: IdleWorker | None = None
        if settings.has_vocabulary_prior and not calibration.has_vocabulary:
            self._worker = IdleWorker(self._work, f"vocabulary prior of rank {group.rank}")
            self._worker.start(after_use)

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which the model is not asked."""
        return nullcontext() if self._worker is None else self._worker.paused()

    def close(self) -> None:
        """End the asking, and keep what was found."""
        if self._worker is not None:
            self._worker.stop()
            if self._group.is_alone:  # others may wait for a new group
                self._calibration.save_vocabulary()

    def _work(self) -> bool:
        """Ask about a slice of the vocabulary; return whether this replica has more to ask."""
        has_more = self._calibration.ask_vocabulary()
        if not has_more:
            self._calibration.save_vocabulary()
        return has_more
