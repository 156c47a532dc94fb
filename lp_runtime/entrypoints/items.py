"""Items of a file of prompts: one for each prompt, sample and turn, with its request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from lp_runtime.config.commands import GenerateConfig
from lp_runtime.config.sampling import MAX_SEED
from lp_runtime.errors import RequestError
from lp_runtime.model.tokenizer import conversation
from lp_runtime.replica.request_builder import RequestOptions
from lp_runtime.request.request import Request
from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.utils.prompt_file import Prompt

Key = tuple[int, int, int]  # identifies a result: index of the prompt, sample, turn


class Item(NamedTuple):
    """One line of the output: a prompt, and the indices of its sample and turn, from 0."""

    prompt: Prompt
    sample: int
    turn: int

    @property
    def key(self) -> Key:
        return self.prompt.index, self.sample, self.turn


def rounds_of(config: GenerateConfig, prompts: list[Prompt]) -> list[list[Item]]:
    """Group the items by turn, because the prompts of a turn contain the answers of the turns before it."""
    num_turns = max(len(prompt.turns) for prompt in prompts) if config.turns == "all" else 1
    samples = range(config.num_samples)
    items = [Item(prompt, sample, 0) for prompt in prompts for sample in samples]  # token ids have no turns
    later = [
        [Item(prompt, sample, turn) for prompt in prompts if turn < len(prompt.turns) for sample in samples]
        for turn in range(1, num_turns)
    ]
    return [items, *later]


def item_request(
    runtime: LookaheadRuntime,
    config: GenerateConfig,
    item: Item,
    answers: Mapping[Key, str],
    seed: int | None,
    options: RequestOptions,
) -> Request:
    """Build an item's request, with the answers to the turns before it. A RequestError names line and turn."""
    more = options.copy()
    more["sample"] = item.sample
    if seed is not None:  # each prompt has a different seed
        more["sampling"] = replace(config.sampling, seed=(seed + item.prompt.index) % (MAX_SEED + 1))
    before = [answers[item.prompt.index, item.sample, turn] for turn in range(item.turn)]
    try:
        return turn_request(runtime, config, item.prompt, before, more)
    except RequestError as error:
        raise RequestError(f"{config.prompts} line {item.prompt.line}, turn {item.turn + 1}: {error}") from error


def turn_request(
    runtime: LookaheadRuntime, config: GenerateConfig, prompt: Prompt, before: Sequence[str], options: RequestOptions
) -> Request:
    """Build the request of a prompt's turn; `before` has the answers to the turns before it."""
    if not config.chat:
        return runtime.request(prompt.value, config.max_new_tokens, **options)
    messages: RequestOptions = {**options, "messages": conversation(prompt.turns, before)}
    return runtime.request(None, config.max_new_tokens, **messages)
