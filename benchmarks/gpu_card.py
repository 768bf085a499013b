"""Ceilings of the card: copies, matrix products, and how long the host needs to launch a kernel."""

from __future__ import annotations

import subprocess
from contextlib import suppress

import torch
from gpu_stage import Context, median_s


def measure(context: Context) -> None:
    describe(context)
    measure_copies(context)
    measure_products(context)
    measure_launches(context)


def describe(context: Context) -> None:
    found: dict[str, object] = {"name": context.device_name}
    if context.device.type == "cuda":
        properties = torch.cuda.get_device_properties(context.device)
        found |= {
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": [properties.major, properties.minor],
            "cudnn": torch.backends.cudnn.version(),
            "driver": driver(),
        }
    context.row(found, ", ".join(f"{key} {value}" for key, value in found.items()))


def driver() -> str | None:
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(words, capture_output=True, text=True, timeout=10).stdout.strip()
    return None


def measure_copies(context: Context) -> None:
    """Measure copies: those inside the card count bytes read and written; others count bytes
    moved."""
    device = context.device
    count = 2**20 if context.dry else 2**30
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    within = 2 * count / median_s(lambda: target.copy_(source), device)
    context.row({"copy": "on the card", "bytes_per_s": within}, f"copy: {within / 1e9:,.0f} GB/s")
    for pinned in (False, True):
        part = 2**18 if context.dry else 2**26
        host = torch.ones(part, dtype=torch.uint8, pin_memory=pinned and device.type == "cuda")
        view = target[:part]
        words = "pinned" if pinned else "pageable"
        to_card = part / median_s(lambda h=host, v=view: v.copy_(h, non_blocking=True), device)
        to_host = part / median_s(lambda h=host, v=view: h.copy_(v, non_blocking=True), device)
        context.row(
            {"copy": words, "to_card_bytes_per_s": to_card, "to_host_bytes_per_s": to_host},
            f"{words} host memory: {to_card / 1e9:.1f} GB/s to the card, "
            f"{to_host / 1e9:.1f} GB/s back",
        )


def measure_products(context: Context) -> None:
    n = 128 if context.dry else 8192
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(n, n, device=context.device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        rate = (
            2 * n**3 / median_s(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), context.device)
        )
        name = str(dtype).removeprefix("torch.")
        context.row(
            {"product": name, "n": n, "flops": rate}, f"{n}^3 {name}: {rate / 1e12:.1f} TFLOP/s"
        )


def measure_launches(context: Context) -> None:
    """Return a thousand additions of one number: no kernel takes as long as its launch."""
    x = torch.zeros(1, device=context.device)
    count = 1000

    def launch() -> None:
        for _ in range(count):
            x.add_(1)

    launch_s = median_s(launch, context.device, warmup=1, count=1) / count
    context.row({"launch_s": launch_s}, f"a launch: {launch_s * 1e6:.1f} us")
