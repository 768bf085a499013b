"""GPUs of a Ray cluster that runs: what they are the node says itself, and Ray gives each to one
worker alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from farspan.domain.cluster import Cluster, Site
from farspan.domain.cluster_json import parse_cluster_json
from farspan.domain.clusterfile import load_cluster, save_cluster
from farspan.domain.gpus import Gpu
from farspan.domain.problems import Refusal
from farspan.launch.launchers.ray import Job, Node, _host_of_node, package_version
from tests import smi, tiny
from tests.launch.ray_nodes import TOKEN, end_node, ray_environment, start_head
from tests.launch.test_launchers import DRIVE, TRAIN
from tests.waiting import LIMIT_S, wait_for

pytestmark = pytest.mark.slow

A100 = {**smi.A100_MIG, "mig.mode.current": "Disabled"}
RTX5060 = {
    "name": "NVIDIA GeForce RTX 5060",
    "memory.total": "8151",
    "driver_version": "580.95.05",
    "compute_cap": "12.0",
    "uuid": "GPU-0c2f5a9d-54a1-3c3e-8f1d-1f0e6b7a4d21",
    "mig.mode.current": "[N/A]",
}
#: Every process of the node that has a rank writes down which GPUs it sees.
SITE = """\
import json, os
if "RANK" in os.environ:
    names = ("CUDA_VISIBLE_DEVICES", "FARSPAN_GIVEN_GPU", "CUDA_DEVICE_ORDER")
    with open(os.path.join({folder!r}, f"rank-{{os.environ['RANK']}}.json"), "w") as file:
        json.dump([os.environ.get(name) for name in names], file)
"""


def node(name: str, *cards: Gpu, gpus: int = 1, accelerator: str | None = None) -> Node:
    return Node(
        name=name,
        address="10.0.0.1",
        site="home",
        cpus=8,
        gpus=gpus,
        accelerator=accelerator,
        cards=cards,
        memory=2**36,
        here=False,
    )


@pytest.mark.parametrize(
    ("name", "label", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100", "a100-80"),
        ("NVIDIA A100-PCIE-40GB", "A100", "a100-40-pcie"),
        ("Quadro RTX 6000", "Quadro-RTX-6000", "rtx6000"),
        ("Tesla V100-SXM2-16GB", "V100", "v100-16"),
        ("NVIDIA GeForce RTX 4090", "GeForce-RTX-4090", "rtx4090"),
        ("NVIDIA H100 80GB HBM3", "H100", "h100"),
        ("NVIDIA RTX PRO 5000 Blackwell", "RTX-PRO-5000", None),
        ("NVIDIA H20", "H20", None),
        ("NVIDIA GeForce GTX 1080", None, None),
        ("Tesla P100-PCIE-16GB", "P100", "p100-16-pcie"),
    ],
)
def test_a_gpu_is_what_its_driver_calls_it_whatever_rays_label(name, label, kind):
    card = Gpu(name=name, memory=16 * 2**30, driver="580.95.05", capability=(8, 0))
    (device,) = _host_of_node(node("a", card, accelerator=label)).devices
    assert (device.kind, device.backend, device.memory) == (kind or name, "cuda", 16 * 2**30)
    assert bool(device.sheet.flops) == (kind is not None), (
        "what nothing is known of is measured, and never guessed"
    )


def test_gpus_that_only_ray_names_are_the_catalogues_and_others_are_refused():
    labels = ("H100", "A100-40G", "GeForce-RTX-4090", "AMD-Instinct-MI300X-OAM", "GH200")
    kinds = [_host_of_node(node("a", accelerator=label)).devices[0].kind for label in labels]
    assert kinds == ["h100", "a100-40", "rtx4090", "mi300x", "gh200"]
    with pytest.raises(Refusal, match=r"nvidia-smi on a lists none of the 2 GPUs"):
        _host_of_node(node("a", gpus=2, accelerator="V100"))
    spark = Gpu(name="NVIDIA GB10", memory=0, capability=(12, 1))
    assert _host_of_node(node("a", spark)).devices[0].memory == 2**36, (
        "it shares the machine's memory"
    )


def test_a_gpu_that_the_catalogue_lacks_is_written_and_read_again(tmp_path):
    card = Gpu(name="NVIDIA GeForce RTX 5060", memory=8151 * 2**20, capability=(12, 0))
    hosts = replace(_host_of_node(node("a", card)), enter=("ssh", "a"))
    cluster = Cluster(sites=(Site(name="home", hosts=(hosts,)),))
    save_cluster(cluster, tmp_path / "c.yaml", "test")
    assert load_cluster(tmp_path / "c.yaml").devices == cluster.devices
    (tmp_path / "typo.yaml").write_text("sites: {a: {hosts: {h: {devices: [a3O]}}}}\n")
    with pytest.raises(Refusal, match="no device kind 'a3O'"):
        load_cluster(tmp_path / "typo.yaml")


@pytest.fixture(scope="module")
def gpu_node(tmp_path_factory):
    """A Ray node of two GPUs with a recorded driver: its address, the environment of who may use
    it, and where its workers say what they see."""
    if package_version("ray") is None:
        pytest.skip("waits for farspan[ray]")
    folder = tmp_path_factory.mktemp("ray-gpus")
    (folder / "sitecustomize.py").write_text(SITE.format(folder=str(folder)))
    environment = {
        **ray_environment(folder),
        "RAY_AUTH_TOKEN": TOKEN,
        "PATH": f"{smi.install(folder / 'bin', A100, RTX5060)}:{os.environ['PATH']}",
        "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}",
    }
    words = ["--num-gpus=2", "--labels=farspan-host=one,site=home"]
    head, where = start_head(words, environment, folder / "head.log")
    yield f"ray:{where}", environment, folder
    end_node(head)


def read(where: str, environment: dict[str, str]) -> Cluster:
    show = [sys.executable, "-m", "farspan", "cluster", "show", where, "--json"]

    def ask() -> bytes | None:
        done = subprocess.run(show, capture_output=True, env=environment, timeout=LIMIT_S)
        return None if done.returncode else done.stdout

    return parse_cluster_json(wait_for(ask, "the cluster answers"), "ray")


def test_ray_gives_each_worker_the_gpu_of_its_plan_alone(tmp_path: Path, gpu_node):
    where, environment, folder = gpu_node
    cluster = read(where, environment)
    devices = cluster.devices
    assert [(one.kind, one.memory) for one in devices] == [
        ("a100-40", 40960 * 2**20),
        ("NVIDIA GeForce RTX 5060", 8151 * 2**20),
    ]
    plan = tiny.plan(TRAIN, rows=(4, 4), micro_rows=2)
    at = [
        replace(plan.devices[0], host="one", backend="cuda", index=k, kind=devices[k].kind)
        for k in (1, 0)
    ]
    run = tiny.run_folder(tmp_path / "run", replace(plan, devices=tuple(at)))
    words = [sys.executable, "-c", DRIVE, str(run.path), where]
    done = subprocess.run(
        words,
        env=environment,
        input=msgspec.json.encode(cluster),
        capture_output=True,
        timeout=LIMIT_S,
    )
    seen = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert seen == [["1", "0", "PCI_BUS_ID"], ["0", "0", "PCI_BUS_ID"]]
    assert b"device-missing" in done.stderr or done.returncode == 0, (
        done.stderr
    )  # Where PyTorch has no GPUs.


@pytest.mark.parametrize(
    ("ids", "names", "order"),
    [
        (["0", "1"], ["NVIDIA A30", "Tesla T4"], [1, 0]),
        (["1", "0"], ["Tesla T4", "NVIDIA A30"], [0, 1]),
        (["2", "3"], ["NVIDIA A30", "Tesla T4"], [1, 0]),
        (["GPU-a", "GPU-b"], ["", ""], [0, 1]),
    ],
)
def test_a_rank_takes_the_actor_with_its_gpu_or_one_of_its_kind(ids, names, order):
    if package_version("ray") is None:
        pytest.skip("waits for farspan[ray]")
    from farspan.launch.ray_driver import Spot, assign_actors

    job = Job(
        address="",
        hosts=("a", "b"),
        ranks=("a", "a", "b"),
        folders={},
        caches={},
        environment={},
        threads=(1, 1, 1),
        gpus=((1, "t4"), (0, "a30"), None),
    )
    spots = [
        Spot("", 0, "", gpu, name) for gpu, name in zip([*ids, None], [*names, ""], strict=True)
    ]
    assert assign_actors(job, spots) == [*order, 2]
