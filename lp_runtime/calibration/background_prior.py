"""Background queries for the vocabulary prior, run while no request uses the model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from lp_runtime.calibration.calibration import Calibration
from lp_runtime.calibration.idle_worker import IdleWorker
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.distributed.transport.group import Group


class BackgroundPrior:
    """Completes the vocabulary prior between requests, if the settings ask for one.

    `calibration` is already prepared; only a gradual one is completed. With `after_use` it waits for the next request
    first, because slots may hold what that request will resume from.
    """

    def __init__(self, calibration: Calibration, group: Group, settings: LookaheadConfig, after_use: bool):
        self._calibration, self._group = calibration, group
        self._worker: IdleWorker | None = None
        if calibration.is_gradual and settings.has_vocabulary_prior and not calibration.has_vocabulary:
            self._worker = IdleWorker(self._work, f"vocabulary prior of rank {group.rank}")
            self._worker.start(after_use)

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which the prior does not use the model."""
        return nullcontext() if self._worker is None else self._worker.paused()

    def close(self) -> None:
        """Stop querying the model; save the results if this replica is alone."""
        if self._worker is not None:
            self._worker.stop()
            if self._group.is_alone:  # in a group, others may be waiting to form a new one: do not delay them
                self._calibration.save_vocabulary()

    def _work(self) -> bool:
        """Query a slice of the vocabulary; return whether this replica has more to query."""
        has_more = self._calibration.ask_vocabulary()
        if not has_more:
            self._calibration.save_vocabulary()
        return has_more
