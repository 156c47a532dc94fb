"""A call of transformers' `generate` that was handed to us (`custom_generate=`): what it asks for, row by row.

`generate` has prepared its processors, criteria and settings by then, but it does not hand on everything it took, and
it lets pass what such a callable may not be able to do: what is asked for and cannot be done is refused here.

Letters: B rows of the batch, L tokens of the longest prompt, V vocabulary.
"""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria

from lp_runtime.errors import ConfigError, RequestError
from lp_runtime.model.hf_config import attention_settings, of_text_model
from lp_runtime.model.runner import ATTENTIONS
from lp_runtime.sampling.processors import of_row

# What generate puts there by itself, and what changes nothing here: we have our own cache, masks and positions.
KNOWN_INPUTS = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position")
SHORTEST_TIME = 1e-9


class GenerateCall:
    """What `generate` handed to us.

    Args:
        model: the caller's.
        input_ids: [B, L].
        logits_processor, stopping_criteria: as prepared by `generate`.
        generation_config: the same.
        model_kwargs: what was to be given to the model.

    Attributes:
        rows: the prompts, without padding.
        samples: for each row, how many earlier rows have the same prompt: identical rows are samples of their own.
        max_new_tokens, eos_token_ids: where every row stops.
        do_sample: whether successors are sampled.
        streamer: told of new tokens, if the caller gave one.
        criteria: stopping criteria beyond length, time and end-of-sequence.

    Raises:
        ConfigError, RequestError: if it asks for what cannot be done.
    """

    def __init__(
        self,
        model,
        input_ids: torch.Tensor,
        logits_processor: Sequence,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ):
        self._input_ids = input_ids
        self._processors = logits_processor
        self._config = generation_config
        self.streamer, assistant = _not_handed_on()
        _check_mode(model, generation_config, assistant)
        mask = _check_inputs(input_ids, model_kwargs)
        self.rows = [tuple(row[keep].tolist()) for row, keep in zip(input_ids, mask, strict=True)]
        if not all(self.rows):
            raise RequestError("a row of the batch is empty: every prompt must have at least one token")
        if self.streamer is not None and len(self.rows) > 1:
            raise ConfigError("streamer: must be left out with a batch of prompts")
        seen: Counter[tuple[int, ...]] = Counter()
        self.samples = []
        for row in self.rows:
            self.samples.append(seen[row])
            seen[row] += 1
        self.do_sample = bool(generation_config.do_sample)
        self.max_new_tokens = generation_config.max_length - input_ids.shape[1]
        eos = generation_config.eos_token_id
        self.eos_token_ids = frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)
        self.criteria = []
        self._time_limits = []
        for criterion in stopping_criteria:
            if isinstance(criterion, MaxTimeCriteria):
                self._time_limits.append(criterion)
            elif not isinstance(criterion, MaxLengthCriteria | EosTokenCriteria):
                self.criteria.append(criterion)
            elif isinstance(criterion, MaxLengthCriteria):
                self.max_new_tokens = min(self.max_new_tokens, criterion.max_length - input_ids.shape[1])
            else:
                self.eos_token_ids |= set(criterion.eos_token_id.tolist())
        if self.max_new_tokens < 1:
            raise RequestError(
                f"max_length={input_ids.shape[1] + self.max_new_tokens}: must be more than the {input_ids.shape[1]}"
                " tokens of the prompt"
            )
        self.wants_scores = bool(generation_config.return_dict_in_generate and generation_config.output_scores)
        self.wants_logits = bool(generation_config.return_dict_in_generate and generation_config.output_logits)

    def time_left(self) -> float | None:
        """Seconds until the earliest time limit, > 0; None without one."""
        if not self._time_limits:
            return None
        now = time.time()
        return max(SHORTEST_TIME, min(c.initial_timestamp + c.max_time - now for c in self._time_limits))

    def processors(self, row: int) -> Sequence:
        """The logits processors of one row alone, without its padding."""
        padding = self._input_ids.shape[1] - len(self.rows[row])
        if len(self.rows) == 1 and not padding:
            return self._processors
        # min_new_tokens becomes a min_length, too, which then counts the padding
        return of_row(self._processors, row, padding, self._config.min_new_tokens is not None)

    def is_done(self, tokens: Sequence[int]) -> bool:
        """Whether any of `criteria` holds for a row's text, prompt included."""
        ids = torch.tensor([list(tokens)], device=self._input_ids.device)
        return any(bool(torch.as_tensor(criterion(ids, None)).any()) for criterion in self.criteria)

    def output(
        self,
        new_tokens: Sequence[Sequence[int]],
        scores: Sequence[torch.Tensor] | None,
        logits: Sequence[torch.Tensor] | None,
    ):
        """What `generate` returns: [B, L + T] token ids, rows padded behind their end, or the output object.

        Args:
            new_tokens: of each row.
            scores, logits: of each row, [new tokens, V]; None if not wanted. Behind a row's end they are zero.
        """
        ids = self._input_ids
        longest = max(map(len, new_tokens))
        pad = self._config.pad_token_id
        pad = min(self.eos_token_ids, default=0) if pad is None else pad  # the same as generate's
        sequences = ids.new_full((len(ids), ids.shape[1] + longest), pad[0] if isinstance(pad, list) else pad)
        sequences[:, : ids.shape[1]] = ids
        for row, tokens in enumerate(new_tokens):
            sequences[row, ids.shape[1] : ids.shape[1] + len(tokens)] = torch.tensor(tokens, device=ids.device)
        if not self._config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences, scores=_by_step(scores, longest), logits=_by_step(logits, longest)
        )


def _by_step(rows: Sequence[torch.Tensor] | None, num_steps: int) -> tuple[torch.Tensor, ...] | None:
    """From [new tokens, V] a row to [B, V] a step."""
    if rows is None:
        return None
    padded = [torch.cat([row, row.new_zeros((num_steps - len(row), row.shape[1]))]) for row in rows]
    return tuple(torch.stack(padded, dim=1))


def _not_handed_on() -> tuple[Any, Any]:
    """(streamer, assistant model) of the call of `generate` that called us: it takes them and keeps them.

    It has put the prompt into the streamer by then, so leaving the streamer alone would leave its reader waiting.
    """
    generate = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    for _ in range(6):
        frame = frame and frame.f_back
        if frame and frame.f_code is generate:
            return frame.f_locals.get("streamer"), frame.f_locals.get("assistant_model")
    return None, None


def _check_mode(model, config: GenerationConfig, assistant) -> None:
    if model.config.is_encoder_decoder:
        raise ConfigError(f"{type(model).__name__}: must be a decoder-only model")
    mode = config.get_generation_mode(assistant)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        settings = {
            "num_beams": config.num_beams if config.num_beams != 1 else None,
            "assistant_model": assistant and type(assistant).__name__,
            "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens,
            "penalty_alpha": config.penalty_alpha,
            "constraints": config.constraints,
            "force_words_ids": config.force_words_ids,
            "dola_layers": config.dola_layers,
            "assistant_early_exit": config.assistant_early_exit,
        }
        given = ", ".join(f"{name}={value}" for name, value in settings.items() if value is not None)
        raise ConfigError(
            f"{given or 'generate'} asks for {mode.value}: lookahead_generate does greedy_search (do_sample=False) and"
            " sample (do_sample=True)"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise ConfigError(f"{name}=True: must be left out; a tree's are not those of the text")


def _check_inputs(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
    """[B, L] bool: which tokens are the prompts'."""
    given = {name: value for name, value in model_kwargs.items() if value is not None and value != {}}
    if unknown := sorted(given.keys() - set(KNOWN_INPUTS)):
        raise ConfigError(f"{unknown[0]}=...: must be left out; lookahead_generate feeds the model token ids alone")
    cache = given.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise ConfigError("past_key_values: must be empty; lookahead_generate keeps a cache of its own")
    mask = given.get("attention_mask")
    mask = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    positions = given.get("position_ids")
    if positions is not None and positions.shape == mask.shape:
        expected = mask.long().cumsum(-1) - 1
        if not torch.equal(positions[mask], expected[mask]):
            raise ConfigError("position_ids: must be left out, or count each row's tokens from 0")
    return mask


@contextmanager
def fit_for_trees(model) -> Iterator[None]:
    """The caller's model in eval mode and with an attention that takes a tree's mask; afterwards as it was."""
    training = [module for module in model.modules() if module.training]
    is_fit = model.config.get_text_config()._attn_implementation in ATTENTIONS
    before = attention_settings(model)
    try:
        for module in training:
            module.training = False
        if not is_fit:
            model.set_attn_implementation(of_text_model(model, "sdpa"))
        yield
    finally:
        for module in training:
            module.training = True
        if not is_fit:
            model.set_attn_implementation(before)
