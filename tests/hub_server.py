"""A server with the routes of the Hugging Face hub that `huggingface_hub` calls to create, fill and
read a repository of a model. It keeps what is committed, and nothing else."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

#: What each token is: its role, and the user that it belongs to.
TOKENS = {
    "hf_write": {"role": "write", "user": "me"},
    "hf_read": {"role": "read", "user": "me"},
}
ORGANIZATIONS = [
    {"name": "lab", "roleInOrg": "write"},
    {"name": "guests", "roleInOrg": "read"},
]


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: int = 0

    @property
    def sha(self) -> str:
        return hashlib.sha1(str(self.commits).encode()).hexdigest()


class Hub(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.uploads: dict[str, bytes] = {}
        #: Method and path of each request, but for HEAD.
        self.requests: list[str] = []
        #: Requests whose line matches get no answer: the connection is closed.
        self.dies_at: str | None = None
        #: Statuses of requests whose line matches.
        self.statuses: dict[str, int] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serve_hub() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        yield hub
        hub.shutdown()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *words: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer_any()

    def do_GET(self) -> None:
        self._answer_any()

    def do_POST(self) -> None:
        self._answer_any()

    def do_PUT(self) -> None:
        self._answer_any()

    def _answer_any(self) -> None:
        line = f"{self.command} {self.path}"
        hub = self.server
        content = self._read_body()
        if self.command != "HEAD":
            hub.requests.append(line)
        if hub.dies_at is not None and re.search(hub.dies_at, line):
            self.close_connection = True
            return
        for pattern, status in hub.statuses.items():
            if re.search(pattern, line):
                self._send(status, {"error": "refused by the test"})
                return
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        for method, pattern, answer in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in method:
                answer(self, content, *match.groups())
                return
        self._send(200 if path == "/" else 404, {})

    def _read_body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _send(self, status: int, value: Any, **headers: str) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", headers.pop("length", str(len(content))))
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _token(self) -> dict[str, str] | None:
        return TOKENS.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def _may_write(self, name: str) -> bool:
        token = self._token()
        if token is None or token["role"] != "write":
            self._send(401 if token is None else 403, {"error": "denied"})
            return False
        if name.partition("/")[0] not in ("me", "lab"):
            self._send(403, {"error": f"no rights to {name}"})
            return False
        return True

    def whoami(self, content: bytes) -> None:
        token = self._token()
        if token is None:
            self._send(401, {"error": "Invalid credentials in Authorization header"})
            return
        access = {"displayName": "test", "role": token["role"]}
        user = {"type": "user", "name": token["user"], "orgs": ORGANIZATIONS}
        self._send(200, user | {"auth": {"type": "access_token", "accessToken": access}})

    def create(self, content: bytes) -> None:
        asked = json.loads(content)
        token = self._token() or {"user": ""}
        name = f"{asked.get('organization') or token['user']}/{asked['name']}"
        if not self._may_write(name):
            return
        url = {"url": f"{self.server.url}/{name}", "name": name, "id": "0"}
        if name in self.server.repositories:
            self._send(409, url | {"error": "You already created this model repo"})
            return
        private = asked.get("private", asked.get("visibility") == "private")
        self.server.repositories[name] = Repository(private)
        self._send(200, url)

    def validate_card(self, content: bytes) -> None:
        assert json.loads(content)["content"].startswith("---\n")
        self._send(200, {"errors": [], "warnings": []})

    def _find(self, name: str) -> Repository | None:
        repository = self.server.repositories.get(name)
        if repository is None or (repository.private and self._token() is None):
            self._send(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return None
        return repository

    def info(self, content: bytes, name: str) -> None:
        repository = self._find(name)
        if repository is not None:
            siblings = [{"rfilename": each} for each in sorted(repository.files)]
            about = {"id": name, "private": repository.private, "sha": repository.sha}
            self._send(200, about | {"siblings": siblings, "tags": []})

    def tree(self, content: bytes, name: str) -> None:
        repository = self._find(name)
        if repository is not None:
            rows = []
            for path, held in repository.files.items():
                oid = hashlib.sha1(held).hexdigest()
                rows.append({"type": "file", "path": path, "size": len(held), "oid": oid})
            self._send(200, rows)

    def preupload(self, content: bytes, name: str) -> None:
        if not self._may_write(name):
            return
        files = []
        for each in json.loads(content)["files"]:
            mode = "lfs" if each["path"].endswith(".safetensors") else "regular"
            files.append({"path": each["path"], "uploadMode": mode, "shouldIgnore": False})
        self._send(200, {"files": files})

    def lfs_batch(self, content: bytes, name: str) -> None:
        if not self._may_write(name):
            return
        objects = []
        for each in json.loads(content)["objects"]:
            upload = {"href": f"{self.server.url}/upload/{each['oid']}", "header": {}}
            objects.append(each | {"actions": {"upload": upload}})
        self._send(200, {"transfer": "basic", "objects": objects})

    def upload(self, content: bytes, oid: str) -> None:
        is_whole = hashlib.sha256(content).hexdigest() == oid
        if is_whole:
            self.server.uploads[oid] = content
        self._send(200 if is_whole else 400, {})

    def commit(self, content: bytes, name: str) -> None:
        repository = self.server.repositories[name]
        if not self._may_write(name):
            return
        files = dict(repository.files)
        for line in content.splitlines():
            row = json.loads(line)
            value = row["value"]
            if row["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif row["key"] == "lfsFile":
                files[value["path"]] = self.server.uploads[value["oid"]]
            elif row["key"] == "deletedFile":
                del files[value["path"]]
        repository.files = files
        repository.commits += 1
        about = {"commitOid": repository.sha, "success": True}
        self._send(200, about | {"commitUrl": f"{self.server.url}/{name}/commit/{repository.sha}"})

    def resolve(self, content: bytes, name: str, path: str) -> None:
        repository = self._find(name)
        if repository is None:
            return
        held = repository.files[path]
        etag = f'"{hashlib.sha1(held).hexdigest()}"'
        self._send(200, held, X_Repo_Commit=repository.sha, ETag=etag)


_NAME = r"([\w.-]+/[\w.-]+)"
_ROUTES = (
    ("GET", r"/api/whoami-v2", _Handler.whoami),
    ("POST", r"/api/repos/create", _Handler.create),
    ("POST", r"/api/validate-yaml", _Handler.validate_card),
    ("GET", rf"/api/models/{_NAME}(?:/revision/\w+)?", _Handler.info),
    ("GET", rf"/api/models/{_NAME}/tree/\w+", _Handler.tree),
    ("POST", rf"/api/models/{_NAME}/preupload/main", _Handler.preupload),
    ("POST", rf"/{_NAME}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    ("PUT", r"/upload/([0-9a-f]+)", _Handler.upload),
    ("POST", rf"/api/models/{_NAME}/commit/main", _Handler.commit),
    ("GET HEAD", rf"/{_NAME}/resolve/\w+/(.+)", _Handler.resolve),
)
