"""What a partition has against what a job asks for, and jobs that wait for what never comes."""

from __future__ import annotations

import re

import pytest

from farspan.domain.config import RunConfig, SlurmConfig, SlurmNodes
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import keys_of
from farspan.launch.slurm_allocation import offered_cluster
from farspan.launch.slurm_client import QueuedJob
from farspan.launch.slurm_partitions import has_gres, requested_memory, require_offered
from farspan.launch.slurm_reasons import find_stuck
from tests.slurm.daemons import Slurm


@pytest.mark.parametrize(
    ("offered", "wanted", "has"),
    [
        ("gpu:a100:4(S:0-1)", "gpu:a100:4", True),
        ("gpu:a100:4(S:0,2)", "gpu:4", True),
        ("gpu:a100:4", "gpu:a100:5", False),
        ("gpu:a100:4", "gpu", True),
        ("gpu:a100:2,gpu:v100:2", "gpu:4", True),
        ("gpu:a100:2,gpu:v100:2", "gpu:v100:4", False),
        ("gpu:a100:4,nvme:1", "gpu:a100,nvme", True),
        ("gpu:4", "gpu:a100:1", False),
        ("", "gpu:1", False),
        ("", "", True),
    ],
)
def test_gres_are_compared_by_name_kind_and_number(offered, wanted, has):
    assert has_gres(offered, wanted) is has


@pytest.mark.parametrize(
    ("memory", "size"),
    [
        ("64G", 64 * 2**30),
        ("3000M", 3000 * 2**20),
        ("3000", 3000 * 2**20),
        ("0", None),
        ("x", None),
    ],
)
def test_memory_is_read_as_sbatch_reads_it(memory, size):
    assert requested_memory(SlurmNodes(memory=memory)) == size


@pytest.mark.parametrize(
    ("reason", "key"),
    [
        ("PartitionConfig", "slurm.partition"),
        ("PartitionNodeLimit", None),
        ("PartitionTimeLimit", "slurm.time"),
        ("BadConstraints", "slurm.constraint"),
        ("QOSMaxWallDurationPerJobLimit", "slurm.time"),
        ("AssocMaxCpuPerJobLimit", "slurm.cpus"),
        ("QOSMaxMemoryPerNode", "slurm.memory"),
        ("QOSMinGRES", "slurm.gres"),
        ("JobHeldUser", "scontrol release 7"),
        ("Resources", None),
        ("Priority", None),
        ("BeginTime", None),
        ("QOSMaxCpuPerUserLimit", None),
        ("AssocGrpCpuLimit", None),
    ],
)
def test_reasons_that_waiting_does_not_resolve_name_what_mends_them(reason, key):
    job = QueuedJob(
        id="7",
        name="farspan-papers",
        state="PENDING",
        reason=reason,
        workdir="/home/me",
        submitted="N/A",
        starts="N/A",
        node_list="",
        cpus=1,
    )
    stuck = find_stuck(job)
    assert (stuck is None) is (key is None)
    if stuck is not None:
        assert key in stuck.remedy
        named = re.findall(r"[a-z_.]*slurm[.\w]+", stuck.remedy)
        assert set(named) <= set(keys_of(RunConfig))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "key"),
    [
        ({"partition": "nope"}, "slurm.partition"),
        ({"nodes": 3}, "slurm.nodes"),
        ({"cpus": 16}, "slurm.cpus"),
        ({"memory": "999G"}, "slurm.memory"),
        ({"gres": "gpu:v100:4"}, "slurm.gres"),
        ({"gpus": 2}, "slurm.gpus"),
        ({"components": [{"cpus": 16}]}, "slurm.components[0].cpus"),
        ({"nodes": 2, "cpus": 2, "memory": "4000M", "gres": "gpu:a30:1"}, None),
    ],
)
def test_what_a_real_partition_lacks_is_named_by_its_key(asked, key, in_slurm: Slurm):
    components = tuple(SlurmNodes(**each) for each in asked.pop("components", ()))
    config = SlurmConfig(**asked, components=components)
    if key is None:
        require_offered(config)
        return
    with pytest.raises(Refusal) as refused:
        require_offered(config)
    assert refused.value.problem.key == key


@pytest.mark.slow
def test_plan_has_the_memory_that_the_job_asks_for(in_slurm: Slurm):
    (host,) = offered_cluster(SlurmConfig(memory="3000M")).hosts
    assert host.memory == host.devices[0].memory == 3000 * 2**20
    (whole,) = offered_cluster(SlurmConfig()).hosts
    assert whole.memory == 4000 * 2**20
