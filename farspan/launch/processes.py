"""A process on a host, however it is entered: what it starts with, how it is asked to stop, what it
leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

from farspan.domain.cluster import STARTING, Host
from farspan.domain.codec import content_hash, load
from farspan.domain.interpreter import module_command
from farspan.domain.plan import Plan
from farspan.domain.problems import EXIT_CODES
from farspan.domain.run import ON_STDIN, SECRET, RunFolder, RunRecord
from farspan.domain.standard_input import KILL, STOP
from farspan.launch.hosts import ask, by_client, command, interpreter, quoted
from farspan.launch.rendezvous import Rendezvous

#: A client, such as ssh, ends so soon after what it runs on a host was killed.
CLIENT_S = 5.0


class Process(Protocol):
    """What a launcher started on one host: one worker, or something that runs several."""

    @property
    def host(self) -> Host: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    def poll(self) -> int | None:
        """The exit code (negative: a signal), or None while it runs."""
        ...

    def signal(self, number: signal.Signals) -> None: ...
    def wait(self, timeout: float | None) -> None: ...


def run_folder(host: Host, plan: Plan, run: RunFolder) -> RunFolder:
    """The run's folder on a host: the same where it shares this machine's disk, else one that no
    other run has."""
    path = run.path.absolute()
    if host.folder is None:
        return RunFolder(path)
    created = load(run.record, RunRecord).created
    name = f"{path.name}-{content_hash(plan, str(path), created)[:8]}"
    return RunFolder(Path(host.folder) / "runs" / name)


def worker_environment(threads: int) -> dict[str, str]:
    """What a process that trains starts with, beside the environment that is there.

    glibc gives large freed blocks back to the kernel and faults them in again, zeroed, on every
    step; kept instead, a small model's step takes less time (row `nanogpt-bf16-malloc` of
    benchmarks/results/training.json).
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        # Else CUDA counts the fastest GPU first, and nvidia-smi, Ray and a plan by place.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "MALLOC_MMAP_THRESHOLD_": str(2**31 - 1),
        "MALLOC_TRIM_THRESHOLD_": str(2**33),
        "MALLOC_TOP_PAD_": str(2**26),
        "TOKENIZERS_PARALLELISM": "false",
        # Its warnings about names of peers that it cannot look up say nothing to a user.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONUNBUFFERED": "1",
    }


def place(host: Host, meeting: Rendezvous) -> dict[str, str]:
    """Where a host's workers meet the others, and keep what is sent to them."""
    cache = str(Path(host.folder) / "cache") if host.folder else None
    interface = meeting.interfaces.get(host.name)
    return meeting_environment(meeting.address, meeting.port, interface, cache)


def meeting_environment(
    address: str, port: int, interface: str | None, cache: str | None
) -> dict[str, str]:
    values = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    if interface:
        values |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    if cache:
        values["FARSPAN_CACHE"] = cache
    return values


def with_environment(values: dict[str, str], words: Sequence[str]) -> list[str]:
    """A command that sets its own environment: ssh and `enter` commands pass none on."""
    return ["env", *(f"{name}={value}" for name, value in values.items()), *words]


class HostProcess:
    """A process on a host, started through the host's `enter` command. Without ranks it is a
    service of the others.

    With `said` its standard input begins with that, and it stops where STOP follows or the input
    ends, as it does where its launcher is gone. With `hold` it is run by `stop_on_stdin`, as what a
    client starts always is: it would not notice that itself. The `secret` of the run goes to
    workers the same way: everybody on a machine can read a command line. They find STOP there
    before they get a signal, which is a preemption without it. With `answers` its standard output
    is read here, not logged. `variables` are for what enters the host.
    """

    def __init__(
        self,
        host: Host,
        ranks: tuple[int, ...],
        words: Sequence[str],
        *,
        log: IO[bytes],
        keep_open: int,
        device: int | None = None,
        said: bytes | None = None,
        hold: bool = False,
        secret: str | None = None,
        answers: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.host = host
        self.ranks = ranks
        self._held = bool(ranks) and said is None and (hold or by_client(host, device))
        #: Whether it stops by the word alone, without a signal.
        self._stops_by_word = said is not None or self._held
        if self._held:
            words = module_command(interpreter(host), "farspan.launch.stop_on_stdin", *words)
            said = f"{secret or ''}\n".encode()
        elif secret is not None:
            words = ["env", f"{SECRET}={ON_STDIN}", *words]
            said = f"{secret}\n".encode()
        # A session of its own: Ctrl-C reaches only the launcher, which passes it on once. It
        # inherits the run's lock, which holds as long as any worker lives, even without its
        # launcher.
        self._process = subprocess.Popen(
            command(host, words, device=device),
            bufsize=0,
            stdout=subprocess.PIPE if answers else log,
            stderr=log,
            stdin=subprocess.DEVNULL if said is None else subprocess.PIPE,
            env={**os.environ, **({STARTING: "1"} if ranks else {}), **(variables or {})},
            start_new_session=True,
            pass_fds=[keep_open],
        )
        self.say(said or b"")

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return _signalled(self._process.poll())

    def signal(self, number: signal.Signals) -> None:
        if number == signal.SIGTERM:
            self.say(STOP)
        elif self._held:
            # What runs there takes its client with it, unless nothing arrives any more.
            self.say(KILL)
            end = threading.Timer(CLIENT_S, self._process.kill)
            end.daemon = True
            end.start()
            return
        if number == signal.SIGKILL or not self._stops_by_word:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End at once what was started here, which has no ranks, also where it stands still. What
        entered its host for it is of the same process group."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def say(self, word: bytes) -> None:
        """Write to standard input, where there is one."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # It has ended already.
                self._process.stdin.write(word)

    def wait(self, timeout: float | None) -> None:
        self._process.wait(timeout)


def read_file(host: Host, path: Path) -> bytes | None:
    """Return a file of a host; None where there is none."""
    if host.folder is None:
        return path.read_bytes() if path.exists() else None
    return ask(host, f"cat {quoted(path)}")


def _signalled(code: int | None) -> int | None:
    """An exit code, negative for a signal also where `held`, a shell or a client such as docker
    says 128 + its number.

    Farspan's own codes stay what they are (130 is `interrupted`), and so does 255, which is ssh's
    own.
    """
    if code is None or code in EXIT_CODES.values() or code - 128 not in set(signal.Signals):
        return code
    return 128 - code
