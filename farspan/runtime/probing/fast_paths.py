"""The fast paths that a device takes in training, and why; what a card alone decides of them.

Whether a run takes them is decided by its plan, too: how long it trains, and on how many devices.
"""

from __future__ import annotations

import importlib.util
import os
import shutil

import torch

from farspan.domain.device_report import DeviceReport, FastPath
from farspan.domain.gpus import has_code_for
from farspan.domain.suggest_device import describe_slice
from farspan.runtime.device import detect_devices, usable_gpus
from farspan.runtime.model import fused_loss
from farspan.runtime.model.attention_policy import attention_policy
from farspan.runtime.native_dtypes import BF16_CAPABILITY, hardware_dtypes
from farspan.semantics.compile_choice import LEAST_COMPILED_CAPABILITY, NO_NVIDIA_GPU

#: A C++ compiler, which PyTorch's needs on a CPU.
CPP_COMPILERS = ("g++", "clang++")

#: As run.yaml has them.
SHORT_NAMES: dict[torch.dtype, str] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}

Chosen = tuple[bool, str]


def report_devices(backend: str) -> tuple[DeviceReport, ...]:
    """Report the devices that `detect_devices` finds, one of each CPU, with their fast paths."""
    devices = detect_devices(backend, None).devices
    if devices[0].backend != "cuda":
        device = torch.device(devices[0].backend)
        return (describe_device(device, devices[0].kind),)
    reports = []
    for index, each in zip(usable_gpus(), devices, strict=True):
        reports.append(describe_device(torch.device("cuda", index), each.kind))
    return tuple(reports)


def describe_device(device: torch.device, name: str) -> DeviceReport:
    """Describe a device with its fast paths. Opens a GPU: what keeps it from being opened is in the
    report."""
    paths = list_fast_paths(device)
    if device.type != "cuda":
        return DeviceReport(
            name=name, backend="mps" if device.type == "mps" else "cpu", paths=paths
        )
    properties = torch.cuda.get_device_properties(device)
    free = None
    failure = ""
    try:
        free = int(torch.cuda.mem_get_info(device)[0])
    except RuntimeError as error:
        failure = next(iter(str(error).splitlines()), type(error).__name__)[:200]
    return DeviceReport(
        name=name,
        backend="cuda",
        paths=paths,
        capability=torch.cuda.get_device_capability(device),
        memory=int(properties.total_memory),
        free=free,
        failure=failure,
        slice=describe_slice(name),
    )


def list_fast_paths(device: torch.device) -> tuple[FastPath, ...]:
    """List what training takes on a device."""
    dtype, why = choose_training_dtype(device)
    policy = attention_policy(device, dtype)
    obstacle = fused_loss.find_obstacle(device)
    loss = "operators" if obstacle else "compiled"
    obstacle = obstacle or "Triton makes one kernel of it"
    compiles, compile_why = choose_compile(device)
    records, graph_why = choose_graph(device, dtype)
    paths = [
        FastPath(name="dtype", takes=SHORT_NAMES[dtype], why=why),
        FastPath(name="attention", takes=policy.kernel, why=policy.reason),
        FastPath(name="head loss", takes=loss, why=obstacle),
    ]
    paths.append(FastPath(name="compile", takes="auto" if compiles else "no", why=compile_why))
    paths.append(FastPath(name="graph", takes="auto" if records else "no", why=graph_why))
    if device.type == "cuda":
        paths.append(describe_wheel(device))
    return tuple(paths)


def choose_training_dtype(device: torch.device) -> tuple[torch.dtype, str]:
    """Return the dtype that a training is likely to take: `precision: auto` measures each of those
    that the device has."""
    dtypes = hardware_dtypes(device)
    if "bf16" in dtypes:
        if device.type == "cuda":
            return torch.bfloat16, "the card multiplies it on its matrix units"
        return torch.bfloat16, "computed in hardware; precision: auto tries it"
    if "fp16" in dtypes:
        return torch.float16, f"with a loss scale; {_without_bf16(device)}"
    return torch.float32, "no shorter dtype is computed in hardware"


def _without_bf16(device: torch.device) -> str:
    if torch.version.hip:
        return "this card has no bf16"
    major, minor = BF16_CAPABILITY
    return f"bf16 needs compute capability {major}.{minor}"


def choose_compile(device: torch.device) -> Chosen:
    """Return whether `compile: auto` may compile blocks on a device, and why."""
    if device.type == "cpu":
        own = os.environ.get("CXX")
        compilers = [own, *CPP_COMPILERS] if own else list(CPP_COMPILERS)
        if any(map(shutil.which, compilers)):
            return False, "train.compile: true asks for it on a CPU"
        return False, "a CPU needs a C++ compiler for it: apt-get install g++"
    if device.type != "cuda":
        return False, "nobody has tried it on Apple GPUs"
    if importlib.util.find_spec("triton") is None:
        return False, "Triton, PyTorch's compiler for GPUs, is not installed"
    if torch.version.hip:
        return False, "train.compile: true asks for it on AMD GPUs"
    major, minor = torch.cuda.get_device_capability(device)
    if major + minor / 10 < LEAST_COMPILED_CAPABILITY:
        fact = f"Triton supports compute capability {LEAST_COMPILED_CAPABILITY} and newer"
        return False, fact
    return True, "in runs long enough to repay the compiler's time"


def choose_graph(device: torch.device, dtype: torch.dtype) -> Chosen:
    """Return whether `graph: auto` may record the whole step as one CUDA graph, and why."""
    if device.type != "cuda":
        return False, NO_NVIDIA_GPU
    if torch.version.cuda is None:
        return False, "nobody has tried it on AMD GPUs"
    if dtype == torch.float16:
        return False, "the host decides on fp16's loss scale after each step"
    return True, "on one GPU, where launches take longer than the work"


def describe_wheel(device: torch.device) -> FastPath:
    """Describe the code that this PyTorch has for a card."""
    capability = torch.cuda.get_device_capability(device)
    version = str(torch.__version__)
    if torch.version.hip:
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        return FastPath(
            name="wheel", takes="ROCm", why=f"torch {version} on {name.partition(':')[0]}"
        )
    archs = tuple(torch.cuda.get_arch_list())
    own = f"sm_{capability[0]}{capability[1]}"
    if own in archs:
        return FastPath(name="wheel", takes="own code", why=f"torch {version} has {own}")
    if any(has_code_for(capability, (arch,)) for arch in archs if arch.startswith("sm_")):
        near = [arch for arch in archs if has_code_for(capability, (arch,))]
        return FastPath(
            name="wheel", takes="code of its family", why=f"torch {version} has {near[-1]}"
        )
    if has_code_for(capability, archs):
        why = f"torch {version} has no {own}, and the driver compiles it at the first start"
        return FastPath(name="wheel", takes="PTX", why=why)
    return FastPath(name="wheel", takes="none", why=f"torch {version} has no code for {own}")
