"""Who is asked to stop saves first: behind ssh, where no signal arrives, and beside others that end
at once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from farspan.domain.cluster import Cluster, Device, Host, Site
from farspan.domain.problems import Refusal
from farspan.domain.run_events import Finished, Step
from farspan.domain.standard_input import STOP
from farspan.launch import workers as module
from farspan.launch.launchers import launch_workers
from farspan.launch.processes import HostProcess
from farspan.launch.workers import Workers
from farspan.runtime.checkpoint import checkpoint_folder
from tests import tiny
from tests.launch.test_launchers import LONG, TRAIN
from tests.waiting import LIMIT_S, wait_for

pytestmark = pytest.mark.slow

#: Says that it runs, and ends with 7 when it is asked to.
ASKED = "trap 'echo asked; exit 7' TERM; while :; do echo up; sleep 0.05; done"


def held(script: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "farspan.launch.stop_on_stdin", "sh", "-c", script]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"the secret of its run\n")
    process.stdin.flush()
    return process


@pytest.mark.parametrize("by", ["input", "word", "signal"])
def test_a_held_command_is_asked_to_stop(by):
    with held(ASKED) as process:
        assert process.stdin is not None and process.stdout is not None
        # While its input has not ended it goes on.
        assert [process.stdout.readline() for _ in range(5)] == [b"up\n"] * 5
        if by == "signal":
            process.send_signal(signal.SIGTERM)
        elif by == "word":
            process.stdin.write(b"s")
            process.stdin.flush()
        else:
            process.stdin.close()
        assert process.stdout.read().endswith(b"asked\n")
        assert process.wait(timeout=LIMIT_S) == 7


def test_a_held_command_is_ended_at_once_also_after_it_was_asked_to_stop():
    with held("trap 'echo asked' TERM; echo up; while :; do sleep 0.05; done") as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.stdin.write(b"s")
        process.stdin.flush()
        assert process.stdout.readline() == b"asked\n"
        process.stdin.write(b"k")
        process.stdin.flush()
        assert process.wait(timeout=LIMIT_S) == 137


@pytest.mark.parametrize(("script", "code"), [("exit 3", 3), ("kill -9 $$", 137)])
def test_a_held_command_ends_by_itself(script, code):
    with held(script) as process:
        assert process.wait(timeout=LIMIT_S) == code


#: Says that it runs; a signal ends it with 3 if it was given the word before, and else with 4.
LISTENS = """
import signal, sys
from farspan.domain.standard_input import holds_more
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(3 if holds_more() else 4))
print("up", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize(("by", "code"), [("word", 3), ("signal", 4)])
def test_a_held_command_hears_the_word_only_where_it_was_said(by, code):
    words = [sys.executable, "-m", "farspan.launch.stop_on_stdin", sys.executable, "-c", LISTENS]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as held:
        assert held.stdin is not None and held.stdout is not None
        held.stdin.write(b"the secret of its run\n")
        assert held.stdout.readline() == b"up\n"
        if by == "word":
            held.stdin.write(STOP)
        else:
            held.send_signal(signal.SIGTERM)
        assert held.wait(timeout=LIMIT_S) == code


class Unlike(Workers):
    """Asked to end, the second worker says at once that it failed, as a client of ssh does; the
    first one is saving."""

    def start(self):
        saves = "trap 'sleep 1.5; touch saved; exit 0' TERM"
        for rank, trap in enumerate((saves, "trap 'exit 255' TERM")):
            script = f"cd {self.run.path}; {trap}; touch up-{rank}; while :; do sleep 0.05; done"
            yield HostProcess(
                self.hosts[0],
                (rank,),
                ["sh", "-c", script],
                log=self.log(f"rank-{rank}"),
                keep_open=self.keep_open,
            )


def test_worker_failing_after_an_interrupt_does_not_end_workers_still_saving(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FAILURE_GRACE_S", 0.3)
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN, rows=(4, 4), micro_rows=2))
    with (
        pytest.raises(Refusal),
        Unlike(run.load_plan(), run, tiny.this_machine(run.load_plan())) as workers,
    ):
        wait_for(lambda: all((run.path / f"up-{rank}").exists() for rank in (0, 1)), "both are up")
        workers.interrupt()
        list(workers)
    assert (run.path / "saved").exists()


@pytest.fixture
def far(tmp_path):
    """A host with a disk of its own behind ssh; each connection has a server of its own, so no
    port."""
    if not shutil.which("sshd", path="/usr/sbin:/usr/bin") or not shutil.which("ssh"):
        pytest.skip("waits for openssh-server")
    folder = tmp_path / ".ssh"
    folder.mkdir(mode=0o700)
    for key in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True
        )
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    server = (
        f"/usr/sbin/sshd -i -e -f /dev/null -h {folder}/host -o StrictModes=no -o PidFile=none "
        f"-o AuthorizedKeysFile={folder}/authorized_keys 2>/dev/null"
    )
    options = [
        f"ProxyCommand={server}",
        "BatchMode=yes",
        "StrictHostKeyChecking=no",
        "UserKnownHostsFile=/dev/null",
        "LogLevel=ERROR",
        "IdentitiesOnly=yes",
    ]
    ssh = (
        "ssh",
        "-F",
        "/dev/null",
        "-i",
        str(folder / "user"),
        *(word for option in options for word in ("-o", option)),
        "127.0.0.1",
    )
    device = Device(kind="cpu-avx2", backend="cpu", memory=2**30)
    return Host(
        name="far",
        devices=(device,),
        address="127.0.0.1",
        enter=ssh,
        python=sys.executable,
        folder=str(tmp_path / "far"),
    )


def test_an_interrupt_reaches_a_worker_behind_ssh_which_saves(far, tmp_path):
    plan = tiny.plan(LONG, micro_rows=2)
    plan = replace(plan, devices=(replace(plan.devices[0], host="far"),))
    run = tiny.run_folder(tmp_path / "run", plan)
    cluster = Cluster(sites=(Site(name="far", hosts=(far,)),))
    events = []
    with launch_workers("local", plan, run, cluster) as workers:
        for event in workers:
            if isinstance(event, Step) and not events:
                workers.interrupt()
                events.append(event)
            last = event
    assert isinstance(last, Finished) and last.reason == "interrupted"
    (saved,) = run.checkpoints.glob("step-*")
    assert checkpoint_folder.verify(saved)
    assert not subprocess.run(
        ["pgrep", "-f", f"farspan.runtime.worker {tmp_path}"], capture_output=True
    ).stdout


def test_worker_ended_behind_ssh_writes_no_checkpoint_and_leaves_no_process(far, tmp_path):
    """As after a trial, whose folder is removed next."""
    plan = tiny.plan(LONG, micro_rows=2)
    plan = replace(plan, devices=(replace(plan.devices[0], host="far"),))
    run = tiny.run_folder(tmp_path / "run", plan)
    cluster = Cluster(sites=(Site(name="far", hosts=(far,)),))
    with launch_workers("local", plan, run, cluster) as workers:
        workers.fetches = False
        for event in workers:
            if isinstance(event, Step):
                break
        workers.end()
        assert not subprocess.run(
            ["pgrep", "-f", f"farspan.runtime.worker {tmp_path}"], capture_output=True
        ).stdout
    assert not list((tmp_path / "far").rglob("step-*"))
