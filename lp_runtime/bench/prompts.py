"""The prompts that lp-bench decodes, from files or built in."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lp_runtime.config.checks import home_path
from lp_runtime.config.commands import BenchConfig
from lp_runtime.config.sampling import SamplingConfig
from lp_runtime.errors import ConfigError, RequestError
from lp_runtime.model.tokenizer import conversation, encode_chat
from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.utils.prompt_file import Prompt, check_conversations, read_prompts

GREEDY = SamplingConfig(temperature=0.0)
OWN_PROMPTS = (
    'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n',
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n",
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n",
)
OWN_TASK = "built in"
OWN_PATH = "built-in prompts"


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt that every method decodes; `task` is Prompt.task."""

    task: str
    token_ids: list[int]


def read_sources(config: BenchConfig) -> list[Prompt]:
    """Read the prompts of the given files, at most config.each per task; without files, the built-in ones."""
    if config.prompts is None:
        own = OWN_PROMPTS[: config.limit]
        return [Prompt(index, index + 1, text, (text,), OWN_TASK, OWN_PATH) for index, text in enumerate(own)]
    prompts: list[Prompt] = []
    for source in config.prompts.split(","):
        path, colon, name = source.rpartition(":")
        if not colon or not path or not name:
            raise ConfigError(f"prompts={source}: must be FILE:FIELD")
        path = home_path("prompts", path)
        of_file = read_prompts(path, name, config.limit)
        _check_unicode(of_file, name)
        if config.turns == "all":
            check_conversations(of_file, path, name)
        prompts += of_file
    counts: Counter[str] = Counter()
    chosen = []
    for prompt in prompts:
        if config.each is None or counts[prompt.task] < config.each:
            counts[prompt.task] += 1
            chosen.append(prompt)
    return chosen


def _check_unicode(prompts: list[Prompt], field: str) -> None:
    for prompt in prompts:  # JSON allows lone surrogates, tokenizers do not
        if any("\ud800" <= character <= "\udfff" for turn in prompt.turns for character in turn):
            raise ConfigError(f"{prompt.where}: field {field!r} is not valid Unicode")


def encode_prompts(runtime: LookaheadRuntime, config: BenchConfig) -> list[BenchPrompt]:
    """Encode the prompts, with the chat template if chat=true, else without added special tokens.

    With turns=all each turn is a separate prompt. The runtime decodes the answers before it greedily, once, so that all
    methods have the same prompts.

    Raises:
        RequestError: a prompt cannot be decoded; names its file and line.
    """
    prompts = []
    for prompt in read_sources(config):
        try:
            for token_ids in _turns_of(runtime, config, prompt):
                runtime.request(token_ids, config.max_new_tokens)
                prompts.append(BenchPrompt(prompt.task, token_ids))
        except RequestError as error:
            raise RequestError(f"{prompt.where}: {error}") from error
    return prompts


def _turns_of(runtime: LookaheadRuntime, config: BenchConfig, prompt: Prompt) -> list[list[int]]:
    """Return the token ids of each turn to decode, one prompt per turn."""
    if not config.chat:
        return [runtime.tokenizer(prompt.turns[0], add_special_tokens=False)["input_ids"]]
    num_turns = len(prompt.turns) if config.turns == "all" else 1
    answers: list[str] = []
    encoded = []
    for turn in range(num_turns):
        messages = conversation(prompt.turns, answers)
        encoded.append(encode_chat(runtime.tokenizer, messages))
        if turn + 1 < num_turns:
            try:
                answer = runtime.generate(messages=messages, max_new_tokens=config.max_new_tokens, sampling=GREEDY)
            except RequestError as error:
                raise RequestError(f"turn {turn + 1}: {error}") from error
            assert answer.message is not None  # the answer to messages
            answers.append(answer.message["content"] or "")  # templates leave earlier reasoning out
    return encoded
