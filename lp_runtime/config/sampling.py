"""How a successor is chosen from logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

from lp_runtime.config.checks import is_list, require_int, require_number
from lp_runtime.errors import ConfigError

MAX_SEED = 2**64 - 1
MIN_TEMPERATURE = 1e-4  # below it logits would overflow
WARPERS = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "typical_p": 1}
"""Settings that matter to sampling alone, and the value at which each does nothing or means greedy decoding."""


@dataclass
class SamplingConfig:
    """How a successor is drawn from a node's logits, in transformers' terms.

    What is None is as the model's generation_config.json says, else off.
    """

    temperature: Optional[float] = None  # noqa: UP045
    """0 is greedy decoding; if given and above 0 (at least 1e-4), successors are sampled."""
    top_k: Optional[int] = None  # noqa: UP045
    """Draw among the k most likely tokens, >= 0; 0 is off."""
    top_p: Optional[float] = None  # noqa: UP045
    """Draw among the most likely tokens that hold this much probability, in (0, 1]; 1 is off."""
    min_p: Optional[float] = None  # noqa: UP045
    """Draw among tokens at least this likely, relative to the most likely one, in [0, 1]; 0 is off."""
    typical_p: Optional[float] = None  # noqa: UP045
    """Locally typical sampling, in (0, 1]; 1 is off."""
    repetition_penalty: Optional[float] = None  # noqa: UP045
    """> 0; above 1 makes tokens that stand in the text already less likely."""
    no_repeat_ngram_size: Optional[int] = None  # noqa: UP045
    """No n-gram of this size occurs twice, >= 0; 0 is off."""
    bad_words_ids: Optional[list[list[int]]] = None  # noqa: UP045
    """Sequences of token ids that must not occur."""
    min_new_tokens: Optional[int] = None  # noqa: UP045
    """No end-of-sequence token before this many new tokens, >= 0."""
    logit_bias: Optional[dict[int, float]] = None  # noqa: UP045
    """Added to the logits, by token id."""
    seed: Optional[int] = None  # noqa: UP045
    """0 to 2**64 - 1; one is drawn, and reported, if not given. One seed, one output, whatever the parallelism."""

    def __post_init__(self) -> None:
        allowed = f"0 (greedy) or a number >= {MIN_TEMPERATURE}"
        require_number(
            "sampling.temperature", self.temperature, allowed, lambda value: value == 0 or value >= MIN_TEMPERATURE
        )
        for name in ("top_p", "typical_p"):
            require_number(f"sampling.{name}", getattr(self, name), "in (0, 1]", lambda value: 0 < value <= 1)
        require_number("sampling.min_p", self.min_p, "in [0, 1]", lambda value: 0 <= value <= 1)
        require_number("sampling.repetition_penalty", self.repetition_penalty, "a number > 0", lambda value: value > 0)
        for name in ("top_k", "no_repeat_ngram_size", "min_new_tokens", "seed"):
            if getattr(self, name) is not None:
                require_int(f"sampling.{name}", getattr(self, name), 0)
        if self.seed is not None and self.seed > MAX_SEED:
            raise ConfigError(f"sampling.seed={self.seed}: must be 0 to 2**64 - 1")
        if self.bad_words_ids is not None and not is_list(self.bad_words_ids):
            raise ConfigError(f"sampling.bad_words_ids={self.bad_words_ids}: must be lists of token ids")
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise ConfigError(f"sampling.logit_bias={self.logit_bias}: must be {{TOKEN_ID: BIAS, ...}}")
        for words in self.bad_words_ids or ():
            if not is_list(words) or not words:
                raise ConfigError(f"sampling.bad_words_ids={self.bad_words_ids}: must be lists of token ids, not empty")
            for token in words:
                require_int("sampling.bad_words_ids", token, 0)
        for token, bias in (self.logit_bias or {}).items():
            require_int("sampling.logit_bias", token, 0)
            require_number(f"sampling.logit_bias of token {token}", bias, "a number", lambda value: True)
        if self.temperature == 0:
            self._refuse_warpers("sampling.temperature=0")

    def draws(self, defaults: Mapping[str, Any]) -> bool:
        """Whether successors are sampled, else picked greedily; `defaults` are the model's own."""
        if self.temperature is not None:
            return self.temperature > 0
        return bool(defaults.get("do_sample")) and defaults.get("temperature") != 0

    def check(self, defaults: Mapping[str, Any]) -> None:
        """Refuse what has no effect with a model's own defaults.

        Raises:
            ConfigError: if a setting is for sampling, and decoding is greedy.
        """
        if not self.draws(defaults):
            reason = "the model's default, greedy decoding; give sampling.temperature > 0"
            self._refuse_warpers(reason)
            if self.seed is not None and self.temperature is None:
                raise ConfigError(f"sampling.seed={self.seed}: has no effect with {reason}")

    def _refuse_warpers(self, reason: str) -> None:
        for name, off in WARPERS.items():
            if (value := getattr(self, name)) is not None and value != off:
                raise ConfigError(f"sampling.{name}={value}: has no effect with {reason}")
