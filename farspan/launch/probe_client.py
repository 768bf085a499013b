"""Ask the probe process about a host and its devices: a conversation with `python -m
farspan.runtime.probe_process` there."""

from __future__ import annotations

import signal
import subprocess
import threading
from contextlib import suppress
from typing import TypeVar

import msgspec

from farspan.domain.cgroup_limits import CgroupLimit
from farspan.domain.cluster import THIS_MACHINE, Cluster, Host
from farspan.domain.decoding import convert_value, decode_json
from farspan.domain.device_report import DeviceReport
from farspan.domain.gpus import Nvidia, Wheel, judge_gpus
from farspan.domain.interpreter import module_command
from farspan.domain.model import ModelSpec
from farspan.domain.plan import PlannedDevice
from farspan.domain.probe_requests import (
    DescribeQuery,
    InstalledQuery,
    MatmulQuery,
    MeasureQuery,
    ProbeResult,
    Query,
    ReportQuery,
)
from farspan.domain.problems import Problem, Refusal, command
from farspan.domain.train import Precision, TrainSpec
from farspan.domain.units import format_bytes
from farspan.launch.agent import nvidia
from farspan.launch.hosts import answer_of, by_client, host_command, host_python
from farspan.launch.processes import with_environment, worker_environment

T = TypeVar("T")
#: No answer takes longer, short of a machine in trouble.
PROBE_ANSWER_S = 300.0
#: The limits of a device are known within this: an interpreter has to start.
CAPS_TIMEOUT_S = 30.0
#: Exit codes of a process that was killed, and of a shell that waited for it.
KILLED_CODES = (-signal.SIGKILL, 128 + signal.SIGKILL)
#: What mends too little memory while a run is planned.
SMALLER_BATCH = "set a smaller model or train.batch.global in run.yaml"
LOCAL_HOST = Host(name="localhost", devices=(), enter=(), cluster=THIS_MACHINE)


class Probe:
    """A probe process on a host, with the threads and the environment that the worker of one device
    would get."""

    def __init__(
        self,
        host: Host = LOCAL_HOST,
        *,
        threads: int = 1,
        device: int | None = None,
        remedy: str = SMALLER_BATCH,
    ) -> None:
        self._host = host
        self._threads = threads
        self._device = device
        self._remedy = remedy
        self._process: subprocess.Popen[bytes] | None = None
        #: Bytes that the process held at most, when it last answered.
        self._peak = 0

    def __enter__(self) -> Probe:
        words = module_command(host_python(self._host), "farspan.runtime.probe_process")
        if by_client(self._host, self._device):  # ssh passes on exit codes, but no signals.
            words = ["sh", "-c", '"$@"; exit $?', "sh", *words]
        words = with_environment(worker_environment(self._threads), words)
        self._process = subprocess.Popen(
            host_command(self._host, words, device=self._device),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        return self

    def describe_devices(self, backend: str, workers: int | None) -> Cluster:
        """Describe this machine's devices as a cluster of one host."""
        return self.ask(DescribeQuery(backend, workers), Cluster).named(THIS_MACHINE)

    def report_devices(self, backend: str) -> tuple[DeviceReport, ...]:
        """Report which fast paths this machine's devices take, and who holds them."""
        return self.ask(ReportQuery(backend), tuple[DeviceReport, ...])

    def installed_torch(self) -> Wheel:
        """Return the host's PyTorch, and the GPUs that it sees."""
        return self.ask(InstalledQuery(), Wheel)

    def matmul_flops(
        self, device: PlannedDevice, precisions: tuple[Precision, ...]
    ) -> dict[str, float]:
        """Measure the FLOP/s of one worker's matrix products, by precision."""
        return self.ask(MatmulQuery(device, precisions), dict[str, float])

    def measure_step(
        self,
        device: PlannedDevice,
        model: ModelSpec,
        train: TrainSpec,
        *,
        precisions: tuple[Precision, ...],
        seconds: float,
    ) -> ProbeResult:
        """Time of real steps of `train.batch` sequences on one worker, about `seconds` for each
        precision."""
        return self.ask(MeasureQuery(device, model, train, precisions, seconds), ProbeResult)

    def ask(self, question: Query, kind: type[T]) -> T:
        """Return the answer of the process. Raises Refusal with what failed there, or what ended
        it."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        watchdog = threading.Timer(PROBE_ANSWER_S, end)
        watchdog.start()
        try:
            process.stdin.write(msgspec.json.encode(question) + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        finally:
            watchdog.cancel()
        if not line:
            raise self._explain_end(late.is_set())
        reply = answer_of(line, self._host)
        self._peak = max(self._peak, int(reply.get("peak", 0)))
        if "problem" in reply:
            raise Refusal.of(convert_value(reply["problem"], Problem))
        return convert_value(reply["answer"], kind, strict=False)

    def _explain_end(self, late: bool) -> Refusal:
        """Return why there is no answer: killed by the kernel, with what limit and peak there were,
        or otherwise."""
        assert self._process is not None
        where = f"host {self._host.name}"
        if self._device is not None:
            where += f", device {self._device}"
        code = self._process.wait(timeout=10)
        if late or code not in KILLED_CODES:
            fact = f"no answer within {PROBE_ANSWER_S:.0f} s" if late else f"exit code {code}"
            return Refusal(
                "worker-lost",
                what="the trial process ended without an answer",
                where=where,
                fact=fact,
                remedy=command("doctor", "--cluster", self._host.cluster_name),
            )
        limit, peak = self._limit_and_peak()
        return Refusal(
            "out-of-memory",
            what="the trial process was killed, as the kernel does when memory runs out",
            where=where,
            fact=f"limit {limit}, peak {peak}; ended by SIGKILL",
            remedy=self._remedy,
        )

    def _limit_and_peak(self) -> tuple[str, str]:
        """Write out the limit and the peak of the control group that the process was in, else of
        the device and of the last answer."""
        words = module_command(host_python(self._host), "farspan.domain.cgroup_limits")
        words = host_command(self._host, words, device=self._device)
        cap = None
        with suppress(OSError, subprocess.TimeoutExpired, msgspec.DecodeError):
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, timeout=CAPS_TIMEOUT_S
            )
            cap = decode_json(done.stdout, CgroupLimit | None)
        limits = []
        peak = self._peak
        if self._device is not None:
            limits.append(self._host.devices[self._device].memory)
        if cap is not None:
            if cap.limit is not None:
                limits.append(cap.limit)
            if cap.peak is not None:
                peak = cap.peak
        limit = format_bytes(min(limits)) if limits else "none"
        return limit, format_bytes(peak) if peak else "unknown"

    def __exit__(self, *exc_info: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)


def check_gpus(backend: str) -> tuple[str, ...]:
    """Return a note on each GPU of this machine that is left out of devices of such a backend.

    Raises Refusal (device-unusable) where its driver lists GPUs and PyTorch can use none of them,
    unless the backend is one that needs no GPU.
    """
    if backend not in ("auto", "cuda"):
        return ()
    listed = convert_value(nvidia(), Nvidia)
    if not listed.gpus and not listed.failure:
        return ()
    with Probe() as probe:
        problem, notes = judge_gpus(listed, probe.installed_torch())
    if problem is not None:
        raise Refusal.of(problem)
    return notes
