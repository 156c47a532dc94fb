"""The Python API on one replica and on two: equal answers, deltas that add up, errors, cancellation."""

from __future__ import annotations

import gc
import itertools
import json
import os
import pickle
import shutil
import signal
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gate import Gate
from support.processes import own_replicas
from transformers import PreTrainedModel

from lp_runtime import (
    ConstraintConfig,
    LookaheadConfig,
    LookaheadRuntime,
    ModelConfig,
    ModelError,
    ReplicaError,
    RequestError,
    SamplingConfig,
)
from lp_runtime.config.lookahead import PLAIN
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.errors import ConfigError
from lp_runtime.model.runner import ModelRunner
from lp_runtime.replica.request_builder import RequestBuilder

PROMPT = "def fib(n):\n    "
IDS = [1, 2, 3]
FIXED = LookaheadConfig(W=7, N=5, G=7, draft_tables="request")  # steps depend neither on time nor on earlier requests


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2], ids=["gpus=1", "gpus=2"])
def runtime(request, small_demo_dir):
    """The demo model, on one and on two replicas."""
    with LookaheadRuntime(
        str(small_demo_dir), gpus=request.param, device="cpu", dtype="float32", lookahead=FIXED
    ) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def single(small_demo_dir):
    """One replica, for comparison."""
    with LookaheadRuntime(ModelConfig(path=str(small_demo_dir)), device="cpu", dtype="float32") as runtime:
        yield runtime


@pytest.fixture(scope="module")
def tiny(tiny_model_dir):
    """A model without a tokenizer."""
    with LookaheadRuntime(str(tiny_model_dir)) as runtime:
        yield runtime


def test_generate_matches_decoding_one_token_per_step(runtime, single):
    out = runtime.generate(PROMPT, max_new_tokens=24, eos=False)
    assert out.num_tokens == len(out.token_ids) == 24
    assert out.finish_reason == "length"
    assert out.text == runtime.tokenizer.decode(out.token_ids, skip_special_tokens=True)
    assert 1 < out.steps < 24
    assert out.compression_ratio == 24 / out.steps
    assert out.tokens_per_second == 24 / out.seconds
    plain = single.generate(PROMPT, max_new_tokens=24, eos=False, lookahead=PLAIN)
    assert (plain.token_ids, plain.text) == (out.token_ids, out.text)
    assert plain.steps == 24


def test_lookahead_settings_of_request_change_neither_output_nor_defaults(runtime):
    default = runtime.generate(PROMPT, max_new_tokens=16, eos=False)
    outs = [
        runtime.generate(PROMPT, max_new_tokens=16, eos=False, lookahead=LookaheadConfig(*setting, drafter=drafter))
        for drafter, setting in [("full", (1, 2, 0)), ("paper", (0, 4, 3))]
    ]
    assert all(out.token_ids == default.token_ids for out in outs)
    assert all(out.step_tokens < default.step_tokens + 1 for out in outs)
    assert runtime.generate(PROMPT, max_new_tokens=16, eos=False).steps == default.steps


def test_text_prompt_and_its_token_ids_give_same_output(runtime):
    text = runtime.generate(PROMPT, max_new_tokens=8, eos=False)
    ids = runtime.generate(runtime.tokenizer(PROMPT).input_ids, max_new_tokens=8, eos=False)
    assert (ids.token_ids, ids.text) == (text.token_ids, text.text)


@pytest.mark.parametrize("prompt", [PROMPT, "s = 'größer 数 🎉", IDS])
def test_deltas_add_up_to_output_of_generate(runtime, prompt):
    stream = runtime.stream(prompt, max_new_tokens=16, eos=False)
    assert stream.generation is None
    deltas = list(stream)
    whole = runtime.generate(prompt, max_new_tokens=16, eos=False)
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert "".join(delta.text for delta in deltas) == whole.text
    decoded = runtime.tokenizer.decode(whole.token_ids, skip_special_tokens=True)
    assert whole.text == decoded  # with U+FFFD for a character that the length limit cut off
    assert stream.generation.token_ids == whole.token_ids
    assert len([delta for delta in deltas if delta.token_ids]) == whole.steps


def test_generation_can_be_compared_copied_and_written_as_json(runtime):
    out = runtime.generate(
        PROMPT, max_new_tokens=16, eos=False, logprobs=True, top_logprobs=2, lookahead=replace(FIXED, drafter="paper")
    )
    assert pickle.loads(pickle.dumps(out)) == out != replace(out, num_steps=0)
    values = json.loads(json.dumps(asdict(out)))
    assert values["token_ids"] == out.token_ids and values["pool"]["num_keys"] == out.pool.num_keys
    assert sum(map(sum, values["counts"]["fed"])) > 0


def test_request_for_one_token_takes_one_step(runtime):
    out = runtime.generate(PROMPT, max_new_tokens=1)
    assert (out.num_tokens, out.steps, out.step_tokens) == (1, 1, 0.0)


def test_stream_closed_early_does_not_affect_next_request(runtime):
    whole = runtime.generate(PROMPT, max_new_tokens=16, eos=False)
    for num_deltas in (1, 3):
        stream = runtime.stream(PROMPT, max_new_tokens=2000, eos=False)
        seen = [token for _ in range(num_deltas) for token in next(stream).token_ids]
        stream.close()
        assert stream.generation is None
        assert list(stream) == []
        assert seen == whole.token_ids[: len(seen)]
        again = runtime.generate(PROMPT, max_new_tokens=16, eos=False)
        assert (again.token_ids, again.steps) == (whole.token_ids, whole.steps)


def test_stream_is_closed_by_another_thread_during_a_step(runtime, tmp_path):
    gate = Gate(tmp_path, len(IDS) + 3)
    stream = runtime.stream(IDS, max_new_tokens=2000, eos=False, processors=[gate])
    with ThreadPoolExecutor(1) as threads:
        reader = threads.submit(list, stream)
        gate.wait_until_held()
        stream.close()
        gate.open()
        num_tokens = sum(len(delta.token_ids) for delta in reader.result())
    assert num_tokens < 100 and stream.generation is None
    assert runtime.generate(IDS, max_new_tokens=4, eos=False).num_tokens == 4


def test_stream_that_is_left_early_is_cancelled_at_once(runtime):
    gc.disable()  # not only when cycles are collected
    try:
        for _ in runtime.stream(PROMPT, max_new_tokens=2000, eos=False):
            break
        assert runtime.generate(PROMPT, max_new_tokens=1).num_tokens == 1
    finally:
        gc.enable()


def test_stream_never_iterated_does_not_block_other_requests(runtime):
    stream = runtime.stream(PROMPT, max_new_tokens=2000, eos=False)
    assert runtime.generate(PROMPT, max_new_tokens=4, eos=False).num_tokens == 4
    stream.close()


def test_second_request_during_stream_is_refused(runtime):
    whole = runtime.generate(PROMPT, max_new_tokens=16, eos=False)
    stream = runtime.stream(PROMPT, max_new_tokens=16, eos=False)
    seen = list(next(stream).token_ids)
    with pytest.raises(RequestError, match="another request is being decoded"):
        runtime.generate("x", max_new_tokens=4)
    seen += [token for delta in stream for token in delta.token_ids]
    assert seen == whole.token_ids


def test_eos_token_ends_output_unless_eos_is_false(runtime, make_eos_runtime):
    free = runtime.generate(IDS, max_new_tokens=12, eos=False)
    eos = free.token_ids[5]
    where = free.token_ids.index(eos)
    with make_eos_runtime(eos, runtime.num_replicas) as stopping:
        assert stopping.info.eos_token_ids == {eos}
        out = stopping.generate(IDS, max_new_tokens=12)
        assert (out.token_ids, out.finish_reason) == (free.token_ids[: where + 1], "eos")
        out = stopping.generate(IDS, max_new_tokens=12, eos=False)
        assert (out.token_ids, out.finish_reason) == (free.token_ids, "length")


@pytest.fixture
def make_eos_runtime(small_demo_dir, tmp_path):
    """Factory of runtimes of the demo model with another end-of-sequence token."""

    def make(token: int, gpus: int) -> LookaheadRuntime:
        path = shutil.copytree(small_demo_dir, tmp_path / "eos")
        for name in ("config.json", "generation_config.json"):
            settings = json.loads((path / name).read_text())
            (path / name).write_text(json.dumps(settings | {"eos_token_id": token}))
        return LookaheadRuntime(str(path), gpus=gpus, device="cpu", dtype="float32", lookahead=FIXED)

    return make


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "message"),
    [
        ([], 4, "the prompt is empty: it must have at least one token"),
        ([64], 4, "token id 64 of the prompt: must be an integer 0 to 63"),
        ([-1], 4, "token id -1 of the prompt: must be an integer 0 to 63"),
        ([1.0], 4, "token id 1.0 of the prompt: must be an integer 0 to 63"),
        (["a"], 4, "token id 'a' of the prompt: must be an integer 0 to 63"),
        ([1], 0, "max_new_tokens=0: must be an integer >= 1"),
        ([1], 2.0, "max_new_tokens=2.0: must be an integer >= 1"),
        ([1], "2", "max_new_tokens='2': must be an integer >= 1"),
        (b"abc", 4, "prompt=b'abc': must be token ids or text, not bytes"),
        (np.array([[1, 2]]), 4, "token id [1, 2] of the prompt: must be an integer 0 to 63"),
        (
            [1] * 253,
            4,
            "the prompt is too long: 253 tokens + max_new_tokens=4 are more than the model's context of 256",
        ),
    ],
)
def test_invalid_requests_are_refused(tiny, prompt, max_new_tokens, message):
    for call in (tiny.generate, tiny.stream):
        with pytest.raises((RequestError, ConfigError)) as caught:
            call(prompt, max_new_tokens)
        assert str(caught.value).startswith(message)
        assert isinstance(caught.value, ValueError)
    assert tiny.generate([1], 4).num_tokens == 4


def test_empty_text_prompt_is_refused(single):
    with pytest.raises(RequestError, match="the prompt is empty"):
        single.generate("", 4)


def test_request_that_fills_context_is_accepted(tiny):
    assert tiny.generate([1] * 246, 10).num_tokens == 10


def test_token_id_prompt_needs_no_tokenizer(tiny):
    out = tiny.generate(IDS, max_new_tokens=6)
    assert (out.num_tokens, out.text) == (6, "")
    with pytest.raises(ModelError, match="no usable tokenizer"):
        tiny.generate("text")


def test_invalid_runtime_settings_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="config: must be given without other arguments"):
        LookaheadRuntime(gpus=2, config=RuntimeConfig())
    with pytest.raises(ConfigError, match="gpus=0: must be an integer >= 1"):
        LookaheadRuntime(gpus=0)
    with pytest.raises(ConfigError, match="lookahead.N=1: must be an integer >= 2"):
        LookaheadRuntime(lookahead=LookaheadConfig(N=1))
    with pytest.raises(ModelError, match="no such directory"):
        LookaheadRuntime(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("gpus", [1, 2])
def test_runtime_closed_during_stream_ends_processes_and_refuses_requests(tiny_model_dir, gpus, capfd, caplog):
    before = own_replicas()
    runtime = LookaheadRuntime(str(tiny_model_dir), gpus=gpus, lookahead=FIXED)
    assert len(own_replicas()) == len(before) + (gpus if gpus > 1 else 0)
    stream = runtime.stream(IDS, max_new_tokens=200)
    next(stream)
    runtime.close()
    assert own_replicas() == before
    runtime.close()
    with pytest.raises(ReplicaError, match="the runtime is closed"):
        next(stream)
    with pytest.raises(ReplicaError, match="the runtime is closed"):
        runtime.generate(IDS)
    errors = capfd.readouterr().err + caplog.text
    assert "Traceback" not in errors and "lost" not in errors


def test_close_frees_model(tiny_model_dir):
    def models() -> set[int]:
        return {id(each) for each in gc.get_objects() if issubclass(type(each), PreTrainedModel)}

    before = models()
    runtime = LookaheadRuntime(str(tiny_model_dir), gpus=1, device="cpu", dtype="float32")
    runtime.generate(IDS, 4)
    new = models() - before
    loaded = [weakref.ref(each) for each in gc.get_objects() if id(each) in new]
    runtime.close()
    assert loaded and not any(reference() for reference in loaded)


def test_replicas_share_step_tokens(runtime, single):
    lookahead = replace(FIXED, prior="none")  # one replica asks about another part of the vocabulary than two do
    alone, shared = (each.generate(PROMPT, 16, eos=False, lookahead=lookahead) for each in (single, runtime))
    assert shared.steps == alone.steps
    if runtime.num_replicas == 1:
        assert shared.step_tokens == alone.step_tokens
    else:
        assert shared.step_tokens < 0.75 * alone.step_tokens


def test_prompt_with_invalid_unicode_is_refused(runtime):
    with pytest.raises(RequestError, match="the prompt is not valid Unicode at character 4: surrogates not allowed"):
        runtime.generate("def \ud800")


def test_model_path_may_be_path_object(tiny_model_dir):
    with LookaheadRuntime(Path(tiny_model_dir), device="cpu") as runtime:
        assert runtime.generate([1], 2).num_tokens == 2


def test_unexpected_error_is_one_line_and_runtime_stays_usable(tiny_model_dir, monkeypatch):
    with LookaheadRuntime(tiny_model_dir, device="cpu") as runtime:
        for error, shown in ((RuntimeError("no\nmemory"), ReplicaError), (KeyboardInterrupt(), KeyboardInterrupt)):
            with monkeypatch.context() as patch:
                patch.setattr(ModelRunner, "forward", raiser(error))
                with pytest.raises(shown) as caught:
                    runtime.generate([1], 4)
            assert str(caught.value) in ("decoding failed: RuntimeError: no", "")
        assert runtime.generate([1], 4).num_tokens == 4


def test_keyboard_interrupt_ends_request_but_not_replicas(tiny_model_dir):
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    with LookaheadRuntime(tiny_model_dir, gpus=2, device="cpu", lookahead=PLAIN) as runtime:
        expected = runtime.generate([1], 8).token_ids
        stream = runtime.stream([1], 200)
        next(stream)
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            for _ in stream:
                pass
            timer.join()  # the interrupt comes here at the latest
        assert runtime.generate([1], 8).token_ids == expected
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize(
    "sampling", [None, pytest.param(SamplingConfig(temperature=1.0, seed=3), marks=pytest.mark.slow)]
)
def test_stop_string_ends_text_and_tokens(runtime, sampling):
    """Text after a stop string is dropped, whether it spans tokens or ends inside a token or step output."""
    steps = list(runtime.stream(PROMPT, 32, eos=False, sampling=sampling))
    text = "".join(delta.text for delta in steps)
    token_ids = [token for delta in steps for token in delta.token_ids]
    step_ends = set(itertools.accumulate(len(delta.token_ids) for delta in steps))
    decode = runtime.tokenizer.decode
    outs = []
    for i, size in zip((8, 16, 24, 32), (1, 3, 6, 3), strict=True):
        string = text[i : i + size]
        stream = runtime.stream(PROMPT, 32, eos=False, sampling=sampling, stop=[string, "never there"])
        streamed = "".join(delta.text for delta in stream)
        out = stream.generation
        assert streamed == out.text == text[: text.index(string) + len(string)]
        assert out.finish_reason == "stop"
        assert out.token_ids == token_ids[: out.num_tokens]
        assert string in decode(out.token_ids)
        assert string not in decode(out.token_ids[:-1])
        outs.append(out)
    assert any(decode(out.token_ids) != out.text for out in outs) and {out.num_tokens for out in outs} - step_ends
    assert runtime.generate(PROMPT, 32, eos=False, sampling=sampling, stop=["never there"]).text == text


def test_logprobs_of_deltas_match_generation(runtime):
    stream = runtime.stream(PROMPT, 20, eos=False, logprobs=True)
    deltas = list(stream)
    assert [value for delta in deltas for value in delta.logprobs or ()] == stream.generation.logprobs
    assert len(stream.generation.logprobs) == stream.generation.num_tokens
    assert all(value <= 0 for value in stream.generation.logprobs)
    assert runtime.generate(PROMPT, 4).logprobs is None


def test_samples_of_one_seed_differ_and_are_reproducible(runtime):
    sampling = SamplingConfig(temperature=1.5)
    outs = runtime.samples(PROMPT, 3, 12, sampling=sampling, eos=False)
    assert len({tuple(out.token_ids) for out in outs}) == 3
    (seed,) = {out.seed for out in outs}
    again = runtime.generate(PROMPT, 12, sampling=SamplingConfig(temperature=1.5, seed=seed), sample=2, eos=False)
    assert again.token_ids == outs[2].token_ids
    with pytest.raises(RequestError, match="num_samples=2: decoding is greedy"):
        runtime.samples(PROMPT, 2)
    with pytest.raises(ConfigError, match=r"sample=4294967296: must be 0 to 2\*\*32 - 1"):
        runtime.samples(PROMPT, 3, 12, sampling=sampling, sample=2**32 - 2)
    assert runtime.generate(PROMPT, 4).seed is None


def test_step_of_64_tokens_commits_64_tokens_of_copied_text(single):
    """A lone replica does not re-feed accepted tokens of a copied text, so a step of 64 tokens commits 64."""
    lookahead = LookaheadConfig(tokens=64, prior="none", draft_tables="request")
    text = single.generate("def f(x):\n", 300, eos=False)
    deltas = list(single.stream("def f(x):\n", 300, eos=False, prediction=text.token_ids, lookahead=lookahead))
    assert [token for delta in deltas for token in delta.token_ids] == text.token_ids
    assert max(len(delta.token_ids) for delta in deltas) == 64


def test_prompt_lookup_ignores_a_prediction(single):
    """A prediction of the text itself saves no step."""
    lookahead = LookaheadConfig(drafter="prompt_lookup")
    plain = single.generate("def f(x):\n", 24, eos=False, lookahead=lookahead)
    predicted = single.generate("def f(x):\n", 24, eos=False, lookahead=lookahead, prediction=plain.token_ids)
    assert predicted.token_ids == plain.token_ids and predicted.steps == plain.steps > 6


@pytest.mark.parametrize(
    "make", [np.array, torch.tensor, lambda ids: list(np.array(ids)), lambda ids: list(torch.tensor(ids))]
)
def test_numbers_of_numpy_and_torch_are_taken(tiny, make):
    sampling = SamplingConfig(temperature=np.float32(0.5), seed=np.int64(3))
    given = {"sampling": sampling, "stop_token_ids": make([63]), "prediction": make([1]), "sample": np.int64(1)}
    actual = tiny.generate(make([1, 2]), np.int64(4), **given)
    plain = {
        "sampling": SamplingConfig(temperature=0.5, seed=3),
        "stop_token_ids": [63],
        "prediction": [1],
        "sample": 1,
    }
    assert actual.token_ids == tiny.generate([1, 2], 4, **plain).token_ids
    request = tiny.request(make([1, 2]), np.int64(4), **given)
    assert {*map(type, (*request.prompt_ids, *request.prediction, request.max_new_tokens, request.sample))} == {int}
    assert tiny.request(IDS, torch.tensor(4), eos=np.False_) == tiny.request(IDS, 4, eos=False)
    assert len(tiny.samples(IDS, np.int64(2), 2, sampling=sampling)) == 2


def test_defaults_that_ask_for_beams_are_reported(tiny_model_dir, tmp_path, caplog):
    path = shutil.copytree(tiny_model_dir, tmp_path / "model")
    file = path / "generation_config.json"
    given = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(given | {"num_beams": 4, "penalty_alpha": 0.6, "dola_layers": None}))
    with LookaheadRuntime(str(path), gpus=1, device="cpu") as runtime:
        assert runtime.generate([1, 2], 4).num_tokens == 4
    reports = [each.getMessage() for each in caplog.records if "generation_config.json" in each.getMessage()]
    assert len(reports) == 1 and reports[0].startswith(
        "generation_config.json: num_beams=4, penalty_alpha=0.6: not used"
    )


def test_options_that_are_none_count_as_not_given(single):
    names = ("stop_token_ids", "prediction", "logprobs", "tools", "skip_special_tokens", "sample", "request_id")
    assert single.generate(PROMPT, 4, **dict.fromkeys(names)).token_ids == single.generate(PROMPT, 4).token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": [""]}, "stop='': must be strings"),
        ({"stop": ["\ud83d"]}, r"stop='\\ud83d': is not valid Unicode"),
        ({"max_time": -1}, "max_time=-1: must be a number of seconds"),
        ({"sample": -1}, "sample=-1: must be 0 to"),
        ({"logprobs": 5}, "logprobs=5: must be true or false"),
        ({"sampling": SamplingConfig(min_new_tokens=9)}, "sampling.min_new_tokens=9: must not be above max_new_tok"),
        ({"sampling": SamplingConfig(top_p=0.5)}, "sampling.top_p=0.5: has no effect"),
        ({"sampling": SamplingConfig(bad_words_ids=[[10**6]])}, "token id 1000000 in sampling.bad_words_ids"),
        ({"sampling": SamplingConfig(logit_bias={10**6: 1.0})}, "token id 1000000 in sampling.logit_bias"),
        ({"messages": [{"role": "user", "content": "x"}]}, "prompt and messages: give one of them"),
    ],
)
def test_invalid_options_are_refused(runtime, options, message):
    with pytest.raises(ValueError, match=message):
        runtime.generate(PROMPT, 4, **options)


CHAT_TEMPLATE = (
    "{% for t in tools or [] %}# tool: {{ t.function.name }}\n{% endfor %}"
    "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('unknown role') }}{% endif %}"
    "# {{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "{{ '\\n' }}{% endfor %}# assistant:{% if thinks %}<think>{% endif %}{# </think> #}"
)


@pytest.fixture(scope="module")
def chatty(small_demo_dir, tmp_path_factory):
    """The demo model with a chat template of reasoning and tools, which refuses an unknown role."""
    folder = shutil.copytree(small_demo_dir, tmp_path_factory.mktemp("chat") / "model")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    with LookaheadRuntime(folder, device="cpu", dtype="float32", lookahead=FIXED) as runtime:
        yield runtime


def test_messages_are_rendered_with_chat_template(chatty, runtime):
    messages = [{"role": "user", "content": "Write a loop."}]
    out = chatty.generate(messages=messages, max_new_tokens=8)
    assert out.token_ids == chatty.generate("# user: Write a loop.\n# assistant:", 8).token_ids
    with pytest.raises(RequestError, match="messages: the model's chat template refuses them: unknown role"):
        chatty.generate(messages=[{"role": "nobody", "content": "x"}])
    with pytest.raises(RequestError, match="messages: the model has no chat template; give a prompt instead"):
        runtime.generate(messages=messages)


def test_answer_is_parsed_into_message(chatty):
    call = '<tool_call>\n{"name": "get", "arguments": {"n": 7}}\n</tool_call>'
    asked = [{"role": "user", "content": "x"}]
    tools = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]
    thinks = {"chat_template_kwargs": {"thinks": True}}

    def message(text: str, messages: list[dict] = asked, **options: Any) -> dict[str, Any]:
        constraint = ConstraintConfig(choice=[text])
        answer = chatty.generate(messages=messages, max_new_tokens=60, constraint=constraint, **options)
        assert answer.text.startswith(text[:4])
        return answer.message

    assert message("Hi.", stop=["."]) == {"role": "assistant", "content": "Hi"}
    both = message("well</think>Hi.", **thinks)
    assert both == {"role": "assistant", "content": "Hi.", "reasoning_content": "well", "reasoning": "well"}
    answer = message(f"a . b</think>{call}", tools=tools, stop=["."], **thinks)  # no stop string in reasoning
    ((called,), name) = answer.pop("tool_calls"), "get"
    assert answer == {"role": "assistant", "content": None, "reasoning_content": "a . b", "reasoning": "a . b"}
    assert called["function"] == {"name": name, "arguments": '{"n": 7}'}
    assert message(call)["content"] == call  # no tools were given
    history = [*asked, {**answer, "tool_calls": [called]}, {"role": "tool", "content": "8"}]
    request = chatty.request(messages=history, max_new_tokens=1)
    assert f"# assistant: {call}\n# tool: 8" in chatty.tokenizer.decode(request.prompt_ids)
    assert chatty.generate("x", 1).message is None


def test_generation_config_of_model_applies(single, small_demo_dir, tmp_path):
    folder = shutil.copytree(small_demo_dir, tmp_path / "model")
    config = json.loads((folder / "generation_config.json").read_text())
    config |= {"do_sample": True, "temperature": 0.9, "top_k": 20, "max_new_tokens": 7, "stop_strings": ["zq"]}
    (folder / "generation_config.json").write_text(json.dumps(config))
    with LookaheadRuntime(folder, device="cpu", dtype="float32", lookahead=FIXED) as own:
        out = own.generate(PROMPT, eos=False)
        assert out.num_tokens == 7
        given = SamplingConfig(temperature=0.9, top_k=20, seed=out.seed)
        assert single.generate(PROMPT, 7, eos=False, sampling=given).token_ids == out.token_ids
        assert own.request(PROMPT).stop == ("zq",)
        assert own.generate(PROMPT, sampling=SamplingConfig(temperature=0)).seed is None


def raiser(error: BaseException):
    def fail(*args, **kwargs):
        raise error

    return fail


@pytest.mark.slow
def test_profile_is_written_and_summary_is_printed(tmp_path, capfd):
    """Profiling writes a trace per replica and shows where a step's time went; the output is the same."""
    settings = {"lookahead": LookaheadConfig(W=4, N=3, G=4, prior="none"), "model": ModelConfig(), "gpus": 1}
    config = RuntimeConfig(device="cpu", dtype="float32", **settings)
    with LookaheadRuntime.from_config(config) as runtime:
        expected = runtime.generate(PROMPT, 24).token_ids
    config = replace(config, profile=True, profile_dir=str(tmp_path / "traces"))
    with LookaheadRuntime.from_config(config) as runtime:
        assert runtime.generate(PROMPT, 24).token_ids == expected
        assert runtime.generate(PROMPT, 1).num_tokens == 1  # no step after the prefill
    trace = json.loads((tmp_path / "traces" / "rank0.json").read_text())
    assert any("linear" in str(event.get("name")) for event in trace["traceEvents"])
    shown = capfd.readouterr().err
    assert "Self CPU" in shown
    assert "a step after the prefill" in shown


def test_unwritable_profile_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    config = RuntimeConfig(profile=True, profile_dir=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="profile_dir="):
        LookaheadRuntime.from_config(config)


def test_request_larger_than_cache_capacity_is_refused(single):
    assert single.info.cache_bytes_per_token > 0
    info = replace(single.info, capacity=20, cache_bytes_per_token=1 << 28)
    builder = RequestBuilder(single.config, info, lambda: single.tokenizer, single.compiler)

    def refusal(ids: list[int], max_new_tokens: int | None) -> str:
        with pytest.raises(RequestError) as caught:
            builder.build(ids, max_new_tokens)
        return str(caught.value)

    are_more = "are more than the 20 (5.00 GiB) that a replica's cache can hold"
    assert refusal(IDS, 18) == (
        f"no room in memory: 3 tokens + max_new_tokens=18 (5.25 GiB) {are_more}: give max_new_tokens=17 or less"
    )
    assert refusal([5] * 20, None) == (
        f"no room in memory: 20 tokens + max_new_tokens=1 (5.25 GiB) {are_more}: shorten the prompt"
    )
    assert builder.build(IDS, 17).max_new_tokens == 17
