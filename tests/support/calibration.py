"""Shorter measurements at the start of a replica: tests need some, not good ones."""

from lp_runtime.calibration import step_meter, vocabulary_prior


def shorten() -> None:
    """Limit what this process, and those forked from it, measure and ask at start.

    Each replica asks about one slice of the vocabulary, however fast it is: drafts must not depend on the time.
    """
    step_meter.MEASURE_SECONDS = 0.2
    vocabulary_prior.ASKING_SECONDS = 0.0
