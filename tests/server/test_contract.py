"""Tests of log-probabilities, echo, penalties, responses, tokens and ignored fields of the OpenAI API."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request

import openai
import pytest
import torch
from support import reference
from support.serving import served

from lp_runtime import LookaheadConfig, LookaheadRuntime, SamplingConfig
from lp_runtime.config.settings import ModelConfig
from lp_runtime.model.loading.loader import load_model, load_tokenizer

PROMPT = reference.PROMPTS[2]
MESSAGES = [{"role": "user", "content": "Write a loop."}]
SPECIAL = "<|endoftext|>"


@pytest.fixture(scope="module")
def runtime(small_model_that_chats):
    lookahead = LookaheadConfig(7, 5, 7, prior="none", draft_tables="request")
    with LookaheadRuntime(small_model_that_chats(), device="cpu", dtype="float32", lookahead=lookahead) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def url(runtime):
    with served(runtime) as (url, _):
        yield url


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ModelConfig())


@pytest.fixture(scope="module")
def log_softmax(runtime):
    """Return a function from token ids to transformers' log-probabilities, [l, V]."""
    model = load_model(runtime.config.model, torch.device("cpu"), "float32")

    def of(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)

    return of


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def body(**more) -> dict:
    return {"model": "demo", "prompt": PROMPT, "max_tokens": 16, "temperature": 0} | more


def post(url: str, **fields: object) -> dict:
    question = urllib.request.Request(url, json.dumps(fields).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(question) as answer:
        return json.load(answer)


def streamed(client, **more):
    """Return the text, tokens, logprobs, top logprobs and offsets that a stream's chunks add up to."""
    chunks = [chunk.choices[0] for chunk in client.completions.create(**body(stream=True, **more))]
    parts = [chunk.logprobs for chunk in chunks if chunk.logprobs]
    lists = ([each for part in parts for each in getattr(part, name)] for name in LOGPROB_FIELDS)
    return ("".join(chunk.text for chunk in chunks), *lists)


LOGPROB_FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def test_prompt_logprobs_match_transformers_for_lm_eval_requests(client, tokenizer, log_softmax):
    """Prompts of token ids get the right loglikelihoods, requested and read as by local-completions."""
    prompts = [tokenizer(text).input_ids for text in reference.PROMPTS]
    done = client.completions.create(**body(prompt=prompts, max_tokens=1, logprobs=1, echo=True, seed=1234))
    assert len(done.choices) == len(prompts)
    for ids, choice in zip(prompts, done.choices, strict=True):
        expected = log_softmax(ids)
        got = choice.logprobs
        assert got.token_logprobs[0] is None and got.top_logprobs[0] is None
        assert len(got.token_logprobs) == len(ids) + 1
        for place, token in enumerate(ids[1:]):
            value = float(expected[place, token])
            assert got.token_logprobs[place + 1] == pytest.approx(value, abs=1e-3)
            is_greedy = got.token_logprobs[place + 1] == max(got.top_logprobs[place + 1].values())
            assert is_greedy == (int(expected[place].argmax()) == token)
        assert choice.text == "".join(got.tokens) == tokenizer.decode(ids) + got.tokens[-1]


def test_echo_returns_the_prompt_before_the_text(client):
    plain = client.completions.create(**body()).choices[0].text
    assert client.completions.create(**body(echo=True)).choices[0].text == PROMPT + plain
    whole = client.completions.create(**body(echo=True, logprobs=3)).choices[0]
    assert streamed(client, echo=True, logprobs=3) == (
        whole.text,
        *(getattr(whole.logprobs, name) for name in LOGPROB_FIELDS),
    )
    alone = client.completions.create(**body(echo=True, max_tokens=0, logprobs=2)).choices[0]
    assert alone.text == PROMPT == "".join(alone.logprobs.tokens)
    options = {"include_usage": True, "continuous_usage_stats": True}
    answers = [
        client.completions.create(**body(echo=True, max_tokens=0)),
        *client.completions.create(**body(echo=True, max_tokens=0, stream=True, stream_options=options)),
    ]
    assert {(each.usage.completion_tokens, each.usage.total_tokens - each.usage.prompt_tokens) for each in answers} == {
        (0, 0)
    }
    assert alone.logprobs.token_logprobs[1:] == pytest.approx(
        whole.logprobs.token_logprobs[1 : len(alone.logprobs.tokens)], abs=1e-4
    )
    with pytest.raises(openai.BadRequestError, match="max_tokens=0"):
        client.completions.create(**body(max_tokens=0))


def test_unicode_line_separators_do_not_split_stream_lines(url):
    """Some clients split streams with str.splitlines, which also ends lines at U+0085, U+2028 and U+2029."""
    prompt = "a\x85b\u2028c\u2029d"
    asks = body(prompt=prompt, echo=True, stream=True)
    question = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(asks).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(question) as answer:
        lines = answer.read().decode().splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks).startswith(prompt)


def test_completion_logprobs_list_chosen_and_top_tokens(client):
    choice = client.completions.create(**body(logprobs=5)).choices[0]
    got = choice.logprobs
    assert [len(top) for top in got.top_logprobs] == [5] * 16
    for text, value, top, offset in zip(got.tokens, got.token_logprobs, got.top_logprobs, got.text_offset, strict=True):
        assert top[text] == value == max(top.values()), "greedy"
        assert choice.text[offset : offset + len(text)] == text
    sampled = client.completions.create(**body(logprobs=1, temperature=0.5, seed=3)).choices[0].logprobs
    assert {len(top) for top in sampled.top_logprobs} == {1, 2}, "the sampled token is there next to the likeliest"
    actual = zip(sampled.tokens, sampled.token_logprobs, sampled.top_logprobs, strict=True)
    assert all(top[text] == value for text, value, top in actual)
    none = client.completions.create(**body(logprobs=0)).choices[0].logprobs
    assert [list(top) for top in none.top_logprobs] == [[text] for text in none.tokens]


def test_chat_top_logprobs_are_sorted_and_equal_when_streamed(client):
    options = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 12, "logprobs": True}
    content = client.chat.completions.create(top_logprobs=20, **options).choices[0].logprobs.content
    assert len(content) == 12
    for entry in content:
        assert len(entry.top_logprobs) == 20 and entry.top_logprobs[0].token == entry.token
        values = [each.logprob for each in entry.top_logprobs]
        assert values == sorted(values, reverse=True) and values[0] == entry.logprob
    chunks = client.chat.completions.create(top_logprobs=20, stream=True, **options)
    streamed = [each for chunk in chunks if (part := chunk.choices[0].logprobs) for each in part.content]
    assert [each.token for each in streamed] == [each.token for each in content]
    actual, expected = (
        [each.logprob for entry in entries for each in entry.top_logprobs] for entries in (streamed, content)
    )
    assert actual == pytest.approx(expected, abs=1e-4)
    with pytest.raises(openai.BadRequestError, match="top_logprobs=2: only with logprobs=true"):
        client.chat.completions.create(top_logprobs=2, **options | {"logprobs": False})
    with pytest.raises(openai.BadRequestError, match="top_logprobs=21: must be at most 20"):
        client.chat.completions.create(top_logprobs=21, **options)


def test_penalties_and_min_tokens_take_effect(client, runtime):
    sampling = SamplingConfig(temperature=0, presence_penalty=1.5, frequency_penalty=2.0)
    expected = runtime.generate(PROMPT, 16, sampling=sampling)
    asked = body(max_tokens=16, presence_penalty=1.5, frequency_penalty=2.0)
    assert client.completions.create(**asked).choices[0].text == expected.text
    assert expected.text != client.completions.create(**body(max_tokens=16)).choices[0].text
    done = client.completions.create(**body(max_tokens=64, extra_body={"min_tokens": 64}))
    assert done.usage.completion_tokens == 64


def test_no_stop_string_ends_a_text_before_min_tokens(client):
    text = client.completions.create(**body(max_tokens=32)).choices[0].text
    asked = body(max_tokens=32, stop=text[2:3])
    assert client.completions.create(**asked).choices[0].text == text[: text.index(text[2])]
    held = client.completions.create(**asked, extra_body={"min_tokens": 32})
    assert held.choices[0].text == text and held.choices[0].finish_reason == "length"


HARMLESS = {
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "parallel_tool_calls": False,
    "response_format": {"type": "text"},
    "skip_special_tokens": True,
    "seed": -1,
    "service_tier": "auto",
    "prediction": {"type": "content", "content": "x"},
    "safety_identifier": "x",
    "user": "x",
    "store": False,
    "modalities": ["text"],
    "use_beam_search": False,
}


def test_fields_without_effect_are_accepted_and_unknown_ones_named(client, url, runtime, caplog):
    asked = body(max_tokens=8)
    plain = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked, extra_body=HARMLESS).choices[0].text == plain
    for _ in range(2):
        done = client.completions.create(**asked, extra_body={"brand_new": 1})
        assert done.choices[0].text == plain
    assert caplog.text.count("brand_new") == 1, "named once"
    two = client.completions.create(**asked, n=2).choices
    assert [choice.text for choice in two] == [plain, plain], "greedy"
    content = [{"type": "text", "text": "Write a loop.", "cache_control": {"type": "ephemeral"}}]
    chats = [
        client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": each}], temperature=0, max_tokens=8
        )
        for each in (content, "Write a loop.")
    ]
    assert chats[0].choices[0].message.content == chats[1].choices[0].message.content
    with served(runtime, strict_fields=True) as (strict, _):
        other = openai.OpenAI(base_url=f"{strict}/v1", api_key="none", max_retries=0)
        assert other.completions.create(**asked, extra_body=HARMLESS).choices[0].text == plain
        with pytest.raises(openai.BadRequestError, match="brand_new: is not a known field"):
            other.completions.create(**body(extra_body={"brand_new": 1}))


def test_acceptance_is_reported(client, url):
    answer = post(f"{url}/v1/completions", prompt=PROMPT, max_tokens=32, temperature=0, ignore_eos=True)
    figures, details = answer["metrics"]["speculative_decoding"], answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0, "nothing was predicted"
    fed = figures["num_draft_tokens"]
    assert fed > figures["num_accepted_draft_tokens"] > 0
    assert figures["mean_acceptance_length"] == pytest.approx(32 / figures["num_spec_steps"])
    assert figures["draft_acceptance_rate"] == pytest.approx(figures["num_accepted_draft_tokens"] / fed)
    options = {"include_usage": True}
    *_, last = client.completions.create(**body(max_tokens=32, stream=True, stream_options=options))
    assert last.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


def test_responses_match_chat_completions(client):
    asked = {"model": "demo", "temperature": 0, "max_output_tokens": 12}
    chat = client.chat.completions.create(
        model="demo",
        messages=[{"role": "system", "content": "Be brief."}, *MESSAGES],
        temperature=0,
        max_completion_tokens=12,
    )
    text = chat.choices[0].message.content
    done = client.responses.create(input="Write a loop.", instructions="Be brief.", **asked)
    assert done.output_text == text and done.status == "incomplete"
    assert done.incomplete_details.reason == "max_output_tokens"
    assert done.usage.output_tokens == 12 and done.usage.input_tokens == chat.usage.prompt_tokens
    openai.types.responses.Response.model_validate(done.to_dict())  # a client may read every field of the type
    parts = [{"type": "input_text", "text": "Write a "}, {"type": "input_text", "text": "loop."}]
    items = [{"role": "developer", "content": "Be brief."}, {"type": "message", "role": "user", "content": parts}]
    assert client.responses.create(input=items, **asked).output_text == text
    events = list(client.responses.create(input=items, stream=True, **asked))
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == text
    assert [each.sequence_number for each in events] == list(range(len(events)))
    assert [each.type for each in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == text
    stop = text[4:7]
    with client.responses.stream(input=items, extra_body={"stop": stop}, **asked) as stream:
        final = stream.get_final_response()
    assert (final.output_text, final.status) == (text[: text.index(stop)], "completed")


def test_responses_ignore_hosted_openai_tools(client, caplog):
    included = ["reasoning.encrypted_content", "web_search_call.action.sources"]
    more = {"tools": [{"type": "web_search"}], "text": {"verbosity": "low"}, "include": included, "truncation": "auto"}
    options = {"model": "demo", "input": "x", "temperature": 0, "max_output_tokens": 8}
    answers = [client.responses.create(**options, **each) for each in (more, {})]
    assert answers[0].output_text == answers[1].output_text
    assert "'tools[web_search]'" in caplog.text and "'text.verbosity'" in caplog.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": []}, "input: is empty"),
        ({"previous_response_id": "x"}, "previous_response_id: is not supported"),
        ({"background": True}, "background=true: is not supported"),
        ({"tools": [{"type": 5}]}, "tools.0.type=5: must be 'function'"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice=required: there are no tools"),
        ({"include": ["message.output_text.logprobs"]}, "include=.* is not supported; leave it out"),
        ({"truncation": "x"}, "truncation='x': must be auto or disabled"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "items of type 'item_reference' are not supported"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input.0.arguments: must be given"),
        ({"input": [{"type": "message", "content": "x"}]}, "input.0.role: must be given"),
        ({"input": 5}, "input=5: must be a string or a list"),
    ],
)
def test_bad_responses_requests_are_refused(client, fields, message):
    with pytest.raises(openai.BadRequestError, match=message):
        client.responses.create(**{"model": "demo", "input": "x"} | fields)


def test_tokenize_and_detokenize_match_the_tokenizer(url, tokenizer):
    ids = tokenizer(PROMPT).input_ids
    answer = post(f"{url}/tokenize", prompt=PROMPT)
    assert answer["tokens"] == ids and answer["count"] == len(ids) and answer["max_model_len"] > 100
    assert post(f"{url}/detokenize", tokens=ids)["prompt"] == PROMPT
    rendered = "# user: Write a loop.\n# assistant:"
    assert post(f"{url}/tokenize", messages=MESSAGES)["tokens"] == tokenizer(rendered).input_ids
    assert post(f"{url}/tokenize", prompt="a", return_token_strs=True)["token_strs"] == ["a"]
    for fields in ({}, {"prompt": "a", "messages": MESSAGES}, {"prompt": 5}):
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(f"{url}/tokenize", **fields)
        assert caught.value.code == 400
    with pytest.raises(urllib.error.HTTPError, match="400"):
        post(f"{url}/detokenize", tokens=[10**9])


def test_tokenizer_does_not_hold_up_the_event_loop(url, tokenizer, monkeypatch):
    """Streams stall while its thread is busy; decoding a body of 1 MiB takes half a second."""
    threads = []

    def noted(method):
        def call(*arguments, **options):
            threads.append((method.__name__, asyncio._get_running_loop()))
            return method(*arguments, **options)

        return call

    for name in ("decode", "convert_ids_to_tokens"):
        monkeypatch.setattr(type(tokenizer), name, noted(getattr(type(tokenizer), name)))
    assert post(f"{url}/detokenize", tokens=tokenizer("a").input_ids) == {"prompt": "a"}
    assert post(f"{url}/tokenize", prompt="a", return_token_strs=True)["token_strs"] == ["a"]
    assert {("decode", None), ("convert_ids_to_tokens", None)} == set(threads)


def test_lone_surrogate_in_metadata_is_returned(url):
    answer = post(f"{url}/v1/responses", input="x", max_output_tokens=2, metadata={"\ud800": "\ud800"})
    assert answer["metadata"] == {"\ud800": "\ud800"}


def test_special_tokens_in_user_text_are_split_only_on_request(url, client, tokenizer):
    """A user's special tokens stay special unless the client says otherwise; the template's always do."""
    text = f"x{SPECIAL}y"
    (special,) = tokenizer.convert_tokens_to_ids([SPECIAL])
    messages = [{"role": "user", "content": text}]
    assert special in post(f"{url}/tokenize", prompt=text)["tokens"]
    assert special in post(f"{url}/tokenize", messages=messages)["tokens"]
    for fields, expected in (({"prompt": text}, text), ({"messages": messages}, f"# user: {text}\n# assistant:")):
        ids = post(f"{url}/tokenize", split_special_tokens=True, **fields)["tokens"]
        assert special not in ids and tokenizer.decode(ids) == expected
    counts = [
        client.chat.completions.create(
            model="demo", messages=messages, max_tokens=1, extra_body={"split_special_tokens": split}
        ).usage.prompt_tokens
        for split in (False, True)
    ]
    assert counts[1] > counts[0]


def test_greedy_decoding_ignores_sampling_options(client):
    """Clients send their own defaults, and the demo model's default is greedy decoding."""
    text = client.completions.create(**body(max_tokens=8)).choices[0].text
    asked = {"model": "demo", "prompt": PROMPT, "max_tokens": 8}
    for options in ({"seed": 5}, {"top_p": 0.9}, {"temperature": 1e-8}, {"temperature": 1.0, "top_p": 0, "seed": 3}):
        assert client.completions.create(**asked, **options).choices[0].text == text
    one, other = (client.completions.create(**body(temperature=1.0, seed=seed)).choices[0].text for seed in (-7, -8))
    assert one == client.completions.create(**body(temperature=1.0, seed=-7)).choices[0].text != other


def test_answer_without_max_tokens_fills_the_context(url, runtime):
    """Nulls inside fields count as not given, too."""
    ids = [1] * (runtime.info.context_length - 5)
    answer = post(f"{url}/v1/completions", prompt=ids, temperature=0, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 5
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(f"{url}/v1/completions", prompt=ids, max_tokens=6, lookahead={"W": None}, stream_options=None)
    assert json.load(caught.value)["error"]["code"] == "context_length_exceeded"


def test_tools_are_refused_if_template_takes_none(client):
    clock = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
    asked = {"model": "demo", "messages": MESSAGES, "max_tokens": 4, "temperature": 0, "tools": [clock]}
    with pytest.raises(openai.BadRequestError, match="takes none"):
        client.chat.completions.create(**asked)
    assert client.chat.completions.create(**asked, tool_choice="none").choices[0].message.tool_calls is None


def test_null_stream_options_are_accepted(url):
    question = {"prompt": PROMPT, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": None}}
    data = json.dumps(question).encode()
    asked = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")


def test_developer_role_becomes_system_if_template_lacks_it(url, client):
    instructions = [{"role": role, "content": "Be brief."} for role in ("developer", "system")]
    one, other = (post(f"{url}/tokenize", messages=[each, *MESSAGES])["tokens"] for each in instructions)
    assert one == other


@pytest.mark.parametrize("choices", [["\u00e9\U0001f600 is it"], ["\u00e9", "\u00e8"]])
def test_logprob_bytes_concatenate_to_the_text(client, choices):
    """Each token of a character has a part of its bytes.

    A constraint may force the rest of a character, or its beginning.
    """
    asked = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 12, "logprobs": True}
    forced = {"structured_outputs": {"choice": choices}}
    choice = client.chat.completions.create(**asked, extra_body=forced).choices[0]
    entries = choice.logprobs.content
    assert any(entry.bytes and not entry.token for entry in entries), "a part of a character"
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content in choices
    assert "".join(entry.token for entry in entries) == choice.message.content


def test_cors_allows_headers_of_the_openai_client(runtime):
    with served(runtime, cors_origins=["https://friend.org"]) as (url, _):
        headers = {"Origin": "https://friend.org", "Access-Control-Request-Method": "POST"}
        headers["Access-Control-Request-Headers"] = "authorization,content-type,x-stainless-lang"
        asked = urllib.request.Request(f"{url}/v1/completions", headers=headers, method="OPTIONS")
        with urllib.request.urlopen(asked) as answer:
            assert "x-stainless-lang" in answer.headers["Access-Control-Allow-Headers"].lower()
