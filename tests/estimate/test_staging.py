"""What goes through the hosts' memory and gloo, and what NCCL carries: the estimate takes the path
that the runtime takes, for every plan by hand on GPUs of one host, and on a GPU beside CPUs."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import farspan.runtime
from farspan import models
from farspan.domain import catalog
from farspan.domain.cluster import Cluster, Device, Host, Site
from farspan.domain.engine import load_engine
from farspan.domain.plan import Plan
from farspan.estimate.between_stages import edges
from farspan.estimate.network import Network
from farspan.estimate.stage import Costs
from farspan.runtime.comm.topology import Topology
from farspan.runtime.comm.worker_group import NCCL
from farspan.semantics.communications import WireFlow
from tests.runtime.plans import HAND_PICKED

ENGINE = load_engine("farspan")
#: Functions of torch.distributed by which one worker sends to another.
MESSAGE_FUNCTIONS = {"isend", "irecv", "send", "recv", "batch_isend_irecv", "P2POp"}


def device(kind: str) -> Device:
    found = catalog.load_devices()[kind].device(kind, 16 * 10**9)
    assert found is not None
    return found


def on_one_host(plan: Plan, kinds: list[str]) -> tuple[Plan, Cluster]:
    """The plan on devices of one host, of these kinds in turn."""
    host_devices = [device(kinds[rank % len(kinds)]) for rank in range(len(plan.devices))]
    planned = []
    for rank, at in enumerate(plan.devices):
        backend = host_devices[rank].backend
        planned.append(
            msgspec.structs.replace(at, host="box", backend=backend, index=rank, site="")
        )
    host = Host(name="box", devices=tuple(host_devices))
    cluster = Cluster(sites=(Site(name="here", hosts=(host,)),))
    return msgspec.structs.replace(plan, devices=tuple(planned)), cluster


def collective_groups(plan: Plan) -> Iterator[tuple[int, ...]]:
    for replica in plan.replicas:
        for stage in replica.stages:
            for axis in stage.mesh.axes:
                yield from (group for group in stage.mesh.groups(axis) if len(group) > 1)


def sent_flows(plan: Plan, costs: Costs) -> Iterator[WireFlow]:
    for replica in plan.replicas:
        for edge in range(len(replica.edges)):
            for backward in (False, True):
                sends = costs.stage_sends(replica, edge, backward)
                yield from (*sends.across, *sends.inside)


@pytest.mark.parametrize("kinds", [["h100"], ["t4"], ["t4", "cpu-avx2"]])
@pytest.mark.parametrize("name", HAND_PICKED)
def test_the_estimate_takes_the_runtimes_path(name: str, kinds: list[str]):
    plan, cluster = on_one_host(HAND_PICKED[name], kinds)
    network = Network(cluster, plan.devices, ENGINE)
    costs = Costs(models.graph(plan.model), plan.train, network)
    assert ENGINE.gpu is not None
    for group in collective_groups(plan):
        by_nccl = Topology(plan, group[0]).backend(group) == NCCL
        known = network.ring_rate(group)
        assert (known != ENGINE.gpu.loopback_rate) == by_nccl, group
        for a, b in itertools.pairwise(group):
            assert network.wire(a, b, collective=True).copy_byte_s == 0
    for source, target, _ in sent_flows(plan, costs):
        wire = network.wire(source, target, collective=False)
        gpus = sum(plan.devices[rank].backend == "cuda" for rank in (source, target))
        if gpus:
            assert wire.rate == ENGINE.gpu.loopback_rate
        copies = 5.0e10 if kinds == ["h100"] else 1.2e10
        assert wire.copy_byte_s == pytest.approx(gpus / copies)


def test_one_module_of_the_runtime_sends_messages():
    """It sends from the hosts' memory. If another did, as NCCL between GPUs, the estimate above
    would be of another path."""
    folder = Path(farspan.runtime.__file__).parent
    senders = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in MESSAGE_FUNCTIONS:
                is_torch = isinstance(node.value, ast.Name) and node.value.id == "dist"
                senders |= {path.name} if is_torch else set()
    assert senders == {"messages.py"}
    assert NCCL.startswith("cpu:gloo,")


@pytest.mark.parametrize(
    ("kind", "seconds"),
    # By hand: 8.4 MB at 2.4 GB/s through the socket, and two copies.
    [
        ("h100", 8.39e6 / 2.4e9 + 2 * 8.39e6 / 5e10),
        ("a100-80", 8.39e6 / 2.4e9 + 2 * 8.39e6 / 2.4e10),
    ],
)
def test_a_microbatch_between_two_gpus_of_a_host(kind: str, seconds: float):
    """4 x 1,024 x 1,024 numbers in 16 bits."""
    spec = models.presets()["gpt2-medium"].spec
    piped = next(plan for plan in HAND_PICKED.values() if plan.replicas[0].edges)
    train = msgspec.structs.replace(piped.train, batch=16, seq_len=1024, precision="bf16")
    plan, cluster = on_one_host(piped, [kind])
    network = Network(cluster, plan.devices, ENGINE)
    costs = Costs(models.graph(spec), train, network)
    hop = network.flows_s((WireFlow(0, 1, 4 * 1024 * 1024 * 2),), 1)
    assert hop.busy + hop.delay == pytest.approx(seconds + ENGINE.message_s + 5e-6, rel=0.01)
    down, up = edges(plan.replicas[0], costs)
    assert min(one.busy for one in (*down, *up)) > ENGINE.message_s
