"""A run whose job trains with nodes of another site's Slurm, which only ssh to its login node leads
to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farspan.domain.run_events import Started
from tests.ports import reserved_port
from tests.slurm import daemons
from tests.slurm.daemons import Slurm
from tests.slurm.places import Place
from tests.waiting import LIMIT_S, wait_for

ROOT = Path(__file__).parents[2]
SSHD = "/usr/sbin/sshd"
#: So many that the run has not ended before Slurm's notice has come.
STEPS = 400


class Login:
    """The login node of a Slurm: an ssh server on this machine, and the ssh of a user elsewhere,
    who calls it `mass`."""

    def __init__(self, folder: Path, slurm: Slurm, port: int) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        home = folder / "home"
        home.mkdir()
        for key in ("user", "host"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
            subprocess.run(words, check=True)
        settings = {
            "HOME": home,
            "PATH": "/usr/bin:/bin",
            "SLURM_CONF": slurm.config,
            "PYTHONPATH": ROOT,
            "HF_HUB_OFFLINE": "1",
        }
        words = " ".join(f'"{name}={value}"' for name, value in settings.items())
        config = folder / "sshd_config"
        config.write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nStrictModes no\n"
            f"PidFile none\nAuthorizedKeysFile {folder}/user.pub\nSetEnv {words}\n"
            "MaxStartups 100\nPasswordAuthentication no\n"
        )
        key = " ".join((folder / "host.pub").read_text().split()[:2])
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {key}\n")
        (folder / "config").write_text(
            f"Host mass\n HostName 127.0.0.1\n Port {port}\n IdentityFile {folder}/user\n"
            f" IdentitiesOnly yes\n UserKnownHostsFile {folder}/known_hosts\n"
        )
        # The first value counts: no machine is too busy for a connection.
        patient = f"-oConnectTimeout={LIMIT_S:.0f} -oServerAliveCountMax=100"
        wrapper = self.bin / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh {patient} -F {folder}/config "$@"\n')
        wrapper.chmod(0o755)
        Path("/run/sshd").mkdir(exist_ok=True)
        with open(folder / "sshd.log", "wb") as log:
            self.server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(config)], stderr=log)
        wait_for(self._answers, "the login node answers", self.server)

    def _answers(self) -> bool:
        words = [self.bin / "ssh", "-oBatchMode=yes", "mass", "true"]
        done = subprocess.run(words, capture_output=True, timeout=LIMIT_S)
        return done.returncode == 0

    def close(self) -> None:
        self.server.terminate()
        self.server.wait(LIMIT_S)


@pytest.fixture(scope="module")
def far_slurm() -> Iterator[Slurm]:
    """The Slurm of the other site."""
    if reason := daemons.missing():
        pytest.skip(f"a real Slurm {reason}")
    with daemons.running(nodes=1) as started:
        yield started


@pytest.fixture
def place(tmp_path: Path, slurm: Slurm, far_slurm: Slurm) -> Iterator[Place]:
    if not shutil.which("sshd", path="/usr/sbin:/usr/bin"):
        pytest.skip("waits for openssh-server")
    with reserved_port() as port:
        login = Login(tmp_path / "ssh", far_slurm, port)
    made = Place(tmp_path, slurm)
    made.environment["PATH"] = f"{login.bin}:{os.environ['PATH']}"
    yield made
    login.close()


def write_config(place: Place, *, on_fault: str = "recover", **site: object) -> None:
    """Write a run.yaml of one node here and one at the other site."""
    # A login shell of the job has a search path of its own.
    setup = [f"export PATH={place.folder}/ssh/bin:$PATH"]
    # ssh begins in the home of the password file.
    options = [f"--output={place.folder}/mass.log"]
    there = {"login": "mass", "python": sys.executable, "cpus": 1, "options": options, **site}
    sites = {"mass": there}
    place.write_config("run.yaml", steps=STEPS, on_fault=on_fault, cpus=1, setup=setup, sites=sites)


def queue(slurm: Slurm) -> list[str]:
    return slurm.run("squeue", "--noheader", "--format=%i").stdout.split()


@pytest.mark.slow
def test_two_jobs_meet_and_one_that_comes_to_its_limit_is_waited_for(
    place: Place, far_slurm: Slurm
):
    place.write_config("alone.yaml", steps=STEPS, nodes=2, cpus=1)
    undisturbed = place.submit("alone.yaml", "undisturbed")
    place.wait_until_ended(undisturbed, "undisturbed")

    write_config(place, on_fault="wait", time="4h")
    job = place.submit("run.yaml", "both")
    place.wait_until_trained(job, "both", 2)
    assert "2 workers on node0, mass-node0 through slurm" in place.log("both")
    # As Slurm does before a limit.
    (held,) = queue(far_slurm)
    far_slurm.run("scancel", "--batch", "--signal=USR1", held)
    place.wait_until_ended(job, "both")

    assert place.finished_losses("both") == place.finished_losses("undisturbed")
    assert far_slurm.job(held)["Restarts"] == "1"
    starts = [event for event in place.events("both") if isinstance(event, Started)]
    assert len(starts) == 2
    assert "it goes back into the queue" in (place.folder / "mass.log").read_text()
    # Nobody needs the other site's nodes any more.
    wait_for(lambda: not queue(far_slurm), "the other site's job has ended")


@pytest.mark.parametrize(
    ("site", "code", "message"),
    [
        ({"login": "nowhere.invalid"}, "host-unreachable", "nowhere.invalid cannot be entered"),
        ({"partition": "gone"}, "launcher-unusable", "slurm.sites.mass.partition"),
    ],
)
def test_site_that_refuses_leaves_nothing_in_a_queue(
    place: Place, far_slurm: Slurm, site: dict[str, object], code: str, message: str
):
    write_config(place, **site)
    done = place.farspan("slurm", "run.yaml", "--run", "runs/refused")
    assert done.returncode != 0
    assert code in done.stderr
    assert message in done.stderr
    assert not queue(place.slurm)
    assert not queue(far_slurm)


def test_plan_counts_the_nodes_that_the_other_site_offers(place: Place):
    write_config(place, rtt="1ms")
    done = place.farspan("plan", "run.yaml", "--launcher", "slurm")
    assert done.returncode == 0, done.stderr
    answer = " ".join(done.stdout.split())
    assert "2 cpu-avx2 at slurm and mass" in answer
    assert "data on all devices (2 cpu-avx2) is fastest" in answer
