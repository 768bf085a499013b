"""The findings of an examination of a cluster, each with the one command that fixes it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from farspan.domain.cluster import Cluster, Host
from farspan.domain.escapes import shell_word
from farspan.domain.gpus import judge_gpus
from farspan.domain.problems import Finding, command
from farspan.domain.units import format_bytes, format_seconds
from farspan.launch.link_measurement import HostPath
from farspan.launch.network_examination import PRIVATE_INTERFACE, Examination, host_address

#: Clocks further apart than this make events of several hosts hard to read side by side.
MAX_SKEW_S = 1.0
#: A small model's checkpoints, its index and a corpus need about this much.
MIN_FREE_DISK_BYTES = 5 * 10**9
#: Where `tarfile` began to refuse what lies outside its folder.
OLDEST_PYTHON = (3, 11, 4)


def list_findings(cluster: Cluster, examined: Examination) -> tuple[Finding, ...]:
    """Return every finding, those that stop a run first."""
    everything = [Finding.of(problem, "refused") for problem in examined.unreachable.values()]
    for path in examined.ways:
        everything += _path_findings(path, cluster, examined)
    for host in cluster.hosts:
        if host.name in examined.hosts:
            everything += _host_findings(host, examined)
    everything += _version_findings(examined)
    everything.sort(key=lambda finding: finding.severity != "refused")
    return tuple(everything)


def _path_findings(path: HostPath, cluster: Cluster, examined: Examination) -> Iterator[Finding]:
    link = f"link {path.a} -> {path.b}"
    if path.failed:
        what, remedy = _diagnose_failed_path(path, cluster, examined)
        fact = f"{path.failed}: {path.fact}"
        if _is_translated(path, examined):
            fact = f"{fact}; {path.ip} is no address of {path.b}'s own"
        yield Finding(
            severity="refused",
            code="host-unreachable",
            what=what,
            where=link,
            fact=fact,
            remedy=remedy,
        )
    if path.interface is not None and PRIVATE_INTERFACE.match(path.interface):
        host_word = shell_word(path.b)
        yield Finding(
            severity="refused",
            code="host-unreachable",
            what=f"{path.a} would reach {path.b} over {path.interface}",
            where=link,
            fact="only this machine sees that interface",
            remedy=(
                f"set address: of {host_word} in the cluster file to its address in your network"
            ),
        )
    # Each pair is seen twice, and the sign does not show whose clock is wrong.
    offset_s = path.clock_offset_s or 0.0
    if path.a < path.b and abs(offset_s) > MAX_SKEW_S:
        skew = f"{format_seconds(abs(offset_s))} {'ahead' if offset_s > 0 else 'behind'}"
        yield Finding(
            severity="warned",
            code="version-mismatch",
            what=f"the clocks of {path.a} and {path.b} differ",
            where=f"hosts {path.a}, {path.b}",
            fact=f"{path.b} is {skew}",
            remedy="sudo timedatectl set-ntp true   (on both)",
        )


def _diagnose_failed_path(
    path: HostPath, cluster: Cluster, examined: Examination
) -> tuple[str, str]:
    """Return the fault of a path, and its remedy: names, routes and firewalls fail in different
    ways, and in one direction or in both."""
    a = path.a
    b = path.b
    host_word = shell_word(b)
    back = next(other for other in examined.ways if other.a == b and other.b == a)
    target = next(host_address(host) for host in cluster.hosts if host.name == b)
    interfaces = examined.hosts[a].interfaces
    own = interfaces.get(path.interface or "", a)
    remedy = f"on {host_word}: sudo ufw allow proto tcp from {shell_word(own)}"
    if path.failed == "name":
        what = f"{a} does not know the name {target}"
        remedy = f"set address: of {host_word} in the cluster file"
    elif path.answers_at and not _reaches_any(b, examined):
        what = f"the address of {b} in the cluster file is another's: {b} answers {a} at its own"
        remedy = f"set address: of {host_word} in the cluster file to {shell_word(path.answers_at)}"
    elif _is_translated(path, examined):
        both = f"both {a} and {b} are" if _is_translated(back, examined) else f"{b} is"
        what = f"{both} behind address translation (NAT), and {a} does not get in to {b}"
        remedy = (
            f"join them by WireGuard: {command('cluster', 'secure', cluster.name)}; or let TCP "
            f"from {shell_word(a)} in to {host_word} at its router or cloud firewall"
        )
    elif back.failed is None:
        what = f"{b} refuses connections from {a}; the other direction works"
    elif path.one_way and back.one_way:
        what = f"{b} refuses connections from {a}, though packets arrive"
    elif path.one_way:
        what = f"answers of {b} do not reach {a}"
        remedy = f"see the link {host_word} -> {shell_word(a)}"
    else:
        what = f"the link {a} -> {b} is cut: nothing of {a} arrives at {b}"
        remedy = f"on {shell_word(a)}: traceroute {shell_word(target)}"
    return what, remedy


def _reaches_any(b: str, examined: Examination) -> bool:
    """Return whether the address of a host in the cluster file leads some other host to it."""
    return any(path.b == b and path.failed is None for path in examined.ways)


def _is_translated(path: HostPath, examined: Examination) -> bool:
    """Return whether the address that did not answer is a router's, or a cloud's, before the
    host."""
    own = examined.hosts[path.b].interfaces.values()
    return bool(path.failed and path.ip and own) and path.ip not in own


def _host_findings(host: Host, examined: Examination) -> Iterator[Finding]:
    facts = examined.hosts[host.name]
    where = f"host {host.name}"
    host_word = shell_word(host.name)
    # A system other than Linux names none of its interfaces.
    absent = bool(facts.interfaces) and host.interface not in facts.interfaces
    if host.interface is not None and (absent or PRIVATE_INTERFACE.match(host.interface)):
        why = "does not exist" if absent else "is seen by that machine alone"
        usable = [name for name in facts.interfaces if not PRIVATE_INTERFACE.match(name)]
        yield Finding(
            severity="refused",
            code="host-unreachable",
            what=f"interface {host.interface} {why}",
            where=where,
            fact=f"it has {', '.join(usable) or 'none'}",
            remedy=f"set interface: of {host_word} to one of them, or leave it out",
        )
    comfortable = format_bytes(MIN_FREE_DISK_BYTES)
    if facts.disk_free < MIN_FREE_DISK_BYTES:
        yield Finding(
            severity="warned",
            code="disk-full",
            what=f"{host.name} has little disk space",
            where=where,
            fact=f"{format_bytes(facts.disk_free)} free, {comfortable} is comfortable",
            remedy=f"on {host_word}: du -xh ~ | sort -h | tail",
        )
    wanted = sum(device.backend == "cuda" for device in host.devices)
    if facts.wheel is not None:
        problem = judge_gpus(facts.nvidia, facts.wheel, host.name).problem
        if problem is not None:
            # A file that names the host's CPU alone means that.
            yield Finding.of(problem, "refused" if wanted else "warned")
    listed = len(facts.nvidia.gpus)
    if wanted > listed:
        yield Finding(
            severity="refused",
            code="device-missing",
            what=f"{host.name} has fewer GPUs than the file says",
            where=where,
            fact=f"{wanted} in the file, {facts.nvidia.failure or listed} there",
            remedy=f"on {host_word}: nvidia-smi, then mend its devices: in the cluster file",
        )
    if _version_numbers(facts.python) < OLDEST_PYTHON:
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
            remedy=command("cluster", "up", host.cluster_name),
        )


def _version_findings(examined: Examination) -> Iterator[Finding]:
    """Yield a finding for each package whose versions differ: major and minor must agree, patches
    should; Python only should."""
    for name in ("python", "farspan", "torch", "ray", "nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        versions = dict[str, str]()
        for host, facts in examined.hosts.items():
            version = facts.python if name == "python" else facts.packages.get(name)
            if version:
                versions[host] = version
        if len(set(versions.values())) < 2:
            continue
        minor_versions = {_version_numbers(version)[:2] for version in versions.values()}
        newest = max(versions.values(), key=_version_numbers)
        stops = len(minor_versions) > 1 and name != "python"
        remedy = f"set python: in the cluster file to interpreters of version {shell_word(newest)}"
        if name != "python":
            package = f"{name}=={newest.split('+')[0]}"
            host_words = [shell_word(host) for host in versions if versions[host] != newest]
            remedy = f"on {', '.join(host_words)}: pip install {shell_word(package)}"
        yield Finding(
            severity="refused" if stops else "warned",
            code="version-mismatch",
            what=f"{name} differs between hosts",
            where=f"hosts {', '.join(versions)}",
            fact=", ".join(map(" ".join, versions.items())),
            remedy=remedy,
        )


def _version_numbers(version: str) -> tuple[int, ...]:
    release = version.split("+")[0]
    return tuple(map(int, re.findall(r"\d+", release)[:3]))
