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

from farspan.domain.cluster import STARTING_VARIABLE, Host
from farspan.domain.interpreter import module_command
from farspan.domain.plan import Plan
from farspan.domain.problems import EXIT_CODES
from farspan.domain.run import ON_STDIN, SECRET_VARIABLE, RunFolder, RunRecord
from farspan.domain.standard_input import KILL, STOP
from farspan.domain.struct_files import content_hash, load
from farspan.launch.hosts import ask_shell, by_client, host_command, host_python, quote_path
from farspan.launch.rendezvous import Rendezvous

#: A client, such as ssh, ends within this after what it runs on a host was killed.
CLIENT_END_TIMEOUT_S = 5.0


class Process(Protocol):
    """What a launcher started on one host: one worker, or something that runs several."""

    @property
    def host(self) -> Host: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    def poll(self) -> int | None:
        """Return the exit code (negative: a signal), or None while it runs."""

    def signal(self, number: signal.Signals) -> None: ...
    def wait(self, timeout: float | None) -> None: ...


def run_folder(host: Host, plan: Plan, run: RunFolder) -> RunFolder:
    """Return a run's folder on a host: the same where it shares this machine's disk, else one that
    no other run has."""
    path = run.path.absolute()
    if host.folder is None:
        return RunFolder(path)
    created = load(run.record, RunRecord).created
    digest = content_hash(plan, str(path), created)
    return RunFolder(Path(host.folder) / "runs" / f"{path.name}-{digest[:8]}")


def worker_environment(threads: int) -> dict[str, str]:
    """Return the variables that a process which trains gets in addition to its environment.

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
        # Its warnings about names of peers that it cannot look up mean nothing to a user.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONUNBUFFERED": "1",
    }


def rendezvous_environment(host: Host, meeting: Rendezvous) -> dict[str, str]:
    """Return where a host's workers meet the others, and keep what is sent to them."""
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
    """Return a command that sets its own environment: ssh and `enter` commands pass none on."""
    assignments = [f"{name}={value}" for name, value in values.items()]
    return ["env", *assignments, *words]


class HostProcess:
    """A process on a host, started through the host's `enter` command. Without ranks it is a
    service of the others.

    With `first_input` its standard input begins with that, and it stops where STOP follows or the
    input ends, as it does where its launcher is gone. With `hold` it is run by `stop_on_stdin`, as
    what a client starts always is: it would not notice that itself. The `secret` of the run goes to
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
        first_input: bytes | None = None,
        hold: bool = False,
        secret: str | None = None,
        answers: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.host = host
        self.ranks = ranks
        needs_wrapper = hold or by_client(host, device)
        #: Whether it is run by `stop_on_stdin`.
        self._is_wrapped = bool(ranks) and first_input is None and needs_wrapper
        #: Whether it stops by STOP on its standard input alone, without a signal.
        self._stops_by_input = first_input is not None or self._is_wrapped
        if self._is_wrapped:
            words = module_command(host_python(host), "farspan.launch.stop_on_stdin", *words)
            first_input = f"{secret or ''}\n".encode()
        elif secret is not None:
            words = ["env", f"{SECRET_VARIABLE}={ON_STDIN}", *words]
            first_input = f"{secret}\n".encode()
        environment = dict(os.environ)
        if ranks:
            environment[STARTING_VARIABLE] = "1"
        environment.update(variables or {})
        # A session of its own: Ctrl-C reaches only the launcher, which passes it on once. It
        # inherits the run's lock, which holds as long as any worker lives, even without its
        # launcher.
        self._process = subprocess.Popen(
            host_command(host, words, device=device),
            bufsize=0,
            stdout=subprocess.PIPE if answers else log,
            stderr=log,
            stdin=subprocess.DEVNULL if first_input is None else subprocess.PIPE,
            env=environment,
            start_new_session=True,
            pass_fds=[keep_open],
        )
        self.write_input(first_input or b"")

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is None or code in EXIT_CODES.values():
            return code
        # A shell or a client such as docker exits with 128 + the number of the signal that killed
        # what it ran. Farspan's own codes are theirs (130 is `interrupted`), and 255 is ssh's.
        return 128 - code if code - 128 in set(signal.Signals) else code

    def signal(self, number: signal.Signals) -> None:
        if number == signal.SIGTERM:
            self.write_input(STOP)
        elif self._is_wrapped:
            # What runs there takes its client with it, unless nothing arrives any more.
            self.write_input(KILL)
            kill_client = threading.Timer(CLIENT_END_TIMEOUT_S, self._process.kill)
            kill_client.daemon = True
            kill_client.start()
            return
        if number == signal.SIGKILL or not self._stops_by_input:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End at once what was started here, which has no ranks, also where it stands still. What
        entered its host for it is of the same process group."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def write_input(self, content: bytes) -> None:
        """Write to standard input, where there is one."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # It has ended already.
                self._process.stdin.write(content)

    def wait(self, timeout: float | None) -> None:
        self._process.wait(timeout)


def read_file(host: Host, path: Path) -> bytes | None:
    """Return a file of a host; None where there is none."""
    if host.folder is None:
        return path.read_bytes() if path.exists() else None
    return ask_shell(host, f"cat {quote_path(path)}")
