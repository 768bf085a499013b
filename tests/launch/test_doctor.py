"""Doctor's findings, each made to happen on the real kernel: links, firewalls, names, keys, clocks,
versions."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch

from farspan.domain.cluster import Cluster, Device, Host, Site
from farspan.domain.cluster_json import as_json, load_cluster_json, save_cluster_json
from farspan.domain.clusterfile import save_cluster
from farspan.domain.gpus import Gpu, Nvidia, Wheel
from farspan.domain.problems import Refusal
from farspan.domain.run import HOME_VARIABLE, RunFolder
from farspan.launch import agent, rendezvous
from farspan.launch.clusters import find_cluster
from farspan.launch.findings import OLDEST_PYTHON, list_findings
from farspan.launch.hosts import Agent, by_client, host_command, start_shell
from farspan.launch.link_measurement import HostPath, require_reached
from farspan.launch.network_examination import Examination, HostFacts, examine_cluster, pair_rounds
from farspan.launch.probe_client import Probe
from farspan_lab import spec, state
from tests import smi
from tests.waiting import LIMIT_S, wait_for

CPU = Device(kind="cpu-avx2", backend="cpu", memory=10**9)


def refused(cluster, found):
    return [finding for finding in list_findings(cluster, found) if finding.severity == "refused"]


def inside(lab, site, script):
    done = subprocess.run(
        [*state.enter(lab, site), "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def change(lab, values, *, one_way=False):
    state.change(
        lab.lab.name,
        ["utah", "star"],
        spec.link_values(values, "test") if "up" not in values else values,
        one_way=one_way,
    )


@pytest.mark.slow
def test_two_healthy_sites_have_no_findings_and_the_figures_of_their_link(cluster):
    found = examine_cluster(cluster, streams=(1, 8))
    assert refused(cluster, found) == []
    assert {(way.a, way.b) for way in found.ways} == {("utah", "star"), ("star", "utah")}
    for way in found.ways:
        assert way.rtt_s >= 0.020
        assert abs(way.clock_offset_s) <= way.rtt_s / 2
        assert way.interface not in ("lo", None)
        assert set(way.bandwidth) == {1, 8}
        assert all(1e6 < rate < 140e6 for rate in way.bandwidth.values())


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("direction", [("utah", "star"), ("star", "utah")])
def test_a_link_that_is_cut_one_way_is_named_with_its_direction(lab, cluster, direction):
    state.change(lab.lab.name, list(direction), {"up": False}, one_way=True)
    found = refused(cluster, examine_cluster(cluster, streams=()))
    assert {finding.code for finding in found} == {"host-unreachable"}
    cut = [finding for finding in found if "is cut" in finding.what]
    assert [finding.where for finding in cut] == [f"link {direction[0]} -> {direction[1]}"]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("behind", [("utah", "star"), ("star",)])
def test_hosts_behind_address_translation_are_named_with_what_joins_them(lab, cluster, behind):
    """Their addresses are those of routers, which let nothing in; no other has a route to their
    own."""
    for name, other in (("utah", "star"), ("star", "utah")):
        if name in behind:
            own = next(host.address for host in cluster.hosts if host.name == name)
            inside(lab, other, f"ip route replace unreachable {own}")

    def move(host):
        address = f"10.99.{len(host.name)}.1" if host.name in behind else host.address
        return msgspec.structs.replace(host, address=address)

    found = refused(cluster, examine_cluster(cluster.with_hosts(move), streams=()))
    translated = [finding for finding in found if "address translation" in finding.what]
    assert {finding.where for finding in translated} == {
        f"link {'star' if name == 'utah' else 'utah'} -> {name}" for name in behind
    }
    for finding in translated:
        assert ("both" in finding.what) == (len(behind) == 2)
        assert "WireGuard" in finding.remedy


@pytest.mark.usefixtures("impatient")
def test_wrong_address_is_named_with_the_right_one(cluster):
    right = next(host.address for host in cluster.hosts if host.name == "star")

    def mistype(host):
        return msgspec.structs.replace(host, address="10.99.9.9") if host.name == "star" else host

    (found,) = refused(cluster, examine_cluster(cluster.with_hosts(mistype), streams=()))
    assert (found.where, found.remedy) == (
        "link utah -> star",
        f"set address: of star in the cluster file to {right}",
    )


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_link_that_is_cut_both_ways_is_named_twice(lab, cluster):
    state.change(lab.lab.name, ["utah", "star"], {"up": False}, one_way=False)
    cut = [
        finding
        for finding in refused(cluster, examine_cluster(cluster, streams=()))
        if "is cut" in finding.what
    ]
    assert {finding.where for finding in cut} == {"link utah -> star", "link star -> utah"}


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
@pytest.mark.skipif(not shutil.which("nft", path="/usr/sbin:/usr/bin"), reason="waits for nftables")
@pytest.mark.parametrize("verdict", ["drop", "reject with tcp reset"])
def test_firewall_finding_names_the_host_and_the_address_to_open(lab, cluster, verdict):
    rule = f"ip saddr 10.77.1.1 tcp flags syn / syn,ack {verdict}"
    nft = (
        "PATH=$PATH:/usr/sbin; nft add table ip f && nft 'add chain ip f i { type filter hook "
        "input priority 0; }'"
    )
    inside(lab, "star", f"{nft} && nft 'add rule ip f i {rule}'")
    (finding,) = refused(cluster, examine_cluster(cluster, streams=()))
    assert finding.where == "link utah -> star"
    assert "star refuses connections from utah; the other direction works" in finding.what
    assert finding.remedy.startswith("on star:")
    assert "10.77.1.1" in finding.remedy


@pytest.mark.slow
def test_address_that_one_host_cannot_resolve_is_refused(cluster):
    sites = list(cluster.sites)
    star = msgspec.structs.replace(sites[1].hosts[0], address="star.invalid")
    sites[1] = msgspec.structs.replace(sites[1], hosts=(star,))
    changed = msgspec.structs.replace(cluster, sites=tuple(sites))
    found = refused(changed, examine_cluster(changed, streams=()))
    assert [(finding.where, "star.invalid" in finding.what) for finding in found] == [
        ("link utah -> star", True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("interface", ["eth99", "lo"])
def test_interface_that_is_missing_or_loopback_is_refused(cluster, interface):
    sites = list(cluster.sites)
    utah = msgspec.structs.replace(sites[0].hosts[0], interface=interface)
    sites[0] = msgspec.structs.replace(sites[0], hosts=(utah,))
    changed = msgspec.structs.replace(cluster, sites=tuple(sites))
    (finding,) = refused(changed, examine_cluster(changed, streams=()))
    assert finding.where == "host utah"
    assert interface in finding.what


def test_host_whose_enter_command_fails_is_unreachable_with_its_error_message():
    host = Host(
        name="far", devices=(CPU,), enter=("sh", "-c", "echo 'no such container: far' >&2; exit 3")
    )
    cluster = Cluster(sites=(Site(name="a", hosts=(host,)),))
    (finding,) = refused(cluster, examine_cluster(cluster, streams=()))
    assert (finding.code, finding.where) == ("host-unreachable", "host far")
    assert "no such container" in finding.fact


def test_remedies_of_hosts_and_links_name_the_cluster_as_the_user_did(tmp_path):
    file = tmp_path / "my cluster.yaml"
    enter = "enter: [no-such-command]"
    file.write_text(
        f"sites: {{a: {{hosts: {{x: {{devices: [t4, t4], {enter}}}, y: {{devices: [t4]}}}}}}}}"
    )
    cluster = find_cluster(f"{file}:2")
    host = cluster.hosts[0]
    with pytest.raises(Refusal) as entered:
        start_shell(host, "true")
    path = HostPath(a="x", b="y", failed="timeout")
    with pytest.raises(Refusal) as reached:
        require_reached(path, host)
    for met in (entered, reached):
        assert met.value.problem.remedy == f"farspan doctor --cluster '{file}:2'"
    # What it is called is no figure of it: neither plans nor measurements depend on it.
    assert as_json(cluster) == as_json(cluster.named("another"))
    without_packages = facts(packages={"torch": None})
    examined = Examination(hosts={"x": without_packages}, unreachable={}, ways=())
    assert list_findings(cluster, examined)[-1].remedy == f"farspan cluster up '{file}:2'"


def test_cluster_of_a_run_is_named_by_its_file_which_doctor_takes(tmp_path, monkeypatch):
    run = RunFolder(tmp_path / "my run")
    run.make()
    written = Cluster(sites=(Site(name="a", hosts=(Host(name="x", devices=(CPU,)),)),))
    save_cluster_json(written.named("cluster.yaml"), run.cluster)
    assert load_cluster_json(run.cluster) == written
    words = shlex.split(run.doctor_command())
    assert words[:-1] == ["farspan", "doctor", "--cluster"]
    assert find_cluster(words[-1]) == written.named(str(run.cluster))
    # On another machine: the folder where farspan was asked to train.
    monkeypatch.setenv(HOME_VARIABLE, "/home/me/runs/a b")
    assert run.doctor_command() == "farspan doctor --cluster '/home/me/runs/a b/cluster.json'"


def test_trial_process_that_ends_here_has_a_remedy_for_this_machine():
    with pytest.raises(Refusal) as met, Probe() as probe:
        probe._process.kill()
        probe._process.wait()
        probe._process.returncode = 1
        probe.describe_devices("cpu", 1)
    assert met.value.problem.remedy == "farspan doctor --cluster here"


def test_host_that_never_answers_is_given_up_after_the_start_limit(monkeypatch):
    monkeypatch.setattr("farspan.launch.hosts.HOST_START_S", 1.0)
    host = Host(name="far", devices=(CPU,), enter=("sh", "-c", "sleep 100000"))
    found = examine_cluster(Cluster(sites=(Site(name="a", hosts=(host,)),)), streams=())
    assert "within 1 s" in found.unreachable["far"].fact


def test_host_whose_shell_prints_at_start_is_refused_with_the_remedy():
    enter = ("sh", "-c", 'echo "Welcome to far"; exec "$@"', "sh")
    host = Host(name="far", devices=(CPU,), enter=enter, python=sys.executable)
    with pytest.raises(Refusal) as met, Agent(host):
        pass
    with pytest.raises(Refusal) as asked, Probe(host) as probe:
        probe.describe_devices("cpu", 1)
    for problem in (met.value.problem, asked.value.problem):
        assert (problem.code, problem.where) == ("host-unreachable", "host far")
        assert "'Welcome to far'" in problem.fact and "~/.bashrc" in problem.remedy


@pytest.mark.parametrize(
    ("reads", "resets", "failed"), [(0, True, "route"), (1, True, "route"), (1, False, "timeout")]
)
def test_reset_or_silent_connection_is_reported_as_a_failed_path(reads, resets, failed):
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.recv(reads)
                if resets:
                    connection.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )
                while not resets and connection.recv(16):
                    continue

        answered = pool.submit(answer)
        found = agent.reach(
            "127.0.0.1",
            server.getsockname()[1],
            "0" * 32,
            deadline=0.5 if failed == "timeout" else LIMIT_S,
            pings=3,
        )
        answered.result(timeout=LIMIT_S)
    assert found["failed"] == failed and found["fact"]


def test_timeout_message_of_old_pythons_is_recognized():
    assert agent.connection_failure(OSError("timed out"), "silent") == {
        "failed": "timeout",
        "fact": "silent",
    }


def test_agent_ends_when_its_standard_input_closes():
    with Agent(Host(name="here", devices=(), enter=())) as agent:
        pid = agent._process.pid
        agent._process.stdin.close()
        agent._process.wait(timeout=LIMIT_S)
        assert not Path(f"/proc/{pid}/cmdline").exists()


def facts(**changes):
    packages = {
        "farspan": "0.1.0",
        "torch": "2.13.0",
        "ray": None,
        "numpy": "2.0.0",
        "nvidia-nccl-cu12": None,
    }
    base = {
        "hostname": "x",
        "python": "3.11.7",
        "system": "Linux",
        "packages": packages,
        "cpus": 4,
        "nvidia": Nvidia(),
        "interfaces": {"e0": "10.0.0.1"},
        "memory": 10**10,
        "disk_free": 10**12,
    }
    return HostFacts(**{**base, **changes, "packages": packages | changes.get("packages", {})})


def pair(a, b, device=CPU, **way):
    hosts = tuple(Host(name=name, devices=(device,)) for name in "ab")
    cluster = Cluster(sites=tuple(Site(name=f"s{host.name}", hosts=(host,)) for host in hosts))
    ways = tuple(
        HostPath(a=x, b=y, rtt_s=0.01, interface="e0", **way) for x, y in (("a", "b"), ("b", "a"))
    )
    return list_findings(cluster, Examination(hosts={"a": a, "b": b}, unreachable={}, ways=ways))


def test_address_that_leads_others_to_a_host_is_not_called_wrong():
    """A router forwards its port; those in its own network do not get out and in again."""
    hosts = tuple(Host(name=name, devices=(CPU,), address=f"203.0.113.{name}") for name in "123")
    cluster = Cluster(sites=tuple(Site(name=f"s{host.name}", hosts=(host,)) for host in hosts))
    failed = HostPath(a="1", b="2", failed="timeout", ip="203.0.113.2", answers_at="10.0.0.2")

    def remedy(*, reached: bool) -> str:
        others = [HostPath(a=a, b=b, rtt_s=0.1) for a, b in ("21", "13", "31", "23")]
        last = HostPath(a="3", b="2", rtt_s=0.1)
        if not reached:
            last = msgspec.structs.replace(last, failed="timeout", ip="203.0.113.2")
        examined = Examination(
            hosts={host.name: facts() for host in hosts},
            unreachable={},
            ways=(failed, last, *others),
        )
        found = list_findings(cluster, examined)
        return next(finding.remedy for finding in found if finding.where == "link 1 -> 2")

    assert remedy(reached=False) == "set address: of 2 in the cluster file to 10.0.0.2"
    assert "WireGuard" in remedy(reached=True)


@pytest.mark.parametrize(
    ("package", "version", "severity"),
    [
        ("torch", "2.11.0", "refused"),
        ("torch", "2.13.1", "warned"),
        ("torch", "3.13.0", "refused"),
        ("farspan", "0.2.0", "refused"),
        ("torch", "2.13.0+cpu", "warned"),
        ("numpy", "1.26.0", None),
    ],
)
def test_versions_refuse_majors_and_minors_and_warn_of_patches(package, version, severity):
    found = pair(facts(), facts(packages={package: version}))
    assert [finding.severity for finding in found] == ([severity] if severity else [])
    if severity:
        assert f"a {facts().packages[package]}, b {version}" in found[0].fact


def test_findings_of_old_python_missing_torch_full_disk_missing_gpu_and_clock_skew():
    assert [f.code for f in pair(facts(), facts(python="3.9.1"))] == [
        "version-mismatch",
        "version-mismatch",
    ]
    assert [f.what for f in pair(facts(), facts(packages={"torch": None}))] == ["b lacks torch"]
    assert [f.code for f in pair(facts(), facts(disk_free=10**9))] == ["disk-full"]
    gpu = msgspec.structs.replace(CPU, backend="cuda")
    one = Nvidia(gpus=(Gpu(name="NVIDIA A30"),))
    assert [f.code for f in pair(facts(nvidia=one), facts(), device=gpu)] == ["device-missing"]
    skew = pair(facts(), facts(), clock_offset_s=3.5)
    assert [(f.severity, f.what) for f in skew] == [("warned", "the clocks of a and b differ")]
    docker = pair(facts(), facts())
    assert docker == ()


def test_gpus_that_pytorch_cannot_use_are_refused_only_if_the_cluster_has_gpu_devices():
    there = {
        "nvidia": Nvidia(gpus=(Gpu(name="NVIDIA A30", driver="580.95.05"),)),
        "wheel": Wheel(torch="2.13.0+cpu", cuda=None),
    }
    gpu = msgspec.structs.replace(CPU, backend="cuda")
    for device, severity in ((gpu, "refused"), (CPU, "warned")):
        found = pair(facts(**there), facts(**there), device=device)
        assert [(f.severity, f.code, f.where) for f in found] == [
            (severity, "device-unusable", f"host {name}") for name in "ab"
        ]
        assert found[0].remedy.startswith("on a: pip install torch==2.13.0+cu130")


@pytest.mark.parametrize(
    ("python", "old"), [("3.11.3", True), ("3.11.4", False), ("3.12.0", False)]
)
def test_python_version_is_compared_up_to_the_patch_number(python, old):
    found = pair(facts(python=python), facts(python=python))
    assert [(f.severity, f.code) for f in found] == [("refused", "version-mismatch")] * 2 * old
    assert all("farspan needs 3.11.4" in f.fact for f in found)


def test_doctor_and_the_package_require_the_same_python():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["requires-python"].split(",")[0] == f">={'.'.join(map(str, OLDEST_PYTHON))}"


@pytest.mark.parametrize(
    ("given", "why"), [("en0", None), ("lo0", "interface lo0 is seen by that machine alone")]
)
def test_given_interface_is_accepted_where_the_system_lists_none(given, why):
    host = Host(name="a", devices=(CPU,), interface=given)
    cluster = Cluster(sites=(Site(name="s", hosts=(host,)),))
    found = list_findings(
        cluster, Examination(hosts={"a": facts(interfaces={})}, unreachable={}, ways=())
    )
    assert [f.what for f in found] == ([why] if why else [])


def test_unknown_interface_asks_for_interface_in_the_cluster_file():
    a, b = (Host(name=name, devices=(CPU,), address=f"10.0.0.{name}") for name in "ab")
    way = HostPath(a="a", b="b", rtt_s=0.01, interface=None)
    with pytest.raises(Refusal) as refusal:
        rendezvous.interface_towards(a, b, way)
    problem = refusal.value.problem
    assert (problem.code, problem.where) == ("host-unreachable", "link a -> b")
    assert (
        "10.0.0.b" in problem.fact and problem.remedy == "set interface: of a in the cluster file"
    )
    assert (
        rendezvous.interface_towards(msgspec.structs.replace(a, interface="en0"), b, way) == "en0"
    )
    with pytest.raises(Refusal, match="lo, which only that machine sees"):
        rendezvous.interface_towards(a, b, msgspec.structs.replace(way, interface="lo"))


@pytest.mark.parametrize("interface", ["lo", "docker0", "br-0123456789ab", "virbr0"])
def test_interfaces_that_only_one_machine_sees_are_refused(interface):
    hosts = tuple(Host(name=name, devices=(CPU,)) for name in "ab")
    cluster = Cluster(sites=(Site(name="s", hosts=hosts),))
    ways = (
        HostPath(a="a", b="b", rtt_s=0.01, interface=interface),
        HostPath(a="b", b="a", rtt_s=0.01, interface="e0"),
    )
    (finding,) = list_findings(
        cluster, Examination(hosts={"a": facts(), "b": facts()}, unreachable={}, ways=ways)
    )
    assert (finding.severity, finding.where) == ("refused", "link a -> b")


@pytest.mark.parametrize("count", range(1, 10))
def test_rounds_have_every_pair_once_and_each_host_once_a_round(count):
    names = [str(i) for i in range(count)]
    found = pair_rounds(names)
    assert sorted(tuple(sorted(p)) for r in found for p in r) == sorted(
        itertools.combinations(names, 2)
    )
    assert all(len({name for p in r for name in p}) == 2 * len(r) for r in found)


# -- over ssh, with a real server in one site and doctor in the other
#   -------------------------------------------------


@pytest.fixture
def ssh(lab, tmp_path):
    """A folder for HOME in utah, whose ssh config leads to a server in star."""
    if not shutil.which("sshd", path="/usr/sbin:/usr/bin"):
        pytest.skip("waits for openssh-server")
    folder = tmp_path / ".ssh"
    folder.mkdir(mode=0o700)
    for key in ("host", "user", "stranger"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True
        )
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen(
        [
            *state.enter(lab, "star"),
            "/usr/sbin/sshd",
            "-D",
            "-e",
            "-f",
            "/dev/null",
            "-h",
            str(folder / "host"),
            "-p",
            "22",
            "-o",
            f"AuthorizedKeysFile={folder}/authorized_keys",
            "-o",
            "StrictModes=no",
            "-o",
            "PidFile=none",
        ],
        stderr=subprocess.DEVNULL,
    )
    connect = "import socket; socket.create_connection(('10.77.2.1', 22))"
    listens = [*state.enter(lab, "star"), sys.executable, "-c", connect]
    wait_for(
        lambda: not subprocess.run(listens, stderr=subprocess.DEVNULL).returncode,
        "sshd listens",
        server,
    )
    yield folder
    server.terminate()
    server.wait(timeout=LIMIT_S)


def doctor_over_ssh(lab, folder, key="user", port=22, name="star"):
    public = (folder / "host.pub").read_text().split()[:2]
    (folder / "known_hosts").write_text(f"[10.77.2.1]:{port},10.77.2.1 {' '.join(public)}\n")
    address = "10.77.2.1" if name == "star" else "nowhere.invalid"
    (folder / "config").write_text(
        f"Host {name}\n HostName {address}\n Port {port}\n User {os.environ.get('USER', 'root')}\n"
        f" IdentityFile {folder}/{key}\n IdentitiesOnly yes\n UserKnownHostsFile "
        f"{folder}/known_hosts\n"
    )
    ssh = (
        "ssh",
        "-F",
        str(folder / "config"),
        "-o",
        "BatchMode=yes",
        "-o",
        "ConnectTimeout=5",
        name,
    )
    hosts = (
        Host(name="utah", devices=(CPU,), address="10.77.1.1", enter=()),
        Host(name=name, devices=(CPU,), address="10.77.2.1", python=sys.executable, enter=ssh),
    )
    cluster = Cluster(sites=tuple(Site(name=f"s-{host.name}", hosts=(host,)) for host in hosts))
    save_cluster(cluster, folder / "cluster.yaml", "test")
    words = [
        *state.enter(lab, "utah"),
        sys.executable,
        "-m",
        "farspan",
        "doctor",
        "--json",
        "--cluster",
        str(folder / "cluster.yaml"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    return msgspec.json.decode(done.stdout)


@pytest.mark.slow
def test_doctor_over_ssh_sees_both_hosts(lab, ssh):
    found = doctor_over_ssh(lab, ssh)
    assert [f for f in found["findings"] if f["severity"] == "refused"] == []
    assert {(way["a"], way["b"]) for way in found["ways"]} == {("utah", "star"), ("star", "utah")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "cause", "remedy"),
    [
        ({"key": "stranger"}, "authentication", "ssh-copy-id star"),
        ({"port": 23}, "port", "port 22 of star"),
        ({"name": "nowhere"}, "name", "~/.ssh/config"),
    ],
)
def test_ssh_failures_of_key_port_and_name_have_their_own_remedies(lab, ssh, wrong, cause, remedy):
    found = doctor_over_ssh(lab, ssh, **wrong)
    (finding,) = [f for f in found["findings"] if f["severity"] == "refused"]
    assert finding["what"].endswith(f"cannot be reached: {cause}")
    assert remedy in finding["remedy"]


def test_ssh_gets_its_command_in_one_quoted_word():
    words = host_command(Host(name="gpu1", devices=()), ["sh", "-c", "echo 'a b'"])
    assert words[0] == "ssh" and words[-2] == "gpu1"
    assert subprocess.run(words[-1], shell=True, capture_output=True, text=True).stdout == "a b\n"


def test_by_client_is_true_for_ssh_and_containers_only():
    """What a lab enters by becomes the command; ssh and containers' tools stay, and signals end
    them alone."""
    device = CPU.but(enter=("docker", "exec", "-i", "gpu1"))
    assert by_client(Host(name="far", devices=(CPU,))) and by_client(
        Host(name="far", devices=(device,), enter=()), 0
    )
    assert not by_client(Host(name="here", devices=(CPU,), enter=()), 0)
    assert not by_client(Host(name="lab", devices=(CPU,), enter=("sh", "-c", 'exec "$@"', "sh")), 0)


def test_doctor_of_this_machine_alone(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        f"sites: {{a: {{hosts: {{{socket.gethostname()}: {{devices: [{{kind: cpu-avx2, memory: "
        f"1GB}}]}}}}}}}}\n"
    )
    words = [sys.executable, "-m", "farspan", "doctor", "--cluster", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "Python 3" in done.stdout and "finding" in done.stdout


def test_doctor_of_a_cluster_asks_each_host_for_its_gpus_and_its_pytorch(tmp_path):
    """The agent finds a recorded driver on the path, and asks the PyTorch of these tests, which is
    a CPU wheel."""
    if torch.cuda.is_available():
        pytest.skip("this PyTorch can use GPUs")
    file = tmp_path / "c.yaml"
    file.write_text(f"sites: {{a: {{hosts: {{{socket.gethostname()}: {{devices: [h100]}}}}}}}}\n")
    words = [sys.executable, "-m", "farspan", "doctor", "--cluster", str(file), "--json"]
    path = f"{smi.install(tmp_path / 'bin', smi.H100)}:{os.environ['PATH']}"
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, "PATH": path}
    )
    (finding,) = [f for f in json.loads(done.stdout)["findings"] if f["code"] == "device-unusable"]
    assert (
        finding["severity"] == "refused"
        and "550.90.07" in finding["fact"]
        and "cu126" in finding["remedy"]
    )


GPU = {
    "name": "NVIDIA H100 80GB HBM3",
    "memory": 81559 * 2**20,
    "driver": "550.90.07",
    "capability": [9, 0],
    "uuid": smi.H100["uuid"],
    "mig": False,
}
PLAIN = {"capability": None, "uuid": "", "mig": False}


@pytest.mark.parametrize(
    ("cards", "how", "gpus", "failure"),
    [
        ((smi.H100,), {}, [GPU], ""),
        ((smi.H100,), {"lacking": ("compute_cap",)}, [GPU | PLAIN], ""),
        (
            (smi.H100 | {"memory.total": "[N/A]", "compute_cap": "[N/A]"},),
            {},
            [GPU | {"memory": 0, "capability": None}],
            "",
        ),
        (
            (smi.A100_MIG,),
            {},
            [
                {
                    "name": "NVIDIA A100-SXM4-40GB",
                    "memory": 40960 * 2**20,
                    "driver": "580.82.07",
                    "capability": [8, 0],
                    "uuid": smi.A100_MIG["uuid"],
                    "mig": True,
                }
            ],
            "",
        ),
        ((), {"said": smi.FAILED, "code": 9}, [], "couldn't communicate with the NVIDIA driver"),
        ((), {"said": smi.NONE, "code": 6}, [], ""),
        ((), {"said": smi.FALLEN, "code": 15}, [], "Unknown Error"),
        ((), {"seconds": 60}, [], "has not answered within 1 s"),
    ],
)
def test_recorded_output_of_nvidia_smi_is_parsed(tmp_path, monkeypatch, cards, how, gpus, failure):
    monkeypatch.setenv("PATH", f"{smi.install(tmp_path, *cards, **how)}:{os.environ['PATH']}")
    monkeypatch.setattr(agent, "DRIVER_S", 1.0 if how.get("seconds") else LIMIT_S)
    said = agent.nvidia()
    assert said["gpus"] == gpus
    assert failure in said["failure"] and bool(failure) == bool(said["failure"])


def test_two_gpus_keep_the_order_of_their_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv(
        "PATH", f"{smi.install(tmp_path, smi.GTX1080, smi.SECOND)}:{os.environ['PATH']}"
    )
    assert [gpu["uuid"] for gpu in agent.nvidia()["gpus"]] == [
        smi.GTX1080["uuid"],
        smi.SECOND["uuid"],
    ]


def test_a_machine_without_nvidia_smi_has_no_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert agent.nvidia() == {"gpus": [], "failure": ""}
