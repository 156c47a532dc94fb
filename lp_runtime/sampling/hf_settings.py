"""transformers' generation settings: a model's defaults, the caller's settings over them, and their processors."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.errors import ConfigError, first_line
from lp_runtime.sampling.types import LogitsProcessor
from lp_runtime.utils.warnings import WITHOUT_WARNINGS

# Defaults of a model's generation_config.json that are applied unless overridden. The others are about beams, caches
# and outputs, which are not ours to set, or are read elsewhere (end-of-sequence ids).
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
    """Return what a model's generation_config.json sets of APPLIED_DEFAULTS, by name."""
    values = model.generation_config.to_dict()
    return {name: values[name] for name in APPLIED_DEFAULTS if values.get(name) is not None}


def build_processors(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    sampling: SamplingConfig,
    max_new_tokens: int,
    eos_token_ids: Collection[int],
    processors: Sequence[LogitsProcessor] = (),
) -> LogitsProcessorList:
    """Return a request's logits processors in transformers' own order, from a call of `generate` that does not decode.

    Args:
        model: a loaded model.
        prompt_ids: token ids of the prompt.
        sampling: settings that override the model's defaults.
        max_new_tokens: largest number of tokens to generate.
        eos_token_ids: tokens that the request stops after; some processors look at them.
        processors: the caller's own.

    Raises:
        ConfigError: if transformers refuses a value.
    """
    captured = LogitsProcessorList()

    def capture(_model, _input_ids, logits_processor, stopping_criteria, generation_config, **_kwargs):
        captured.extend(logits_processor)

    try:
        with WITHOUT_WARNINGS:
            ids = torch.tensor([list(prompt_ids)], dtype=torch.int64, device=model.device)
            _without_inapplicable_defaults(model, eos_token_ids).generate(  # type: ignore[operator]  # of a mixin that PreTrainedModel does not name
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=_generation_config(model, sampling, max_new_tokens, eos_token_ids),
                logits_processor=LogitsProcessorList(processors),
                custom_generate=capture,
            )
    except Exception as error:  # transformers checks values in many places, in its own words
        raise ConfigError(f"sampling: {first_line(error)}") from error
    return captured


def _without_inapplicable_defaults(model: PreTrainedModel, eos_token_ids: Collection[int]) -> PreTrainedModel:
    """Return a copy of a model without the defaults that this call of `generate` would refuse.

    Stop strings and token healing want a tokenizer: the engine looks for stop strings itself, and prompts are fed as
    they are. A growing score of the end-of-sequence tokens wants at least one of them.
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
    """Return the caller's settings for `generate`, which fills in the model's own defaults, then transformers'."""
    defaults = model.generation_config
    given = {
        "do_sample": sampling.draws(defaults_of(model)),
        "temperature": sampling.temperature or None,
        # transformers' own default is 50, which nobody asked for; a model's file may
        "top_k": defaults.top_k or 0 if sampling.top_k is None else sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": sampling.typical_p,
        "repetition_penalty": None if sampling.repetition_penalty is None else float(sampling.repetition_penalty),
        "no_repeat_ngram_size": sampling.no_repeat_ngram_size,
        "bad_words_ids": sampling.bad_words_ids or None,
        "min_new_tokens": sampling.min_new_tokens,
        "sequence_bias": _sequence_bias(sampling),
    }
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        num_beams=1,
        num_return_sequences=1,
        eos_token_id=sorted(eos_token_ids) or [-1],  # None would be the model's
        pad_token_id=0,  # nothing is padded; None is warned about
        **{name: value for name, value in given.items() if value is not None},
    )


def _sequence_bias(sampling: SamplingConfig) -> dict[tuple[int], float] | None:
    """Return the logit biases as transformers wants them, or None without any.

    Lists, its other way, cannot name token 0 before transformers 5.23.
    """
    return {(token,): float(bias) for token, bias in sampling.logit_bias.items()} if sampling.logit_bias else None
