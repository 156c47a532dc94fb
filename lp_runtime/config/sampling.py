"""Sampling settings: the choice of a node's successor from its logits."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

from lp_runtime.config.checks import is_list, keep_plain_values, plain, require_int, require_number
from lp_runtime.errors import ConfigError

MAX_SEED = 2**64 - 1
MIN_TEMPERATURE = 1e-4  # below this, dividing logits by the temperature could overflow
MAX_PENALTY = 2  # presence and frequency penalties: OpenAI's range
SAMPLING_ONLY = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "typical_p": 1}
"""Settings that have no effect on greedy decoding, and the value of each that is off or means greedy decoding."""


@dataclass
class SamplingConfig:
    """Sampling settings, with transformers' names and meanings.

    A setting that is None has the value of the model's generation_config.json; if that has none, it is off.
    """

    temperature: Optional[float] = None  # noqa: UP045 (OmegaConf reads this annotation)
    """0 is greedy decoding; above 0 (at least 1e-4) successors are sampled."""
    top_k: Optional[int] = None  # noqa: UP045
    """Sample among the k most likely tokens, >= 0; 0 is off."""
    top_p: Optional[float] = None  # noqa: UP045
    """Sample among the most likely tokens whose probabilities sum to this value, in (0, 1]; 1 is off."""
    min_p: Optional[float] = None  # noqa: UP045
    """Sample among tokens with at least this probability, relative to the most likely one, in [0, 1]; 0 is off."""
    typical_p: Optional[float] = None  # noqa: UP045
    """Locally typical sampling, in (0, 1]; 1 is off."""
    repetition_penalty: Optional[float] = None  # noqa: UP045
    """Penalty for tokens that occurred before, > 0; above 1 makes repetition less likely, 1 is off."""
    presence_penalty: Optional[float] = None  # noqa: UP045
    """Subtracted once from the logits of tokens that occur in the new text, -2 to 2; 0 is off. As in the OpenAI API,
    the prompt does not count."""
    frequency_penalty: Optional[float] = None  # noqa: UP045
    """Subtracted from a token's logit for each of its occurrences in the new text, -2 to 2; 0 is off."""
    no_repeat_ngram_size: Optional[int] = None  # noqa: UP045
    """No n-gram of this size may occur twice, >= 0; 0 is off."""
    bad_words_ids: Optional[list[list[int]]] = None  # noqa: UP045
    """Sequences of token ids that must not occur."""
    min_new_tokens: Optional[int] = None  # noqa: UP045
    """Number of new tokens before an end-of-sequence token may be chosen, >= 0."""
    logit_bias: Optional[dict[int, float]] = None  # noqa: UP045
    """Bias added to the logits, by token id."""
    seed: Optional[int] = None  # noqa: UP045
    """Seed of the sampling noise, 0 to 2**64 - 1; if not given, one is chosen and reported. The same seed gives the
    same output at any LP degree."""

    def __post_init__(self) -> None:
        keep_plain_values(self)
        self._check_numbers()
        self._check_bad_words()
        self._check_logit_bias()
        if self.temperature == 0:
            self._refuse_warpers("sampling.temperature=0")

    def _check_numbers(self) -> None:
        allowed = f"0 (greedy) or a number >= {MIN_TEMPERATURE}"
        require_number(
            "sampling.temperature", self.temperature, allowed, lambda value: value == 0 or value >= MIN_TEMPERATURE
        )
        for name in ("top_p", "typical_p"):
            require_number(f"sampling.{name}", getattr(self, name), "in (0, 1]", lambda value: 0 < value <= 1)
        require_number("sampling.min_p", self.min_p, "in [0, 1]", lambda value: 0 <= value <= 1)
        require_number("sampling.repetition_penalty", self.repetition_penalty, "a number > 0", lambda value: value > 0)
        for name in ("presence_penalty", "frequency_penalty"):
            allowed = f"in [-{MAX_PENALTY}, {MAX_PENALTY}]"
            require_number(
                f"sampling.{name}", getattr(self, name), allowed, lambda value: -MAX_PENALTY <= value <= MAX_PENALTY
            )
        for name in ("top_k", "no_repeat_ngram_size", "min_new_tokens", "seed"):
            require_int(f"sampling.{name}", getattr(self, name), 0, or_none=True)
        if self.seed is not None and self.seed > MAX_SEED:
            raise ConfigError(f"sampling.seed={self.seed}: must be 0 to 2**64 - 1")

    def _check_bad_words(self) -> None:
        if self.bad_words_ids is not None and not is_list(self.bad_words_ids):
            raise ConfigError(f"sampling.bad_words_ids={self.bad_words_ids}: must be lists of token ids")
        if self.bad_words_ids is None:
            return
        lists = [plain(words) for words in self.bad_words_ids]
        if not all(is_list(words) and words for words in lists):
            raise ConfigError(f"sampling.bad_words_ids={self.bad_words_ids}: must be lists of token ids, not empty")
        self.bad_words_ids = [[*map(plain, words)] for words in lists]
        for token in itertools.chain(*self.bad_words_ids):
            require_int("sampling.bad_words_ids", token, 0)

    def _check_logit_bias(self) -> None:
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise ConfigError(f"sampling.logit_bias={self.logit_bias}: must be {{TOKEN_ID: BIAS, ...}}")
        if self.logit_bias is not None:
            self.logit_bias = {plain(token): plain(bias) for token, bias in self.logit_bias.items()}
        for token, bias in (self.logit_bias or {}).items():
            require_int("sampling.logit_bias", token, 0)
            require_number(f"sampling.logit_bias of token {token}", bias, "a number", lambda value: True)

    def samples(self, defaults: Mapping[str, Any]) -> bool:
        """Whether successors are sampled, with the model's defaults of generation_config.json; if not, greedy."""
        if self.temperature is not None:
            return self.temperature > 0
        return bool(defaults.get("do_sample")) and defaults.get("temperature") != 0

    def check(self, defaults: Mapping[str, Any]) -> None:
        """Raise ConfigError if decoding is greedy with the model's defaults and a setting needs sampling."""
        if not self.samples(defaults):
            reason = "the model's default, greedy decoding; give sampling.temperature > 0"
            self._refuse_warpers(reason)
            if self.seed is not None and self.temperature is None:
                raise ConfigError(f"sampling.seed={self.seed}: has no effect with {reason}")

    def _refuse_warpers(self, reason: str) -> None:
        for name, off in SAMPLING_ONLY.items():
            if (value := getattr(self, name)) is not None and value != off:
                raise ConfigError(f"sampling.{name}={value}: has no effect with {reason}")
