"""The file of a cluster for Ray's cluster launcher (`ray up`).

Keys as `ray/autoscaler/ray-schema.json` of 2.60.0 has them, of machines that are there (`provider:
local`). Ray gives all nodes one user, one key and one start command; which machine it is on, and so
its interpreter and labels, the command finds by the machine's addresses. From here Ray enters the
first node alone; that one enters the others, at the addresses by which hosts call each other.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from importlib import metadata

from farspan.domain.cluster import Cluster, Host
from farspan.domain.escapes import shell_line, shell_word
from farspan.domain.problems import Refusal
from farspan.launch.cluster_exporter import ClusterExporter
from farspan.launch.hosts import host_python
from farspan.launch.launchers.ray import refuse_public
from farspan.launch.network_examination import host_address
from farspan.launch.ssh_settings import SshAccess
from farspan_exports.yaml_text import as_yaml

VERSION = "ray 2.60.0"
FILE = "ray-cluster.yaml"
RAY_PORT = 6379
#: The second autoscaler of 2.60.0 takes the head of machines that are there for gone, and starts no
#: workers.
VARIABLES = "RAY_AUTH_MODE=token RAY_enable_autoscaler_v2=0"
#: What Ray takes for the value of a label (`ray/_private/label_utils.py`).
RAY_LABEL = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?\Z")
TOKEN = "~/.ray/auth_token"
#: Where a node has what is known of its machine.
MACHINE = "~/.farspan-ray-machine"


def write(
    name: str, cluster: Cluster, accesses: Mapping[str, SshAccess]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Write the file of a cluster. Raises Refusal (cannot-export)."""
    hosts = cluster.machines
    ways = [accesses[host.name] for host in hosts]
    _require_one_way(ways, hosts)
    _require_labels(cluster)
    auth = {"ssh_user": ways[0].user}
    if ways[0].key is not None:
        auth["ssh_private_key"] = ways[0].key
    if ways[0].proxy_command is not None:
        auth["ssh_proxy_command"] = ways[0].proxy_command
    head = f"{host_address(hosts[0])}:{RAY_PORT}"
    ray = f'. {MACHINE}; {VARIABLES} "$python" -m ray.scripts.scripts'
    stop = f"{ray} stop"
    own = (
        '--node-ip-address="$address" --num-cpus="$devices" --num-gpus="$gpus" '
        '--labels="farspan-host=$host,site=$site" --disable-usage-stats'
    )
    first = (
        f"--head --port={RAY_PORT} --dashboard-host=127.0.0.1 "
        "--autoscaling-config=~/ray_bootstrap_config.yaml"
    )
    content = {
        "cluster_name": name,
        "provider": {
            "type": "local",
            "head_ip": ways[0].address,
            "worker_ips": [host_address(host) for host in hosts[1:]],
        },
        "auth": auth,
        "max_workers": len(hosts) - 1,
        "file_mounts": {TOKEN: TOKEN},
        "setup_commands": [
            f"cat > {MACHINE} <<'END'\n{_describe_machines(cluster)}END\n",
            f". {MACHINE}; {_install_ray()}",
        ],
        "head_start_ray_commands": [stop, f"{ray} start {first} {own}"],
        "worker_start_ray_commands": [stop, f"{ray} start --address={head} {own}"],
    }
    text = (
        f"# The machines of the farspan cluster {name}, for {VERSION}.\n"
        "# ray get-auth-token --generate makes the token once, ray up FILE starts Ray. It ends by\n"
        f"# ray exec FILE {shell_word(stop)}\n{as_yaml(content)}"
    )
    key = "ssh_private_key to the first host, which enters the others with it"
    if ways[0].key is None:
        key = "no key: the first host must be able to enter the others"
    notes = (
        f"then on {shell_word(hosts[0].name)}, with the same --cluster: "
        f"farspan train run.yaml --launcher ray:{head}",
        "every host needs farspan: farspan cluster up",
        f"Ray checks no host keys, and copies {key}",
    )
    return {FILE: text}, notes


def _require_one_way(ways: list[SshAccess], hosts: tuple[Host, ...]) -> None:
    """Refuse hosts that one `auth` of Ray cannot enter, with every reason."""
    reasons = []
    for what in ("user", "key"):
        values = {getattr(way, what) for way in ways}
        if len(values) > 1:
            listed = ", ".join(sorted(str(value) for value in values))
            reasons.append(f"all nodes have one {what}, not {listed}")
    for host in hosts:
        try:
            ipaddress.IPv4Address(host_address(host))
        except ValueError:
            reasons.append(f"address: of {host.name} is no address of IPv4")
        else:
            refuse_public(host)
    ports = [f"{host.name}: {way.port}" for host, way in zip(hosts, ways, strict=True)]
    if any(way.port != 22 for way in ways):
        reasons.append(f"it enters port 22 only, not {', '.join(ports)}")
    if reasons:
        raise Refusal(
            "cannot-export",
            what="Ray's cluster launcher cannot enter these hosts",
            where="--to ray",
            fact="; ".join(reasons),
            remedy="farspan train run.yaml --launcher ray, which starts Ray itself",
        )


def _require_labels(cluster: Cluster) -> None:
    """Refuse names that cannot be labels of Ray's nodes."""
    for host in cluster.machines:
        for name in (host.name, cluster.site_of(host.name).name):
            if not RAY_LABEL.match(name):
                raise Refusal(
                    "cannot-export",
                    what=f"{name!r} cannot be a label of Ray",
                    where="--to ray",
                    fact="a label has letters, digits, - _ . and at most 63 of them",
                    remedy="give it another name in the cluster file",
                )


def _describe_machines(cluster: Cluster) -> str:
    """Return shell text that sets what a start of Ray needs, by the machine that it runs on."""
    lines = ['case " $(hostname -I) " in']
    for host in cluster.machines:
        values = {
            "host": host.name,
            "site": cluster.site_of(host.name).name,
            "address": host_address(host),
            "python": host_python(host),
            "devices": len(host.devices),
            "gpus": sum(device.backend == "cuda" for device in host.devices),
        }
        words = " ".join(f"{name}={shell_word(value)}" for name, value in values.items())
        lines.append(f"  *{shell_word(f' {host_address(host)} ')}*) {words} ;;")
    lines.append('  *) echo "no host of the cluster file has an address of $(hostname)" >&2')
    lines.append("     exit 1 ;;")
    return "\n".join([*lines, "esac", ""])


def _install_ray() -> str:
    """Return shell text that installs Ray where it is missing. The interpreter of `farspan cluster
    up` has no pip of its own, but the wheel of one."""
    # All nodes need the version of whoever joins them.
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        version = VERSION.partition(" ")[2]
    install = shell_line("install", f"ray=={version}")
    wheel = '"$(ls "${python%/venv/bin/python}"/wheels/pip-*.whl)/pip"'
    has_pip = '"$python" -c "import pip" 2>/dev/null'
    return (
        f'"$python" -c "import ray" 2>/dev/null || if {has_pip}; '
        f'then "$python" -m pip {install}; else "$python" {wheel} {install}; fi'
    )


exporter = ClusterExporter(name="ray", version=VERSION, write=write)
