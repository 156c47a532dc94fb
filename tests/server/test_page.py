"""The page, in a real headless browser: it shows what was generated, runs of tokens coloured, and the figures."""

from __future__ import annotations

import re
import shutil
import urllib.parse
import urllib.request

import pytest
import reference
from processes import wait_until
from serving import served

from lp_runtime import LookaheadConfig, LookaheadRuntime

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync --window-size=1000,900"
DRIVER = shutil.which("chromedriver")
FIXED = LookaheadConfig(7, 5, 7, prior="none")
SHOWN = ("output", "count", "steps", "model", "legend", "error")
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def site(demo_model_dir):
    """(base URL, the text that the page is to show) of a server with two replicas."""
    with LookaheadRuntime(demo_model_dir, gpus=2, device="cpu", dtype="float32", lookahead=FIXED) as runtime:
        done = runtime.generate(reference.PROMPTS[1], 64)
        with served(runtime) as (url, _):
            yield url, done


def test_the_page_asks_for_nothing_from_elsewhere(site):
    with urllib.request.urlopen(site[0]) as answer:
        page = answer.read().decode()
    assert answer.headers["Content-Type"].startswith("text/html")
    assert not re.search(r"(src|href)=|url\(|https?://|import\s", page)


@pytest.mark.skipif(BROWSER is None or DRIVER is None, reason="needs Chromium and its driver")
def test_a_generation_in_a_browser(site, tmp_path):
    webdriver = pytest.importorskip("selenium.webdriver")
    url, done = site
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path}/profile"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    try:
        query = {"prompt": reference.PROMPTS[1], "tokens": 64, "go": ""}
        browser.get(f"{url}/?{urllib.parse.urlencode(query)}")
        wait_until(lambda: browser.find_element("tag name", "body").get_attribute("data-done"))
        texts = {name: browser.find_element("id", name).get_attribute("textContent") for name in SHOWN}
        runs = browser.find_elements("css selector", "#output .run.many")
        image = browser.get_screenshot_as_png()
        (tmp_path / "page.png").write_bytes(image)
        # A click on the button begins anew, one on the other ends it.
        browser.execute_script("delete document.body.dataset.done; document.getElementById('tokens').value = 900")
        browser.find_element("id", "go").click()
        wait_until(lambda: int(browser.find_element("id", "count").text) not in (0, done.num_tokens))
        browser.find_element("id", "stop").click()
        wait_until(lambda: browser.find_element("tag name", "body").get_attribute("data-done"))
        assert browser.find_element("id", "error").text == ""
    finally:
        browser.quit()
    assert texts["output"] == reference.PROMPTS[1] + done.text and texts["error"] == ""
    assert texts["count"] == str(done.num_tokens) and 1 < int(texts["steps"]) < done.num_tokens
    assert texts["model"] == "demo on 2 replicas"
    assert "found by replica 0" in texts["legend"] and "found by replica 1" in texts["legend"]
    assert len(runs) > 3
    width, height = (int.from_bytes(image[at : at + 4], "big") for at in (16, 20))
    assert image.startswith(PNG) and width >= 900 and height >= 500 and len(image) > 20_000
