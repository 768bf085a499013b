"""What one device and one group of devices can do: matrix products, memory, collectives. No
training step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from farspan.domain.cluster import DType, MatmulRate
from farspan.domain.plan import PlannedDevice
from farspan.domain.probe import DeviceRates, LeftOut
from farspan.runtime.comm.collective import Group, meet
from farspan.runtime.device import free_memory, open_device, release, settle, usable_memory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Seconds that each figure is taken over: several periods of a CPU quota, whose pauses are part of
#: the rate.
TIMED_S = 0.5
#: All-reduces of one size that are timed at most.
MOST = 50
#: Bytes that are copied to time memory: past any cache. Less where a device has little.
COPIED = 2**28
#: An all-reduce that would take longer than this, by a smaller one, is left out.
LONGEST_S = 20.0


def device_rates(
    planned: PlannedDevice,
    shapes: tuple[tuple[int, int, int], ...],
    dtypes: tuple[DType, ...],
    allowed: int,
) -> DeviceRates:
    """Rates of one device, in so many bytes. `shapes` are (m, k, n) of `[m, k] @ [k, n]`."""
    device = open_device(planned)
    memory = usable_memory(device)
    rates = list[MatmulRate]()
    left_out = list[LeftOut]()
    for m, k, n in shapes:
        if (needed := product_bytes(m, k, n)) > (free := free_memory(device, allowed)):
            left_out.append(
                LeftOut(
                    what=f"the product [{m}, {k}] @ [{k}, {n}]", needed=needed, free=max(0, free)
                )
            )
            continue
        flops: dict[DType, float] = {}
        for dtype in dtypes:
            # Drawn: a GPU multiplies equal numbers with less power, and so faster.
            a = torch.rand(m, k, device=device).to(DTYPES[dtype])
            b = torch.rand(k, n, device=device).to(DTYPES[dtype])
            flops[dtype] = 2 * m * k * n / _seconds(lambda a=a, b=b: a @ b, device)
            del a, b
            release(device)
        rates.append(MatmulRate(m=m, k=k, n=n, flops=flops))
    source = torch.ones(max(4, min(COPIED, free_memory(device, allowed) // 8)) // 4, device=device)
    target = torch.empty_like(source)
    # Every byte is read once and written once.
    bandwidth = 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)
    return DeviceRates(
        rates=tuple(rates), bandwidth=bandwidth, memory=memory, left_out=tuple(left_out)
    )


def product_bytes(m: int, k: int, n: int) -> int:
    """What a product takes at most: its three matrices in fp32, and the second one again as
    libraries lay it out; where the device lacks a narrower dtype, its numbers beside those in
    fp32."""
    return 6 * (m * k + m * n + 2 * k * n)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Mean seconds of one call, over TIMED_S and at least three."""
    work()
    settle(device)
    calls = 0
    began = time.perf_counter()
    while (spent := time.perf_counter() - began) < TIMED_S or calls < 3:
        work()
        settle(device)
        calls += 1
    return spent / calls


def allreduce_seconds(
    rank: int, world: int, device: PlannedDevice, sizes: tuple[int, ...], secret: bytes
) -> dict[int, float]:
    """Seconds of an all-reduce over all devices, by bytes: the slowest rank's median.

    MASTER_ADDR and MASTER_PORT say where the ranks meet, and the secret is by what they know each
    other.
    """
    group = Group(rank, world, open_device(device), meet(rank, world, secret))
    times: dict[int, float] = {}
    for size in sorted(sizes):
        # Large ones grow with their size; the time of a small one says nothing about them.
        if times and max(times) > 1e6 and times[max(times)] * size / max(times) > LONGEST_S:
            break
        # Gloo keeps a copy of what it sums, and a part of another.
        if max(group.gather(float(3 * size > free_memory(group.device, 2**62)))):
            break
        tensor = torch.zeros(max(1, size // 4), device=group.device)

        def seconds(tensor: Tensor = tensor) -> float:
            group.sum(0.0)  # All start together.
            began = time.perf_counter()
            dist.all_reduce(tensor)
            settle(group.device)
            return time.perf_counter() - began

        seconds()
        # As many on every rank: over TIMED_S by the slowest one's second try.
        again = round(TIMED_S / max(group.gather(seconds())))
        taken = [seconds() for _ in range(max(2, min(MOST, again)))]
        # Every rank goes on with the same figure, or they would disagree on when to stop.
        times[size] = max(group.gather(statistics.median(taken)))
    group.close()
    return times
