"""Malformed HTTP requests, made from a seed, for tests and `benchmarks/correctness.py fuzz`."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

KEY = "secret"  # the API key that the server requires
LIMITS = {
    "max_body_bytes": 100_000,
    "max_new_tokens": 64,
    "api_keys": {"tests": KEY},
    "strict_fields": True,
}  # the server's settings
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = "/v1/messages"
GOOD = {
    COMPLETIONS: {"prompt": "def f(", "max_tokens": 2, "temperature": 1, "seed": 7},
    CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "temperature": 1, "seed": 7},
    RESPONSES: {"input": "x", "max_output_tokens": 2, "temperature": 1, "seed": 7},
    MESSAGES: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "temperature": 1, "seed": 7},
}
HUGE, NAN, INFINITY = 2**70, float("nan"), float("inf")
SURROGATE = "\ud800"
ABSENT = object()


@dataclass(frozen=True)
class HttpCase:
    """A request, byte for byte.

    Attributes:
        kind: what is wrong with the request.
        data: what is sent.
        may_pass: whether some requests of the kind can be answered after all; others must be refused.
    """

    kind: str
    data: bytes
    may_pass: bool = False


NO_STRING = (1, 1.5, True, [], {})
NO_BOOL = ("true", "", 1, 0.5, [], {})
NO_INT = ("5", "", "x", 1.5, True, [], {}, NAN, INFINITY, 1e308)
NO_NUMBER = ("1", "", True, [], {}, NAN, INFINITY, -INFINITY)

COMMON = {
    "model": (*NO_STRING, "other", "", SURROGATE),
    "max_tokens": (*NO_INT, 0, -1, -HUGE),
    "temperature": (*NO_NUMBER, -1, -1e-9, 10**400),
    "top_p": (*NO_NUMBER, -0.5, 1.001, 2, HUGE),
    "top_k": (*NO_INT, -2, -HUGE),
    "min_p": (*NO_NUMBER, -0.1, 1.1),
    "repetition_penalty": (*NO_NUMBER, 0, -1),
    "n": (*NO_INT, 0, -1, 129, HUGE),
    "stream": NO_BOOL,
    "stream_options": (*NO_STRING, "x", {"include_usage": True}, {"include_usage": 1}, {"x": 1}),
    "stop": (1, True, {}, "", [""], [1], [None], [[]], ["x"] * 17, SURROGATE, [SURROGATE]),
    "seed": (*NO_INT, -(2**63) - 1, 2**64, HUGE),
    "logit_bias": (
        *NO_STRING[:-1],
        *("x", {"x": 1}, {"1": "x"}, {"1": NAN}, {"1": None}, {"999999": 1}, {"-1": 1}),
        *({"\uff11": 1}, {"1" * 50: 1}, {"": 1}, {"1.5": 1}, {SURROGATE: 1}),
    ),
    "presence_penalty": (*NO_NUMBER, 2.01, -3),
    "frequency_penalty": (*NO_NUMBER, 2.01, -3),
    "user": NO_STRING,
    "metadata": (1, "x", True, []),
    "store": NO_BOOL,
    "service_tier": NO_STRING,
    "min_tokens": (*NO_INT, -1, 65, HUGE),
    "split_special_tokens": NO_BOOL,
    "ignore_eos": NO_BOOL,
    "stop_token_ids": (1, "x", {}, [1.5], ["x"], [-1], [HUGE], [1] * 1025),
    "include_stop_str_in_output": NO_BOOL,
    "skip_special_tokens": NO_BOOL,
    "allowed_token_ids": (1, "x", {}, [], [1.5], ["x"], [-1], [HUGE]),
    "bad_words": (1, "x", {}, [1], [None], [SURROGATE], ["x"] * 1025),
    "truncate_prompt_tokens": (*NO_INT, 0, -2),
    "truncation_side": (*NO_STRING, "x"),
    "trace": (*NO_BOOL, True),
    "max_time": (*NO_NUMBER, 0, -1, 1e9),
    "gpus": (*NO_INT, 0, -1, 10_000, HUGE),
    "lookahead": (
        *NO_STRING[:-1],
        "x",
        *({"W": value} for value in (*NO_INT, -1, 257, HUGE)),
        *({"N": value} for value in (*NO_INT, -1, 0, 1, 33, HUGE)),
        *({"G": value} for value in (*NO_INT, -1, 257, HUGE)),
        *({name: value} for value in (*NO_INT, -1, 0, 4097, HUGE) for name in ("budget", "tokens")),
        {"tokens": 64, "W": 15},
        *({"drafter": value} for value in (*NO_STRING, "", "x", SURROGATE)),
        *(
            {"nonsense": 1},
            {"draft_tables": "runtime"},
            {"draft_tables": "/tmp/x"},
            {"acceptance": "tree"},
            {SURROGATE: 1},
        ),
    ),
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
BLOCKS = ("text", "image", "document", "thinking", "tool_use", "tool_result", "search_result")
FLAT_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
TEMPLATE = {
    "chat_template_kwargs": (1, "x", True, []),
    "enable_thinking": NO_BOOL,
    "thinking_token_budget": (*NO_INT, -2),
    "continue_final_message": NO_BOOL,
    "add_generation_prompt": NO_BOOL,
}
OWN = {
    COMPLETIONS: {
        "prompt": (
            *(ABSENT, None, 1, True, {}, "", [], [""], [[]], [[], [1]], [[1], []], [1, "x"], ["x", 1], [None]),
            *([999999], [-1], [1.5], [True], [HUGE], [[HUGE]], [["x"]], [{}], SURROGATE, ["x", SURROGATE]),
            *("x " * 20_000, ["x"] * 129, [1] * 5000),
        ),
        "logprobs": (*NO_INT, -1, 6, HUGE),
        "echo": NO_BOOL,
        "suffix": (*NO_STRING, "x"),
        "best_of": (*NO_INT, 0, 2, HUGE),
    },
    CHAT: {
        **TEMPLATE,
        "reasoning_effort": NO_STRING,
        "messages": (
            *(ABSENT, None, 1, "x", {}, [], [1], [None], [[]], ["x"], [{}], [{"content": "x"}]),
            *([{"role": role, "content": "x"}] for role in (1, None, [], SURROGATE)),
            *([{"role": "user", "content": content}] for content in (1, True, {}, [1], ["x"], [{}], SURROGATE)),
            [{"role": "user", "content": [{"type": "text"}]}],
            [{"role": "user", "content": [{"type": "text", "text": SURROGATE}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}],
            [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}],
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}],
            [{"role": "tool", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}],
            [{"role": "user", "content": [{"type": "text", "text": "x", "x": 1}]}],
            [{"role": "user", "content": "x " * 20_000}],
        ),
        "logprobs": NO_BOOL,
        "top_logprobs": (*NO_INT, -1, 1, 20, 21),
        "max_completion_tokens": (*NO_INT, 0, -1, -HUGE),
    },
    RESPONSES: {
        **TEMPLATE,
        "input": (
            *(ABSENT, None, 1, True, {}, [], [1], [{}], [{"role": "user", "content": 1}], SURROGATE, "x " * 20_000),
            *([{"type": each}] for each in (1, None, [], SURROGATE, "function_call", "reasoning", "item_reference")),
            [{"type": "function_call_output", "call_id": "c", "output": "x"}],
            [{"type": "web_search_call"}],
        ),
        "tools": (
            1,
            {},
            [1],
            [{}],
            [{"type": "web_search"}],
            [{"type": "namespace", "name": "x", "tools": [{}]}],
            [{"type": "function", "name": "a b"}],
            [FLAT_TOOL] * 129,
        ),
        "tool_choice": (1, {}, [], "x", {"type": "function"}, {"type": "function", "name": "x"}, "required"),
        "parallel_tool_calls": NO_BOOL,
        "instructions": (*NO_STRING, SURROGATE),
        "max_output_tokens": (*NO_INT, 0, -1, -HUGE),
        "previous_response_id": (*NO_STRING, "x"),
        "conversation": (1, "x", {"id": "x"}),
        "prompt": ({"id": "x"}, "x"),
        "background": (*NO_BOOL, True),
        "text": (
            *NO_STRING[:-1],
            {"format": {"type": "json_schema", "name": "x"}},
            {"format": 1},
            {"verbosity": "low"},
        ),
        "include": (1, {}, ["x"], [1]),
        "truncation": (*NO_STRING, "x"),
    },
    MESSAGES: {
        "messages": (
            *(ABSENT, None, 1, "x", {}, [], [1], [None], [[]], ["x"], [{}], [{"content": "x"}], [{"role": "user"}]),
            *([{"role": role, "content": "x"}] for role in (1, None, [], "tool", SURROGATE)),
            *([{"role": "user", "content": each}] for each in (1, True, {}, [], [1], ["x"], [{}], SURROGATE)),
            *([{"role": "user", "content": [{"type": each}]}] for each in (1, None, [], SURROGATE, *BLOCKS)),
            *([{"role": "assistant", "content": [{"type": each}]}] for each in ("tool_use", "tool_result", "image")),
            [{"role": "user", "content": [{"type": "text", "text": SURROGATE}]}],
            [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]}],
            [{"role": "user", "content": "x " * 20_000}],
        ),
        "system": (1, True, {}, [1], [{}], [{"type": "text"}], [{"type": "image"}], SURROGATE),
        "stop_sequences": (1, "x", {}, [1], [""], [None], ["x"] * 17, [SURROGATE]),
        "tools": (1, {}, [1], [{}], [{"name": "a b"}], [{"name": "a"}], [{"type": "bash_20250124", "name": "bash"}]),
        "tool_choice": (1, "auto", {}, [], {"type": "x"}, {"type": "any"}, {"type": "tool"}),
        "thinking": (1, "x", [], {}, {"type": "x"}, {"type": "enabled", "budget_tokens": -1}),
        "output_config": (1, "x", [], {"format": 1}, {"format": {"type": "json_schema"}}, {"effort": 1}),
        "mcp_servers": ([{"type": "url", "url": "http://127.0.0.1/"}], "x"),
        "speed": NO_STRING,
    },
}
OTHERS = {
    COMPLETIONS: CHAT,
    CHAT: COMPLETIONS,
    RESPONSES: COMPLETIONS,
    MESSAGES: COMPLETIONS,
}  # routes with fields that this route does not know
# Wrong bodies of the routes that decode nothing.
TOKENS = {
    "/tokenize": [{}, {"prompt": 1}, {"prompt": []}, {"messages": []}, {"messages": "x"}, {"prompt": SURROGATE}, []],
    f"{MESSAGES}/count_tokens": [{}, {"messages": []}, {"messages": "x"}, {"messages": [{}], "system": 1}, []],
    "/detokenize": [{}, {"tokens": "x"}, {"tokens": ["x"]}, {"tokens": [-1]}, {"tokens": [HUGE]}, {"tokens": [1.5]}],
}
# Fields that OpenAI's clients can send but that are not supported here, and unknown names.
UNKNOWN = {
    "tools": [[TOOL], [1]],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}],
    "functions": [[{"name": "f", "parameters": {}}]],
    "function_call": [{"name": "f"}],
    "parallel_tool_calls": ["x"],
    "response_format": [
        {"type": "json"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema"},
        {"type": "text", "schema": {}},
        {"type": "json_object", "schema": {"type": "objct"}},
    ],
    "structured_outputs": [
        *({"json": {"type": "objct"}}, {"json": {"not": {}}}, {"json": SURROGATE}, {"regex": "(("}, {"regex": ""}),
        *({"grammar": 'root ::= "a" root'}, {"choice": []}, {"choice": [1]}, {"structural_tag": {}}, {"x": 1}, "x"),
        {"regex": "a", "choice": ["a"]},
    ],
    "modalities": [["text", "audio"]],
    "audio": [{"voice": "alloy", "format": "mp3"}],
    "verbosity": ["low"],
    "web_search_options": [{}],
    "guided_json": [{}],
    "use_beam_search": [True],
    "json_schema": [{}],
    "grammar": ['root ::= "a"'],
    "format": ["json", {"type": "object"}],
    "n_predict": [0, 5],
    "prompt_logprobs": [0, 1],
    "sampling": [{"seed": 1}],
    "processors": [["os.system"]],
    "": [1],
    SURROGATE: [1],
    "\x00": [1],
    "__class__": [{}],
    "x" * 10_000: [1],
    "two\nlines": [1],
}
# Values that are allowed, or almost: a 200 is fine, an error of the server is not.
EXTREME = {
    "temperature": (1e-9, 1e-4, 1e308, HUGE, 10**308),
    "max_tokens": (65, HUGE),  # the server's limit is lower
    "top_k": (HUGE, 2**63, 10**9, -1),
    "top_p": (0, 1e-300, 5e-324),
    "min_p": (1, 1e-300),
    "repetition_penalty": (1e308, 1e-300, 5e-324, HUGE),
    "seed": (-(2**63), -2, -1, 0, 2**63, 2**64 - 1),
    "logit_bias": ({"1": 1e308}, {"1": -1e308}, {"1": HUGE}, {"5": -1e308, "6": 1e308}),
    "stop": (["x"] * 16, ["x" * 20_000], "\x00", "\ufffd", "\u0301", []),
    "user": ("x" * 50_000, SURROGATE, "\x00"),
    "input": (  # the demo model's chat template does not show these
        [{"type": "function_call", "call_id": "c", "name": SURROGATE, "arguments": "{"}],
        [{"type": "reasoning", "content": [{"text": SURROGATE}]}],
    ),
    "metadata": ({SURROGATE: SURROGATE}, {"x": [[[[]]]]}),
    "max_time": (1e-300, 1e6),
    "presence_penalty": (2, -2, 0.5),
    "frequency_penalty": (2, -2),
    "split_special_tokens": (True,),
    "n": (2,),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (False,),
    "response_format": ({"type": "text"}, {"type": "json_object"}),
    "structured_outputs": ({}, {"choice": ["a", "\u00fc"]}, {"json": True}, {"regex": "[a-z]{2,9}"}),
    "skip_special_tokens": (True, False),
    "stop_token_ids": ([5], [], [0, 1, 2]),
    "include_stop_str_in_output": (True,),
    "allowed_token_ids": ([5, 6, 7], list(range(4000))),
    "bad_words": (["the"], ["x" * 9000], ["\x00", "\ufffd"]),
    "truncate_prompt_tokens": (1, -1, 10**9),
    "truncation_side": ("left", "right"),
    "chat_template_kwargs": ({}, {"x": [[{}]]}, {"messages": 1}, {SURROGATE: SURROGATE}),
    "enable_thinking": (True, False),
    "reasoning_effort": ("none", "high", SURROGATE),
    "thinking_token_budget": (-1, 0, 3, 10**9),
    "continue_final_message": (True,),
    "add_generation_prompt": (True, False),
    "prediction": ({"type": "content", "content": "x"},),
    "service_tier": ("auto",),
    "gpus": (1,),
    "lookahead": (
        *({}, {"W": 256, "N": 32, "G": 256}, {"W": 0, "N": 2, "G": 0}, {"budget": 1}, {"budget": 4096}),
        *({"tokens": 1}, {"tokens": 64}),
        *({"drafter": drafter} for drafter in ("full", "paper", "prompt_lookup", "recycling")),
        {"W": 256, "N": 32, "G": 256, "drafter": "paper", "budget": 4096},
    ),
}


def request(path: str, body: bytes, method: str = "POST", headers: Mapping[str, str | None] | None = None) -> bytes:
    """Return a request, byte for byte.

    Args:
        path: of the URL.
        body: sent after the headers.
        method: HTTP method.
        headers: replace the usual ones or are added to them; a header of None is left out.
    """
    sent: dict[str, str | None] = {"Host": "x", "Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    sent |= {"Content-Length": str(len(body)), "Connection": "close"} | (headers or {})
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items() if value is not None)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _bodies() -> Iterator[HttpCase]:
    """Yield every wrong value of every field, unknown fields, and extreme values."""
    for path, good in GOOD.items():
        own = COMMON | OWN[path]
        foreign = {name: [values[-1]] for name, values in OWN[OTHERS[path]].items()}
        foreign = {name: values for name, values in foreign.items() if name not in own}
        for kind, table in (("field", own), ("unknown field", UNKNOWN | foreign), ("extreme value", EXTREME)):
            for name, values in table.items():
                for value in values:
                    body = {key: each for key, each in (good | {name: value}).items() if each is not ABSENT}
                    yield HttpCase(kind, request(path, _json(body)), kind == "extreme value")
        for name, value in (("top_p", 2), ("top_k", -2), ("min_p", 7), ("seed", 2**64)):
            yield HttpCase("field", request(path, _json(good | {name: value, "temperature": 0})))

    for path, bodies in TOKENS.items():
        yield from (HttpCase("field", request(path, _json(body))) for body in bodies)


def _documents(rng: random.Random) -> Iterator[HttpCase]:
    """Yield bodies that are not a JSON object, not JSON, or not text."""
    for path, good in GOOD.items():
        whole = _json(good)
        documents = [b"", b" ", b"null", b"1", b"true", b'"x"', b"[]", b"[{}]", b"{}", b"{", b"}", b"NaN", b"'x'"]
        documents += [whole + b"x", whole + whole, b"\xff\xfe" + whole, whole.replace(b":", b"="), b"\x00" * 40]
        documents += [whole.replace(b"2", b"02", 1), whole.replace(b"}", b",}"), whole.replace(b'"', b"'")]
        documents += [b"[" * depth + b"]" * depth for depth in (50, 5_000, 45_000)]
        documents += [b'{"a":' * depth + b"1" + b"}" * depth for depth in (50, 5_000, 14_000)]
        documents += [whole[:-1] + b',"metadata":{"x":' + b"[" * 30_000 + b"]" * 30_000 + b"}}"]
        documents += [whole[:-1] + b',"lookahead":' + b"[" * 900 + b"]" * 900 + b"}"]
        documents += [whole.replace(b": 2", b": -" + b"9" * digits, 1) for digits in (30, 4_000, 5_000, 90_000)]
        numbers = (b"1e999", b"-1e999", b"Infinity", b"-" + b"1" * 400)
        documents += [whole.replace(b": 2", b": " + number, 1) for number in numbers]
        documents += [_json(good | {"user": "x"}).replace(b'"x"', b'"\xc3\x28"'), b"\x80" + whole]
        documents += [whole[: rng.randrange(1, len(whole) - 1)] for _ in range(20)]
        documents += [rng.randbytes(rng.choice((1, 40, 1000))) for _ in range(20)]
        yield from (HttpCase("document", request(path, document)) for document in documents)
        for kind in ("text/plain", "", "x", "application/xml", "application/x-www-form-urlencoded", "json", "*/*"):
            yield HttpCase("content type", request(path, whole, headers={"Content-Type": kind}))
        yield HttpCase("content type", request(path, whole, headers={"Content-Type": None}))
        form = "multipart/form-data; boundary=x"
        yield HttpCase("content type", request(path, b"--x\r\n\r\n--x--", headers={"Content-Type": form}))
        for encoding in ("utf-16", "utf-32", "utf-7"):
            yield HttpCase("document", request(path, json.dumps(good)[1:].encode(encoding)))


def _places(rng: random.Random) -> Iterator[HttpCase]:
    """Yield wrong methods and paths."""
    for path, good in GOOD.items():
        for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "post", "X" * 100):
            yield HttpCase("method", request(path, b"", method))
        for other in (f"/{path}", f"{path}/", f"{path}/x", path.upper(), f"{path}%00", f"{path}%ff", f"/v2{path[3:]}"):
            yield HttpCase("path", request(other, _json(good)))
    for path in ("/health", "/metrics", "/", "/v1/models"):
        yield from (HttpCase("method", request(path, b"{}", method)) for method in ("POST", "PUT", "DELETE"))
    names = ["other", "%ff", "%00", "..%2f..%2fetc%2fpasswd", "a/b/c", "%", "%zz", "demo/", "x" * 5000, "%F0%9F%8E%89"]
    yield from (HttpCase("path", request(f"/v1/models/{name}", b"", "GET")) for name in names)
    paths = ["/x", "/v1", "/v1/", "/v1/embeddings", "/docs", "/openapi.json", "/..", "/../../etc/passwd", "/%2e%2e/x"]
    paths += [
        "*",
        "x",
        "/" + "x" * 5000,
        "/" + "a/" * 2000,
        "/health/",
        "http://other/v1/completions/x",
        "//",
        "/?a=b/",
    ]
    paths += ["/" + bytes(rng.choices(range(0x21, 0x7F), k=12)).decode() for _ in range(20)]
    for path in paths:
        if path.partition("?")[0].partition("#")[0] != "/":
            yield HttpCase("path", request(path, b"", "GET"))


def _headers(rng: random.Random) -> Iterator[HttpCase]:
    """Yield wrong headers: keys, lengths, encodings, malformed lines."""
    for path, good in GOOD.items():
        body = _json(good)
        keys = (None, "", "Bearer", "Bearer ", "Bearer x", f"Basic {KEY}", KEY, f"Bearer {KEY}x", "Bearer \xff", "\t")
        yield from (HttpCase("key", request(path, body, headers={"Authorization": key})) for key in keys)
        for length in ("-1", "x", "1e3", "0x10", "1.5", "5, 6", "", "9" * 30, "9" * 5000, "200000", "\xb2"):
            yield HttpCase("length", request(path, body, headers={"Content-Length": length}))
        for encoding in ("gzip", "x", "chunked, gzip", "chunked, chunked", "\xff", ""):
            headers = {"Content-Length": None, "Transfer-Encoding": encoding}
            yield HttpCase("encoding", request(path, body, headers=headers))
        chunked = {"Content-Length": None, "Transfer-Encoding": "chunked"}
        for chunks in (b"x\r\n", b"-1\r\n", b"5\r\nabc\r\n0\r\n\r\n", b"f" * 30 + b"\r\n", b"\xff\r\n", b"5;" * 40_000):
            yield HttpCase("chunks", request(path, chunks, headers=chunked))
        broken = body[:-1]
        split = b"".join(b"%x\r\n%b\r\n" % (1, broken[at : at + 1]) for at in range(len(broken))) + b"0\r\n\r\n"
        yield HttpCase("chunks", request(path, split, headers=chunked))
        large = b"".join(b"1000\r\n" + b"x" * 4096 + b"\r\n" for _ in range(50)) + b"0\r\n\r\n"
        yield HttpCase("too large", request(path, large, headers=chunked))
        yield HttpCase("too large", request(path, b"x" * 100_001))
        yield HttpCase("too large", request(path, b"x" * 3_000_000))
        head, _, rest = request(path, body).partition(b"\r\n")
        for line in (b"POST", b"POST /", b"", b"\x00", b"POST " + path.encode(), b"POST / HTTP/9.9", b"POST / HTTP/x"):
            yield HttpCase("request line", line + b"\r\n" + rest)
        yield HttpCase("request line", head.replace(b" ", b"  ", 1) + b"\r\n" + rest)
        yield HttpCase("request line", b"POST /" + b"x" * 200_000 + b" HTTP/1.1\r\n" + rest)
        lines = [b"no colon", b": no name", b"a b: c", b"x: \x00", b"x\x01: y", b"x: " + b"y" * 200_000, b"\xff: x"]
        lines += [b"Content-Length: 1\r\nContent-Length: 2", b"Host: a\r\nHost: b", b"x :y"]
        for line in lines:
            yield HttpCase("header", head + b"\r\n" + line + b"\r\n" + rest)
        yield HttpCase("header", request(path, body, headers={"Host": None}))
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        upgrade["Sec-WebSocket-Key"] = "dGhlIHNhbXBsZSBub25jZQ=="
        yield HttpCase("upgrade", request(path, b"", "GET", upgrade))
        yield HttpCase("request line", b"\x16\x03\x01" + rng.randbytes(200) + b"\r\n\r\n")  # the beginning of TLS
        yield HttpCase("request line", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")


def any_value(rng: random.Random, depth: int = 3) -> object:
    """Return any JSON value."""
    plain = [None, True, False, 0, 1, -1, 0.5, HUGE, 1e308, NAN, INFINITY, "", "x", "7", SURROGATE, "\x00", "9" * 50]
    if depth == 0 or rng.random() < 0.6:
        return rng.choice(plain)
    values = [any_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return values if rng.random() < 0.5 else {rng.choice(("x", "1", "W", "N", "role", SURROGATE)): v for v in values}


def _random(rng: random.Random) -> HttpCase:
    """Return a request with random values in several fields, sometimes with a few wrong bytes."""
    path = rng.choice(list(GOOD))
    names = [*COMMON, *OWN[path], *rng.sample(list(UNKNOWN), 1)]
    body = GOOD[path] | {name: any_value(rng) for name in rng.sample(names, rng.randrange(1, 5))}
    data = bytearray(_json(body))
    if rng.random() < 0.3:
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    return HttpCase("random", request(path, bytes(data)), may_pass=True)


def http_cases(count: int, seed: int = 0) -> list[HttpCase]:
    """Return requests in random order: each entry of the tables once, if `count` allows, and random ones.

    Args:
        count: number of requests; at least a tenth of them are random.
        seed: of the random choices.
    """
    rng = random.Random(seed)
    cases = [*_bodies(), *_documents(rng), *_places(rng), *_headers(rng)]
    cases += [_random(rng) for _ in range(max(count // 10, count - len(cases)))]
    rng.shuffle(cases)
    return cases[:count]
