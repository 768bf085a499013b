"""TCP's buffers on the hosts of a cluster: what their links need, and what `farspan cluster tune`
sets in sites of a lab and puts back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from farspan.app.cluster_hosts import tune_cluster
from farspan.cli.main import main
from farspan.domain.cluster import Cluster, Device, Host, Link, Site
from farspan.domain.clusterfile import save_cluster
from farspan.launch.hosts import Agent
from farspan.launch.tcp_buffers import MAX_BUFFER, buffer_needs
from farspan_lab import state
from farspan_lab.cluster import of_lab
from tests.launch.conftest import up
from tests.waiting import LIMIT_S, wait_for

SETTINGS = ("tcp_rmem", "tcp_wmem")
#: 100 Mbit/s for 20 ms are 250 kB: one stream needs twice that.
NEEDED = 500_000


@pytest.fixture
def lab():
    """Two sites whose streams have 64 kB under way, and a link that takes four times that."""
    name = f"tune-{os.getpid()}"
    sites = "{utah: {devices: 1}, star: {devices: 1}}"
    link = "{between: [utah, star], rtt: 20ms, bandwidth: 100Mbit/s}"
    yield up(f"name: {name}\nwindow: 64kB\nsites: {sites}\nlinks: [{link}]\n")
    state.down(name)


@pytest.fixture
def file(lab, tmp_path) -> str:
    path = tmp_path / "cluster.yaml"
    save_cluster(of_lab(lab), path, "a test")
    return str(path)


def buffers_of(lab, site: str) -> dict[str, list[int]]:
    paths = [f"/proc/sys/net/ipv4/{name}" for name in SETTINGS]
    words = [*state.enter(lab, site), "cat", *paths]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    rows = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    return dict(zip(SETTINGS, rows, strict=True))


def with_largest(buffers: dict[str, list[int]], largest: int) -> dict[str, list[int]]:
    return {name: [*sizes[:2], largest] for name, sizes in buffers.items()}


def keeper_of(host: Host) -> int:
    """The process that puts the buffers of a host back."""
    with Agent(host, "tune_agent.py") as agent:
        # Its record lies where only root writes.
        program = (
            "import glob, json, os, sys\n"
            "inode = os.stat('/proc/self/ns/net').st_ino\n"
            "print(json.load(open(f'/run/farspan-tcp-buffers-{inode}.json'))['pid'])\n"
        )
        words = [*agent.host.enter, sys.executable, "-c", program]
        return int(subprocess.check_output(words, timeout=LIMIT_S))


def test_buffers_are_set_for_the_link_and_put_back_when_told(lab, file):
    before = {site: buffers_of(lab, site) for site in ("utah", "star")}
    (utah, star), unknown = tune_cluster(file)
    assert unknown == ()
    for host, site, peer in ((utah, "utah", "star"), (star, "star", "utah")):
        assert host.state == "set"
        assert (host.need.peer, host.need.buffer) == (peer, NEEDED)
        assert host.interface is not None
        assert host.until - time.time() > 23 * 3600
        assert buffers_of(lab, site) == with_largest(before[site], NEEDED)
    for state_then in ("restored", "untouched"):
        ends, _ = tune_cluster(file, undo=True)
        assert [host.state for host in ends] == [state_then] * 2
    assert {site: buffers_of(lab, site) for site in before} == before


def test_buffers_are_put_back_after_the_time_by_themselves(lab, file):
    before = {site: buffers_of(lab, site) for site in ("utah", "star")}
    tune_cluster(file, seconds=0.5)
    wait_for(
        lambda: {site: buffers_of(lab, site) for site in before} == before,
        "the buffers are put back",
    )
    (utah, star), _ = tune_cluster(file, undo=True)
    assert utah.state == star.state == "untouched"


def test_later_tune_keeps_what_was_there_before_the_first(lab, file, tmp_path):
    """It makes nothing smaller, also for a link that needs less, nor end sooner."""
    before = buffers_of(lab, "utah")
    tune_cluster(file)
    slow = of_lab(lab)
    links = tuple(replace(link, bandwidth=link.bandwidth / 2) for link in slow.links)
    save_cluster(replace(slow, links=links), tmp_path / "slow.yaml", "a test")
    (utah, _), _ = tune_cluster(str(tmp_path / "slow.yaml"), seconds=100.0)
    assert utah.state == "set"
    assert utah.until - time.time() > 23 * 3600
    assert buffers_of(lab, "utah") == with_largest(before, NEEDED)
    tune_cluster(file, undo=True)
    assert buffers_of(lab, "utah") == before


def test_buffers_are_put_back_by_a_file_that_knows_no_bandwidth(lab, file, tmp_path):
    before = buffers_of(lab, "utah")
    tune_cluster(file)
    links = tuple(replace(link, bandwidth=None) for link in of_lab(lab).links)
    save_cluster(replace(of_lab(lab), links=links), tmp_path / "unknown.yaml", "a test")
    ends, _ = tune_cluster(str(tmp_path / "unknown.yaml"), undo=True)
    assert [host.state for host in ends] == ["restored"] * 2
    assert buffers_of(lab, "utah") == before


def test_user_sees_what_root_has_set_whatever_roots_umask_is(lab, file):
    host = of_lab(lab).machines[0]
    strict = replace(host, enter=(*host.enter, "sh", "-c", 'umask 077; exec "$@"', "sh"))
    with Agent(strict, "tune_agent.py") as agent:
        agent.ask("set_buffers", largest=NEEDED, seconds=3600.0)
    nobody = replace(host, enter=(*host.enter, "setpriv", "--reuid=65534", "--clear-groups"))
    with Agent(nobody, "tune_agent.py") as agent:
        assert agent.ask("look")["until"] is not None
    tune_cluster(file, undo=True)


def test_another_users_lock_keeps_nobody_waiting(lab, file):
    """Only root may open what root locks."""
    host = of_lab(lab).machines[0]
    tune_cluster(file)
    script = (
        "import fcntl, glob, os\n"
        "inode = os.stat('/proc/self/ns/net').st_ino\n"
        "for path in glob.glob(f'/run/farspan-tcp-buffers-{inode}*'):\n"
        "    try:\n"
        "        fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "    except (PermissionError, BlockingIOError):\n"
        "        pass\n"
        "print('holds', flush=True)\n"
        "input()\n"
    )
    words = [*host.enter, "setpriv", "--reuid=65534", "--clear-groups", sys.executable, "-c"]
    with subprocess.Popen(
        [*words, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"holds\n"
        (utah, _), _ = tune_cluster(file, undo=True)
        assert utah.state == "restored"
        process.stdin.close()


def test_buffers_are_never_made_smaller(lab, file):
    before = buffers_of(lab, "utah")
    size = 2 * NEEDED
    large = f"4096 4096 {size}"
    script = " && ".join(f"echo {large} > /proc/sys/net/ipv4/{name}" for name in SETTINGS)
    subprocess.run([*state.enter(lab, "utah"), "sh", "-c", script], check=True, timeout=LIMIT_S)
    (utah, star), _ = tune_cluster(file)
    assert (utah.state, utah.until, star.state) == ("enough", None, "set")
    assert {sizes[2] for sizes in buffers_of(lab, "utah").values()} == {size}
    assert before != buffers_of(lab, "utah")
    tune_cluster(file, undo=True)


def test_value_that_somebody_else_has_set_meanwhile_stays(lab, file):
    before = buffers_of(lab, "utah")
    tune_cluster(file)
    words = "echo 4096 8192 123456 > /proc/sys/net/ipv4/tcp_rmem"
    subprocess.run([*state.enter(lab, "utah"), "sh", "-c", words], check=True, timeout=LIMIT_S)
    tune_cluster(file, undo=True)
    assert buffers_of(lab, "utah") == {**before, "tcp_rmem": [4096, 8192, 123456]}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_buffers_are_put_back_though_their_keeper_was_ended(lab, file, number):
    before = buffers_of(lab, "utah")
    tune_cluster(file)
    host = of_lab(lab).machines[0]
    os.kill(keeper_of(host), number)
    if number == signal.SIGTERM:
        wait_for(lambda: buffers_of(lab, "utah") == before, "the buffers are put back")
    else:
        assert buffers_of(lab, "utah") != before
    tune_cluster(file, undo=True)
    assert buffers_of(lab, "utah") == before


def test_tunes_at_the_same_time_leave_the_largest_buffers_and_the_latest_end(lab, file):
    host = of_lab(lab).machines[0]
    before = buffers_of(lab, "utah")
    wanted = [(NEEDED, 60.0), (NEEDED // 2, 7200.0), (NEEDED // 4, 600.0)]

    def tune(need: tuple[int, float]) -> dict:
        with Agent(host, "tune_agent.py") as agent:
            return agent.ask("set_buffers", largest=need[0], seconds=need[1])

    with ThreadPoolExecutor(len(wanted)) as pool:
        answers = list(pool.map(tune, wanted))
    # One that cannot have its turn in time reports it, and has set nothing.
    done = {
        need: answer["until"]
        for need, answer in zip(wanted, answers, strict=True)
        if "refused" not in answer
    }
    assert buffers_of(lab, "utah") == with_largest(before, max(size for size, _ in done))
    with Agent(host, "tune_agent.py") as agent:
        assert agent.ask("look")["until"] == max(done.values())
    tune_cluster(file, undo=True)
    assert buffers_of(lab, "utah") == before


def test_host_that_refuses_its_settings_has_no_record_of_them(lab, file):
    script = "mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys"
    subprocess.run([*state.enter(lab, "utah"), "sh", "-c", script], check=True, timeout=LIMIT_S)
    utah, star = tune_cluster(file)[0]
    assert "Read-only file system" in utah.fact
    assert star.state == "set"
    utah, star = tune_cluster(file, undo=True)[0]
    assert (utah.state, star.state) == ("untouched", "restored")


def test_user_who_is_not_root_gets_the_command_for_root(lab, tmp_path, capsys):
    """Also where sudo would be used, which that user may not."""
    if os.geteuid():
        pytest.skip("waits for root, who can be another user")
    before = buffers_of(lab, "utah")

    def as_nobody(host: Host) -> Host:
        return replace(host, enter=(*host.enter, "setpriv", "--reuid=65534", "--clear-groups"))

    path = tmp_path / "cluster.yaml"
    save_cluster(of_lab(lab).with_hosts(as_nobody), path, "a test")
    for options in ((), ("--sudo",)):
        assert main(["cluster", "tune", str(path), *options, "--json"]) == 32
        answer = json.loads(capsys.readouterr().out)
        assert [problem["code"] for problem in answer["problems"]] == ["path-unusable"] * 2
        problem = answer["problems"][0]
        assert ("sudo -n" in problem["fact"]) == bool(options)
        settings = [f"'net.ipv4.{name}=4096 {before[name][1]} {NEEDED}'" for name in SETTINGS]
        assert problem["remedy"] == f"on utah: sudo sysctl -w {' '.join(settings)}"
    assert buffers_of(lab, "utah") == before


def test_host_that_does_not_answer_leaves_the_others_tuned(lab, file, tmp_path, capsys):
    cluster = of_lab(lab)

    def break_star(host: Host) -> Host:
        return replace(host, enter=("false",)) if host.name == "star" else host

    path = tmp_path / "broken.yaml"
    save_cluster(cluster.with_hosts(break_star), path, "a test")
    assert main(["cluster", "tune", str(path), "--for", "1h", "--json"]) == 36
    answer = json.loads(capsys.readouterr().out)
    assert [(host["host"], host["state"]) for host in answer["hosts"]] == [("utah", "set")]
    assert "star cannot be reached" in answer["problems"][0]["what"]
    tune_cluster(file, undo=True)


def device() -> Device:
    return Device(kind="cpu-avx2", backend="cpu", memory=2**30)


def cluster_of(*links: Link) -> Cluster:
    sites = [
        Site(name=f"site-{name}", hosts=(Host(name=name, devices=(device(),)),)) for name in "abc"
    ]
    return Cluster(sites=tuple(sites), links=links)


def test_host_needs_twice_the_largest_product_of_its_links():
    near = Link(a="site-a", b="site-b", rtt_s=0.010, bandwidth=1.25e9)
    far = Link(a="site-a", b="site-c", rtt_s=0.100, bandwidth=1.25e7)
    # From b to c by way of a: the slower link's rate, the sum of the round trips.
    needs, unknown = buffer_needs(cluster_of(near, far))
    assert unknown == ()
    assert {name: (need.peer, need.buffer) for name, need in needs.items()} == {
        "a": ("b", 25_000_000),
        "b": ("a", 25_000_000),
        "c": ("b", 2_750_000),
    }


def test_buffer_has_the_bytes_that_the_kernel_can_count():
    (need, *_) = buffer_needs(cluster_of(Link(a="site-a", b="site-b", rtt_s=1.0, bandwidth=1e11)))[
        0
    ].values()
    assert need.buffer == MAX_BUFFER


def test_link_of_unknown_bandwidth_is_left_out_and_named(tmp_path: Path, capsys):
    known = Link(a="site-a", b="site-b", rtt_s=0.010, bandwidth=1e6)
    needs, unknown = buffer_needs(cluster_of(known, Link(a="site-b", b="site-c", rtt_s=0.05)))
    assert set(needs) == {"a", "b", "c"}
    assert unknown == (("b", "c"),)
    path = tmp_path / "cluster.yaml"
    save_cluster(cluster_of(known, Link(a="site-b", b="site-c", rtt_s=0.05)), path, "a test")
    # None of these hosts is there: their links are listed all the same.
    assert main(["cluster", "tune", str(path), "--json"]) == 36
    assert json.loads(capsys.readouterr().out)["unknown"] == [["b", "c"]]
    save_cluster(cluster_of(Link(a="site-a", b="site-b", rtt_s=0.010)), path, "a test")
    assert main(["cluster", "tune", str(path)]) == 35
    assert f"farspan probe --cluster {path} -o measured.yaml" in capsys.readouterr().err
