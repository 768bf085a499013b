"""Hosts with nothing but an ssh server and a Python: what `farspan cluster up`, `status` and `down`
do there, and what they refuse."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from farspan.domain.cluster import Device, Host
from farspan.launch.cluster_setup import _Base, _send_wheels
from farspan.launch.findings import OLDEST_PYTHON
from farspan.launch.hosts import Agent
from farspan.launch.own_release import (
    build_own_wheel,
    find_pip_wheel,
    pinned_versions,
    release_name,
    repack_installed,
)
from farspan_lab import state
from tests.launch.conftest import up
from tests.launch.ssh_hosts import BARE_PYTHON, SshHosts, write_cluster
from tests.waiting import LIMIT_S, wait_for

SITES = (
    "sites: {home: {}, jump: {}, a: {}}\n"
    "links: [{between: [home, jump], rtt: 1ms}, {between: [jump, a], rtt: 1ms}]\n"
)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server behind a jump host; the user's home has no other way there."""
    name = f"up-{os.getpid()}"
    lab = up(f"name: {name}\n{SITES}")
    hosts = SshHosts(lab, tmp_path_factory.mktemp("ssh"))
    for site in ("jump", "a"):
        hosts.start(site)
    yield hosts
    hosts.close()
    state.down(name)


@pytest.fixture
def hosts(served):
    """The same, with a configuration that leads there, and nothing in the user's folder there."""
    (served.ssh / "config").write_text("")
    served.know("jump", "a")
    served.configure("jump", "jump")
    served.configure("a", "a", ProxyJump="jump")
    write_cluster(served.folder / "cluster.yaml", ["a"])
    for left in (".local", ".cache"):
        shutil.rmtree(served.folder / "a" / left, ignore_errors=True)
    return served


def environment_of(hosts: SshHosts) -> Path:
    """Make what `up` has begun to make: a folder that it owns, and an interpreter in it."""
    base = hosts.folder / "a/.local/share/farspan"
    subprocess.run([BARE_PYTHON, "-m", "venv", "--without-pip", base / "venv"], check=True)
    (base / "farspan-environment").write_text("")
    (base / "lock").touch()
    return base


def answer_of(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def refusal_of(hosts: SshHosts, action: str = "up") -> dict:
    """The one problem of the only host."""
    done = hosts.farspan("cluster", action, "cluster.yaml", "--json")
    (problem,) = answer_of(done)["problems"]
    assert done.returncode != 0
    return problem


def test_host_behind_a_jump_host_is_examined_without_anything_installed(hosts):
    (host,) = answer_of(hosts.farspan("cluster", "status", "cluster.yaml", "--json"))["hosts"]
    assert (host["release"], host["is_current"], host["runs"]) == (None, False, [])
    assert not (hosts.folder / "a/.local").exists()


def test_keys_of_an_agent_and_addresses_of_ipv6_lead_to_a_host(hosts):
    """Its own server, by the loopback address of IPv6, through itself."""
    socket = hosts.folder / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    try:
        wait_for(socket.exists, "the agent listens", agent)
        variables = {"SSH_AUTH_SOCK": str(socket)}
        key = hosts.ssh / "user"
        subprocess.run(["ssh-add", "-q", key], env={**os.environ, **variables}, check=True)
        public = (hosts.ssh / "host-a.pub").read_text().split()[:2]
        with (hosts.ssh / "known_hosts").open("a") as known:
            known.write(f"::1 {' '.join(public)}\n")
        (hosts.ssh / "config").write_text(
            f"Host *\n UserKnownHostsFile {hosts.ssh}/known_hosts\n"
            f"Host jump\n HostName {hosts.address('jump')}\n"
            f"Host near\n HostName {hosts.address('a')}\n ProxyJump jump\n"
            "Host a\n HostName ::1\n ProxyJump near\n"
        )
        done = hosts.farspan("cluster", "status", "cluster.yaml", "--json", variables=variables)
        assert [host["host"] for host in answer_of(done)["hosts"]] == ["a"]
    finally:
        agent.terminate()
        agent.wait(timeout=LIMIT_S)


@pytest.mark.parametrize(
    ("options", "jump_options", "cause", "remedy"),
    [
        ({"User": "nobody-here"}, {}, ": authentication", "ssh-copy-id a"),
        ({"key": "stranger"}, {}, ": authentication", "ssh-copy-id a"),
        ({"Port": 23}, {}, ": port, behind the jump host jump", "ssh jump ping -c 3 10.77.3.1"),
        ({}, {"Port": 23}, ": its jump host jump: port", "port 22 of jump"),
        ({}, {"key": "stranger"}, ": its jump host jump: authentication", "ssh-copy-id jump"),
    ],
)
def test_wrong_ssh_settings_are_named_with_their_fix(hosts, options, jump_options, cause, remedy):
    (hosts.ssh / "config").write_text("")
    hosts.configure("jump", "jump", **jump_options)
    hosts.configure("a", "a", ProxyJump="jump", **options)
    problem = refusal_of(hosts)
    assert problem["code"] == "host-unreachable"
    assert problem["what"].endswith(cause), problem
    assert remedy in problem["remedy"]
    if "User" in options:
        assert "as user nobody-here" in problem["fact"]


def test_likely_name_of_a_host_comes_from_the_users_configuration(hosts):
    hosts.configure("north-gate *.example.org !south-gate", "a")
    write_cluster(hosts.folder / "cluster.yaml", ["nort-gate", "elsewhere.invalid"])
    done = hosts.farspan(
        "cluster", "status", "cluster.yaml", "--json", variables={"HOME": str(hosts.folder)}
    )
    named, unlike = answer_of(done)["problems"]
    assert named["remedy"] == "name the host north-gate, as ~/.ssh/config does"
    assert unlike["remedy"] == "add elsewhere.invalid to ~/.ssh/config with its HostName"


def test_changed_host_key_is_refused_with_the_command_that_forgets_the_old_one(hosts):
    known = hosts.ssh / "known_hosts"
    other = (hosts.ssh / "stranger.pub").read_text().split()[:2]
    lines = [line for line in known.read_text().splitlines() if hosts.address("a") not in line]
    known.write_text("\n".join([*lines, f"{hosts.address('a')} {' '.join(other)}", ""]))
    problem = refusal_of(hosts)
    assert problem["what"].endswith(": changed host key")
    assert problem["remedy"].startswith(f"ssh-keygen -f {known} -R {hosts.address('a')}")


def test_unknown_host_key_is_not_accepted(hosts):
    hosts.know("jump")
    problem = refusal_of(hosts)
    assert problem["what"].endswith(": host key")
    assert problem["remedy"].startswith("ssh a ")


def old_python() -> Path:
    """A Python here that is too old for farspan."""
    names = ["/usr/bin/python3", *(f"python3.{minor}" for minor in range(10, 6, -1))]
    for name in names:
        path = shutil.which(name)
        if path is None:
            continue
        program = "import sys; print(*sys.version_info[:3])"
        done = subprocess.run([path, "-c", program], capture_output=True, text=True)
        if done.returncode == 0 and tuple(map(int, done.stdout.split())) < OLDEST_PYTHON:
            return Path(path)
    pytest.skip("waits for a Python older than 3.11.4")


def test_python_that_is_too_old_is_refused_before_anything_is_sent(hosts):
    link = hosts.folder / "a/tools/python3"
    before = link.readlink()
    link.unlink()
    link.symlink_to(old_python())
    try:
        problem = refusal_of(hosts)
    finally:
        link.unlink()
        link.symlink_to(before)
    assert problem["code"] == "version-mismatch"
    assert "farspan needs 3.11.4" in problem["fact"]
    assert not (hosts.folder / "a/.local").exists()


def test_host_without_a_python_is_refused_with_its_fix(hosts):
    path = hosts.folder / "cluster.yaml"
    write_cluster(path, ["a"], python="python3.99")
    problem = refusal_of(hosts)
    assert problem["what"].endswith(": python")
    assert problem["remedy"].startswith("set python: of a")


def test_full_disk_is_refused_before_anything_is_sent(hosts):
    folder = hosts.folder / "small"
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m", "none", str(folder)]
    subprocess.run([*state.enter(hosts.lab, "a"), *mount], check=True)
    # A session has the namespace of its server, so it sees the small disk too.
    write_cluster(hosts.folder / "cluster.yaml", ["a"], folder=str(folder))
    problem = refusal_of(hosts)
    assert problem["code"] == "disk-full"
    assert "21 MB free" in problem["fact"]


def test_folder_of_somebody_else_is_left_alone(hosts):
    mine = hosts.folder / "a/.local/share/farspan/thesis.tex"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert refusal_of(hosts)["code"] == "path-unusable"
    done = hosts.farspan("cluster", "down", "cluster.yaml", "--all")
    assert (done.returncode, mine.read_text()) == (0, "mine")


def test_one_up_at_a_time_works_on_a_host(hosts):
    base = environment_of(hosts)
    with (base / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert refusal_of(hosts)["code"] == "run-busy"
        assert refusal_of(hosts, "down")["code"] == "run-busy"
    assert (base / "venv").exists()


def test_training_on_a_host_without_farspan_names_the_command_that_installs_it(hosts):
    (hosts.folder / "text").mkdir(exist_ok=True)
    (hosts.folder / "text/a.txt").write_text("the wind listeth " * 400)
    (hosts.folder / "run.yaml").write_text("data: text\nbudget: {time: 1m}\n")
    words = ("train", "run.yaml", "--cluster", "cluster.yaml", "--json")
    problem = answer_of(hosts.farspan(*words))["problem"]
    assert problem["code"] == "extra-missing"
    assert problem["remedy"] == "farspan cluster up cluster.yaml"
    assert not (hosts.folder / "runs").exists()


def test_training_with_up_begins_nothing_where_a_host_is_not_reached(hosts):
    write_cluster(hosts.folder / "typed.yaml", ["a", "aa"])
    (hosts.folder / "text").mkdir(exist_ok=True)
    (hosts.folder / "text/a.txt").write_text("the wind listeth " * 400)
    (hosts.folder / "run.yaml").write_text("data: text\n")
    words = ("train", "run.yaml", "--cluster", "typed.yaml", "--up", "--json")
    problem = answer_of(hosts.farspan(*words))["problem"]
    assert (problem["code"], problem["where"]) == ("host-unreachable", "host aa")
    assert not (hosts.folder / "a/.local").exists()


def test_down_ends_and_removes_only_what_farspan_has_there(hosts):
    base = environment_of(hosts)
    sleep = "import time; time.sleep(1000)"
    own = subprocess.Popen([base / "venv/bin/python", "-c", sleep])
    other = subprocess.Popen([BARE_PYTHON, "-c", sleep])
    folder = hosts.folder / "a/.cache/farspan"
    run = folder / "runs/one-12345678"
    not_a_run = folder / "runs/mine/notes.txt"
    for path in (run / "run.json", run / "plan.json", not_a_run, folder / "cache/corpora/x/tokens"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    try:
        (host,) = answer_of(hosts.farspan("cluster", "down", "cluster.yaml", "--json"))["hosts"]
        assert (host["ended"], host["runs_left"]) == ([own.pid], 1)
        assert own.wait(timeout=LIMIT_S) != 0
        assert not base.exists()
        assert run.exists()
        (host,) = answer_of(hosts.farspan("cluster", "down", "cluster.yaml", "--all", "--json"))[
            "hosts"
        ]
        assert (host["runs_left"], host["bytes_left"]) == (0, 0)
        assert not run.exists()
        assert not (folder / "cache").exists()
        assert not_a_run.exists()
        assert other.poll() is None
    finally:
        for process in (own, other):
            process.kill()
            process.wait(timeout=LIMIT_S)


def test_wheel_that_was_cut_off_is_sent_from_there(tmp_path):
    (tmp_path / "home").mkdir()
    host = Host(
        name="far",
        devices=(Device(kind="cpu-avx2", backend="cpu", memory=2**30),),
        enter=("env", f"HOME={tmp_path}/home"),
        python=sys.executable,
    )
    wheel = build_own_wheel(tmp_path)
    whole = wheel.path.read_bytes()
    base = tmp_path / "home/base"
    reports = []
    with Agent(host, "setup_agent.py") as agent:
        assert agent.ask("claim", base=str(base)) == {}
        part = base / "wheels" / f".{wheel.sha256[:16]}.part"
        part.write_bytes(whole[:1000])
        files = {wheel.path.name: wheel.sha256}
        assert agent.ask("have", base=str(base), files=files) == {"sizes": {wheel.path.name: 1000}}
        _send_wheels(_Base(agent, str(base), {}), [wheel], reports.append)
        assert (base / "wheels" / wheel.path.name).read_bytes() == whole
        # Bytes of another file are not taken for it.
        damaged = b"x" + whole[1:]
        (base / "wheels" / wheel.path.name).write_bytes(damaged)
        assert agent.ask("have", base=str(base), files=files) == {"sizes": {wheel.path.name: 0}}
        values = {"name": wheel.path.name, "digest": wheel.sha256, "size": wheel.size, "offset": 0}
        answer = agent.ask("receive", base=str(base), content=[damaged], **values)
        assert not answer["is_whole"]


def test_wheel_of_an_installed_library_installs_the_same_files(tmp_path):
    version = pinned_versions()["msgspec"]
    wheel = repack_installed("msgspec", version, tmp_path)
    assert wheel is not None
    target = tmp_path / "target"
    pip = [BARE_PYTHON, f"{find_pip_wheel()}/pip", "install", "--isolated", "--no-index"]
    subprocess.run([*pip, "--no-deps", "--target", target, wheel.path], check=True)
    program = "import msgspec; print(msgspec.__file__, msgspec.json.decode('[1]'))"
    environment = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run(
        [BARE_PYTHON, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.stdout.split() == [str(target / "msgspec/__init__.py"), "[1]"]


def test_release_is_named_by_version_and_code(tmp_path):
    assert release_name() == release_name()
    assert build_own_wheel(tmp_path).path.parent.name == release_name()


@pytest.fixture
def bare(tmp_path):
    """Two sites: one behind a jump host, with a package index; one whose only route is to the
    other and to the user's home."""
    name = f"bare-{os.getpid()}"
    lab = up(
        f"name: {name}\nsites: {{home: {{}}, jump: {{}}, a: {{}}, b: {{}}, index: {{}}}}\n"
        "links: [{between: [home, jump], rtt: 2ms}, {between: [jump, a], rtt: 1ms}, "
        "{between: [home, b], rtt: 5ms}, {between: [a, b], rtt: 5ms}, "
        "{between: [a, index], rtt: 0.1ms}]\n"
    )
    hosts = SshHosts(lab, tmp_path)
    hosts.start("jump")
    hosts.start("b")
    index = f"http://{hosts.address('index')}:8000/"
    hosts.start("a", variables={"PIP_INDEX_URL": index, "PIP_TRUSTED_HOST": hosts.address("index")})
    hosts.know("jump", "a", "b")
    hosts.configure("jump", "jump")
    hosts.configure("a", "a", ProxyJump="jump")
    hosts.configure("b", "b")
    yield hosts
    hosts.close()
    state.down(name)


@pytest.fixture
def index(bare):
    """The package index: wheels of what is installed here, and who has asked for which."""
    wheels = bare.folder / "cache/wheels"
    wheels.mkdir(parents=True)
    pages = bare.folder / "pages"
    for name, version in pinned_versions().items():
        wheel = repack_installed(name, version, wheels)
        assert wheel is not None, name
        (pages / name).mkdir(parents=True)
        (pages / name / wheel.path.name).symlink_to(wheel.path)
    asked = bare.folder / "asked"
    serve = ["-m", "http.server", "8000", "--directory", str(pages)]
    with asked.open("wb") as log:
        words = [*state.enter(bare.lab, "index"), sys.executable, *serve]
        server = subprocess.Popen(words, stdout=log, stderr=log)
    yield asked
    server.terminate()
    server.wait(timeout=LIMIT_S)


@pytest.mark.slow
def test_one_command_trains_on_two_sites_with_nothing_but_ssh_and_python(bare, index):
    folder = bare.folder
    hosts = {name: f"address: {bare.address(name)}" for name in ("a", "b")}
    devices = "devices: [{kind: cpu-avx2, memory: 2GB}]"
    (folder / "cluster.yaml").write_text(
        f"sites:\n  north: {{hosts: {{a: {{{hosts['a']}, {devices}}}}}}}\n"
        f"  south: {{hosts: {{b: {{{hosts['b']}, {devices}}}}}}}\n"
        "links: [{between: [north, south], rtt: 5ms}]\n"
    )
    (folder / "text").mkdir()
    for number in range(20):
        words = " ".join(f"{word}{number % 7}" for word in ("wind", "list", "blow") * 60)
        (folder / f"text/{number}.txt").write_text(f"Paper {number}\n\n{words}.\n")
    (folder / "run.yaml").write_text(
        "data: text\ntokenizer: {train: bpe, vocab: 300}\n"
        "model: {family: gpt2, layers: 2, d_model: 32, heads: 2, context: 32}\n"
        "train: {steps: 8, batch: {global: 8}}\ncheckpoint: {every: 1s}\n"
        "parallel: {technique: pipeshard}\n"
    )
    words = ("train", "run.yaml", "--cluster", "cluster.yaml", "--up", "--run", "run")
    done = bare.farspan(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a: installing farspan[train] from its index" in done.stdout
    assert "b: installing farspan[train] from wheels" in done.stdout
    assert "/torch-" in index.read_text()

    # The run is at home: its report, its events, its newest checkpoint.
    run = folder / "run"
    plan = json.loads((run / "plan.json").read_text())
    assert {device["host"] for device in plan["devices"]} == {"a", "b"}
    assert (run / "report.html").is_file()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["reason"] for event in events if event["event"] == "finished"] == ["done"]
    newest = max((run / "checkpoints").glob("step-*"))
    assert newest.name == "step-00000008"
    assert (newest / "manifest.json").is_file()
    # The user's keys are nowhere else.
    for name in hosts:
        assert not (folder / name / ".ssh").exists()

    words = ("cluster", "up", "cluster.yaml", "--json")
    again = answer_of(bare.farspan(*words))["hosts"]
    assert [(host["host"], host["changed"]) for host in again] == [("a", False), ("b", False)]
    # Another release takes the place of this one in the same environment.
    ready = folder / "b/.local/share/farspan/ready.json"
    ready.write_text(ready.read_text().replace(release_name(), "0.0.1-00000000"))
    again = answer_of(bare.farspan(*words))["hosts"]
    assert [(host["host"], host["changed"]) for host in again] == [("a", False), ("b", True)]
    assert json.loads(ready.read_text())["release"] == release_name()

    status = answer_of(bare.farspan("cluster", "status", "cluster.yaml", "--json"))["hosts"]
    assert [host["is_current"] for host in status] == [True, True]
    assert [len(host["runs"]) for host in status] == [1, 1]
    assert bare.farspan("cluster", "down", "cluster.yaml", "--all").returncode == 0
    for name in hosts:
        assert not (folder / name / ".local/share/farspan").exists()
        assert not list((folder / name / ".cache/farspan/runs").glob("*"))
