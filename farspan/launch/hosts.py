"""Reaching hosts: the command that runs something on one, and a conversation with the agent that
runs there."""

from __future__ import annotations

import functools
import os
import secrets
import select
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from farspan.domain.cluster import Host
from farspan.domain.escapes import shell_line, shell_word
from farspan.domain.problems import Refusal

#: Commands that stay, as clients of a process elsewhere. They pass its standard input on, and no
#: signals: what is signalled is the client alone.
CLIENTS = frozenset({"ssh", "docker", "podman", "kubectl"})
#: A host that has not answered the first question by then is not reachable (ssh itself gives up
#: after CONNECT_S).
START_S = 12.0
CONNECT_S = 8
#: ssh asks a host that says nothing every so many seconds whether it is there, and ends after so
#: many times without an answer: a line that is cut, or that a router has forgotten, would else be
#: waited on for hours.
ALIVE_S = 5
UNANSWERED = 3
#: A host answers a question about its files within this.
ANSWER_S = 30.0
#: An answer of more bytes is none: a host must not fill this machine's memory.
MOST_BYTES = 2**28
#: Reads its program from standard input first: command lines have a limit, and ssh needs no quoting
#: for it.
#: `-c` puts the current folder on the path: it goes first of all. `-I` would do that too, but also
#: hide what `pip install --user` has installed.
BOOTSTRAP = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())).decode())"
)


def _enter(host: Host, device: int | None) -> tuple[str, ...]:
    enter = host.enter if device is None else host.devices[device].slot.enter or host.enter
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": CONNECT_S,
        "ServerAliveInterval": ALIVE_S,
        "ServerAliveCountMax": UNANSWERED,
    }
    return (
        ("ssh", *(f"-o{key}={value}" for key, value in options.items()), "--", host.name)
        if enter is None
        else enter
    )


def command(host: Host, words: Sequence[str], *, device: int | None = None) -> list[str]:
    """The command on this machine that runs `words` on `host`, confined to one of its devices where
    it can be."""
    enter = _enter(host, device)
    # ssh hands one text to the shell there.
    return [*enter, shlex.join(words)] if enter[:1] == ("ssh",) else [*enter, *words]


def by_client(host: Host, device: int | None = None) -> bool:
    """Whether what `command` starts is a client of the process on the host, and not that
    process."""
    return not CLIENTS.isdisjoint(_enter(host, device)[:1])


def answer_of(line: bytes, host: Host) -> dict[str, Any]:
    """What a process on a host answers in a line. Refuses a line of anything else, as of a shell
    that starts there."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        raise Refusal(
            "host-unreachable",
            what=f"{host.name} prints something before it answers",
            where=f"host {host.name}",
            fact=(
                f"it says {line.decode(errors='replace').strip()[:200]!r}, as a shell's start-up "
                "files may"
            ),
            remedy=(
                f"on {shell_word(host.name)}, as the first line of ~/.bashrc: "
                "case $- in *i*) ;; *) return ;; esac"
            ),
        ) from None


def quoted(path: Path) -> str:
    """A path for a shell on a host; one that begins with ~ lies in the home folder there."""
    text = str(path)
    return f'"$HOME"/{shlex.quote(text[2:])}' if text.startswith("~/") else shlex.quote(text)


def started(host: Host, text: str, **streams: int) -> subprocess.Popen[bytes]:
    """A shell command on a host. Raises Refusal (host-unreachable) where what reaches the host is
    not here."""
    words = command(host, ["sh", "-c", text])
    try:
        return subprocess.Popen(words, **streams)  # type: ignore[call-overload,no-any-return]
    except OSError as error:
        raise Refusal(
            "host-unreachable",
            what=f"{host.name} cannot be reached",
            where=f"host {host.name}",
            fact=f"{words[0]}: {error.strerror}",
            remedy="farspan doctor --cluster, with the same cluster",
        ) from None


def ask(host: Host, text: str, seconds: float = ANSWER_S, most: int = MOST_BYTES) -> bytes | None:
    """What a shell command on a host prints; None where it fails, cannot be started, has not ended
    by then, or prints more than `most` bytes."""
    nothing = subprocess.DEVNULL
    try:
        process = started(host, text, stdin=nothing, stdout=subprocess.PIPE, stderr=nothing)
    except Refusal:
        return None
    with process:
        content = _read(process, most, time.monotonic() + seconds)
        if content is None:
            process.kill()
    return content if process.returncode == 0 else None


def _read(process: subprocess.Popen[bytes], most: int, deadline: float) -> bytes | None:
    """All that a process prints until it ends; None where that is more than `most` bytes, or is not
    done by then."""
    assert process.stdout is not None
    content = bytearray()
    descriptor = process.stdout.fileno()
    while True:
        if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        if not (piece := os.read(descriptor, 2**20)):
            break
        content += piece
        if len(content) > most:
            return None
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    return bytes(content)


def interpreter(host: Host) -> str:
    """The Python there: this one where the host is this machine."""
    return sys.executable if host.enter == () else host.python


class Agent:
    """The agent on one host, for the time of a `with`. Raises Refusal (host-unreachable) with what
    failed and why."""

    def __init__(self, host: Host) -> None:
        self.host = host
        #: What other hosts connect to.
        self.address = host.address or host.name
        self._asking = threading.Lock()

    def __enter__(self) -> Agent:
        words = command(self.host, [interpreter(self.host), "-u", "-c", BOOTSTRAP])
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise self._unreachable("command", f"{words[0]}: {error.strerror}") from None
        self._errors: list[bytes] = []
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        program = resources.files("farspan.launch").joinpath("agent.py").read_bytes()
        try:
            self._write(b"%d\n%b" % (len(program), program))
            self.ask("hello", deadline_s=START_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    @functools.cached_property
    def target(self) -> dict[str, Any]:
        """Where this agent answers others' pings, streams and datagrams, and what who calls has to
        say first. Until this is asked for the first time it listens nowhere."""
        place: dict[str, Any] = {"address": self.address, "secret": secrets.token_hex(16)}
        return place | self.ask("serve", **place)

    def ask(self, do: str, *, deadline_s: float = 30.0, **values: Any) -> dict[str, Any]:
        """One question; what the agent answers within the deadline."""
        with self._asking:
            self._write(msgspec.json.encode({"do": do, **values}) + b"\n")
            line = self._line(time.monotonic() + deadline_s)
        if line is None:
            raise self._unreachable("timeout", f"no answer to {do!r} within {deadline_s:g} s")
        answer = answer_of(line, self.host)
        if error := answer.get("error"):
            raise self._unreachable("agent", str(error))
        return answer

    def _write(self, content: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(content)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _line(self, deadline: float) -> bytes | None:
        assert self._process.stdout is not None
        ready, _, _ = select.select(
            [self._process.stdout], [], [], max(0.0, deadline - time.monotonic())
        )
        if not ready:
            return None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        return line

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._errors.extend(self._process.stderr)

    def _ended(self) -> Refusal:
        """Why the command that should have reached the host ended, in the words of ssh or of the
        shell there."""
        self._process.wait(timeout=ANSWER_S)
        self._reader.join(timeout=2)
        words = " ".join(b" ".join(self._errors).decode(errors="replace").split())
        return self._unreachable(
            _cause(words), words[-300:] or f"exit code {self._process.returncode}"
        )

    def _unreachable(self, cause: str, fact: str) -> Refusal:
        name = self.host.name
        host_word = shell_word(self.host.name)
        remedy = {
            "name": f"add {host_word} to ~/.ssh/config with its HostName",
            "route": f"ping {host_word}",
            "port": (
                f"start its ssh server there: sudo systemctl start ssh   (port 22 of {host_word})"
            ),
            "authentication": f"ssh-copy-id {host_word}",
            "host key": f"ssh {host_word}   (once, to see and accept its key)",
            "python": (
                f"set python: of {host_word} in the cluster file to an interpreter that is there"
            ),
        }.get(cause, shell_line(*command(self.host, ["true"])))
        return Refusal(
            "host-unreachable",
            what=f"{name} cannot be reached: {cause}",
            where=f"host {name}",
            fact=fact,
            remedy=remedy,
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        process = self._process
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)


def _cause(words: str) -> str:
    """What failed, from the message of OpenSSH (its strings are stable) or of a shell."""
    causes = {
        "Permission denied": "authentication",
        "Too many authentication": "authentication",
        "Host key verification failed": "host key",
        "Could not resolve hostname": "name",
        "Connection refused": "port",
        "No route to host": "route",
        "Network is unreachable": "route",
        "timed out": "route",
        "not found": "python",
        "No such file": "python",
    }
    return next((cause for sign, cause in causes.items() if sign in words), "command")
