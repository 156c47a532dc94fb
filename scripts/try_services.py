"""Run unmodified proxies, chat pages and load generators against lp-serve; see try_clients.py.

litellm's proxy and Open WebUI are started, get a few requests, and pass them on. guidellm and evalscope send 12
requests each to every route that they know.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

START_SECONDS = 300  # Open WebUI creates a database first
ANSWER_SECONDS = 900
NUM_REQUESTS = 12
LENGTH = 16  # tokens of an answer
PROXY_KEY = "sk-lp"  # litellm needs a setting to start without a key
QUESTION = [{"role": "user", "content": "Which files are here?"}]
SCHEMA = {"type": "object", "properties": {"folder": {"enum": ["src", "tests"]}}, "required": ["folder"]}
TOOL = {"type": "function", "function": {"name": "list_files", "description": "List files.", "parameters": SCHEMA}}
CALLS = {"max_tokens": 64, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "list_files"}}}
ANTHROPIC_CALLS = {
    "max_tokens": 64,
    "tools": [{"name": "list_files", "description": "List files.", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "list_files"},
}


def free_port() -> int:
    """Return a port that no server listens on."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


@contextlib.contextmanager
def running(command: Sequence[str], folder: str, variables: Mapping[str, str], ready: str) -> Iterator[None]:
    """Run a server in a folder, which is its home, until the block ends.

    Args:
        ready: URL that answers once the server is up.
    """
    environment = {**os.environ, "HOME": folder, "HF_HUB_OFFLINE": "1", **variables}
    log = Path(folder) / "log"
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(ready, timeout=5):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} did not start: {log.read_text()[-400:]!r}")
            time.sleep(1)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # no process is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def post(url: str, body: Mapping[str, Any], key: str = "") -> Any:
    """Post JSON; return the answer, or the list of events of a stream. No event may be an error."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}", "anthropic-version": "2023-06-01"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url}: {error.code} {error.read()[:300]!r}") from None
    if not body.get("stream"):
        return json.loads(text)
    lines = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert events and not any("error" in event and event["error"] for event in events), text[-400:]
    return events


def streamed_text(events: Sequence[dict[str, Any]]) -> str:
    """Return the text of a chat's stream, which must have ended with a reason."""
    choices = [choice for event in events for choice in event.get("choices") or ()]
    assert any(choice.get("finish_reason") for choice in choices), "the stream has no finish_reason"
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def call_of(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the tool call in a chat's answer; its arguments must satisfy SCHEMA."""
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "list_files" and isinstance(
        json.loads(call["function"]["arguments"])["folder"], str
    )
    return call


def ask_chats(base: str, options: dict[str, Any], key: str) -> None:
    """Query a chat whole, as a stream, with a call and with the call's result."""
    chats = f"{base}/chat/completions"
    plain = {**options, "messages": QUESTION, "temperature": 0}
    whole = post(chats, plain, key)["choices"][0]["message"]["content"]
    text = streamed_text(post(chats, {**plain, "stream": True, "stream_options": {"include_usage": True}}, key))
    assert text == whole, f"{text!r} and {whole!r}"
    call = call_of(post(chats, {**plain, **CALLS}, key))
    result = {"role": "tool", "tool_call_id": call["id"], "content": "notes.txt"}
    history = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    streamed_text(post(chats, {**plain, "messages": history, "tools": [TOOL], "stream": True}, key))


def ask_messages(base: str, options: dict[str, Any], key: str) -> None:
    """Query Anthropic's Messages API whole, as a stream, and with a call and its result."""
    plain = {**options, "messages": QUESTION, "temperature": 0}
    whole = "".join(block["text"] for block in post(f"{base}/messages", plain, key)["content"])
    events = post(f"{base}/messages", {**plain, "stream": True}, key)
    assert events[-1]["type"] == "message_stop"
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == whole
    (call,) = post(f"{base}/messages", {**plain, **ANTHROPIC_CALLS}, key)["content"]
    assert call["type"] == "tool_use" and call["input"]["folder"] in ("src", "tests")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "notes.txt"}
    history = [*QUESTION, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    post(f"{base}/messages", {**plain, "messages": history, "tools": ANTHROPIC_CALLS["tools"]}, key)
    assert post(f"{base}/messages/count_tokens", {**plain, "system": "Be short."}, key)["input_tokens"] > 0


def ask_responses(base: str, options: dict[str, Any], key: str) -> None:
    """Query OpenAI's responses whole and as a stream."""
    plain = {"model": options["model"], "input": "Which files are here?", "max_output_tokens": LENGTH}
    assert post(f"{base}/responses", plain, key)["output"]
    last = post(f"{base}/responses", {**plain, "stream": True}, key)[-1]["type"]
    assert last in ("response.completed", "response.incomplete"), last


def try_litellm_proxy(url: str, model: str, _: str) -> str:
    """Run litellm's proxy with three kinds of provider; return the kinds of queries."""
    port = free_port()
    providers = {"openai": f"{url}/v1", "hosted_vllm": f"{url}/v1", "anthropic": url}
    models = [
        {"model_name": name, "litellm_params": {"model": f"{name}/{model}", "api_base": base, "api_key": "none"}}
        for name, base in providers.items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = {"model_list": models, "general_settings": {"master_key": PROXY_KEY}}
        (Path(folder) / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
        command = ("litellm", "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port))
        base = f"http://127.0.0.1:{port}"
        with running(command, folder, {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}, f"{base}/health/liveliness"):
            for name in providers:
                options = {"model": name, "max_tokens": LENGTH}
                for ask in (ask_chats, ask_messages, ask_responses):
                    try:
                        ask(f"{base}/v1", options, PROXY_KEY)
                    except Exception as error:
                        raise RuntimeError(f"{name}, {ask.__name__}: {error}") from error
    return f"chats, messages and responses through the providers {', '.join(providers)}"


def try_open_webui(url: str, model: str, _: str) -> str:
    """Run Open WebUI; return the kinds of queries."""
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            "DATA_DIR": f"{folder}/data",
            "OPENAI_API_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": "none",
            "ENABLE_OLLAMA_API": "false",
            "WEBUI_AUTH": "false",
            "WEBUI_SECRET_KEY": "none",
            "OFFLINE_MODE": "true",  # no models for embeddings
            "BYPASS_EMBEDDING_AND_RETRIEVAL": "true",
        }
        command = ("open-webui", "serve", "--host", "127.0.0.1", "--port", str(port))
        with running(command, folder, variables, f"{base}/health"):
            key = post(f"{base}/api/v1/auths/signin", {"email": "", "password": ""})["token"]
            post(f"{base}/openai/verify", {"url": f"{url}/v1", "key": "none"}, key)
            request = urllib.request.Request(f"{base}/api/models", headers={"Authorization": f"Bearer {key}"})
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                assert model in [each["id"] for each in json.load(answer)["data"]]
            options = {"model": model, "max_tokens": LENGTH}
            ask_chats(f"{base}/api/v1", options, key)
            params = {
                "top_k": 20,
                "min_p": 0.05,
                "repeat_penalty": 1.1,
                "seed": 1,
                "stop": ["#"],
                "logit_bias": "11:-5",
            }
            body = {**options, "messages": QUESTION, "stream": True, "params": params}
            streamed_text(post(f"{base}/api/chat/completions", body, key))
            ask_messages(f"{base}/api/v1", options, key)
            ask_responses(f"{base}/openai", options, key)
            chat = [*QUESTION, {"role": "assistant", "content": "notes.txt"}]
            for task in ("title", "follow_up", "tags"):
                post(f"{base}/api/v1/tasks/{task}/completions", {"model": model, "messages": chat}, key)
    return "chats, messages, responses, title, follow-ups and tags"


def run_load(command: Sequence[str], folder: str) -> str:
    """Run a load generator in a folder; return its output.

    Raises:
        RuntimeError: it failed.
    """
    environment = {**os.environ, "HOME": folder, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(done.stdout + done.stderr)[-400:]!r}")
    return done.stdout


def try_guidellm(url: str, model: str, model_dir: str) -> str:
    """Return how many requests of guidellm succeeded on each route; all must."""
    routes = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
    with tempfile.TemporaryDirectory() as folder:
        for route in routes:
            run_load(
                (
                    *("guidellm", "run", "--disable-console"),
                    *("--backend", f"kind=openai_http,target={url},model={model},request_format={route}"),
                    *("--data", f"kind=synthetic_text,prompt_tokens=24,output_tokens={LENGTH}"),
                    *("--tokenizer", f"kind=huggingface_auto,model={model_dir}"),
                    *("--profile", "kind=concurrent,streams=4"),
                    *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
                    *("--output", "kind=json,path=out.json"),
                ),
                folder,
            )
            (report,) = json.loads((Path(folder) / "out.json").read_text())["benchmarks"]
            totals = report["metrics"]["request_totals"]
            assert totals["successful"] == NUM_REQUESTS and not totals["errored"], f"{route}: {totals}"
    return f"{NUM_REQUESTS} of {NUM_REQUESTS} requests on each of {', '.join(routes)}"


def try_evalscope(url: str, model: str, model_dir: str) -> str:
    """Return how many requests of evalscope succeeded on each route; all must."""
    routes = {"/v1/chat/completions": "openai", "/v1/completions": "openai", "/v1/responses": "responses"}
    for route, api in routes.items():
        with tempfile.TemporaryDirectory() as folder:
            run_load(
                (
                    *("evalscope", "perf", "--model", model, "--api", api, "--url", url + route),
                    *("--tokenizer-path", model_dir, "--prompt", "Write a loop."),
                    *("--number", str(NUM_REQUESTS), "--parallel", "4", "--max-tokens", str(LENGTH)),
                    *("--outputs-dir", folder, "--no-timestamp"),
                ),
                folder,
            )
            (path,) = Path(folder).rglob("benchmark_summary.json")
            summary = json.loads(path.read_text())
            assert summary["Success Requests"] == NUM_REQUESTS and not summary["Failed Requests"], f"{route}: {summary}"
    return f"{NUM_REQUESTS} of {NUM_REQUESTS} requests on each of {', '.join(routes)}"


SERVICES = {
    "litellm proxy": ("litellm", try_litellm_proxy),
    "Open WebUI": ("open-webui", try_open_webui),
    "guidellm": ("guidellm", try_guidellm),
    "evalscope": ("evalscope", try_evalscope),
}  # by name: the command, which is looked up in PATH, and the function
