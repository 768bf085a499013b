"""The device that a worker computes on: selecting it, its memory, its dtypes, its name."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib.util
import os
import platform
import re
import resource
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import torch

from farspan._version import __version__
from farspan.domain.cgroup_limits import read_cgroup_limits
from farspan.domain.cluster import (
    GIVEN_GPU_VARIABLE,
    READY_VARIABLE,
    Cluster,
    DataSheet,
    Device,
    Host,
    Site,
    WorkerSlot,
)
from farspan.domain.device_report import FREE_REMEDY, describe_held_memory
from farspan.domain.escapes import shell_word
from farspan.domain.gpus import TorchGpu, Wheel, has_code_for, is_kind, judge_granted_gpus
from farspan.domain.plan import PlannedDevice
from farspan.domain.problems import Refusal
from farspan.domain.run import source_commit
from farspan.domain.run_events import Environment
from farspan.domain.train import Precision
from farspan.domain.units import counted
from farspan.runtime.native_dtypes import hardware_dtypes

#: glibc's malloc.h.
_M_MMAP_THRESHOLD = -3
#: What CUDA says of a card that another program has for itself (cudaErrorDevicesUnavailable).
BUSY = "busy or unavailable"
#: What errors say where memory is full: PyTorch's of CPUs, CUDA's and NCCL's, cuBLAS's and cuDNN's.
FULL = re.compile(r"can't allocate memory|out of memory|ALLOC_FAILED", re.IGNORECASE)


def open_device(planned: PlannedDevice, precision: Precision = "fp32") -> torch.device:
    """Open the torch device that a plan names; TF32 matrix products are enabled only for a training
    in tf32. Refuses when this machine lacks it, or has another GPU in its place."""
    torch.set_num_threads(planned.threads)
    if planned.backend == "cpu":
        return torch.device("cpu")
    if planned.backend == "mps" and torch.backends.mps.is_available():
        return torch.device("mps")
    index = int(os.environ.get(GIVEN_GPU_VARIABLE, planned.index))
    gpus = usable_gpus() if planned.backend == "cuda" else ()
    if index < len(gpus):
        name = torch.cuda.get_device_name(gpus[index])
        check_kind(planned, name)
        torch.cuda.set_device(gpus[index])
        require_openable(torch.device("cuda", gpus[index]), name, planned.host)
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        return torch.device("cuda", gpus[index])
    usable = counted(len(gpus), "CUDA device")
    raise Refusal(
        "device-missing",
        what=f"the plan wants {planned.backend} device {planned.index}",
        where=planned.host,
        fact=f"this machine has {usable} that PyTorch can use; {installed_torch()}",
        remedy="farspan doctor   (there); or plan for what is here: farspan train run.yaml",
    )


def check_kind(planned: PlannedDevice, name: str) -> None:
    """Refuse a GPU of a kind that was not planned for; plans of before there were kinds in them
    take any."""
    if planned.kind and not is_kind(name, planned.kind):
        raise Refusal(
            "plan-mismatch",
            what=f"GPU {planned.index} is not the one that was planned for",
            where=planned.host,
            fact=f"the plan is for {planned.kind}; it is {name}",
            remedy=(
                f"put that GPU back, or name {shell_word(name)} among the host's devices, and "
                "plan again"
            ),
        )


def require_openable(device: torch.device, name: str, host: str) -> None:
    """Open a GPU. Raises Refusal (device-busy) where another program has it for itself alone, or
    leaves no memory to open it."""
    try:
        torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        if BUSY not in str(error) and not memory_is_full(error):
            raise
        raise Refusal(
            "device-busy",
            what=f"{name} cannot be opened: another program holds it",
            where=host,
            fact=str(error).splitlines()[0][:200],
            remedy=FREE_REMEDY,
        ) from None


def describe_others(device: torch.device) -> str:
    """Describe what other programs hold of a GPU's memory; empty where it is little."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    return describe_held_memory(torch.cuda.get_device_name(device), total, free, own)


def usable_gpus() -> tuple[int, ...]:
    """CUDA's numbers of the GPUs that this PyTorch has code for, in the order of the PCI bus, as
    nvidia-smi has them. A device's place in its host, and in a plan, is its place among these."""
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if not torch.cuda.is_available():
        return ()
    archs = () if torch.version.hip else tuple(torch.cuda.get_arch_list())
    everyone = range(torch.cuda.device_count())
    return tuple(i for i in everyone if has_code_for(torch.cuda.get_device_capability(i), archs))


def installed_torch() -> Wheel:
    """Describe what this PyTorch was built for, and the GPUs that it sees."""
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    seen = list[TorchGpu]()
    # A driver that is too old is reported as a warning.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    error = " ".join(str(warning.message) for warning in caught)
    try:
        for index in range(torch.cuda.device_count() if available else 0):
            name = torch.cuda.get_device_name(index)
            capability = torch.cuda.get_device_capability(index)
            seen.append(TorchGpu(name=name, capability=capability))
    except RuntimeError as failed:
        error = str(failed) or error
    error = " ".join(error.split())[:300]
    return Wheel(
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        archs=tuple(torch.cuda.get_arch_list()),
        seen=tuple(seen),
        error=error,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        triton=has_triton(),
    )


def has_triton() -> bool:
    """Return whether this interpreter has Triton, PyTorch's compiler for GPUs."""
    return importlib.util.find_spec("triton") is not None


def apply_lab_limits(variable: str = READY_VARIABLE) -> None:
    """Let an emulated device be as slow as it is meant to be, now that its worker has started; or
    with TAKEN be this process's, which was a spare."""
    for line in os.environ.pop(variable, "").splitlines():
        file, _, value = line.partition("=")
        Path(file).write_text(value)


def _require_granted_gpus() -> None:
    """Refuse to take the CPU where Slurm has given GPUs to this process, unless somebody has hidden
    them. Raises Refusal (device-missing)."""
    granted = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    if not granted.isdecimal() or int(granted) == 0:
        return
    node = os.environ.get("SLURMD_NODENAME", platform.node())
    problem = judge_granted_gpus(int(granted), installed_torch(), node)
    if problem is not None:
        raise Refusal.of(problem)


def detect_devices(backend: str, workers: int | None) -> Cluster:
    """Describe this machine as a cluster of one host: its GPUs, or `workers` shares of its CPU."""
    memory = psutil.virtual_memory()
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    if backend == "auto":
        apple = torch.backends.mps.is_available()
        backend = "cuda" if usable_gpus() else "mps" if apple else "cpu"
        if backend == "cpu":
            _require_granted_gpus()
    if backend == "cuda":
        devices = [_cuda_device(i) for i in usable_gpus()][: workers or None]
    elif backend == "mps":
        sheet = DataSheet(dtypes=hardware_dtypes(torch.device("mps")))
        devices = [Device(kind=_cpu_name(), backend="mps", memory=memory.total, sheet=sheet)]
    else:
        count = workers or 1
        share = Device(
            kind=_cpu_name(),
            backend="cpu",
            memory=usable_memory(torch.device("cpu")) // count,
            sheet=DataSheet(dtypes=hardware_dtypes(torch.device("cpu"))),
            slot=WorkerSlot(threads=max(1, cores // count)),
        )
        devices = [share] * count
    missing = max(workers or 1, 1) - len(devices)
    if missing > 0:
        key = "parallel.workers" if devices else "parallel.device"
        raise Refusal(
            "device-missing",
            what=f"the run asks for {counted(workers or 1, f'{backend} worker')}",
            where=f"run.yaml, key {key}",
            fact=f"this machine has {counted(len(devices), f'{backend} device')}",
            remedy=f"set parallel.workers: {len(devices)}"
            if devices
            else "set parallel.device: cpu",
            key=key,
        )
    host = Host(
        name=platform.node(),
        devices=tuple(devices),
        cpus=cores,
        memory=memory.total,
        enter=(),
        triton=has_triton() if backend == "cuda" else msgspec.UNSET,
    )
    return Cluster(sites=(Site(name="here", hosts=(host,)),))


def memory_is_full(error: BaseException) -> bool:
    """Return whether an error means that a device's memory, or the host's, is full; each library
    has words of its own."""
    raised_as_such = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return raised_as_such or bool(FULL.search(str(error)))


def synchronize_device(device: torch.device) -> None:
    """Wait until a device has computed what was launched; a GPU does so later."""
    if device.type == "cuda":
        # One stream computes. NCCL's sums, on streams of their own, overlap with the passes and
        # are none of theirs.
        torch.cuda.current_stream(device).synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()


def mark_launched(device: torch.device) -> Callable[[], None]:
    """Return a function that waits until a GPU has done what its current stream has launched so
    far; other devices have done it by then."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def give_back(size: int) -> None:
    """Have blocks of at least `size` bytes, once free, go back to the kernel, where malloc is
    glibc's. Workers keep them else (`launch/workers.py`), which is faster, but between blocks that
    stay glibc leaves holes that fit none."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, size)


def usable_memory(device: torch.device) -> int:
    """Free bytes of a GPU; of a CPU what the machine, and each control group that this process is
    in, allow."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([psutil.virtual_memory().total, *(cap.limit for cap in read_cgroup_limits())])


def free_memory(device: torch.device, allowed: int) -> int:
    """Bytes that this process can still take: of those `allowed` to it, of the device's, and of
    what control groups leave."""
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        return int(min(allowed, available) - torch.cuda.memory_allocated(device))
    process_free = allowed - psutil.Process().memory_info().rss
    return min(process_free, available_host_memory())


def available_host_memory() -> int:
    """Bytes that a process can still take of the host's memory, and of what control groups
    leave."""
    group_free = [cap.limit - cap.used for cap in read_cgroup_limits()]
    return min([psutil.virtual_memory().available, *group_free])


def release_memory(device: torch.device) -> None:
    """Give what is free of this process's memory back, to who measures next and to the limits that
    it is under."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with contextlib.suppress(AttributeError, OSError):  # Where malloc is not glibc's.
        ctypes.CDLL(None).malloc_trim(0)


def _cpu_name() -> str:
    return read_cpu_info("model name") or platform.processor() or platform.machine()


@functools.cache
def read_cpu_info(key: str) -> str:
    """Return a value of /proc/cpuinfo of the first core; empty where Linux does not have it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(key):
                return line.split(":", 1)[1].strip()
    return ""


def _cuda_device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    # ROCm's numbers are other ones.
    capability = msgspec.UNSET if torch.version.hip else properties.major + properties.minor / 10
    dtypes = hardware_dtypes(torch.device("cuda", index))
    sheet = DataSheet(dtypes=dtypes, capability=capability)
    return Device(
        kind=properties.name,
        backend="cuda",
        memory=properties.total_memory,
        sheet=sheet,
        slot=WorkerSlot(threads=1),
    )


def environment(device: torch.device) -> Environment:
    """Where this worker runs, for the record."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    memory = psutil.virtual_memory()
    return Environment(
        farspan=__version__,
        python=platform.python_version(),
        torch=str(torch.__version__),
        platform=platform.platform(),
        device=name,
        cpus=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory_bytes=memory.total,
        commit=source_commit(),
    )


def peak_memory(device: torch.device) -> int:
    """Peak bytes so far: of the process on a CPU, of the allocator on a GPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
