"""A server with just enough of the OpenAI API, whose answers a test specifies."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Pieces = Iterable[str | dict] | int


@dataclass
class FakeServer:
    """Answers of a fake server, and the requests that it has received.

    Attributes:
        pieces: returns the pieces of a text by the number of the request. An integer is a status to fail with; a piece
            "" ends the connection; a dictionary is sent as an event.
        bodies: bodies of the requests so far.
        keys: Authorization headers of the requests so far.
        num_at_once: largest number of requests that waited for their pieces at once.
    """

    pieces: Callable[[int], Pieces]
    bodies: list[dict] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    num_at_once: int = 0
    num_open: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def fake_server(pieces: Callable[[int], Pieces]) -> Iterator[tuple[str, FakeServer]]:
    """Yield the URL of a fake server, and the server."""
    fake = FakeServer(pieces)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            fake.keys.append(self.headers["Authorization"])
            self.answer(200, json.dumps({"data": [{"id": "fake"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with fake.lock:
                number = len(fake.bodies)
                fake.bodies.append(body)
                fake.num_open += 1
                fake.num_at_once = max(fake.num_at_once, fake.num_open)
            try:
                texts = fake.pieces(number)
            finally:
                with fake.lock:  # before the client has its answer and can send the next request
                    fake.num_open -= 1
            self.stream(texts, is_chat="messages" in body)

        def stream(self, texts: Pieces, is_chat: bool) -> None:
            if isinstance(texts, int):
                self.answer(texts, json.dumps({"error": {"message": "not\nnow"}}))
                return
            self.send_response(200)
            self.end_headers()
            num_pieces = 0
            for text in texts:
                num_pieces += 1
                if not text:
                    return
                if isinstance(text, dict):
                    self.event(text)
                    continue
                choice = {"delta": {"content": text}} if is_chat else {"text": text}
                self.event({"choices": [choice]})
            self.event({"choices": [], "usage": {"completion_tokens": 2 * num_pieces}})
            self.wfile.write(b"data: [DONE]\n\n")

        def event(self, body: dict) -> None:
            self.wfile.write(f": a comment\ndata: {json.dumps(body)}\n\n".encode())

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # clients may connect all at once

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
