"""Tests of the server's prefix cache: usage and metrics report it, and clients do not share entries."""

from __future__ import annotations

import re
import urllib.request

import openai
import pytest
from support.serving import served

from lp_runtime import LookaheadRuntime
from lp_runtime.config.lookahead import LookaheadConfig
from lp_runtime.config.settings import ModelConfig, RuntimeConfig

SYSTEM = {"role": "system", "content": "Write code that is short and correct. " * 12}
QUESTION = {"role": "user", "content": "Write a loop."}


@pytest.fixture(scope="module")
def url(small_model_that_chats):
    config = RuntimeConfig(
        ModelConfig(path=str(small_model_that_chats())),
        LookaheadConfig(7, 5, 7, prior="none"),
        device="cpu",
        dtype="float32",
        prefix_cache_bytes=None,
    )
    with (
        LookaheadRuntime.from_config(config) as runtime,
        served(runtime, api_keys={"ann": "a-key", "ben": "b-key"}) as (url, _),
    ):
        yield url


def ask(url: str, key: str, messages, **more):
    """Return (text, prompt tokens, cached tokens) of a chat."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    answer = client.chat.completions.create(
        model="demo", messages=messages, max_tokens=16, temperature=0, extra_body=more
    )
    usage = answer.usage
    return answer.choices[0].message.content, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens


def metric(url: str, name: str) -> float:
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    return float(re.search(rf"^{name}{{.*}} (\S+)$", text, re.M)[1])


def test_prefix_cache_is_reused_by_next_turn_and_not_by_other_clients(url):
    text, num_prompt, num_cached = ask(url, "a-key", [SYSTEM, QUESTION])
    assert num_cached == 0
    hits, tokens = (metric(url, f"lp_prefix_cache_{name}_total") for name in ("hits", "tokens"))
    turn = [SYSTEM, QUESTION, {"role": "assistant", "content": text}, QUESTION]
    again, num_turn, num_cached = ask(url, "a-key", turn)
    assert num_prompt <= num_cached < num_turn
    assert metric(url, "lp_prefix_cache_hits_total") == hits + 1
    assert metric(url, "lp_prefix_cache_tokens_total") == tokens + num_cached
    assert ask(url, "b-key", turn) == (again, num_turn, 0), "another client"
    assert ask(url, "a-key", turn, cache_salt="apart") == (again, num_turn, 0)
    assert ask(url, "a-key", turn, cache_salt="apart") == (again, num_turn, num_turn - 1)


def test_too_long_cache_salt_is_refused(url):
    with pytest.raises(openai.BadRequestError, match="cache_salt: must have at most 256 characters"):
        ask(url, "a-key", [QUESTION], cache_salt="x" * 257)
