"""A process that answers questions about this machine, one JSON line each: `python -m
farspan.runtime.probe_process`.

The command line keeps torch out of itself; it asks this process what devices there are, how fast
they multiply, and what one real training step takes in time and memory.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from farspan.domain.decoding import json_decoder
from farspan.domain.probe_requests import (
    AllReduceQuery,
    DescribeQuery,
    InstalledQuery,
    MatmulQuery,
    MeasureQuery,
    ProbeResult,
    Query,
    RatesQuery,
    ReportQuery,
    Speed,
    UnitsQuery,
)
from farspan.domain.problems import Problem, Refusal
from farspan.domain.train import Precision
from farspan.runtime.compiler import keep_compiled_code
from farspan.runtime.device import (
    detect_devices,
    installed_torch,
    memory_is_full,
    open_device,
    peak_memory,
    release_memory,
    synchronize_device,
)
from farspan.runtime.model.compiled_blocks import BlockInputs, compile_or_restore
from farspan.runtime.model.decoder import Decoder, initial_parameters
from farspan.runtime.model.kernel_selection import select_kernels
from farspan.runtime.native_dtypes import TORCH_DTYPES
from farspan.runtime.probing.fast_paths import report_devices
from farspan.runtime.probing.rates import measure_allreduce, measure_device_rates
from farspan.runtime.probing.unit_timing import unit_times
from farspan.runtime.state.train_state import TrainState
from farspan.semantics.kernel_choice import BYTES
from farspan.semantics.lr_schedule import learning_rate

#: Steps before the timed ones: allocators and kernels settle.
WARMUP_STEPS = 2
#: Steps so slow that these many times the asked seconds are gone are not waited for; two are always
#: made.
SLOW = 4


def matmul_rate(request: MatmulQuery) -> dict[str, float]:
    rates: dict[str, float] = {}
    for precision in request.precisions:
        device = open_device(request.device, precision)
        dtype = TORCH_DTYPES[precision]
        m, k, n = (2048, 384, 1536) if device.type == "cpu" else (8192, 2048, 8192)
        a = torch.ones(m, k, dtype=dtype, device=device)
        b = torch.ones(k, n, dtype=dtype, device=device)
        product = functools.partial(torch.matmul, a, b)
        times = [_time_call(product, device) for _ in range(12)]
        rates[precision] = 2 * m * k * n / statistics.median(times[2:])
    return rates


def _time_call(work: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    work()
    synchronize_device(device)
    return time.perf_counter() - began


def measure(request: MeasureQuery) -> ProbeResult:
    """Real steps of the real model on random tokens: forward, backward, update."""
    speeds: dict[Precision, Speed] = {}
    compiled = request.train.compile is True
    tokens = request.train.batch * request.train.seq_len
    # fp32 last: a process's peak memory only grows, and the leaner precisions must not be given
    # fp32's.
    for precision in sorted(request.precisions, key=BYTES.__getitem__):
        device = open_device(request.device, precision)
        times, is_compiled = _step_times(request, precision, device)
        step_s = lower_quartile(times)
        compiled = compiled and is_compiled
        memory = peak_memory(device)
        tokens_per_s = tokens / step_s
        speeds[precision] = Speed(step_s=step_s, tokens_per_s=tokens_per_s, memory_bytes=memory)
        release_memory(device)
    return ProbeResult(
        rows=request.train.batch,
        seq_len=request.train.seq_len,
        speeds=speeds,
        compiled=compiled,
    )


def lower_quartile(times: Sequence[float]) -> float:
    """Return the lower quartile: other load on the machine only ever adds time to so few steps. Of
    fewer than four, whose quartile would lie beyond them, the least."""
    if len(times) < 4:
        return min(times)
    return statistics.quantiles(times, n=4)[0]


def _step_times(
    request: MeasureQuery, precision: Precision, device: torch.device
) -> tuple[list[float], bool]:
    """Return the seconds of steps, and whether their blocks were compiled, which is done before."""
    train = request.train
    # As a worker does: a second copy of its values would be counted as its memory.
    with torch.device("meta"):
        model = Decoder(request.model, attention=train.attention, recompute=train.recompute)
    state = TrainState(model, precision, device)
    select_kernels(model, device, state.dtype)
    state.load_parameters(initial_parameters(request.model, train.seed))
    is_compiled = False
    if train.compile is True:
        inputs = BlockInputs((train.batch,), train.seq_len)
        is_compiled = not compile_or_restore(model, device, state.dtype, inputs)
    generator = torch.Generator().manual_seed(train.seed)
    shape = train.batch, train.seq_len + 1
    tokens = torch.randint(request.model.vocab_size, shape, generator=generator).to(device)
    lr = learning_rate(train.schedule, train.optimizer.lr, 0, train.steps)
    num_targets = train.batch * train.seq_len

    def step() -> None:
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.div(num_targets).backward()
        grad_norm = math.sqrt(state.squared_grad_norm())
        state.optimizer_step(train.optimizer, lr, 1, max(1.0, grad_norm))

    times: list[float] = []
    spent = 0.0
    began = time.monotonic()
    while spent < request.seconds or len(times) < WARMUP_STEPS + 2:
        if spent > SLOW * request.seconds and len(times) >= 2:
            break
        times.append(_time_call(step, device))
        spent = time.monotonic() - began
    state.remove_hooks()
    timed = times[WARMUP_STEPS:] if len(times) >= WARMUP_STEPS + 2 else times
    return timed, is_compiled


def answer(request: Query) -> object:
    if isinstance(request, DescribeQuery):
        return detect_devices(request.backend, request.workers)
    if isinstance(request, ReportQuery):
        return report_devices(request.backend)
    if isinstance(request, InstalledQuery):
        return installed_torch()
    if isinstance(request, RatesQuery):
        return measure_device_rates(request.device, request.shapes, request.dtypes, request.memory)
    if isinstance(request, UnitsQuery):
        device = open_device(request.device)
        return unit_times(
            device,
            request.model,
            request.seq_len,
            request.rows,
            request.dtypes,
            request.memory,
            compiled=request.compiled,
        )
    if isinstance(request, AllReduceQuery):
        os.environ |= {"MASTER_ADDR": request.address, "MASTER_PORT": str(request.port)}
        if request.interface:
            os.environ["GLOO_SOCKET_IFNAME"] = request.interface
            os.environ["NCCL_SOCKET_IFNAME"] = request.interface
        secret = request.secret.encode()
        return measure_allreduce(request.rank, request.world, request.device, request.sizes, secret)
    return matmul_rate(request) if isinstance(request, MatmulQuery) else measure(request)


def main() -> None:
    keep_compiled_code()
    decoder = json_decoder(Query)
    for line in sys.stdin.buffer:
        reply: dict[str, object]
        try:
            reply = {"answer": answer(decoder.decode(line))}
        except Refusal as refusal:
            reply = {"problem": refusal.problem}
        except (MemoryError, RuntimeError) as error:
            problem = Problem(
                code="out-of-memory" if memory_is_full(error) else "worker-lost",
                what="a trial step failed",
                where="probe",
                fact=" ".join(str(error).split())[:300],
                remedy="set a smaller train.batch.global or model in run.yaml",
            )
            reply = {"problem": problem}
        # As long as it lives: nobody else could report it of a process that was killed.
        reply["peak"] = peak_memory(torch.device("cpu"))
        sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
