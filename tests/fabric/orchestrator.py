"""A stand-in for FABRIC's orchestrator, for fablib's own client: slices in memory, whose state the
tests decide."""

from __future__ import annotations

import http.server
import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

from tests.fabric.resources import recorded_summary

FABLIB = "fabrictestbed-extensions==2.0.9"
ALLOCATE = Path(__file__).with_name("allocate.py")


class Orchestrator:
    """Its slices, by id, and every request that changed one."""

    def __init__(self, python: Path) -> None:
        self.python = python
        self.slices = dict[str, dict[str, Any]]()
        self.changes = list[tuple[str, str]]()
        #: The state that a new slice has, and whether its VMs get addresses.
        self.new_state = "StableOK"
        #: Where a request for room is answered with a time.
        self.slot: str | None = None
        self.address = ""

    def answer(self, method: str, path: str, query: dict[str, str], body: bytes) -> object:
        """Return the data of a response; None for what there is not."""
        words = path.strip("/").split("/")
        match method, words:
            case "GET", ["portalresources", "summary"]:
                return [recorded_summary()]
            case "GET", ["resources", "calendar"]:
                return [{"interval": "day", "data": []}]
            case "POST", ["resources", "find-slot"]:
                return [{"slots": [] if self.slot is None else [{"start": self.slot}]}]
            case "POST", ["slices", "creates"]:
                return self._create(query, json.loads(body))
            case "GET", ["slices"]:
                return list(self.slices.values())
            case "GET", ["slices", slice_id]:
                return [self.slices[slice_id]]
            case "GET", ["slivers"]:
                return []
            case "POST", ["slices", "renew", slice_id]:
                self.slices[slice_id]["lease_end_time"] = query["lease_end_time"]
                self.changes.append(("renew", slice_id))
                return []
            case "DELETE", ["slices", "delete", slice_id]:
                del self.slices[slice_id]
                self.changes.append(("delete", slice_id))
                return []
        return None

    def _create(self, query: dict[str, str], body: dict[str, Any]) -> object:
        slice_id = f"id-{len(self.changes)}"
        graph = body["graph_model"]
        if self.new_state == "StableOK":
            made = subprocess.run(
                [self.python, ALLOCATE], input=graph, capture_output=True, text=True, check=True
            )
            graph = made.stdout
        self.slices[slice_id] = {
            "slice_id": slice_id,
            "name": query["name"],
            "state": self.new_state,
            "model": graph,
            "lease_end_time": query["lease_end_time"],
        }
        self.changes.append(("create", slice_id))
        return [{"slice_id": slice_id, "sliver_id": "s1"}]


@contextmanager
def orchestrator_server(python: Path) -> Iterator[Orchestrator]:
    """Run the stand-in."""
    orchestrator = Orchestrator(python)

    class Handler(http.server.BaseHTTPRequestHandler):
        def respond(self) -> None:
            url = urlparse(self.path)
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            data = orchestrator.answer(self.command, url.path, query, body)
            content = json.dumps({"data": data}).encode()
            self.send_response(404 if data is None else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = respond  # noqa: N815

        def log_message(self, *words: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        orchestrator.address = f"http://127.0.0.1:{server.server_port}"
        yield orchestrator
        server.shutdown()
