"""Measurements at a replica's start: shorter ones, as tests do not need accurate ones, and their comparison."""

from lp_runtime.calibration import step_meter, vocabulary_prior
from lp_runtime.lookahead.top_k import VocabularyPrior
from lp_runtime.model.modules import packed_linear


def shorten() -> None:
    """Limit measurements, trials of layouts and the vocabulary prior at start, in this process and its forks.

    Each replica asks about one slice of the vocabulary, however fast it is: drafts must not depend on timing.
    """
    step_meter.MEASURE_SECONDS = 0.05
    step_meter.LONG_ROUNDS = 1
    packed_linear.NUM_TRIALS = 1
    vocabulary_prior.ASKING_SECONDS = 0.0


def is_equal(prior: VocabularyPrior, other: VocabularyPrior) -> bool:
    """Return whether all entries of two vocabulary priors are equal."""
    return all((mine == theirs).all() for mine, theirs in zip(prior, other, strict=True))
