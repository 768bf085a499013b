"""Rates of one device and of one group of devices: matrix products, memory, collectives. No
training step."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from farspan.domain.cluster import DType, MatmulRate
from farspan.domain.plan import PlannedDevice
from farspan.domain.probe_requests import DeviceRates, LeftOut
from farspan.runtime.comm.worker_group import Group, connect_workers
from farspan.runtime.device import (
    free_memory,
    open_device,
    release_memory,
    synchronize_device,
    usable_memory,
)
from farspan.runtime.native_dtypes import TORCH_DTYPES

#: Seconds that each figure is taken over: several periods of a CPU quota; its pauses are part of
#: the rate.
RATE_S = 0.5
#: A GPU is waited for after this many seconds of work, not after each call, as waiting takes 10 to
#: 20 us and so a third of a product of 45 us.
WAIT_EVERY_S = 5e-3
#: Kernels whose launch is timed, after as many to warm up.
LAUNCHES = 1000
#: All-reduces of one size that are timed at most.
MAX_ALL_REDUCES = 50
#: Bytes that are copied to time memory: past any cache. Less where a device has little.
COPIED = 2**28
#: An all-reduce that would take longer than this, by a smaller one, is left out.
MAX_ALL_REDUCE_S = 20.0


def measure_device_rates(
    planned: PlannedDevice,
    shapes: tuple[tuple[int, int, int], ...],
    dtypes: tuple[DType, ...],
    allowed: int,
) -> DeviceRates:
    """Measure the rates of one device in `allowed` bytes. `shapes` are (m, k, n) of `[m, k] @ [k,
    n]`."""
    device = open_device(planned)
    memory = usable_memory(device)
    rates = list[MatmulRate]()
    left_out = list[LeftOut]()
    for m, k, n in shapes:
        # The three matrices in fp32, and the second one again as libraries lay it out; this also
        # covers a dtype that the device converts to fp32.
        needed = 6 * (m * k + m * n + 2 * k * n)
        free = free_memory(device, allowed)
        if needed > free:
            what = f"the product [{m}, {k}] @ [{k}, {n}]"
            left_out.append(LeftOut(what=what, needed=needed, free=max(0, free)))
            continue
        flops: dict[DType, float] = {}
        for dtype in dtypes:
            # Drawn: a GPU multiplies equal numbers with less power, and so faster.
            a = torch.rand(m, k, device=device).to(TORCH_DTYPES[dtype])
            b = torch.rand(k, n, device=device).to(TORCH_DTYPES[dtype])
            product_s = _mean_seconds(functools.partial(torch.matmul, a, b), device)
            flops[dtype] = 2 * m * k * n / product_s
            del a, b
            release_memory(device)
        rates.append(MatmulRate(m=m, k=k, n=n, flops=flops))
    return DeviceRates(
        rates=tuple(rates),
        bandwidth=_measure_memory_bandwidth(device, allowed),
        memory=memory,
        left_out=tuple(left_out),
        launch_s=msgspec.UNSET if device.type == "cpu" else measure_launch_s(device),
    )


def measure_launch_s(device: torch.device) -> float:
    """Return the seconds to launch one of many small kernels. The host decides them: the kernels
    take less."""
    number = torch.zeros(1, device=device)
    launch_s = 0.0
    for _ in range(2):
        synchronize_device(device)
        began = time.perf_counter()
        for _ in range(LAUNCHES):
            number.add_(1)
        synchronize_device(device)
        launch_s = (time.perf_counter() - began) / LAUNCHES
    return launch_s


def _measure_memory_bandwidth(device: torch.device, allowed: int) -> float:
    """Return bytes a second of a copy in the device's memory, in `allowed` bytes."""
    copied = min(COPIED, free_memory(device, allowed) // 8)
    source = torch.ones(max(4, copied) // 4, device=device)
    target = torch.empty_like(source)
    copy_s = _mean_seconds(lambda: target.copy_(source), device)
    # Every byte is read once and written once.
    return 2 * source.nbytes / copy_s


def _mean_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the mean seconds of one call, over RATE_S and at least three calls."""
    work()
    synchronize_device(device)
    together = 1 if device.type == "cpu" else count_calls_between_waits(work, device)
    calls = 0
    began = time.perf_counter()
    spent = 0.0
    while spent < RATE_S or calls < 3:
        for _ in range(together):
            work()
        synchronize_device(device)
        calls += together
        spent = time.perf_counter() - began
    return spent / calls


def count_calls_between_waits(work: Callable[[], object], device: torch.device) -> int:
    """Return the calls that keep a GPU busy for WAIT_EVERY_S, by the time of one."""
    began = time.perf_counter()
    work()
    synchronize_device(device)
    return max(1, round(WAIT_EVERY_S / (time.perf_counter() - began)))


def measure_allreduce(
    rank: int, world: int, device: PlannedDevice, sizes: tuple[int, ...], secret: bytes
) -> dict[int, float]:
    """Return the seconds of an all-reduce over all devices, by bytes: the slowest rank's median.

    The ranks connect at MASTER_ADDR and MASTER_PORT, and authenticate with the secret.
    """
    opened = open_device(device)
    group = Group(rank, world, opened, connect_workers(rank, world, secret))
    times: dict[int, float] = {}
    for size in sorted(sizes):
        # Large ones grow with their size, which the time of a small one does not predict.
        largest = max(times, default=0)
        if largest > 1e6 and times[largest] * size / largest > MAX_ALL_REDUCE_S:
            break
        # Gloo keeps a copy of what it sums, and a part of another.
        too_large = 3 * size > free_memory(opened, 2**62)
        if max(group.all_gather(float(too_large))):
            break
        tensor = torch.zeros(max(1, size // 4), device=opened)

        def seconds(tensor: Tensor = tensor) -> float:
            group.all_reduce_sum(0.0)  # All start together.
            began = time.perf_counter()
            dist.all_reduce(tensor)
            synchronize_device(opened)
            return time.perf_counter() - began

        seconds()
        # The same number on every rank: over RATE_S by the slowest one's second try.
        slowest_s = max(group.all_gather(seconds()))
        repeats = max(2, min(MAX_ALL_REDUCES, round(RATE_S / slowest_s)))
        taken = [seconds() for _ in range(repeats)]
        # Every rank keeps the same figure, or they would disagree on when to stop.
        times[size] = max(group.all_gather(statistics.median(taken)))
    group.close()
    return times
