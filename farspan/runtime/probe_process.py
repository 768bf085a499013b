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
from torch import Tensor

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
#: Seconds of a timed step at most, about: beyond it a step reads fewer tokens. Two steps in each of
#: two precisions, one of them perhaps several times slower, end within `PROBE_ANSWER_S`
#: (launch/probe_client.py).
LONGEST_STEP_S = 15.0
#: Tokens of the passes that tell how long a step would take, and of a timed step at least.
FEWEST_TOKENS = 128


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
    """Real steps of the real model on random tokens: forward, backward, update; fewer and shorter
    sequences than asked for where steps would take long."""
    speeds: dict[Precision, Speed] = {}
    compiled = request.train.compile is True
    shape = None
    # fp32 last: a process's peak memory only grows, and the leaner precisions must not be given
    # fp32's.
    for precision in sorted(request.precisions, key=BYTES.__getitem__):
        device = open_device(request.device, precision)
        trial = _TrialSteps(request, precision, device)
        if shape is None:
            shape = trial.affordable_shape()
        times, is_compiled = trial.time_steps(shape)
        step_s = lower_quartile(times)
        compiled = compiled and is_compiled
        memory = peak_memory(device)
        tokens_per_s = math.prod(shape) / step_s
        speeds[precision] = Speed(step_s=step_s, tokens_per_s=tokens_per_s, memory_bytes=memory)
        del trial
        release_memory(device)
    assert shape is not None
    rows, seq_len = shape
    return ProbeResult(rows=rows, seq_len=seq_len, speeds=speeds, compiled=compiled)


def lower_quartile(times: Sequence[float]) -> float:
    """Return the lower quartile: other load on the machine only ever adds time to so few steps. Of
    fewer than four, whose quartile would lie beyond them, the least."""
    if len(times) < 4:
        return min(times)
    return statistics.quantiles(times, n=4)[0]


def limit_shape(rows: int, seq_len: int, most_tokens: float) -> tuple[int, int]:
    """Return sequences and their tokens, fewer than given where those are more than `most_tokens`:
    first fewer sequences, then shorter ones, of a power of two, FEWEST_TOKENS at least."""
    if rows * seq_len <= most_tokens:
        return rows, seq_len
    if seq_len <= max(most_tokens, FEWEST_TOKENS):
        return max(1, int(most_tokens // seq_len)), seq_len
    return 1, max(FEWEST_TOKENS, 2 ** int(math.log2(max(1.0, most_tokens))))


class _TrialSteps:
    """A model with the state that it trains with in one precision, and steps of it."""

    def __init__(self, request: MeasureQuery, precision: Precision, device: torch.device) -> None:
        self._request = request
        self._device = device
        train = request.train
        # As a worker does: a second copy of its values would be counted as its memory.
        with torch.device("meta"):
            self._model = Decoder(
                request.model, attention=train.attention, recompute=train.recompute
            )
        self._state = TrainState(self._model, precision, device)
        select_kernels(self._model, device, self._state.dtype)
        self._state.load_parameters(initial_parameters(request.model, train.seed))

    def affordable_shape(self) -> tuple[int, int]:
        """Return the sequences of a timed step, and their tokens: those asked for, or fewer, which
        take LONGEST_STEP_S by the speed of passes over FEWEST_TOKENS."""
        train = self._request.train
        asked = train.batch * train.seq_len
        # Steps are compiled for one shape, on devices that are fast.
        if asked <= FEWEST_TOKENS or train.compile is True:
            return train.batch, train.seq_len
        tokens = self._random_tokens(1, min(FEWEST_TOKENS, train.seq_len))
        add_gradients = functools.partial(self._add_gradients, tokens)
        # Memory is first touched in the first pass.
        pass_s = min(_time_call(add_gradients, self._device) for _ in range(2))
        self._state.clear_gradients()
        affordable = (tokens.numel() - 1) * LONGEST_STEP_S / pass_s
        return limit_shape(train.batch, train.seq_len, affordable)

    def time_steps(self, shape: tuple[int, int]) -> tuple[list[float], bool]:
        """Return the seconds of steps over sequences of a shape, and whether their blocks were
        compiled, which is done before."""
        train = self._request.train
        rows, seq_len = shape
        is_compiled = False
        if train.compile is True:
            inputs = BlockInputs((rows,), seq_len)
            is_compiled = not compile_or_restore(
                self._model, self._device, self._state.dtype, inputs
            )
        tokens = self._random_tokens(rows, seq_len)
        lr = learning_rate(train.schedule, train.optimizer.lr, 0, train.steps)

        def step() -> None:
            self._add_gradients(tokens)
            grad_norm = math.sqrt(self._state.squared_grad_norm())
            self._state.optimizer_step(train.optimizer, lr, 1, max(1.0, grad_norm))

        times: list[float] = []
        spent = 0.0
        began = time.monotonic()
        while spent < self._request.seconds or len(times) < WARMUP_STEPS + 2:
            if spent > SLOW * self._request.seconds and len(times) >= 2:
                break
            times.append(_time_call(step, self._device))
            spent = time.monotonic() - began
        self._state.remove_hooks()
        timed = times[WARMUP_STEPS:] if len(times) >= WARMUP_STEPS + 2 else times
        return timed, is_compiled

    def _random_tokens(self, rows: int, seq_len: int) -> Tensor:
        """Return token ids [rows, seq_len + 1]."""
        generator = torch.Generator().manual_seed(self._request.train.seed)
        vocab_size = self._request.model.vocab_size
        return torch.randint(vocab_size, (rows, seq_len + 1), generator=generator).to(self._device)

    def _add_gradients(self, tokens: Tensor) -> None:
        loss = self._model.loss(tokens[:, :-1], tokens[:, 1:])
        num_targets = tokens.shape[0] * (tokens.shape[1] - 1)
        loss.div(num_targets).backward()


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
