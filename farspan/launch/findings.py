"""What an examination of a cluster means: each finding with the one command that fixes it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from farspan.domain.cluster import Cluster, Host
from farspan.domain.escapes import shell_word
from farspan.domain.gpus import judge
from farspan.domain.install import install_command_there
from farspan.domain.problems import Finding
from farspan.domain.units import format_bytes, format_seconds
from farspan.launch.examine import Examination, HostFacts, HostPath, address

#: Clocks further apart than this make events of several hosts hard to read side by side.
MAX_SKEW_S = 1.0
#: A small model's checkpoints, its index and a corpus need about this much.
LITTLE_DISK = 5 * 10**9
#: Where `tarfile` began to refuse what lies outside its folder.
OLDEST_PYTHON = (3, 11, 4)
#: Interfaces that only this machine sees: loopback, and the bridges of Docker, libvirt and LXC.
PRIVATE = re.compile(r"(lo\d*|docker\d*|br-[0-9a-f]{12}|virbr\d*|lxcbr\d*|cni\d*)$")


def findings(cluster: Cluster, examined: Examination) -> tuple[Finding, ...]:
    """Every finding, those that stop a run first."""
    everything = [
        *(Finding.of(problem, "refused") for problem in examined.unreachable.values()),
        *(finding for way in examined.ways for finding in _of_way(way, cluster, examined)),
        *(
            finding
            for host in cluster.hosts
            if host.name in examined.hosts
            for finding in _of_host(host, examined)
        ),
        *_of_versions(examined),
    ]
    return tuple(sorted(everything, key=lambda finding: finding.severity != "refused"))


def _of_way(way: HostPath, cluster: Cluster, examined: Examination) -> Iterator[Finding]:
    hosts = {host.name: host for host in cluster.hosts}
    if way.failed:
        yield _unreachable(way, examined, hosts)
    if way.interface is not None and PRIVATE.match(way.interface):
        yield Finding(
            severity="refused",
            code="host-unreachable",
            what=f"{way.a} would reach {way.b} over {way.interface}",
            where=f"link {way.a} -> {way.b}",
            fact="only this machine sees that interface",
            remedy=(
                f"set address: of {shell_word(way.b)} in the cluster file to its address in your "
                "network"
            ),
        )
    # Each pair is seen twice, and the sign says nothing about who is wrong.
    if way.a < way.b and abs(way.clock_offset_s or 0.0) > MAX_SKEW_S:
        yield Finding(
            severity="warned",
            code="version-mismatch",
            what=f"the clocks of {way.a} and {way.b} differ",
            where=f"hosts {way.a}, {way.b}",
            fact=f"{way.b} is {_offset(way.clock_offset_s or 0.0)}",
            remedy="sudo timedatectl set-ntp true   (on both)",
        )


def _offset(seconds: float) -> str:
    return f"{format_seconds(abs(seconds))} {'ahead' if seconds > 0 else 'behind'}"


def _unreachable(way: HostPath, examined: Examination, hosts: dict[str, Host]) -> Finding:
    """Who has to do what: names, routes and firewalls fail in different ways, and in one direction
    or in both."""
    back = next(other for other in examined.ways if (other.a, other.b) == (way.b, way.a))
    target = address(hosts[way.b])
    own = examined.hosts[way.a].interfaces.get(way.interface or "", way.a)
    if way.failed == "name":
        what = f"{way.a} does not know the name {target}"
        remedy = f"set address: of {shell_word(way.b)} in the cluster file"
    elif back.failed is None:
        what = f"{way.b} refuses connections from {way.a}; the other direction works"
        remedy = f"on {shell_word(way.b)}: sudo ufw allow proto tcp from {shell_word(own)}"
    elif way.one_way and back.one_way:
        what = f"{way.b} refuses connections from {way.a}, though packets arrive"
        remedy = f"on {shell_word(way.b)}: sudo ufw allow proto tcp from {shell_word(own)}"
    elif way.one_way:
        what = f"answers of {way.b} do not reach {way.a}"
        remedy = f"see the link {shell_word(way.b)} -> {shell_word(way.a)}"
    else:
        what = f"the link {way.a} -> {way.b} is cut: nothing of {way.a} arrives at {way.b}"
        remedy = f"on {shell_word(way.a)}: traceroute {shell_word(target)}"
    return Finding(
        severity="refused",
        code="host-unreachable",
        what=what,
        where=f"link {way.a} -> {way.b}",
        fact=f"{way.failed}: {way.fact}",
        remedy=remedy,
    )


def _of_host(host: Host, examined: Examination) -> Iterator[Finding]:
    facts = examined.hosts[host.name]
    where = f"host {host.name}"
    host_word = shell_word(host.name)
    # A system other than Linux names none of its interfaces.
    absent = bool(facts.interfaces) and host.interface not in facts.interfaces
    if host.interface is not None and (absent or PRIVATE.match(host.interface)):
        why = "does not exist" if absent else "is seen by that machine alone"
        usable = ", ".join(name for name in facts.interfaces if not PRIVATE.match(name)) or "none"
        yield Finding(
            severity="refused",
            code="host-unreachable",
            what=f"interface {host.interface} {why}",
            where=where,
            fact=f"it has {usable}",
            remedy=f"set interface: of {host_word} to one of them, or leave it out",
        )
    if facts.disk_free < LITTLE_DISK:
        yield Finding(
            severity="warned",
            code="disk-full",
            what=f"{host.name} has little disk space",
            where=where,
            fact=(
                f"{format_bytes(facts.disk_free)} free, {format_bytes(LITTLE_DISK)} is comfortable"
            ),
            remedy=f"on {host_word}: du -xh ~ | sort -h | tail",
        )
    wanted = sum(device.backend == "cuda" for device in host.devices)
    if facts.wheel is not None and (problem := judge(facts.nvidia, facts.wheel, host.name).problem):
        # A file that names the host's CPU alone means that.
        yield Finding.of(problem, "refused" if wanted else "warned")
    if wanted > len(facts.nvidia.gpus):
        yield Finding(
            severity="refused",
            code="device-missing",
            what=f"{host.name} has fewer GPUs than the file says",
            where=where,
            fact=f"{wanted} in the file, {facts.nvidia.failure or len(facts.nvidia.gpus)} there",
            remedy=f"on {host_word}: nvidia-smi, then mend its devices: in the cluster file",
        )
    if _numbers(facts.python) < OLDEST_PYTHON:
        yield Finding(
            severity="refused",
            code="version-mismatch",
            what=f"Python of {host.name} is too old",
            where=where,
            fact=f"{facts.python}; farspan needs {'.'.join(map(str, OLDEST_PYTHON))}",
            remedy=f"set python: of {host_word} in the cluster file to a newer interpreter",
        )
        return
    missing = [name for name in ("farspan", "torch") if facts.packages[name] is None]
    if missing:
        yield Finding(
            severity="refused",
            code="extra-missing",
            what=f"{host.name} lacks {' and '.join(missing)}",
            where=where,
            fact=f"not installed for {host.python} there",
            remedy=f"on {host_word}: {install_command_there('train', host.python)}",
        )


def _of_versions(examined: Examination) -> Iterator[Finding]:
    """One for each thing whose versions differ: major and minor must agree, patches should; Python
    only should."""
    for name in ("python", "farspan", "torch", "ray", "nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        known = {
            host: version
            for host, facts in examined.hosts.items()
            if (version := _version(facts, name))
        }
        if len(set(known.values())) < 2:
            continue
        parts = {_numbers(version)[:2] for version in known.values()}
        newest = max(known.values(), key=_numbers)
        package = f"{name}=={newest.split('+')[0]}"
        yield Finding(
            severity="refused" if len(parts) > 1 and name != "python" else "warned",
            code="version-mismatch",
            what=f"{name} differs between hosts",
            where=f"hosts {', '.join(known)}",
            fact=", ".join(f"{host} {version}" for host, version in known.items()),
            remedy="set python: in the cluster file to interpreters of version "
            f"{shell_word(newest)}"
            if name == "python"
            else (
                f"on {', '.join(shell_word(host) for host in known if known[host] != newest)}: "
                f"pip install {shell_word(package)}"
            ),
        )


def _version(facts: HostFacts, name: str) -> str | None:
    return facts.python if name == "python" else facts.packages.get(name)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])
