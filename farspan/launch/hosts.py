"""Reaches hosts: the command that runs something on one, and a conversation with the agent that
runs there."""

from __future__ import annotations

import functools
import os
import secrets
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from farspan.domain.cluster import Host
from farspan.domain.decoding import convert_value, decode_json
from farspan.domain.escapes import shell_line, shell_word
from farspan.domain.problems import Problem, Refusal, command
from farspan.launch.reach_faults import EntryFault, explain_fault

#: Commands that stay, as clients of a process elsewhere. They pass its standard input on, and no
#: signals: only the client gets those.
CLIENTS = frozenset({"ssh", "docker", "podman", "kubectl", "srun"})
#: A host that has not answered the first question by then is not reachable (ssh itself gives up
#: after CONNECT_S).
HOST_START_S = 12.0
CONNECT_S = 8
#: ssh asks a silent host every ALIVE_S whether it is there, and ends after MAX_UNANSWERED times
#: without an answer: else it would wait for hours on a link that is cut, or that a router has
#: forgotten.
ALIVE_S = 5
MAX_UNANSWERED = 3
#: A killed command that enters a host is gone within this.
KILL_S = 10.0
#: A host answers a question about its files within this.
HOST_ANSWER_S = 30.0
#: An answer of more bytes is none: a host must not fill this machine's memory.
MAX_ANSWER_BYTES = 2**28
#: sudo that asks nobody for a password: nobody is there to give one.
SUDO = ("sudo", "-n")
#: Reads its program from standard input first: command lines have a limit, and ssh needs no quoting
#: for it.
#: `-c` puts the current folder on the path: it goes first of all. `-I` would do that too, but also
#: hide what `pip install --user` has installed.
BOOTSTRAP = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())).decode())"
)
#: The module that agents' programs share.
AGENT_LOOP = "farspan.launch.agent_loop"
Value = TypeVar("Value")
Answer = TypeVar("Answer", bound=msgspec.Struct)


def enter_command(host: Host, device: int | None = None) -> tuple[str, ...]:
    """Return the words that enter a host, or one of its devices; what they run there follows."""
    enter = host.enter
    if device is not None:
        enter = host.devices[device].slot.enter or enter
    if enter is not None:
        return enter
    return (
        "ssh",
        "-oBatchMode=yes",
        f"-oConnectTimeout={CONNECT_S}",
        f"-oServerAliveInterval={ALIVE_S}",
        f"-oServerAliveCountMax={MAX_UNANSWERED}",
        "--",
        host.name,
    )


def host_command(host: Host, words: Sequence[str], *, device: int | None = None) -> list[str]:
    """Return the command here that runs `words` on `host`, confined to one of its devices where
    it can be."""
    enter = enter_command(host, device)
    if enter[:1] == ("ssh",):  # It hands one text to the shell there.
        words = [shlex.join(words)]
    return [*enter, *words]


def by_client(host: Host, device: int | None = None) -> bool:
    """Return whether what `command` starts is a client of the process on the host, and not that
    process."""
    return not CLIENTS.isdisjoint(enter_command(host, device)[:1])


def answer_of(line: bytes, host: Host) -> dict[str, Any]:
    """Decode a process's answer, one line. Refuses a line of anything else, as of a shell
    that starts there."""
    try:
        return decode_json(line, dict[str, Any])
    except msgspec.DecodeError:
        printed = line.decode(errors="replace").strip()
        raise Refusal(
            "host-unreachable",
            what=f"{host.name} prints something before it answers",
            where=f"host {host.name}",
            fact=f"it says {printed[:200]!r}, as a shell's start-up files may",
            remedy=(
                f"on {shell_word(host.name)}, as the first line of ~/.bashrc: "
                "case $- in *i*) ;; *) return ;; esac"
            ),
        ) from None


def quote_path(path: Path) -> str:
    """Quote a path for a shell on a host; one that begins with ~ lies in the home folder there."""
    text = str(path)
    if text.startswith("~/"):
        return f'"$HOME"/{shlex.quote(text[2:])}'
    return shlex.quote(text)


def start_shell(host: Host, text: str, **streams: int) -> subprocess.Popen[bytes]:
    """Start a shell command on a host. Ctrl-C does not reach it. Raises Refusal (host-unreachable)
    where the command that enters it is not here."""
    words = host_command(host, ["sh", "-c", text])
    try:
        return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
            words, start_new_session=True, **streams
        )
    except OSError as error:
        raise Refusal(
            "host-unreachable",
            what=f"{host.name} cannot be reached",
            where=f"host {host.name}",
            fact=f"{words[0]}: {error.strerror}",
            remedy=command("doctor", "--cluster", host.cluster_name),
        ) from None


def ask_shell(
    host: Host, text: str, seconds: float = HOST_ANSWER_S, most: int = MAX_ANSWER_BYTES
) -> bytes | None:
    """Return the output of a command on a host; None where it fails, cannot be started, has not
    ended by then, or prints more than `most` bytes."""
    nothing = subprocess.DEVNULL
    try:
        process = start_shell(host, text, stdin=nothing, stdout=subprocess.PIPE, stderr=nothing)
    except Refusal:
        return None
    with process:
        content = _read_all(process, most, time.monotonic() + seconds)
        if content is None:
            process.kill()
    return content if process.returncode == 0 else None


def _read_all(process: subprocess.Popen[bytes], most: int, deadline: float) -> bytes | None:
    """Read all that a process prints until it ends; None where that is more than `most` bytes, or
    is not done by then."""
    assert process.stdout is not None
    content = bytearray()
    while _is_readable(process.stdout, deadline):
        piece = os.read(process.stdout.fileno(), 2**20)
        content += piece
        if len(content) > most:
            return None
        if not piece:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return None
            return bytes(content)
    return None


def _is_readable(stream: IO[bytes], deadline: float) -> bool:
    remaining_s = max(0.0, deadline - time.monotonic())
    return bool(select.select([stream], [], [], remaining_s)[0])


def with_each_host(hosts: Sequence[Host], work: Callable[[Host], Value]) -> list[Value | Problem]:
    """Do the same on all hosts, side by side; return what became of each, or its problem."""

    def attempt(host: Host) -> Value | Problem:
        try:
            return work(host)
        except Refusal as refusal:
            return refusal.problem

    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        return list(pool.map(attempt, hosts))


def host_python(host: Host) -> str:
    """Return the Python there: this one where the host is this machine."""
    return sys.executable if host.enter == () else host.python


def agent_program(name: str) -> bytes:
    """Return an agent's file as one program, with the module that it imports of farspan, which no
    host needs to have."""
    folder = resources.files("farspan.launch")
    loop = (folder / f"{AGENT_LOOP.rpartition('.')[2]}.py").read_text(encoding="utf-8")
    agent = (folder / name).read_text(encoding="utf-8")
    lines = (
        "import sys, types",
        f"loop = sys.modules[{AGENT_LOOP!r}] = types.ModuleType({AGENT_LOOP!r})",
        f"exec({loop!r}, loop.__dict__)",
        f"exec({agent!r})",
    )
    return "\n".join(lines).encode()


class Agent:
    """Runs an agent, a file of this folder, on one host for the time of a `with`; with `sudo` as
    root there. Raises Refusal (host-unreachable) with what failed and why."""

    def __init__(self, host: Host, program: str = "agent.py", *, sudo: bool = False) -> None:
        self.host = host
        self._program = program
        self._words = (*(SUDO if sudo else ()), host_python(host), "-u", "-c", BOOTSTRAP)
        #: What other hosts connect to.
        self.address = host.address or host.name
        self._asking = threading.Lock()

    def __enter__(self) -> Agent:
        words = host_command(self.host, self._words)
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            fact = f"{words[0]}: {error.strerror}"
            raise self._unreachable(self._unknown_fault("command", fact)) from None
        self._errors: list[bytes] = []
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        program = agent_program(self._program)
        try:
            self._send(b"%d\n%b" % (len(program), program))
            self.ask("hello", deadline_s=HOST_START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    @functools.cached_property
    def target(self) -> dict[str, Any]:
        """Where this agent answers others' pings, streams and datagrams, and the secret that a
        caller has to send first. Until this is asked for the first time it listens nowhere."""
        place: dict[str, Any] = {"address": self.address, "secret": secrets.token_hex(16)}
        return place | self.ask("serve", **place)

    def ask(
        self,
        do: str,
        *,
        deadline_s: float = 30.0,
        content: Iterable[bytes] = (),
        **values: Any,
    ) -> dict[str, Any]:
        """Send one question, and `content` after it; return what the agent answers within the
        deadline, which begins then."""
        question = msgspec.json.encode({"do": do, **values})
        with self._asking:
            self._send(question + b"\n")
            for piece in content:
                self._send(piece)
            line = self._read_line(time.monotonic() + deadline_s)
        if line is None:
            raise self._unreachable(
                self._unknown_fault("timeout", f"no answer to {do!r} within {deadline_s:g} s")
            )
        answer = answer_of(line, self.host)
        if error := answer.get("error"):
            raise self._unreachable(self._unknown_fault("agent", str(error)))
        return answer

    def ask_for(self, kind: type[Answer], do: str, **values: Any) -> Answer:
        """Send one question; return the answer as a struct. Raises Refusal (host-unreachable)."""
        return self.convert_answer(self.ask(do, **values), kind, do)

    def convert_answer(self, answer: dict[str, Any], kind: type[Answer], do: str) -> Answer:
        """Return an answer as a struct. Raises Refusal (host-unreachable) for another form."""
        try:
            return convert_value(answer, kind)
        except msgspec.ValidationError as error:
            fault = self._unknown_fault("agent", f"it answers {do!r} otherwise: {error}")
            raise self._unreachable(fault) from None

    def _send(self, content: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(content)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._explain_end() from None

    def _read_line(self, deadline: float) -> bytes | None:
        assert self._process.stdout is not None
        if not _is_readable(self._process.stdout, deadline):
            return None
        line = self._process.stdout.readline()
        if not line:
            raise self._explain_end()
        return line

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._errors.extend(self._process.stderr)

    def _explain_end(self) -> Refusal:
        """Return why the command that should have reached the host ended, in the words of ssh or of
        the shell there."""
        code = self._process.wait(timeout=HOST_ANSWER_S)
        self._reader.join(timeout=2)
        printed = b"".join(self._errors).decode(errors="replace")
        enter = enter_command(self.host)
        ssh = enter if enter[:1] == ("ssh",) else ()
        fault = explain_fault(self.host.name, ssh, printed, self._entering_command())
        return self._unreachable(fault._replace(fact=fault.fact or f"exit code {code}"))

    def _unknown_fault(self, cause: str, fact: str) -> EntryFault:
        return EntryFault(cause, fact, self._entering_command())

    def _entering_command(self) -> str:
        return shell_line(*host_command(self.host, ["true"]))

    def _unreachable(self, fault: EntryFault) -> Refusal:
        return Refusal(
            "host-unreachable",
            what=f"{self.host.name} cannot be reached: {fault.cause}",
            where=f"host {self.host.name}",
            fact=fault.fact,
            remedy=fault.remedy,
        )

    def is_alive(self, deadline_s: float) -> bool:
        """Ask whether it is still there."""
        try:
            self.ask("hello", deadline_s=deadline_s)
        except Refusal:
            return False
        return True

    def kill(self) -> None:
        """End the agent at once, also where its host does not answer."""
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=KILL_S)
        with self._asking:  # Who waits for an answer sees its end.
            self.__exit__()

    def __exit__(self, *exc_info: object) -> None:
        process = self._process
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=KILL_S)
