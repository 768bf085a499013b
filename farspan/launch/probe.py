"""Ask the probe process about a host and its devices: a conversation with `python -m farspan.runtime.probe` there."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from farspan.domain.cluster import Cluster, DType, Host, UnitTime
from farspan.domain.gpus import Nvidia, Wheel, judge
from farspan.domain.model import ModelSpec
from farspan.domain.plan import PlannedDevice
from farspan.domain.probe import DeviceRates, ProbeResult
from farspan.domain.problems import Problem, Refusal
from farspan.domain.train import Precision, TrainSpec
from farspan.launch.agent import nvidia
from farspan.launch.hosts import answer_of, command, interpreter
from farspan.launch.meeting import Meeting
from farspan.launch.workers import with_environment, worker_environment

T = TypeVar("T")
#: No answer takes longer, short of a machine in trouble.
ANSWER_S = 300.0
THIS_MACHINE = Host(name="localhost", devices=(), enter=())


class Probe:
    """A probe process on a host, with the threads and the environment that the worker of one device would get."""

    def __init__(self, host: Host = THIS_MACHINE, *, threads: int = 1, device: int | None = None) -> None:
        self._host, self._threads, self._device = host, threads, device
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Probe:
        words = [interpreter(self._host), "-m", "farspan.runtime.probe"]
        self._process = subprocess.Popen(
            command(self._host, with_environment(worker_environment(self._threads), words), device=self._device),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        return self

    def describe(self, backend: str, workers: int | None) -> Cluster:
        """This machine's devices, as a cluster of one host."""
        return self._ask({"type": "describe", "backend": backend, "workers": workers}, Cluster)

    def installed(self) -> Wheel:
        """The host's PyTorch, and the GPUs that it sees."""
        return self._ask({"type": "installed"}, Wheel)

    def matmul_flops(self, device: PlannedDevice, precisions: tuple[Precision, ...]) -> dict[str, float]:
        """FLOP/s of one worker's matrix products, by precision."""
        return self._ask({"type": "matmul", "device": device, "precisions": precisions}, dict[str, float])

    def measure(
        self, device: PlannedDevice, model: ModelSpec, train: TrainSpec, *,
        precisions: tuple[Precision, ...], seconds: float,
    ) -> ProbeResult:  # fmt: skip
        """Time of real steps of `train.batch` sequences on one worker, about `seconds` for each precision."""
        question = {
            "type": "measure", "device": device, "model": model, "train": train, "precisions": precisions,
            "seconds": seconds,
        }  # fmt: skip
        return self._ask(question, ProbeResult)

    def rates(
        self, device: PlannedDevice, shapes: Sequence[tuple[int, int, int]], dtypes: Sequence[DType]
    ) -> DeviceRates:
        """What the device can do: products of these (m, k, n), its memory's speed and size."""
        return self._ask({"type": "rates", "device": device, "shapes": shapes, "dtypes": dtypes}, DeviceRates)

    def units(
        self, device: PlannedDevice, model: ModelSpec, seq_len: int, rows: Sequence[int], dtypes: Sequence[DType]
    ) -> tuple[UnitTime, ...]:
        """Seconds of the model's units over so many sequences."""
        question = {
            "type": "units", "device": device, "model": model, "seq_len": seq_len, "rows": rows, "dtypes": dtypes,
        }  # fmt: skip
        return self._ask(question, tuple[UnitTime, ...])

    def allreduce(
        self, device: PlannedDevice, rank: int, world: int, meeting: Meeting, interface: str | None,
        sizes: Sequence[int],
    ) -> dict[int, float]:  # fmt: skip
        """Seconds of all-reduces with the other probes that are asked at the same time."""
        question = {
            "type": "allreduce", "device": device, "rank": rank, "world": world, "address": meeting.address,
            "port": meeting.port, "secret": meeting.secret, "interface": interface, "sizes": sizes,
        }  # fmt: skip
        return self._ask(question, dict[int, float])

    def _ask(self, question: dict[str, Any], kind: type[T]) -> T:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        watchdog = threading.Timer(ANSWER_S, process.kill)
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
            raise Refusal(
                "worker-lost", what="the trial process ended without an answer", where="probe",
                fact=f"exit code {process.wait(timeout=10)} (-9 is the kernel's, when memory runs out)",
                remedy="set a smaller model or train.batch.global in run.yaml",
            )  # fmt: skip
        reply = answer_of(line, self._host)
        if "problem" in reply:
            raise Refusal.of(msgspec.convert(reply["problem"], Problem))
        return msgspec.convert(reply["answer"], kind, strict=False)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)


def check_gpus(backend: str) -> tuple[str, ...]:
    """A note on each GPU of this machine that is left out of devices of such a backend.

    Raises Refusal (device-unusable) where its driver lists GPUs of which PyTorch can use none, unless the backend is
    one that needs no GPU.
    """
    listed = msgspec.convert(nvidia(), Nvidia) if backend in ("auto", "cuda") else Nvidia()
    if not listed.gpus and not listed.failure:
        return ()
    with Probe() as probe:
        problem, notes = judge(listed, probe.installed())
    if problem is not None:
        raise Refusal.of(problem)
    return notes
