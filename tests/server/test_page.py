"""Tests of the page in a headless browser: generated text, colored runs of tokens, and figures."""

from __future__ import annotations

import json
import re
import urllib.parse
import urllib.request

import openai
import pytest
from support import browser, reference
from support.processes import wait_until
from support.serving import served

from lp_runtime import LookaheadConfig, LookaheadRuntime

FIXED = LookaheadConfig(7, 5, 7, prior="none", draft_tables="request")
SHOWN = ("output", "count", "steps", "model", "legend", "error")
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def chat_url(small_model_that_chats):
    """Yield the base URL of a server whose model has a chat template."""
    with (
        LookaheadRuntime(small_model_that_chats(), device="cpu", dtype="float32", lookahead=FIXED) as runtime,
        served(runtime) as (url, _),
    ):
        yield url


@pytest.fixture(scope="module")
def site(demo_model_dir):
    """Yield (base URL, generation that the page must show) of a server with two replicas."""
    with LookaheadRuntime(demo_model_dir, gpus=2, device="cpu", dtype="float32", lookahead=FIXED) as runtime:
        done = runtime.generate(reference.PROMPTS[1], 64)
        with served(runtime) as (url, _):
            yield url, done


def test_head_request_for_the_page_returns_200(chat_url):
    with urllib.request.urlopen(urllib.request.Request(chat_url, method="HEAD")) as answer:
        assert answer.status == 200 and answer.read() == b""


def test_page_loads_no_external_resources_and_forbids_framing(chat_url):
    with urllib.request.urlopen(chat_url) as answer:
        page = answer.read().decode()
    assert answer.headers["Content-Type"].startswith("text/html")
    assert not re.search(r"(src|href)=|url\(|https?://|import\s", page)
    assert answer.headers["X-Frame-Options"] == "DENY"
    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]


@pytest.mark.slow
@pytest.mark.skipif(browser.find() is None, reason="no Chromium here; scripts/browser.sh fetches one")
def test_browser_shows_generated_text_and_token_runs(site, tmp_path):
    url, done = site
    query = {"prompt": reference.PROMPTS[1], "tokens": 64, "go": ""}
    with browser.page(browser.find(), tmp_path / "profile") as page:
        page.open(f"{url}/?{urllib.parse.urlencode(query)}")
        wait_until(lambda: page.run("document.getElementById('model')?.textContent"))
        assert page.run("document.getElementById('prompt').value") == reference.PROMPTS[1]
        assert page.run("document.getElementById('output').textContent") == "", "a link starts nothing"
        page.run("document.getElementById('go').click()")
        wait_until(lambda: page.run("document.body?.dataset.done"))
        texts = {name: page.run(f"document.getElementById('{name}').textContent") for name in SHOWN}
        num_runs = page.run("document.querySelectorAll('#output .run.many').length")
        titles = page.run("[...document.querySelectorAll('#output .run')].map(run => run.title)")
        image = page.screenshot()
        (tmp_path / "page.png").write_bytes(image)
        # A click on `go` starts a new generation, and a click on `stop` ends it.
        page.run("delete document.body.dataset.done; document.getElementById('tokens').value = 900")
        page.run("document.getElementById('go').click()")
        wait_until(lambda: int(page.run("document.getElementById('count').textContent")) not in (0, done.num_tokens))
        page.run("document.getElementById('stop').click()")
        wait_until(lambda: page.run("document.body.dataset.done"))
        assert page.run("document.getElementById('error').textContent") == ""
    assert texts["output"] == reference.PROMPTS[1] + done.text and texts["error"] == ""
    assert texts["count"] == str(done.num_tokens) and 1 < int(texts["steps"]) < done.num_tokens
    assert texts["model"] == "demo on 2 replicas"
    # Whether the second replica finds any depends on its speed compared with the first, which has every root.
    finders = {int(rank) for title in titles for rank in title.rpartition("replica ")[2].split(", ") if rank}
    assert 0 in finders <= {0, 1}
    assert texts["legend"].endswith("".join(f"found by replica {rank}" for rank in sorted(finders)))
    assert "guessed" in texts["legend"] and "forced" not in texts["legend"]
    assert num_runs > 3
    width, height = (int.from_bytes(image[at : at + 4], "big") for at in (16, 20))
    assert image.startswith(PNG) and width >= 900 and height >= 500 and len(image) > 20_000


SCHEMA = {"type": "object", "properties": {"copied_name": {"enum": ["abcabc"]}, "n": {"type": "integer"}}}
RUNS = """[...document.querySelectorAll('#output .run.many')].map(
    run => [run.className.split(' ')[2], run.title, getComputedStyle(run).backgroundColor])"""


@pytest.mark.slow
@pytest.mark.skipif(browser.find() is None, reason="no Chromium here; scripts/browser.sh fetches one")
def test_browser_shows_constrained_text_and_forced_runs(site, tmp_path):
    """The text follows the schema, and forced runs look different from guessed ones."""
    schema = SCHEMA | {"required": ["copied_name", "n"], "additionalProperties": False}
    with browser.page(browser.find(), tmp_path / "profile") as page:
        page.open(f"{site[0]}/?{urllib.parse.urlencode({'prompt': reference.PROMPTS[1], 'tokens': 60})}")
        wait_until(lambda: page.run("document.getElementById('model')?.textContent"))
        page.run("document.getElementById('go').click()")
        wait_until(lambda: page.run("document.body?.dataset.done"))
        guessed = [run for run in page.run(RUNS) if run[0] == "guessed"]
        assert page.run("document.getElementById('schema').hidden")
        page.run("const choice = document.getElementById('constraint'); choice.value = 'json_schema'")
        page.run("document.getElementById('constraint').dispatchEvent(new Event('change'))")
        assert not page.run("document.getElementById('schema').hidden")
        page.run("document.getElementById('schema').value = '{'; document.getElementById('go').click()")
        assert page.run("document.getElementById('error').textContent").startswith("JSON schema: ")
        page.run(f"document.getElementById('schema').value = {json.dumps(json.dumps(schema))}")
        page.run("delete document.body.dataset.done; document.getElementById('go').click()")
        wait_until(lambda: page.run("document.body.dataset.done"))
        shown = page.run("document.getElementById('output').textContent").removeprefix(reference.PROMPTS[1])
        assert page.run("document.getElementById('error').textContent") == ""
        assert "forced by the constraint" in page.run("document.getElementById('legend').textContent")
        runs = page.run(RUNS)
    assert shown.startswith('{"copied_name": "abcabc", "n": ')
    forced = [run for run in runs if run[0] == "forced"]
    assert forced and all(re.search(r"\(\d+ forced", title) for _, title, _ in forced)
    assert guessed and not {colour for *_, colour in forced} & {colour for *_, colour in guessed}


@pytest.mark.skipif(browser.find() is None, reason="no Chromium here; scripts/browser.sh fetches one")
def test_browser_shows_both_turns_of_a_chat(chat_url, tmp_path):
    """The second of two turns is sent with the first, and both stay on the page."""
    client = openai.OpenAI(base_url=f"{chat_url}/v1", api_key="none", max_retries=0)
    messages: list[dict[str, str]] = []
    for text in ("Write a loop.", "Another one."):
        messages.append({"role": "user", "content": text})
        done = client.chat.completions.create(model="demo", messages=messages, max_tokens=16, temperature=0)
        messages.append({"role": "assistant", "content": done.choices[0].message.content})
    with browser.page(browser.find(), tmp_path / "profile") as page:
        page.open(f"{chat_url}/?tokens=16")
        wait_until(lambda: page.run("document.getElementById('model')?.textContent"))
        page.run("const mode = document.getElementById('mode'); mode.value = 'chat'")
        page.run("document.getElementById('mode').dispatchEvent(new Event('change'))")
        for text in ("Write a loop.", "Another one."):
            page.run(f"delete document.body.dataset.done; document.getElementById('prompt').value = '{text}'")
            page.run("document.getElementById('go').click()")
            wait_until(lambda: page.run("document.body.dataset.done"))
        assert page.run("document.getElementById('error').textContent") == ""
        shown = page.run("document.getElementById('output').textContent")
        page.run("document.getElementById('new').click()")
        assert page.run("document.getElementById('output').textContent") == ""
    first, second = messages[1]["content"], messages[3]["content"]
    assert shown == f"> Write a loop.\n\n{first}\n\n> Another one.\n\n{second}"
