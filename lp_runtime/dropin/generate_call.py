"""A parsed and checked call of transformers' `generate` with `custom_generate=lookahead_generate`.

`generate` has already prepared its processors, criteria and settings. It does not pass on every argument
(`GenerateArguments`), and it does not check what a callable supports: unsupported settings are refused here.

Letters: B rows of the batch, L tokens of the longest prompt, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from transformers import (
    Cache,
    GenerationConfig,
    GenerationMixin,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    QuantizedCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from lp_runtime.dropin.callers_cache import CacheCopy, cache_to_fill, fill_cache, holds_tokens
from lp_runtime.errors import ConfigError, RequestError
from lp_runtime.model.kv_cache.cache_names import CACHE_NAMES, given_cache
from lp_runtime.model.support import counted_columns
from lp_runtime.sampling.processors import moved, of_row
from lp_runtime.sampling.types import LogitsProcessor

# Model inputs that `generate` adds by itself. Checked, but not fed: the runner has its own cache, masks and positions.
KNOWN_INPUTS = ("attention_mask", "position_ids", *CACHE_NAMES, "use_cache", "logits_to_keep")
# Name of the cache in the output of `generate`; transformers 5.24 renamed it.
CACHE_FIELD = next(each.name for each in fields(GenerateDecoderOnlyOutput) if each.name in CACHE_NAMES)
OLD_INPUTS = ("cache_position",)  # as KNOWN_INPUTS, in earlier versions of transformers
INPUT_WORDS = {"mm_encoder_outputs": "images, videos or audio"}  # internal inputs, in words that the caller knows
MIN_TIME_SECONDS = 1e-9  # for a time limit that has already passed: max_time must be above 0
MAX_FRAMES = 6  # between this module and `generate`: the callable and its decorators


class GenerateArguments(NamedTuple):
    """Arguments of a call of `generate` that it does not pass on; None if the caller gave none.

    `GenerationMixin._extract_generation_mode_kwargs` (transformers 5.x) only passes a callable those of its keywords
    that are in `generate`'s **kwargs. `streamer` and `assistant_model` are named parameters, so the callable never
    receives them. Neither can be ignored: `generate` has already put the prompt into the streamer, whose reader would
    wait forever if it were never ended, and an assistant model must be refused. So we read both from the stack frame.
    """

    streamer: BaseStreamer | None = None
    assistant_model: PreTrainedModel | None = None
    cache: Cache | None = None


def arguments_of_generate() -> GenerateArguments:
    """Return the arguments of the call of `generate` on the stack; all None if there is no such call."""
    generate = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    for _ in range(MAX_FRAMES):
        frame = frame and frame.f_back
        if frame and frame.f_code is generate:
            given = frame.f_locals
            _, cache = given_cache(given.get("kwargs") or {})
            return GenerateArguments(given.get("streamer"), given.get("assistant_model"), cache)
    return GenerateArguments()


class GenerateCall:
    """A checked call of `generate`: its prompts, limits, processors and wanted outputs."""

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Sequence[LogitsProcessor],
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ):
        self._input_ids = input_ids
        # `generate` has made their tensors on the device of the inputs
        self._processors = [moved(each, model.device) for each in logits_processor]
        self._config = generation_config
        self.streamer, assistant, own_cache = arguments_of_generate()
        _check_mode(model, generation_config, assistant)
        self._mask = _check_inputs(input_ids, model_kwargs)
        is_seen = generation_config.return_dict_in_generate or own_cache is not None
        # To be filled with keys, values and states of all tokens except the last; None if the caller would not see it,
        # or if layers of the model hold more than these.
        self.cache = cache_to_fill(model.config, model_kwargs, own_cache is not None) if is_seen else None
        _check_hidden(self._mask, counted_columns(model), generation_config.max_length)
        # The prompts, without padding.
        self.rows = [tuple(row[keep].tolist()) for row, keep in zip(input_ids, self._mask, strict=True)]
        if not all(self.rows):
            raise RequestError("a row of the batch is empty: every prompt must have at least one token")
        if self.streamer is not None and len(self.rows) > 1:
            raise ConfigError("streamer: must be left out with a batch of prompts")
        # For each row, the number of earlier rows with an equal prompt: equal rows are independent samples.
        self.samples = [self.rows[:place].count(row) for place, row in enumerate(self.rows)]
        self.do_sample = bool(generation_config.do_sample)
        limits = _limits_of(stopping_criteria)
        self.max_new_tokens = max(1, limits.max_length - input_ids.shape[1])  # criteria are asked after a token
        self.eos_token_ids = limits.eos_token_ids
        self.criteria = limits.others  # stopping criteria other than length, time and end-of-sequence
        self._limits = limits
        if generation_config.max_length <= input_ids.shape[1]:
            raise RequestError(
                f"max_length={generation_config.max_length}: must be more than the {input_ids.shape[1]} tokens of the"
                " prompt"
            )
        # Whether the output includes processed logits, and raw ones.
        self.wants_scores = bool(generation_config.return_dict_in_generate and generation_config.output_scores)
        self.wants_logits = bool(generation_config.return_dict_in_generate and generation_config.output_logits)

    @property
    def device(self) -> torch.device:
        """Device of the inputs and of all that the caller gets."""
        return self._input_ids.device

    def time_left(self) -> float | None:
        """Return the seconds until the earliest time limit, > 0; None without a limit."""
        if not self._limits.times:
            return None
        now = time.time()
        return max(MIN_TIME_SECONDS, min(c.initial_timestamp + c.max_time - now for c in self._limits.times))

    def check_length(self, row: int, context_length: int | None) -> None:
        if context_length is None:
            return
        length = len(self.rows[row])
        most = context_length + 1 - length  # the last new token is not fed, so it needs no position
        if self.max_new_tokens > most:
            remedy = f"max_new_tokens={self.max_new_tokens}: must be at most {most}"
            raise RequestError(
                f"{remedy if most > 0 else 'the prompt is too long'}: {length} tokens + {self.max_new_tokens} new ones,"
                f" without the last one, are more than the model's context of {context_length}"
            )

    @property
    def pads_rows(self) -> bool:
        """Whether a row that ends before others is padded; otherwise it continues until all rows have ended."""
        return self._limits.pads_rows

    def processors(self, row: int) -> Sequence[LogitsProcessor]:
        """Return the logits processors for a row that is decoded alone and without padding."""
        padding = self._input_ids.shape[1] - len(self.rows[row])
        if len(self.rows) == 1 and not padding:
            return self._processors
        # `generate` also turns min_new_tokens into a min_length, which counts the padding
        return of_row(self._processors, row, padding, self._config.min_new_tokens is not None)

    def is_done(self, tokens: Sequence[int], scores: tuple[torch.Tensor, ...] | None) -> bool:
        """Whether any of `criteria` holds for a row's prompt and new tokens.

        `scores` has the [1, V] processed logits of each new token; None if the output does not include them.
        """
        ids = torch.tensor([list(tokens)], device=self._input_ids.device)
        return any(bool(torch.as_tensor(criterion(ids, scores)).any()) for criterion in self.criteria)

    def fill_cache(self, rows: Sequence[CacheCopy]) -> None:
        """Fill `cache` as `generate` would have.

        Keys and values are zero for padding and after the end of a row. A recurrent state is that after the row's own
        last token in `rows`.
        """
        assert self.cache is not None
        length = self._input_ids.shape[1]
        places = []
        for row, mask in zip(rows, self._mask, strict=True):
            prompt = mask.nonzero()[:, 0]
            new = torch.arange(length, length + row.num_tokens - len(prompt), device=prompt.device)
            places.append(torch.cat([prompt, new]))
        fill_cache(self.cache, rows, places)

    def output(
        self,
        new_tokens: Sequence[Sequence[int]],
        scores: Sequence[torch.Tensor] | None,
        logits: Sequence[torch.Tensor] | None,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Return the output of `generate`: [B, L + longest row's new tokens] ids, rows padded after their end.

        With `return_dict_in_generate` it is an output object, whose scores and logits are zero after a row's end.
        `scores` and `logits` have each row's processed and raw logits, [new tokens, V]; None if not wanted.
        """
        ids = self._input_ids
        longest = max(map(len, new_tokens))
        pad = self._config.pad_token_id
        pad = self._config.eos_token_id if pad is None else pad  # the same default as in `generate`
        pad = 0 if pad is None else int(torch.as_tensor(pad).flatten()[0])  # both may be tensors
        sequences = ids.new_full((len(ids), ids.shape[1] + longest), pad, dtype=torch.int64)
        sequences[:, : ids.shape[1]] = ids
        for row, tokens in enumerate(new_tokens):
            sequences[row, ids.shape[1] : ids.shape[1] + len(tokens)] = torch.tensor(tokens, device=ids.device)
        if not self._config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,  # type: ignore[arg-type]  # a Tensor of int64, as transformers' own
            scores=_by_step(scores, longest),  # type: ignore[arg-type]  # declared as a tuple of one tensor
            logits=_by_step(logits, longest),  # type: ignore[arg-type]  # declared as a tuple of one tensor
            **{CACHE_FIELD: self.cache},  # type: ignore[arg-type]  # mypy thinks that it could be any field
        )


def _by_step(rows: Sequence[torch.Tensor] | None, num_steps: int) -> tuple[torch.Tensor, ...] | None:
    """Turn [new tokens, V] tensors per row into zero-padded [B, V] tensors per step; None for None."""
    if rows is None:
        return None
    padded = [torch.cat([row, row.new_zeros((num_steps - len(row), row.shape[1]))]) for row in rows]
    return tuple(torch.stack(padded, dim=1))


class _Limits(NamedTuple):
    """The stopping criteria of a call, by kind."""

    max_length: int  # upper bound on the tokens of a row, including prompt and padding
    eos_token_ids: frozenset[int]
    times: list[MaxTimeCriteria]
    others: list[StoppingCriteria]
    # Whether any criterion has end-of-sequence tokens: only then does `generate` pad rows that have ended.
    pads_rows: bool


def _limits_of(criteria: StoppingCriteriaList) -> _Limits:
    # `generate` has made a criterion for each setting, or left it out for one of the caller's of the same type.
    # A subclass may stop elsewhere than its attributes say, so it is called.
    eos_token_ids: set[int] = set()
    lengths, times, others = [], [], []
    for criterion in criteria:
        if type(criterion) is MaxTimeCriteria:
            times.append(criterion)
        elif type(criterion) is MaxLengthCriteria:
            lengths.append(math.ceil(criterion.max_length))  # `generate` accepts 5.0
        elif type(criterion) is EosTokenCriteria:
            eos_token_ids.update(criterion.eos_token_id.reshape(-1).tolist())
        else:
            others.append(criterion)
    pads_rows = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    return _Limits(min(lengths), frozenset(eos_token_ids), times, others, pads_rows)


def _check_mode(model: PreTrainedModel, config: GenerationConfig, assistant: PreTrainedModel | None) -> None:
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
    if config.cache_implementation == "quantized":
        raise ConfigError("cache_implementation=quantized: must be left out; lookahead_generate has no quantized cache")
    if "prepare_inputs_for_generation" in vars(model):
        raise ConfigError(
            "prepare_inputs_for_generation: was replaced on the model, as PEFT does for learned prompts;"
            " lookahead_generate feeds the model token ids alone"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise ConfigError(f"{name}=True: must be left out; those of a token tree are not those of the text")


def _check_inputs(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
    """Refuse unsupported model inputs; return the [B, L] bool mask of prompt tokens, False for padding."""
    given = {name: value for name, value in model_kwargs.items() if value is not None and value != {}}
    if unknown := sorted(given.keys() - {*KNOWN_INPUTS, *OLD_INPUTS}):
        what = INPUT_WORDS.get(unknown[0], f"{unknown[0]}=...")
        raise ConfigError(f"{what}: must be left out; lookahead_generate feeds the model token ids alone")
    name, cache = given_cache(given)
    if isinstance(cache, QuantizedCache):
        raise ConfigError(f"{name}: a QuantizedCache: must be a DynamicCache, or left out")
    if holds_tokens(cache):
        raise ConfigError(f"{name}: must be empty; lookahead_generate uses its own cache")
    mask = given.get("attention_mask")
    lengths = {each.shape[-1] for each in (mask, given.get("position_ids")) if each is not None}
    length = input_ids.shape[-1]
    # position_ids too: `generate` drops a mask of ones after it has derived positions from it
    if other := lengths - {length}:
        raise ConfigError(f"attention_mask, position_ids: for {other.pop()} tokens; input_ids have {length}")
    mask = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    _check_positions(given.get("position_ids"), mask)
    return mask


def _check_hidden(mask: torch.Tensor, most: int | None, length: int) -> None:
    """Refuse a mask, [B, L] bool, that hides tokens inside a prompt; `most` is that of `counted_columns`."""
    if most is None or length <= most:
        return
    is_inside = ~mask & (mask.cumsum(-1) > 0) & (mask.flip(-1).cumsum(-1).flip(-1) > 0)
    if is_inside.any():
        raise RequestError(
            "attention_mask: hides tokens inside a prompt (is pad_token_id in the text?); with this model it may hide"
            " only tokens at the ends"
        )


def _check_positions(positions: torch.Tensor | None, mask: torch.Tensor) -> None:
    """Refuse positions that do not count each row's tokens from 0.

    `positions` is [L], [1 or B, L] or, for models with several kinds of positions, [n, 1 or B, L]. `mask` is [B, L]
    bool, False for padding.
    """
    if positions is None:
        return
    expected = mask.long().cumsum(-1) - 1
    try:
        differs = (positions.expand(*positions.shape[:-2], *mask.shape) != expected)[..., mask]
    except RuntimeError:  # of another shape
        differs = torch.ones(1, dtype=torch.bool)
    if differs.any():
        raise ConfigError("position_ids: must be left out, or count each row's tokens from 0")
