"""One stage of benchmarks/gpu.py in its process: what its rows are written with, and timing.

gpu_stage.py MODULE --rows FILE --folder FOLDER --limit SECONDS [--dry | --name NAME_OF_GPU]
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Step = Callable[[], object]


@dataclass(frozen=True)
class Context:
    """`dry` asks for tiny sizes on the CPU. `ends` is a time of time.monotonic(): what would not be
    done by then is better left out."""

    device: torch.device
    #: As the driver names the GPU.
    device_name: str
    dry: bool
    rows: Path
    folder: Path
    ends: float

    def row(self, found: dict[str, Any], text: str) -> None:
        """Keep one result; `text` is what a reader of the terminal sees of it."""
        with open(self.rows, "a") as file:
            file.write(json.dumps(found | {"text": text}) + "\n")
        print(text, flush=True)

    @property
    def left_s(self) -> float:
        return self.ends - time.monotonic()


def parse() -> tuple[argparse.Namespace, Context]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--limit", type=float, required=True)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--name", default="cpu")
    parser.add_argument("--case", type=int, help="of gpu_predicted: one shape, alone")
    given = parser.parse_args()
    context = Context(
        device=torch.device("cpu") if given.dry else torch.device("cuda", 0),
        device_name=given.name,
        dry=given.dry,
        rows=given.rows,
        folder=given.folder,
        ends=time.monotonic() + given.limit,
    )
    return given, context


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(step: Step, count: int, device: torch.device) -> float:
    """Seconds of one step, by `count` steps in a row."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return (time.perf_counter() - began) / count


def median_s(
    step: Step, device: torch.device, *, warmup: int = 3, rounds: int = 5, count: int = 3
) -> float:
    """Median over rounds of the seconds of a step."""
    seconds(step, warmup, device)
    return statistics.median(seconds(step, count, device) for _ in range(rounds))


def peak_bytes(step: Step, device: torch.device) -> int | None:
    """Bytes that a step allocates beyond what is allocated before it; None on a CPU."""
    if device.type != "cuda":
        step()
        return None
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return torch.cuda.max_memory_allocated(device) - held


def profile(step: Step, device: torch.device, count: int = 2, top: int = 20) -> dict[str, Any]:
    """Kernels of a step: how many, how long the GPU is busy, and the longest of them by name."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profiler(activities=activities) as profiled:
        seconds(step, count, device)
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    kernels = [event for event in profiled.key_averages() if event.device_type == wanted]

    def busy_us(event: Any) -> float:
        return event.self_device_time_total if on_gpu else event.self_cpu_time_total

    kernels.sort(key=busy_us, reverse=True)
    return {
        "launches": sum(event.count for event in kernels) / count,
        "busy_ms": sum(map(busy_us, kernels)) / count / 1e3,
        "kernels": [
            {
                "name": event.key[:120],
                "count": event.count / count,
                "ms": busy_us(event) / count / 1e3,
            }
            for event in kernels[:top]
        ],
    }


def profile_row(context: Context, what: str, step: Step) -> None:
    """Keep a profile, if the profiler works here: no measurement is to be lost by it."""
    try:
        found = profile(step, context.device)
    except (RuntimeError, AttributeError, ValueError) as error:
        context.row({"profile": what, "failed": repr(error)}, f"{what}: no profile: {error}")
        return
    context.row(
        {"profile": what, **found},
        f"{what}: {found['launches']:.0f} launches, busy {found['busy_ms']:.2f} ms a step",
    )


def main() -> None:
    given, context = parse()
    module = importlib.import_module(given.module)
    if given.case is None:
        module.measure(context)
    else:
        module.measure_case(context, given.case)


if __name__ == "__main__":
    import gpu_stage  # The stages import it by this name: then there is one Context, not two.

    gpu_stage.main()
