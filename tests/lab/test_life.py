"""From up to down: also after a SIGKILL of any part, half made, twice, and beside another lab."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from farspan.domain.problems import EXIT_CODES, Refusal
from farspan_lab import state
from tests.lab.conftest import OWN, Peer, Start, play, traces, two
from tests.waiting import LIMIT_S, wait_for

FARSPAN = [sys.executable, "-m", "farspan"]
#: Leaves its terminal, its session and its parent.
DAEMON = (
    "import os, time\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n        "
    "time.sleep(600)\n"
)


def refused(code: str, done: subprocess.CompletedProcess[str]) -> None:
    assert done.stderr.startswith(f"error[{code}]: ") and done.returncode == EXIT_CODES[code], (
        done.stdout + done.stderr
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "lab.yaml").write_text(two("life"))
    return tmp_path / "lab.yaml"


def farspan_lab(action: str, *words: str) -> subprocess.CompletedProcess[str]:
    words = words if action == "up" else ("--lab", f"{OWN}-life", *words)
    return subprocess.run([*FARSPAN, "lab", action, *words], capture_output=True, text=True)


def test_the_commands_from_up_to_down(file: Path):
    assert farspan_lab("up", str(file)).returncode == 0
    done = farspan_lab("exec", "utah", "--device", "0", "--", "sh", "-c", "hostname; exit 7")
    assert (done.stdout, done.returncode) == ("utah\n", 7)
    done = farspan_lab(
        "link", "utah", "star", "--rtt", "80ms", "--bandwidth", "1Mbit/s", "--one-way", "--json"
    )
    assert '"delay_s":0.04,"jitter_s":0.0,"bandwidth":125000.0' in done.stdout
    assert '"delay_s":0.01,"jitter_s":0.0,"bandwidth":null' in done.stdout
    refused("run-exists", farspan_lab("up", str(file)))
    refused("out-of-range", farspan_lab("link", "utah", "gpn", "--down"))
    refused("out-of-range", farspan_lab("link", "utah", "star", "--rtt=-5ms"))
    refused("usage", farspan_lab("link", "utah", "star"))
    refused("out-of-range", farspan_lab("exec", "gpn", "true"))
    refused("out-of-range", farspan_lab("exec", "utah", "--device", "1", "true"))
    refused("out-of-range", farspan_lab("status", "--lab", "../run"))
    refused("path-missing", farspan_lab("status", "--lab", f"{OWN}-other"))
    assert farspan_lab("down").returncode == 0
    assert traces() == []
    refused("path-missing", farspan_lab("down"))
    refused("path-missing", farspan_lab("exec", "utah", "true"))


def test_a_signal_reaches_the_command_itself(start: Start):
    lab = start(two("life"))
    process = Peer(lab, "utah", "echo").process
    process.terminate()
    assert process.wait(timeout=LIMIT_S) == -signal.SIGTERM


def test_down_ends_all_that_runs_inside_and_nothing_else(start: Start):
    ours = start(two("one"))
    others = start(two("other"))
    inside = Peer(ours, "utah", "echo")
    beside = Peer(others, "utah", "echo")
    subprocess.run([*state.enter(ours, "star", 0), sys.executable, "-c", DAEMON], check=True)
    state.down(f"{OWN}-one")
    assert inside.process.wait(timeout=LIMIT_S) == -signal.SIGKILL
    assert beside.process.poll() is None
    assert min(play(others, "star", "ping", "utah", 3)) > 0.02
    state.down(f"{OWN}-other")
    assert beside.process.wait(timeout=LIMIT_S) == -signal.SIGKILL


def test_lab_killed_by_sigkill_is_reported_and_removed_by_down(start: Start):
    lab = start(two("life"))
    inside = Peer(lab, "utah", "echo")
    os.kill(lab.pid, signal.SIGKILL)
    with pytest.raises(Refusal, match=f"farspan lab down --lab {OWN}-life") as refusal:
        wait_for(lambda: not state.status(f"{OWN}-life"), "the lab is said to be dead")
    assert refusal.value.problem.code == "lab-unavailable"
    with pytest.raises(Refusal, match="already"):
        start(two("life"))
    assert inside.process.poll() is None
    state.down(f"{OWN}-life")
    assert inside.process.wait(timeout=LIMIT_S) == -signal.SIGKILL
    again = start(two("life"))
    assert again.pid != lab.pid


def test_requests_without_sense_do_no_harm(start: Start):
    lab = start(two("life"))
    stranger = msgspec.json.encode([msgspec.structs.replace(lab.lab.links[0], source="gpn")])
    for request in (b"", b"{}", b"[{}]", b"\xff", stranger):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(state.home(lab.lab.name) / "control"))
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            assert client.recv(1) == b""
    assert state.status(lab.lab.name).pid == lab.pid


def test_a_site_that_takes_its_interface_down_harms_no_other(start: Start):
    lab = start(two("life"))
    subprocess.run([*state.enter(lab, "star"), "ip", "link", "set", "wan0", "down"], check=True)
    assert play(lab, "utah", "ping", "star", 2, 0.5) == [None, None]
    assert [one.dropped for one in state.status(lab.lab.name).traffic if one.source == "utah"] == [
        2
    ]


@pytest.mark.parametrize("after_s", [0.05, 0.15, 0.25, 0.35, 0.5])
def test_up_that_is_killed_halfway_can_be_taken_down(file: Path, after_s: float):
    process = subprocess.Popen([*FARSPAN, "lab", "up", str(file)], stdout=subprocess.DEVNULL)
    while f"{OWN}-life" not in state.names() and process.poll() is None:
        time.sleep(0.005)
    time.sleep(after_s)
    process.kill()
    process.wait()
    state.down(f"{OWN}-life")
    # A supervisor that was only starting ends by itself: there is nothing for it to make.
    wait_for(lambda: traces() == [], "no trace is left")


def test_up_that_fails_leaves_nothing(start: Start):
    with pytest.raises(Refusal, match=r"namespaces may use: .*reno") as refusal:
        start(two("life") + "congestion: carrier-pigeon\n")
    assert refusal.value.problem.code == "lab-unavailable"
    assert traces() == []


@pytest.fixture
def nobody() -> Iterator[list[str]]:
    """The words that make a command run as a user without rights, who has a folder for its labs."""
    folder = Path(tempfile.mkdtemp(prefix="farspan-nobody-"))
    given = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "XDG_RUNTIME_DIR": folder,
    }
    try:
        if os.geteuid() == 0:
            os.chown(folder, 65534, 65534)
        words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "env", "-i"]
        yield [*words, *(f"{key}={value}" for key, value in given.items())]
        assert list(folder.iterdir()) == []
    finally:
        folder.rmdir()


def test_an_unprivileged_user_has_the_network(nobody: list[str]):
    # The environment's own Python may lie in a folder that is closed to others.
    python = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    probe = [*nobody, python, "-c", "import farspan_lab.state, yaml; farspan_lab.state._unshare()"]
    if subprocess.run(probe, capture_output=True).returncode:
        pytest.skip(
            "waits for root, a Python that others may run, and user namespaces that may open "
            "/dev/net/tun"
        )
    script = Path(__file__).with_name("rootless.py")
    done = subprocess.run(
        [*nobody, python, str(script)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "fine\n", done.stderr
