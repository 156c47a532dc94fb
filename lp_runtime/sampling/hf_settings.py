"""transformers' generation settings: a model's defaults, the caller's overrides, and their processors."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Sequence

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.errors import ConfigError, first_line
from lp_runtime.sampling.types import LogitsProcessor
from lp_runtime.utils.warnings import without_warnings

log = logging.getLogger(__name__)
# Defaults of a model that ask for another way of decoding, and the value of each that does not.
IGNORED_DEFAULTS = {
    "num_beams": 1,
    "penalty_alpha": 0,
    "dola_layers": None,
    "force_words_ids": None,
    "constraints": None,
}
# Defaults from a model's generation_config.json that apply unless overridden. The others concern beams, caches and
# outputs, which do not apply here, or are read elsewhere (end-of-sequence ids).
APPLIED_DEFAULTS = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "top_h",
    "epsilon_cutoff",
    "eta_cutoff",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "min_length",
    "min_new_tokens",
    "sequence_bias",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "max_new_tokens",
    "max_length",
    "max_time",
    "stop_strings",
)


def defaults_of(model: PreTrainedModel) -> dict[str, object]:
    values = model.generation_config.to_dict()
    return {name: values[name] for name in APPLIED_DEFAULTS if values.get(name) is not None}


def warn_of_ignored_defaults(model: PreTrainedModel) -> None:
    values = {name: getattr(model.generation_config, name, None) for name in IGNORED_DEFAULTS}
    ignored = [f"{name}={value}" for name, value in values.items() if value not in (None, IGNORED_DEFAULTS[name])]
    if ignored:
        log.warning("generation_config.json: %s: not used; there is greedy search and sampling", ", ".join(ignored))


def build_processors(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    sampling: SamplingConfig,
    max_new_tokens: int,
    eos_token_ids: Collection[int],
    processors: Sequence[LogitsProcessor] = (),
) -> LogitsProcessorList:
    """Return a request's logits processors, including the caller's `processors`, in transformers' order.

    They are captured from a call of `generate` whose decoding loop is replaced. Raises ConfigError if transformers
    refuses a value of `sampling`, which overrides the model's defaults.
    """
    captured = LogitsProcessorList()

    def capture(_model, _input_ids, logits_processor, stopping_criteria, generation_config, **_kwargs):
        captured.extend(logits_processor)

    try:
        with without_warnings():
            ids = torch.tensor([list(prompt_ids)], dtype=torch.int64, device=model.device)
            _without_inapplicable_defaults(model, eos_token_ids).generate(  # type: ignore[operator]  # from a mixin unknown to the type checker
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=_generation_config(model, sampling, max_new_tokens, eos_token_ids),
                logits_processor=LogitsProcessorList(processors),
                custom_generate=capture,
            )
    except Exception as error:  # transformers validates values in many places, with various exceptions
        raise ConfigError(f"sampling: {first_line(error)}") from error
    return captured


def _without_inapplicable_defaults(model: PreTrainedModel, eos_token_ids: Collection[int]) -> PreTrainedModel:
    """Return a copy of a model without the defaults that this call of `generate` would refuse.

    Stop strings and token healing require a tokenizer; but the engine looks for stop strings itself, and prompts are
    fed unchanged. A growing score of the end-of-sequence tokens requires at least one of them.
    """
    stand_in = copy.copy(model)
    stand_in.generation_config = copy.copy(model.generation_config)
    stand_in.generation_config.stop_strings = None
    stand_in.generation_config.token_healing = False
    if not eos_token_ids:
        stand_in.generation_config.exponential_decay_length_penalty = None
    return stand_in


def _generation_config(
    model: PreTrainedModel, sampling: SamplingConfig, max_new_tokens: int, eos_token_ids: Collection[int]
) -> GenerationConfig:
    """Return the caller's settings for `generate`, which adds the model's defaults, then transformers'."""
    defaults = model.generation_config
    given = {
        "do_sample": sampling.samples(defaults_of(model)),
        "temperature": sampling.temperature or None,
        # transformers' default of 50 is not wanted; a model's file may set a value
        "top_k": defaults.top_k or 0 if sampling.top_k is None else sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": sampling.typical_p,
        "repetition_penalty": None if sampling.repetition_penalty is None else float(sampling.repetition_penalty),
        "no_repeat_ngram_size": sampling.no_repeat_ngram_size,
        "bad_words_ids": sampling.bad_words_ids or None,
        "min_new_tokens": sampling.min_new_tokens,
        # a dict, because transformers before 5.23 does not accept token 0 in a list
        "sequence_bias": {(token,): float(bias) for token, bias in (sampling.logit_bias or {}).items()} or None,
    }
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        num_beams=1,
        num_return_sequences=1,
        eos_token_id=sorted(eos_token_ids) or [-1],  # None would mean the model's default
        pad_token_id=0,  # unused, but None causes a warning
        **{name: value for name, value in given.items() if value is not None},
    )
