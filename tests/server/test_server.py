"""Tests of lp-serve with the official openai client and with clients that misbehave."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import openai
import pytest
from support import reference
from support.processes import PATIENCE, marked, one_core, wait_until
from support.serving import served

from lp_runtime import ConfigError, LookaheadConfig, LookaheadRuntime, SamplingConfig
from lp_runtime.config.serving import ServeConfig
from lp_runtime.model.loading.loader import load_tokenizer

FIXED = LookaheadConfig(7, 5, 7, prior="none", draft_tables="request")
PROMPT = reference.PROMPTS[1]
SAMPLED = {"temperature": 0.8, "seed": 7}
NONE_RUNNING = 'lp_requests_running{model_name="demo"} 0.0'
LONG = 3000  # tokens; a request of this length does not end during a test


@pytest.fixture(scope="module")
def runtime(small_model_that_chats):
    with LookaheadRuntime(small_model_that_chats(), device="cpu", dtype="float32", lookahead=FIXED) as runtime:
        yield runtime


def generated(runtime, prompts: list[str]) -> dict:
    """Return generations by (prompt, sampled)."""
    made = {}
    for sampled in (False, True):
        sampling = SamplingConfig(**SAMPLED) if sampled else SamplingConfig(temperature=0.0)
        for prompt in prompts:
            made[prompt, sampled] = runtime.generate(prompt, 32, eos=False, sampling=sampling, logprobs=True)
    return made


@pytest.fixture(scope="module")
def expected(runtime):
    """Return generations of PROMPT, made before the server starts."""
    return generated(runtime, [PROMPT])


@pytest.fixture(scope="module")
def expected_of_all(runtime):
    """Return generations of all prompts."""
    return generated(runtime, reference.PROMPTS)


@pytest.fixture(scope="module")
def server(runtime, expected):
    with served(runtime) as (url, scheduler):
        yield url, scheduler


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0)


def body(**more) -> dict:
    return {"model": "demo", "prompt": PROMPT, "max_tokens": 32, "extra_body": {"ignore_eos": True}} | more


@pytest.mark.parametrize("sampled", [False, True])
def test_completions_match_generate(client, expected, sampled):
    whole = expected[PROMPT, sampled]
    options = SAMPLED if sampled else {"temperature": 0}
    done = client.completions.create(**body(**options, logprobs=1))
    choice = done.choices[0]
    assert (choice.text, choice.finish_reason, done.object) == (whole.text, "length", "text_completion")
    assert choice.logprobs.token_logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    assert "".join(choice.logprobs.tokens) == whole.text
    assert done.usage.completion_tokens == 32 and done.usage.prompt_tokens > 10
    chunks = list(client.completions.create(**body(**options, stream=True, stream_options={"include_usage": True})))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert 3 < len(chunks) <= whole.steps + 3
    assert chunks[-1].choices == [] and chunks[-1].usage == done.usage


@pytest.mark.slow
def test_several_prompts_and_samples_are_returned_in_order(client, runtime, expected_of_all):
    expected = expected_of_all
    done = client.completions.create(**body(prompt=reference.PROMPTS, temperature=0))
    assert [choice.text for choice in done.choices] == [expected[prompt, False].text for prompt in reference.PROMPTS]
    ids = load_tokenizer(runtime.config.model)(PROMPT).input_ids
    done = client.completions.create(**body(prompt=[ids, ids], n=2, **SAMPLED))
    texts = [choice.text for choice in done.choices]
    assert texts[0] == expected[PROMPT, True].text != texts[1] and texts[2:] == texts[:2]
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert done.usage.completion_tokens == 128 and done.usage.prompt_tokens == 2 * len(ids)


def test_stop_strings_are_not_shown(client, expected):
    text = expected[PROMPT, False].text
    stop = text[10:14]
    shown = text[: text.index(stop)]
    for stops in (stop, [stop, "never there"]):
        done = client.completions.create(**body(temperature=0, stop=stops))
        assert (done.choices[0].text, done.choices[0].finish_reason) == (shown, "stop")
        chunks = list(client.completions.create(**body(temperature=0, stop=stops, stream=True)))
        assert "".join(chunk.choices[0].text for chunk in chunks) == shown
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_lookahead_settings_do_not_change_the_text(client, expected):
    for lookahead in ({"W": 0, "N": 2, "G": 0}, {"drafter": "prompt_lookup"}, {"budget": 4}):
        done = client.completions.create(**body(temperature=0, extra_body={"ignore_eos": True, "lookahead": lookahead}))
        assert done.choices[0].text == expected[PROMPT, False].text


def test_null_fields_count_as_unset(client, expected):
    nulls = dict.fromkeys(("n", "stream", "echo", "stop", "suffix", "logit_bias", "presence_penalty", "lookahead"))
    done = client.completions.create(**body(temperature=0, extra_body={"ignore_eos": True} | nulls))
    assert done.choices[0].text == expected[PROMPT, False].text


def test_chat_matches_completion_of_the_rendered_prompt(client, server):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Write "}, {"type": "text", "text": "a loop."}]},
    ]
    options = {"model": "demo", "messages": messages, "temperature": 0, "logprobs": True}
    done = client.chat.completions.create(max_completion_tokens=24, **options)
    choice = done.choices[0]
    plain = "# system: Be brief.\n# user: Write a loop.\n# assistant:"
    assert (
        choice.message.content
        == client.completions.create(**body(prompt=plain, max_tokens=24, temperature=0, extra_body={})).choices[0].text
    )
    assert choice.message.role == "assistant" and len(choice.logprobs.content) == done.usage.completion_tokens
    chunks = list(client.chat.completions.create(max_tokens=24, stream=True, **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    logprobs = [
        each.logprob for chunk in chunks if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content
    ]
    assert logprobs == [each.logprob for each in choice.logprobs.content]


def test_models_health_and_metrics_routes_answer(client, server):
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with urllib.request.urlopen(f"{server[0]}/health") as answer:
        assert json.load(answer) == {"status": "ok", "replicas": 1}
    client.completions.create(**body(temperature=0))
    text = urllib.request.urlopen(f"{server[0]}/metrics").read().decode()
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))

    def figure(name: str, labels: str = "") -> float:
        return float(figures[f'{name}{{model_name="demo"{labels}}}'])

    assert figure("lp_new_tokens_total") >= 32 and figure("lp_compression_ratio") > 1
    assert figure("lp_requests_total", ',outcome="length"') >= 1
    assert figure("lp_replicas") == 1 and figure("lp_first_token_seconds_count") >= 1
    assert figure("lp_inter_token_seconds_count") >= 1 and figure("lp_queue_seconds_count") >= 1
    assert 0 <= figure("lp_kv_cache_usage") < 1
    assert sum(float(value) for name, value in figures.items() if name.startswith("lp_accepted_tokens_total{")) > 0


@pytest.mark.slow
def test_concurrent_clients_get_correct_texts(server, expected_of_all):
    def ask(number: int) -> bool:
        sampled, prompt = bool(number % 2), reference.PROMPTS[number % 3]
        client = openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0)
        options = SAMPLED if sampled else {"temperature": 0}
        if number % 4 < 2:
            text = client.completions.create(**body(prompt=prompt, **options)).choices[0].text
        else:
            chunks = client.completions.create(**body(prompt=prompt, stream=True, **options))
            text = "".join(chunk.choices[0].text for chunk in chunks)
        return text == expected_of_all[prompt, sampled].text

    with ThreadPoolExecutor(24) as pool:
        assert all(pool.map(ask, range(24)))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "prompt: is empty"),
        ({"prompt": [999999]}, "token id 999999"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": 100000}, "the prompt is too long"),
        ({"temperature": -1}, "temperature=-1.0: must be 0 (greedy)"),
        ({"top_p": 2, "temperature": 1}, "top_p=2.0: must be in (0, 1]"),
        ({"n": 0}, "n=0: must be at least 1"),
        ({"n": "2"}, "n='2': must be an integer"),
        ({"prompt": {}}, "prompt: must be a string or a list"),
        ({"presence_penalty": 2.5}, "presence_penalty=2.5: must be in [-2, 2]"),
        ({"stop": ""}, "stop=''"),
        ({"stop": "e\u0301" * 600}, "stop: a string has 1200 characters; must have at most 1024"),
        ({"stop": ["x"] * 17}, "stop: 17 strings"),
        ({"stop": 5}, "stop=5: must be a string or a list"),
        ({"logit_bias": {"x": 1}}, "logit_bias of 'x'"),
        ({"logprobs": 6}, "logprobs=6: must be at most 5"),
        ({"suffix": "x"}, "suffix: the model's tokenizer has no tokens for fill-in-the-middle"),
        ({"suffix": "x", "prompt": ["x"]}, "suffix: only with one prompt, as text"),
        ({"best_of": 3}, "best_of=3: is not supported; leave it out or give n=1"),
        ({"extra_body": {"tools": [{"type": "function"}]}}, "tools: is not supported; leave it out or give []"),
        ({"extra_body": {"guided_json": {}}}, "guided_json: is not supported"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search: is not supported; leave it out or give false"),
        ({"extra_body": {"stop_token_ids": [9**9]}}, "token id 387420489 in stop_token_ids: must be"),
        ({"extra_body": {"allowed_token_ids": [9**9]}}, "token id 387420489 in allowed_token_ids: must be"),
        ({"extra_body": {"truncate_prompt_tokens": 0}}, "truncate_prompt_tokens=0: must be -1, or at least 1"),
        ({"extra_body": {"lookahead": {"policy": "paper"}}}, "lookahead.policy: is not a known field"),
        ({"extra_body": {"lookahead": {"W": -1, "N": 5, "G": 5}}}, "lookahead.W=-1"),
        ({"extra_body": {"lookahead": {"W": 10**9, "N": 5, "G": 5}}}, "lookahead.W=1000000000: must be at most 256"),
        ({"stream_options": {"include_usage": True}}, "stream_options: only with stream=true"),
    ],
)
def test_bad_requests_are_refused_in_one_line(client, more, message):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**body(**more))
    assert message in caught.value.body["message"] and "\n" not in caught.value.body["message"]


def test_client_disconnect_cancels_the_request(server):
    url, scheduler = server
    for stream in (True, False):
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        asked = {
            "prompt": PROMPT,
            "max_tokens": LONG,
            "stream": stream,
            "ignore_eos": True,
            "lookahead": {"W": 0, "N": 2, "G": 0},
        }
        before = scheduler.totals.requests.get("cancelled", 0)
        connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
        wait_until(lambda: scheduler.num_running)
        connection.sock.close()
        wait_until(lambda: NONE_RUNNING in urllib.request.urlopen(f"{url}/metrics").read().decode())
        assert scheduler.totals.requests["cancelled"] == before + 1


SLOW = {"ignore_eos": True, "lookahead": {"W": 0, "N": 2, "G": 0}}


def test_full_queue_gets_429_and_wrong_key_401(runtime, expected):
    with served(runtime, max_waiting=1, api_keys={"somebody": "secret"}, max_new_tokens=LONG) as (url, scheduler):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="guess", max_retries=0).models.list()
        assert urllib.request.urlopen(f"{url}/health").status == 200
        stream = client.completions.create(**body(max_tokens=LONG, stream=True, extra_body=SLOW))
        next(iter(stream))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.completions.create, **body(temperature=0))
            wait_until(lambda: scheduler.num_waiting == 1)
            with pytest.raises(openai.RateLimitError, match="busy: 1 requests are waiting, and at most 1 may"):
                client.completions.create(**body())
            stream.close()
            assert waiting.result().choices[0].text == expected[PROMPT, False].text
        with pytest.raises(openai.BadRequestError, match="n=3: must be at most 2 with max_waiting=1"):
            client.completions.create(**body(n=3, **SAMPLED))
        with pytest.raises(openai.BadRequestError, match="2 prompts x n=2: must be at most 2 with max_waiting=1"):
            client.completions.create(**body(prompt=["a", "b"], n=2, **SAMPLED))


def test_server_max_new_tokens_limits_answers(runtime):
    with served(runtime, max_new_tokens=3) as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        for length in (3, 4, 1 << 30):  # even more than any context holds
            answer = client.completions.create(**body(max_tokens=length, extra_body={"ignore_eos": True}))
            assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 3
        with pytest.raises(openai.BadRequestError):
            client.completions.create(**body(max_tokens=-1))


def test_request_is_refused_after_the_queue_timeout(runtime):
    with served(runtime, queue_timeout=0.01) as (url, scheduler):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        slow = runtime.request(PROMPT, LONG, eos=False, lookahead=LookaheadConfig(0, 2, 0))
        running = scheduler.submit(slow)  # has no deadline
        wait_until(lambda: scheduler.num_running == 1)
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="did not begin before its deadline") as caught:
                client.completions.create(**body(stream=stream))
            assert caught.value.status_code == 503
        running.cancel()


@contextmanager
def command(tmp_path, *overrides: str):
    """Start lp-serve and yield (mark, process, client)."""
    code = "from lp_runtime.entrypoints.cli import serve_main; serve_main()"
    settings = ["device=cpu", "dtype=float32", "lookahead.W=7", "lookahead.N=5", "lookahead.G=7"]
    with marked() as mark, one_core(), open(tmp_path / "stderr", "w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *settings, "lookahead.prior=none", *overrides],
            cwd=tmp_path,
            env=mark.environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        url = process.stdout.readline().split()[-1]
        yield mark, process, openai.OpenAI(base_url=url, api_key="none", max_retries=0)


@pytest.mark.slow
def test_lp_serve_survives_a_killed_replica_and_ends_on_ctrl_c(tmp_path):
    """A replica of two is killed while it decodes, and Ctrl-C ends every process."""
    with command(tmp_path, "port=0", "gpus=2") as (mark, process, client):
        assert [model.id for model in client.models.list()] == ["demo_model"]
        asked = body(model="demo_model", max_tokens=200, temperature=0)
        whole = client.completions.create(**asked).choices[0].text
        text = ""
        for number, chunk in enumerate(client.completions.create(**asked, stream=True)):
            text += chunk.choices[0].text
            if number == 3:
                subprocess.run(["kill", "-9", str(mark.workers()[0])], check=True)
        assert text == whole
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE)
        mark.assert_gone()
    said = (tmp_path / "stderr").read_text()
    stages = re.findall(r"starting, (\d) of 5 \(\d+ s\): (\w+)", said)
    expected = [("1", "compiling"), ("2", "loading"), ("3", "fusing"), ("4", "checking"), ("5", "measuring")]
    assert stages[:5] == expected, "by one replica of two"  # then those of the restarted replica
    assert f"a page to try it: {str(client.base_url).removesuffix('v1/')}" in said


@pytest.mark.slow
def test_lp_serve_exits_when_no_replica_is_left(tmp_path):
    """Whatever started the server can then start it again, with all its restarts."""
    with command(tmp_path, "port=0", "gpus=1", "failure.restarts=0") as (mark, process, client):
        stream = client.completions.create(**body(model="demo_model", max_tokens=LONG), stream=True)
        next(iter(stream))
        subprocess.run(["kill", "-9", str(mark.workers()[0])], check=True)
        with pytest.raises(openai.APIError, match="all replicas were lost while decoding"):
            list(stream)
        assert process.wait(PATIENCE) == 1
        mark.assert_gone()
    last = (tmp_path / "stderr").read_text().splitlines()[-1]
    assert last == "error: no replica is left (replica 0: its process ended (signal 9))"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param("loading", marks=pytest.mark.slow), "serving"])
def test_sigterm_ends_lp_serve_cleanly(tmp_path, stage):
    """SIGTERM also ends a loading server, and process 1 of a container, which ignores it by default."""
    with marked() as mark, one_core(), open(tmp_path / "stderr", "w") as stderr:
        code = "from lp_runtime.entrypoints.cli import serve_main; serve_main()"
        command = [sys.executable, "-c", code, "port=0", "device=cpu", "lookahead.prior=none"]
        options = {"cwd": tmp_path, "env": mark.environment, "stdout": subprocess.PIPE, "stderr": stderr}
        process = subprocess.Popen(command, **options)
        if stage == "serving":
            assert process.stdout.readline().startswith(b"serving ")
        else:
            wait_until(lambda: "loading" in (tmp_path / "stderr").read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM, "an exit, not a death by the signal"
        mark.assert_gone()
    assert "Traceback" not in (tmp_path / "stderr").read_text()


@pytest.mark.slow
def test_killed_lp_serve_leaves_no_process_and_frees_its_port(tmp_path):
    """Its replicas end by themselves in the middle of a request, and the next server takes the port."""
    asked = body(model="demo_model", temperature=0)
    with command(tmp_path, "port=0", "gpus=1") as (mark, process, client):
        text, port = client.completions.create(**asked).choices[0].text, client.base_url.port
        stream = client.completions.create(**asked | {"max_tokens": 2000}, stream=True)
        assert next(iter(stream)).choices[0].text and len(mark.workers()) == 1
        process.kill()
        mark.assert_gone()
        stream.close()
    with command(tmp_path, f"port={port}", "gpus=1") as (_, _, client):
        assert client.base_url.port == port and client.completions.create(**asked).choices[0].text == text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("host=300.0.0.1", "host=300.0.0.1 port=8000"),
        ("api_key=''", "api_key: is empty"),
        ("api_keys=/nowhere", "api_keys=/nowhere: No such file or directory"),
        ("ssl_certfile=/nowhere", "ssl_certfile=/nowhere: "),
    ],
)
def test_bad_settings_are_refused_in_one_line(override, message, capsys):
    from lp_runtime.entrypoints.cli import serve_main

    with pytest.raises(SystemExit) as caught:
        serve_main([override])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 70000}, "port=70000: must be 0 to 65535"),
        ({"max_waiting": -1}, "max_waiting=-1"),
        ({"header_timeout": 0.0}, "header_timeout=0.0: must be a number of seconds > 0"),
        ({"max_connections": 0}, "max_connections=0: must be an integer >= 1"),
        ({"ssl_keyfile": "/x"}, "ssl_keyfile=/x: only with ssl_certfile"),
        ({"server": "apache"}, "server=apache: must be one of uvicorn, ray_serve"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigError) as caught:
        ServeConfig(**settings)
    assert str(caught.value).startswith(message)
