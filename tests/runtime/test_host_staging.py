"""What a GPU sends through the host's memory: copies that end when the test's numbers say so, under
real workers, and a step on a device that has no values to wait for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from farspan.domain.plan import Plan
from farspan.runtime.comm import host_staging
from farspan.runtime.comm.host_staging import HostStaging
from farspan.runtime.comm.topology import Topology
from farspan.runtime.parallel import executor
from farspan.runtime.parallel.executor import Executor
from farspan.runtime.parallel.pipeline import Batch
from tests.examples import slow_but
from tests.runtime import jobs
from tests.runtime.copies import SlowCopies, slow_copies
from tests.runtime.fleet import Fleet
from tests.runtime.launches import pose_as_gpu
from tests.runtime.plans import HAND_PICKED
from tests.runtime.test_collective_order import PLANS, pretend_collectives, tokens_of
from tests.runtime.verify import Case

CPU = torch.device("cpu")
#: One of each way in which tensors travel.
TRAVELLING = (
    "hierarchical",
    "zero 1",
    "zero 2",
    "zero 3",
    "hybrid 3",
    "two stages",
    "a unit each, several streams",
    "unlike rows and depths, several streams",
    "tied over three and three",
    "replicas unlike",
    "replicas unlike, overlapped",
)
ROUNDED = ("hierarchical, 8 bits", "zero 3, 16 bits")
TRAVELLING_KEPT = ("zero 3", "a unit each, several streams", "hierarchical, 8 bits")
#: One of each way in which collectives and messages follow one another.
VALUELESS_KEPT = (
    "one worker",
    "hierarchical",
    "zero 2",
    "hybrid 3",
    "megatron, sequences and vocabulary",
    "data and tensor, zero 3",
    "a unit each, several streams",
    "tied over three and three",
)


def in_bits(plan: Plan, bits: int) -> Plan:
    """Have a plan's sums of gradients travel in fewer bits."""
    replicas = []
    for one in plan.replicas:
        stages = []
        for stage in one.stages:
            stages.append(replace(stage, grad_sync=replace(stage.grad_sync, bits=bits)))
        replicas.append(replace(one, stages=tuple(stages)))
    return replace(plan, replicas=tuple(replicas))


def test_a_cpu_hands_its_tensors_over_without_a_copy():
    staging = HostStaging(CPU)
    data = torch.arange(5.0)
    copy = staging.download(data)
    assert not copy.staged
    assert copy.wait() is data
    assert staging.upload(data) is data
    assert staging.fetch(data) is data


def test_a_copy_is_whole_when_its_event_has_passed_and_its_buffer_is_used_again():
    with slow_copies(0, pace=0.0) as made:
        staging = HostStaging(CPU)
        first = staging.download(torch.arange(700.0))
        second = staging.download(torch.arange(600.0))
        buffers = {first.values.data_ptr(), second.values.data_ptr()}
        assert len(buffers) == 2
        # The second ends after the first.
        assert torch.equal(second.wait(), torch.arange(600.0))
        assert torch.equal(first.values, torch.arange(700.0))
        first.give_back()
        first.give_back()
        assert staging.download(torch.arange(650.0)).values.data_ptr() in buffers
        assert staging.download(torch.arange(650.0)).values.data_ptr() not in buffers
    assert made()[0].changed == []


def test_a_buffer_of_an_upload_is_not_used_before_the_upload_has_ended():
    with slow_copies(0, pace=0.0) as made:
        staging = HostStaging(CPU)
        buffer = staging.make_buffer(500, torch.float32)
        buffer.values.copy_(torch.arange(500.0))
        uploaded = staging.upload(buffer)
        other = staging.make_buffer(500, torch.float32)
        assert other.values.data_ptr() != buffer.values.data_ptr()
        assert torch.equal(uploaded, torch.arange(500.0))
        made()[0].pace = 1.0
        assert staging.make_buffer(500, torch.float32).values.data_ptr() == buffer.values.data_ptr()
        assert made()[0].changed == []


def test_buffers_are_freed_on_close():
    with slow_copies(0):
        staging = HostStaging(CPU)
        copy = staging.download(torch.arange(700.0))
        copy.wait()
        copy.give_back()
        assert staging._pool is not None and any(staging._pool._idle.values())
        staging.close()
        assert not any(staging._pool._idle.values())


def test_what_is_large_is_fetched_through_two_buffers(monkeypatch):
    monkeypatch.setattr(host_staging, "FETCHED_BYTES", 4096)
    given = torch.arange(100_000.0).view(100, 1000)
    with slow_copies(0):
        staging = HostStaging(CPU)
        assert torch.equal(staging.fetch(given), given)
        assert staging._pool is not None
        assert sum(map(len, staging._pool._idle.values())) == 2


def same(found: object, wanted: object) -> bool:
    """Return whether results are the same to the last bit."""
    return msgspec.msgpack.encode(found, enc_hook=_encode) == msgspec.msgpack.encode(
        wanted, enc_hook=_encode
    )


def _encode(value: object) -> bytes:
    assert isinstance(value, np.ndarray)
    return value.tobytes()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", slow_but(TRAVELLING_KEPT, TRAVELLING + ROUNDED))
def test_late_copies_change_no_bit(fleet: Fleet, folder: Path, name: str):
    plan = HAND_PICKED[name.split(", 8")[0].split(", 16")[0]]
    if name.endswith(" bits"):
        plan = in_bits(plan, int(name.split()[-2]))
    case = Case(folder, plan)
    wanted = fleet.run(jobs.check, case.world, plan, case.path, 1)
    case = Case(folder, plan)
    found = fleet.run(jobs.check_with_slow_copies, case.world, plan, case.path, 1, len(name))
    for rank, (gradients, trained, copied) in enumerate(found):
        assert same((gradients, trained), wanted[rank])
        assert copied.downloads and copied.uploads
        assert copied.changed == []


class NoValues(SlowCopies):
    """Copies of the meta device, which has shapes and no values: whatever asks it for one fails, as
    `.cpu()` and `.item()` do."""

    def begin_download(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> host_staging.CopyEvent:
        zeros = [torch.zeros(source.shape, dtype=source.dtype) for source, _ in pairs]
        targets = [target for _, target in pairs]
        return super().begin_download(list(zip(zeros, targets, strict=True)))

    def begin_upload(self, source: Tensor) -> tuple[Tensor, host_staging.CopyEvent]:
        uploaded, event = super().begin_upload(source)
        return torch.empty_like(uploaded, device="meta"), event


def wait_for_device(*given: object) -> None:
    raise AssertionError("the host waited for the device")


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("name", slow_but(VALUELESS_KEPT, PLANS))
def test_passes_and_sums_ask_the_device_for_no_value(monkeypatch, name: str, kind: str):
    """Between GPUs alone, by NCCL, and between a GPU and CPUs, by gloo."""
    monkeypatch.setitem(
        host_staging.COPY_ENGINES, "meta", lambda device: NoValues(random.Random(0), 0.5)
    )
    plan = PLANS[name]
    devices = [replace(device, backend=kind) for device in plan.devices]
    plan = replace(plan, devices=tuple(devices), sync=None)
    pose_as_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", wait_for_device)
    monkeypatch.setattr(executor, "synchronize_device", wait_for_device)
    monkeypatch.setattr(Topology, "device", "meta")
    for rank in range(len(plan.devices)):
        with pytest.MonkeyPatch.context() as patch:
            pretend_collectives(patch, rank, random.Random(rank), 0.5)
            topology = Topology(plan, rank)
            worker = Executor(topology, torch.device("meta"))
            worker.begin_run()

            def read(microbatch: int, topology: Topology = topology) -> Batch:
                tokens = tokens_of(topology, microbatch).to("meta")
                return Batch(tokens, tokens)

            count = len(topology.replica_samples(0))
            if worker.tied is not None:
                worker.tied.post_receives(np.zeros((count, plan.train.seq_len), np.int64))
            worker.pipeline.run_microbatches(read, 1.0, worker._send_loss)
            if worker.tied is not None:
                worker.tied.on_passes_done()
            worker.grad_reducer.finish_sums()
            if worker.tied is not None:
                worker.tied.add_received()
            worker.messenger.close()
