"""A server of a runtime in this process, over the HTTP stack that lp-serve uses."""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from lp_runtime import LookaheadRuntime, Scheduler
from lp_runtime.config.serving import ServeConfig
from lp_runtime.config.settings import DEMO_MODEL
from lp_runtime.server.answers import PING_SECONDS
from lp_runtime.server.app import Server
from lp_runtime.server.serve import HttpServer
from lp_runtime.server.tracing import Tracing

TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}# assistant:"
TOOLS_TEMPLATE = (
    "{% for t in tools or [] %}# tool: {{ t.function.name }}\n{% endfor %}"
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "\n{% endfor %}# assistant:"
)


class QuickServer(HttpServer):
    """A server that notices within 0.01 s, instead of 0.1 s, that it shall end."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(0.01)


@contextmanager
def served(
    runtime: LookaheadRuntime,
    max_waiting: int = 64,
    policy: str = "fair",
    tracing: Tracing | None = None,
    ping_seconds: float = PING_SECONDS,
    **settings: Any,
) -> Iterator[tuple[str, Scheduler]]:
    """Serve a runtime's model under the name `demo`, for any Host header.

    Args:
        settings: of ServeConfig; `api_keys` is a dict of keys by the client's name.

    Yields:
        base URL and scheduler of the server.
    """
    with Scheduler(runtime, max_waiting, policy) as scheduler, tempfile.NamedTemporaryFile("w") as keys:
        if "api_keys" in settings:
            keys.writelines(f"{name} {key}\n" for name, key in settings["api_keys"].items())
            keys.flush()
            settings["api_keys"] = keys.name
        config = ServeConfig(model=runtime.config.model, served_name="demo", host="0.0.0.0", **settings)
        routes = Server(runtime, scheduler, config, tracing, ping_seconds)
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        server = QuickServer(routes, scheduler, config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", scheduler
        finally:
            server.should_exit = True
            thread.join()


def demo_model_that_chats(folder: Path, template: str = TEMPLATE) -> Path:
    """Write a copy of the demo model with a chat template to a new folder; return the folder."""
    shutil.copytree(DEMO_MODEL, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


@contextmanager
def answering(text: str) -> Iterator[str]:
    """Answer every request with a fixed text of events; yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
