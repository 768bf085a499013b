"""What a host, a run folder of somebody else, and somebody on the network may do on this machine:
little."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import socket
import stat
import subprocess
import sys
import tarfile

import pytest
from msgspec.structs import replace

from farspan.domain.cluster import Cluster, Device, Host, Site
from farspan.domain.cluster_json import save_cluster_json
from farspan.domain.problems import Refusal
from farspan.domain.run import RunRecord
from farspan.domain.run_events import read_events
from farspan.domain.struct_files import load, save
from farspan.domain.train import TrainSpec
from farspan.launch import checkpoint_mirror, trust
from farspan.launch.hosts import Agent, ask_shell, host_command
from farspan.launch.link_measurement import measure_round_trip
from farspan.launch.processes import run_folder
from farspan.launch.run_folder_transfer import RemoteRun
from tests import tiny
from tests.waiting import LIMIT_S

TRAIN = TrainSpec(steps=4, batch=4, seq_len=16, precision="fp32", validate_every=4, seed=3)
CPU = Device(kind="cpu-avx2", backend="cpu", memory=2**30)


@pytest.fixture
def far(tmp_path):
    """A host with a disk of its own, whose `tar` is what a test puts at `bin/tar`, if anything."""
    (tmp_path / "bin").mkdir()
    return Host(
        name="far",
        devices=(CPU,),
        address="127.0.0.1",
        enter=("env", f"PATH={tmp_path}/bin:{os.environ['PATH']}"),
        python=sys.executable,
        folder=str(tmp_path / "disk"),
    )


@pytest.fixture
def sent(far, tmp_path):
    """A run that was sent there."""
    plan = tiny.plan(TRAIN)
    plan = replace(plan, devices=(replace(plan.devices[0], host="far"),))
    run = tiny.run_folder(tmp_path / "run", plan)
    away = RemoteRun(far, plan, run, run_folder(far, plan, run))
    away.send_run()
    return run, away, run_folder(far, plan, run)


def checkpoint_files(folder, content=b"0" * 100):
    folder.mkdir(parents=True)
    for name in ("part-00000.safetensors", "manifest.json"):
        (folder / name).write_bytes(content)


def hostile_tar(tmp_path, *members):
    """From now on the host's `tar -cf -` sends these (name, type, content or target of a link)
    instead."""
    with tarfile.open(tmp_path / "hostile.tar", "w") as archive:
        for name, kind, content in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                info.linkname = content
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    script = tmp_path / "bin" / "tar"
    script.write_text(f"#!/bin/sh\ncat {tmp_path}/hostile.tar\n")
    script.chmod(0o755)


# -- what a host sends back
#   --------------------------------------------------------------------------------------------


def test_checkpoints_come_back_and_replace_those_of_their_name(sent):
    run, away, there = sent
    checkpoint_files(there.checkpoints / "step-00000004")
    checkpoint_files(there.checkpoints / "best")
    (there.checkpoints / ".step-00000006.tmp").mkdir()
    (there.checkpoints / ".step-00000006.tmp" / "part-00000.safetensors").write_bytes(b"half")
    checkpoint_files(run.checkpoints / "step-00000004", b"older")
    away.fetch_checkpoints()
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["best", "step-00000004"]
    assert (run.checkpoints / "step-00000004" / "manifest.json").read_bytes() == b"0" * 100


@pytest.mark.parametrize(
    "members",
    [
        [("plan.json", tarfile.REGTYPE, b"{}")],
        [("cluster.json", tarfile.REGTYPE, b"{}")],
        [("checkpoints/../cluster.json", tarfile.REGTYPE, b"{}")],
        [("checkpoints/step-1/../../cluster.json", tarfile.REGTYPE, b"{}")],
        [("/tmp/farspan-was-here", tarfile.REGTYPE, b"{}")],
        [("checkpoints/step-1/part-00000.safetensors.py", tarfile.REGTYPE, b"{}")],
        [("checkpoints/step-1/part-00000.safetensors", tarfile.SYMTYPE, "/etc/passwd")],
        [
            (
                "checkpoints/step-1/part-00000.safetensors",
                tarfile.LNKTYPE,
                "checkpoints/step-1/manifest.json",
            )
        ],
        [
            ("checkpoints/step-1", tarfile.SYMTYPE, "/tmp"),
            ("checkpoints/step-1/manifest.json", tarfile.REGTYPE, b"{}"),
        ],
        [("checkpoints/step-1/manifest.json", tarfile.FIFOTYPE, b"")],
        [("checkpoints/step-1/manifest.json", tarfile.GNUTYPE_SPARSE, b"")],
    ],
)
def test_nothing_but_files_of_checkpoints_is_taken(sent, tmp_path, members):
    run, away, there = sent
    checkpoint_files(there.checkpoints / "step-00000004")
    checkpoint_files(run.checkpoints / "step-00000002", b"ours")
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    hostile_tar(tmp_path, ("checkpoints/step-9/manifest.json", tarfile.REGTYPE, b"{}"), *members)
    with pytest.raises(Refusal, match="did not come back"):
        away.fetch_checkpoints()
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_a_host_cannot_fill_the_disk(sent, tmp_path, monkeypatch):
    run, away, there = sent
    checkpoint_files(there.checkpoints / "step-00000004")
    monkeypatch.setattr(checkpoint_mirror, "HEADER_BYTES", 1000)
    most = checkpoint_mirror.max_checkpoint_bytes(away._plan)
    hostile_tar(
        tmp_path, ("checkpoints/step-1/part-00000.safetensors", tarfile.REGTYPE, bytes(most + 1))
    )
    with pytest.raises(Refusal, match="which no checkpoints of this plan take"):
        away.fetch_checkpoints()
    assert not list(run.checkpoints.iterdir())
    # Neither comes to an end by itself.
    assert ask_shell(away._host, "yes", LIMIT_S, most=10**6) is None
    assert ask_shell(away._host, "sleep 100000 & yes | head -c 5; exec sleep 100000", 1) is None


@pytest.mark.parametrize(
    "line", [b"\xff\xfe", b"{}", b"[" * 100_000, b'{"event": "step", "at": "never"}']
)
def test_malformed_event_from_a_remote_host_is_refused(sent, line):
    run, away, there = sent
    there.events.write_bytes(line + b"\n")
    away.pull_events()
    with pytest.raises(Refusal, match="file-unreadable"):
        list(read_events(run.events))


def test_an_away_run_is_for_its_user_alone(sent):
    _, _, there = sent
    assert stat.S_IMODE(there.path.stat().st_mode) == 0o700


# -- what is sent
#   ------------------------------------------------------------------------------------------------


def test_no_link_leads_out_of_a_model_that_is_sent(sent, tmp_path):
    _, away, there = sent
    model = tmp_path / "model"
    secret = tmp_path / "secret.json"
    model.mkdir()
    secret.write_text("mine")
    (model / "config.json").write_text("{}")
    (model / "generation.json").symlink_to(model / "config.json")
    assert away._send_initial(str(model)) == f"{there.path}/initial"
    assert (there.path / "initial" / "generation.json").read_text() == "{}"
    (model / "vocab.json").symlink_to(secret)
    with pytest.raises(Refusal, match="leads out of its folder"):
        away._send_initial(str(model))
    assert not (there.path / "initial" / "vocab.json").exists()


# -- run folders
#   ------------------------------------------------------------------------------------------------


@pytest.fixture
def entering(tmp_path, monkeypatch):
    """A run folder whose cluster.json enters a host by a command that leaves a mark."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN))
    enter = ("sh", "-c", f'touch {tmp_path}/ran; exec "$@"', "sh")
    host = Host(name="here", devices=(CPU,), enter=enter, python=sys.executable)
    save_cluster_json(Cluster(sites=(Site(name="here", hosts=(host,)),)), run.cluster)
    run.config.write_text("data: docs\n")
    return run


def farspan(*words):
    return subprocess.run(
        [sys.executable, "-m", "farspan", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
    )


def test_run_made_by_another_user_starts_nothing_until_it_is_trusted(entering, tmp_path):
    done = farspan("resume", entering.path)
    assert done.returncode == 42, done.stderr
    assert f"touch {tmp_path}/ran" in done.stderr and "--trust" in done.stderr
    assert not (tmp_path / "ran").exists()
    done = farspan("resume", entering.path, "--trust")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ran").exists()
    trust.require_trusted(entering)  # Looked at once.


def test_a_seal_is_of_this_user_this_machine_and_these_files(entering, tmp_path, monkeypatch):
    trust.seal_run(entering)
    trust.require_trusted(entering)
    key = tmp_path / "state" / "farspan" / "key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    record = load(entering.record, RunRecord)
    save(replace(record, initial="/etc"), entering.record)
    with pytest.raises(Refusal, match="run-untrusted"):
        trust.require_trusted(entering)
    save(record, entering.record)
    trust.require_trusted(entering)
    cluster = entering.cluster.read_bytes()
    entering.cluster.write_bytes(cluster.replace(b"ran", b"run"))
    with pytest.raises(Refusal, match="run-untrusted"):
        trust.require_trusted(entering)
    entering.cluster.write_bytes(cluster)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    with pytest.raises(Refusal, match="run-untrusted"):
        trust.require_trusted(entering)


@pytest.mark.parametrize(
    "change",
    ["{login: other, cpus: 1}", "{login: mass, cpus: 1, options: ['--export=BASH_ENV=/tmp/x']}"],
)
def test_a_seal_is_of_what_is_submitted_at_other_slurm_sites(entering, change):
    def name_site(site: str) -> None:
        entering.config.write_text(f"data: docs\nslurm: {{sites: {{mass: {site}}}}}\n")

    bare = Host(name="here", devices=(CPU,), enter=())
    save_cluster_json(Cluster(sites=(Site(name="here", hosts=(bare,)),)), entering.cluster)
    save(replace(load(entering.record, RunRecord), launcher="slurm"), entering.record)
    trust.require_trusted(entering)  # It starts nothing.
    name_site("{login: mass, cpus: 1}")
    with pytest.raises(Refusal, match="ssh mass sbatch"):
        trust.require_trusted(entering)
    trust.seal_run(entering)
    trust.require_trusted(entering)
    name_site(change)
    with pytest.raises(Refusal, match="run-untrusted"):
        trust.require_trusted(entering)
    name_site("{login: mass, cpus: 1}")
    trust.require_trusted(entering)


@pytest.mark.parametrize("change", ["python", "ssh", "device", "ray"])
def test_run_that_starts_other_programs_or_hosts_requires_trust(entering, change):
    bare = Host(name="here", devices=(CPU,), enter=())
    hosts = {
        "python": replace(bare, enter=("env",), python="/tmp/evil"),
        "ssh": replace(bare, enter=None),
        "device": replace(bare, devices=(CPU.but(enter=("touch", "ran")),)),
        "ray": bare,
    }
    save(Cluster(sites=(Site(name="here", hosts=(bare,)),)), entering.cluster)
    trust.require_trusted(entering)  # This Python on this machine alone.
    save(Cluster(sites=(Site(name="here", hosts=(hosts[change],)),)), entering.cluster)
    if change == "ray":
        save(
            replace(load(entering.record, RunRecord), launcher="ray:evil.example:6379"),
            entering.record,
        )
    with pytest.raises(Refusal, match="run-untrusted"):
        trust.require_trusted(entering)


def test_a_host_whose_name_looks_like_an_option_is_none_to_ssh():
    words = host_command(Host(name="-oProxyCommand=touch ran", devices=()), ["true"])
    assert words[words.index("-oProxyCommand=touch ran") - 1] == "--"
    assert (
        shutil.which("ssh") is None
        or b"ran" not in subprocess.run(words, capture_output=True, timeout=LIMIT_S).stdout
    )


# -- the ports of agents
#   -----------------------------------------------------------------------------------------------


def test_agent_listens_on_its_address_only_and_requires_its_secret():
    here, there = (
        Host(name=name, devices=(), enter=(), address="127.0.0.1") for name in ("here", "there")
    )
    with Agent(here) as a, Agent(there) as b:
        port = b.target["port"]
        listening = subprocess.run(
            ["ss", "-Hltun"], capture_output=True, text=True, timeout=LIMIT_S
        ).stdout
        assert {line.split()[4] for line in listening.splitlines() if f":{port} " in line} == {
            f"127.0.0.1:{port}"
        }
        for garbage in (b"", b"p" * 10, b"\xff" * 200, b"0" * 32 + b"p."):
            with (
                # The agent may have closed before all of it was sent.
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as connection,
            ):
                connection.sendall(garbage)
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(100) == b""
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram:
                datagram.sendto(garbage, ("127.0.0.1", port))
        assert b.ask("received")["bytes"] == 0
        assert b.ask("datagrams", tag="")["count"] == 0
        assert measure_round_trip(a, b, pings=3).failed is None


def test_agent_without_peers_opens_no_port():
    with Agent(Host(name="here", devices=(), enter=())) as agent:
        pid = agent._process.pid
        listening = subprocess.run(
            ["ss", "-Hltunp"], capture_output=True, text=True, timeout=LIMIT_S
        ).stdout
        assert f"pid={pid}," not in listening
