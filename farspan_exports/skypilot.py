"""A cluster for SkyPilot: its pools of machines behind ssh, one a site, and a task that trains on
whichever machine of them is free.

Keys of the pools as `sky/ssh_node_pools` of 0.14.1 reads them, of the task as its `get_task_schema`
and `get_resources_schema` have them. SkyPilot makes a Kubernetes cluster of each pool. A task of it
has one pool, so a run over several sites is not its to start.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farspan.domain import catalog
from farspan.domain.cluster import Cluster, Host
from farspan.domain.escapes import shell_word
from farspan.domain.problems import Refusal, command
from farspan.domain.run import make_cache_folder
from farspan.launch.cluster_exporter import ClusterExporter
from farspan.launch.own_release import build_own_wheel
from farspan.launch.ssh_settings import SshAccess
from farspan_exports.yaml_text import as_yaml

VERSION = "skypilot 0.14.1"
POOLS = "ssh_node_pools.yaml"
TASK = "farspan-task.yaml"
#: The names by which SkyPilot labels GPUs: the first that the driver's name contains
#: (`sky/utils/gpu_names.py`, `k8s_gpu_labeler_setup.yaml.j2`).
# fmt: off
GPU_NAMES = (
    "GB300", "GB200", "B300", "B200", "B100", "GH200", "H200", "H100-80GB", "H100-MEGA", "H100",
    "A100-80GB", "A100", "A10G", "A10", "A16", "A30", "A40", "RTX6000-Ada", "L40S", "L40", "L4",
    "A6000", "A5000", "A4000", "V100-32GB", "V100", "P100", "P40", "P4000", "P4", "T4g", "T4",
    "K80", "M60",
)
# fmt: on
#: What SkyPilot takes for the name of a pool, a Kubernetes context.
POOL_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*\Z")
#: What it takes for the name of a task (`sky/skylet/constants.py`, CLUSTER_NAME_VALID_REGEX).
TASK_NAME = re.compile(r"[a-zA-Z]([-_.a-zA-Z0-9]*[a-zA-Z0-9])?\Z")
#: The images that tasks run in have another Python than farspan needs.
PYTHON = "3.12"


def write(
    name: str, cluster: Cluster, accesses: Mapping[str, SshAccess]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Write the pools and the task of a cluster. Raises Refusal (cannot-export)."""
    _check(name, cluster, accesses)
    pools = {}
    choices: list[dict[str, Any]] = []
    for site in cluster.sites:
        hosts = [host for host in site.hosts if host.devices]
        if hosts:
            pools[site.name] = {"hosts": [_pool_entry(host, accesses[host.name]) for host in hosts]}
        for host in hosts:
            choice = {"infra": f"ssh/{site.name}", **_ask_for_devices(host)}
            if choice not in choices:
                choices.append(choice)
    wheel = build_own_wheel(make_cache_folder("wheels")).path
    there = f"~/farspan-wheel/{wheel.name}"
    task = {
        "name": name,
        # The folder with run.yaml and its text.
        "workdir": ".",
        "resources": {"any_of": choices},
        "file_mounts": {there: str(wheel)},
        "setup": (
            f"python3 -m pip install uv\npython3 -m uv venv --python {PYTHON} ~/farspan\n"
            "python3 -m uv pip install --python ~/farspan/bin/python --torch-backend auto \\\n"
            f'  "farspan[train] @ file://$HOME/{Path(there).relative_to("~")}"\n'
        ),
        "run": "~/farspan/bin/farspan train run.yaml --until-done\n",
    }
    head = f"# The machines of the farspan cluster {name}, for {VERSION}.\n"
    files = {
        POOLS: f"{head}# sky ssh up reads them in ~/.sky/{POOLS}.\n{as_yaml(pools)}",
        TASK: f"{head}# sky launch FILE trains run.yaml of this folder on one of them.\n"
        f"{as_yaml(task)}",
    }
    notes = (
        f"then: add {POOLS} to ~/.sky/{POOLS}, sky ssh up, and beside run.yaml: "
        f"sky launch {shell_word(TASK)}",
        "a task trains on one machine; over several sites: farspan train --cluster",
        "the run lies on that machine: checkpoint.copy in run.yaml keeps it in a bucket",
        "SkyPilot installs Kubernetes (k3s) on the machines, with sudo",
    )
    return files, notes


def _check(name: str, cluster: Cluster, accesses: Mapping[str, SshAccess]) -> None:
    """Refuse a cluster that SkyPilot cannot have, with every reason."""
    reasons = []
    if not TASK_NAME.match(name):
        reasons.append(f"{name!r} cannot be the name of a task: rename the cluster file")
    for site in cluster.sites:
        if not POOL_NAME.match(site.name):
            reasons.append(f"{site.name!r} cannot be the name of a pool")
    for host in cluster.machines:
        access = accesses[host.name]
        if host.enter is not None and (access.proxy_command or access.port != 22):
            reasons.append(f"{host.name} is entered by an ssh command with options of its own")
        kinds = {device.kind for device in host.devices if device.backend == "cuda"}
        if len(kinds) > 1:
            reasons.append(f"{host.name} has {len(kinds)} kinds of GPUs, and a task asks for one")
        if any(device.backend == "mps" for device in host.devices):
            reasons.append(f"{host.name} has a GPU of Apple, which Kubernetes does not give away")
    if reasons:
        raise Refusal(
            "cannot-export",
            what="SkyPilot cannot have these hosts",
            where="--to skypilot",
            fact="; ".join(reasons),
            remedy=command("train", "run.yaml", "--cluster", cluster.name),
        )


def _pool_entry(host: Host, access: SshAccess) -> Any:
    """Return a host as a pool has it: by its name in the user's ssh configuration, or as the
    cluster file enters it."""
    if host.enter is None:
        return host.name
    entry = {"ip": access.address, "user": access.user}
    return entry if access.key is None else {**entry, "identity_file": access.key}


def _ask_for_devices(host: Host) -> dict[str, Any]:
    """Return what a task asks for to get a machine like this host."""
    counts = Counter(device.kind for device in host.devices if device.backend == "cuda")
    if not counts:
        # Kubernetes' own processes take a part of the cores.
        return {"cpus": f"{max(1, (host.cpus or 1) // 2)}+"}
    ((kind, count),) = counts.items()
    return {"accelerators": {_gpu_name(kind): count}}


def _gpu_name(kind: str) -> str:
    """Return SkyPilot's name of a kind of GPU, by its labeler's rule."""
    entry = catalog.load_devices().get(kind)
    driver = entry.match[0] if entry is not None and entry.match else kind
    for name in GPU_NAMES:
        if name.lower() in driver.lower():
            return name
    label = driver.lower().replace("nvidia ", "").replace("geforce ", "")
    return label.replace("rtx ", "rtx").replace(" ", "-")


exporter = ClusterExporter(name="skypilot", version=VERSION, write=write)
