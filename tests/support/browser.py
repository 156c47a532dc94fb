"""Control headless Chromium by DevTools (https://chromedevtools.github.io/devtools-protocol)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from websockets.sync.client import ClientConnection, connect

from support.processes import PATIENCE, wait_until

OWN = Path(sys.prefix) / "chromium" / "chromium"  # scripts/browser.sh installs it there
PLACES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = "--headless --no-sandbox --no-zygote --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync --window-size=1000,900 --remote-debugging-port=0"
SOFTWARE = "--single-process --in-process-gpu --use-gl=angle --use-angle=swiftshader --enable-unsafe-swiftshader"
LISTENS = "DevTools listening on "


def find() -> str | None:
    """Return the browser's path; None if there is none."""
    actual = next(filter(None, map(shutil.which, PLACES)), None)
    return actual or (str(OWN) if OWN.exists() else None)


class Page:
    """A page of the browser, empty at first."""

    def __init__(self, connection: ClientConnection):
        self._connection, self._number, self._session = connection, 0, None
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._ask("Page.enable")

    def _ask(self, method: str, **parameters) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._connection.send(json.dumps(message | ({"sessionId": self._session} if self._session else {})))
        while True:
            answer = json.loads(self._connection.recv(timeout=PATIENCE))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, url: str) -> None:
        """Navigate to a URL."""
        self._ask("Page.navigate", url=url)

    def run(self, script: str):
        """Return the value of a JavaScript expression."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self) -> bytes:
        """Return a screenshot as PNG."""
        return base64.b64decode(self._ask("Page.captureScreenshot")["data"])


@contextmanager
def page(path: str, folder: Path) -> Iterator[Page]:
    """Start a browser with its profile in the new `folder`; yield a page."""
    flags = [*FLAGS.split(), *(SOFTWARE.split() if path == str(OWN) else ["--disable-gpu"])]
    command = [path, *flags, f"--user-data-dir={folder}", "about:blank"]
    environment = os.environ | (
        {"LD_LIBRARY_PATH": str(OWN.parent / "lib"), "FONTCONFIG_PATH": str(OWN.parent)} if path == str(OWN) else {}
    )
    log = folder / "log"
    folder.mkdir()
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        wait_until(lambda: LISTENS in log.read_text(errors="replace") or process.poll() is not None)
        text = log.read_text(errors="replace")
        assert LISTENS in text, text
        address = text.partition(LISTENS)[2].split()[0]
        with connect(address, max_size=None, open_timeout=PATIENCE, ping_interval=None) as connection:
            yield Page(connection)
    finally:
        process.kill()
        process.wait()
