"""Slices of cluster files in fablib itself: its own validation against a recorded summary of
resources, and its own client against a stand-in of the orchestrator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farspan.app.fabric import make_slice, plan_slice
from farspan.domain.clusterfile import load_cluster
from farspan.domain.fabric import GPU_MODELS, SUMMARY_NAMES, SliceCheck
from farspan.domain.problems import Refusal
from farspan.launch import fabric_setup
from farspan.launch.clusters import find_cluster, shipped_clusters
from farspan.launch.fabric_client import PYTHON_VARIABLE, FabricProcess
from farspan.planning.fabric_layout import lay_out_slice
from tests.environments import install_apart
from tests.fabric.orchestrator import FABLIB, Orchestrator, orchestrator_server
from tests.fabric.resources import LOCATIONS, write_summary
from tests.fabric.test_refusals import token_file
from tests.waiting import wait_for

pytestmark = pytest.mark.slow
FABRIC_CLUSTERS = [name for name in shipped_clusters() if name.startswith("fabric/")]


@pytest.fixture(scope="session")
def fablib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has fablib."""
    python = install_apart(FABLIB, tmp_path_factory.mktemp("fablib"), "FARSPAN_TEST_FABLIB")
    if python is None:
        pytest.skip("fablib cannot be installed here")
    return python


@pytest.fixture
def home(fablib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder of a user with fablib, who has no credentials."""
    for name in [name for name in os.environ if name.startswith("FABRIC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FARSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(PYTHON_VARIABLE, str(fablib))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def testbed(fablib: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Orchestrator]:
    """A stand-in of the testbed, and a user's token and keys for it."""
    projects = [{"uuid": "p1", "name": "mine", "tags": ["Component.GPU"]}]
    claims = {"exp": time.time() + 86400, "projects": projects}
    # With it, fablib asks nobody whether the token is valid.
    valid = {"expires_at": "2999-01-01 00:00:00 +0000"}
    monkeypatch.setenv("FABRIC_TOKEN_LOCATION", token_file(home, claims, **valid))
    monkeypatch.setenv("FABRIC_PROJECT_ID", "p1")
    monkeypatch.setenv("FABRIC_BASTION_USERNAME", "ada_0001")
    key = home / "slice_key"
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-b", "3072", "-N", "", "-f", key], check=True)
    monkeypatch.setenv("FABRIC_SLICE_PRIVATE_KEY_FILE", str(key))
    monkeypatch.setenv("FABRIC_SLICE_PUBLIC_KEY_FILE", f"{key}.pub")
    with orchestrator_server(fablib) as orchestrator:
        monkeypatch.setenv("FABRIC_ORCHESTRATOR_HOST", orchestrator.address)
        monkeypatch.setenv("FABRIC_CREDMGR_HOST", orchestrator.address)
        yield orchestrator


def run_farspan(*words: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, "-m", "farspan", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )


def test_components_are_those_of_fablib(fablib: Path, home: Path):
    code = (
        "from fabrictestbed_extensions.fablib.constants import Constants as c; import json; "
        "print(json.dumps([sorted(c.COMPONENT_MODELS), c.GPU_TESLA_T4, c.GPU_RTX6000, c.GPU_A30, "
        "c.GPU_A40]))"
    )
    done = subprocess.run([fablib, "-c", code], capture_output=True, text=True, check=True)
    models, *in_summaries = json.loads(done.stdout.splitlines()[-1])
    assert set(GPU_MODELS.values()) <= set(models)
    assert list(SUMMARY_NAMES.values()) == in_summaries


THREE = """sites:
  utah: {hosts: {vm1: {devices: [rtx6000, rtx6000]}, vm2: {devices: [t4]}}}
  mass: {hosts: {vm3: {devices: [rtx6000]}}}
"""


def test_built_slices_pass_fablibs_validation(home: Path):
    (home / "three.yaml").write_text(THREE)
    errors = {}
    with FabricProcess(write_summary(home)) as process:
        for name in ("three.yaml", *FABRIC_CLUSTERS):
            layout = lay_out_slice(find_cluster(name), name, list(LOCATIONS))
            check = process.ask("check_slice", SliceCheck, layout=layout, hours=24)
            errors[name] = list(check.errors)
            # Built as it was laid out.
            built = check.built
            assert built.networks == {each.name: each.kind for each in layout.networks}
            for vm, asked in zip(built.vms, layout.vms, strict=True):
                assert (vm.name, vm.site, vm.gpus) == (asked.name, asked.site, asked.gpus)
                assert (vm.cores, vm.ram_gb) == (asked.cores, asked.ram_gb)
                assert (vm.address, vm.user) == (asked.address, "ubuntu")
                joined = [each.name for each in layout.networks if vm.name in each.vms]
                assert [card.network for card in vm.cards] == joined
    assert errors == {
        "three.yaml": [],
        "fabric/gat-amst": [],
        "fabric/tacc-tacc": [],
        "fabric/utah-mass": [],
        # These have no such GPUs in the recorded summary.
        "fabric/bris-star": ["vm1", "vm2"],
        "fabric/utah-gpn": ["vm2"],
    }


def test_commands_on_a_recorded_summary(home: Path):
    summary = write_summary(home)
    question = ("--model", "gpt2m", "--tokens", "16M", "--technique", "fsdp")
    done = run_farspan("fabric", "offers", *question, "--resources", summary, "-o", "one.yaml")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["#", "GPUs", "at", "free", "technique", "done", "in"]
    assert "2 a30" in lines[1] and "now" in lines[1]
    assert load_cluster(home / "one.yaml").summary == "2 a30 in 1 host at 1 site"
    done = run_farspan("fabric", "new", "one.yaml", "--print", "--resources", summary)
    assert done.returncode == 0, done.stderr
    assert "slice one, default_ubuntu_22, for 24 hours" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    done = run_farspan("fabric", "new", "one.yaml", "--resources", summary)
    assert "requested of the testbed itself" in done.stderr
    done = run_farspan("fabric", "new", "fabric/bris-star", "--print", "--resources", summary)
    assert done.returncode == 28 and "FABRIC has no room for vm1, vm2 now" in done.stderr
    done = run_farspan("fabric", "import", "x", "--json")
    problem = json.loads(done.stdout)["problem"]
    assert done.returncode == 66 and problem["remedy"] == "fabric-cli tokens create"


def test_offers_need_no_credentials(fablib: Path, home: Path, monkeypatch: pytest.MonkeyPatch):
    with orchestrator_server(fablib) as orchestrator:
        monkeypatch.setenv("FABRIC_ORCHESTRATOR_HOST", orchestrator.address)
        question = ("--model", "gpt2", "--tokens", "1M", "--technique", "data", "--json")
        done = run_farspan("fabric", "offers", *question)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert len(answer["offers"]) > 7 and "is not there" in answer["no_calendar"]


def test_slice_is_made_imported_extended_and_deleted(
    testbed: Orchestrator, home: Path, monkeypatch: pytest.MonkeyPatch
):
    entered = list[str]()
    monkeypatch.setattr(
        fabric_setup, "set_up_vms", lambda record, cluster, report: entered.append(record.name)
    )
    with FabricProcess() as process:
        planned = plan_slice(process, "fabric/gat-amst", "mine", 48)
        made = make_slice(process, planned, home / "mine.yaml")
    assert entered == ["mine"]
    cluster = load_cluster(home / "mine.yaml")
    assert cluster.links == find_cluster("fabric/gat-amst").links
    assert [host.address for host in cluster.hosts] == ["192.168.77.1", "192.168.77.2"]
    config = (home / "mine.ssh_config").read_text()
    assert "HostName 2001:db8::1" in config and "User ada_0001" in config
    assert all(card.mac for vm in made.record.vms for card in vm.cards)

    # A second of that name is refused, and the first can be imported as one of anybody's.
    done = run_farspan("fabric", "new", "fabric/gat-amst", "--name", "mine", "--print")
    assert done.returncode == 18, done.stderr
    done = run_farspan("fabric", "import", "mine", "-o", "again.yaml")
    assert done.returncode == 0, done.stderr
    again = load_cluster(home / "again.yaml")
    assert again.summary == "4 a30 in 2 hosts at 2 sites"
    assert again.links[0].rtt_s == pytest.approx(0.103, rel=0.1)
    assert 47 * 3600 < again.lease_s(["vm1"]) <= 48 * 3600
    assert [host.enter for host in again.hosts] != [host.enter for host in cluster.hosts]

    done = run_farspan("fabric", "extend", "mine", "--hours", "72", "--json")
    assert done.returncode == 0, done.stderr
    (held,) = testbed.slices.values()
    assert json.loads(done.stdout)["lease_end"] == held["lease_end_time"]
    done = run_farspan("fabric", "delete", "mine")
    assert done.stdout == "mine: deleted\n" and testbed.slices == {}
    done = run_farspan("fabric", "import", "mine")
    assert done.returncode == 10 and "there is no such slice" in done.stderr


def test_slice_that_fails_is_deleted(testbed: Orchestrator, home: Path):
    testbed.new_state = "StableError"
    done = run_farspan("fabric", "new", "fabric/gat-amst")
    assert done.returncode == 67 and "did not become ready" in done.stderr
    assert [change for change, _ in testbed.changes] == ["create", "delete"]
    assert not (home / "gat-amst-slice.yaml").exists()


def test_interrupt_deletes_the_slice(testbed: Orchestrator, home: Path):
    testbed.new_state = "Configuring"
    words = [sys.executable, "-m", "farspan", "fabric", "new", "fabric/gat-amst"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: testbed.changes, "the slice is requested", process)
    process.terminate()
    _, printed = process.communicate(timeout=300)
    assert process.returncode == 130, printed
    assert testbed.slices == {}


def test_room_later_is_named(testbed: Orchestrator, home: Path):
    testbed.slot = "2999-01-01T00:00:00+00:00"
    done = run_farspan("fabric", "new", "fabric/bris-star")
    assert done.returncode == 28 and "free in 3" in done.stderr
    assert testbed.changes == []


def test_project_without_gpus_is_refused(
    testbed: Orchestrator, home: Path, monkeypatch: pytest.MonkeyPatch
):
    claims: dict[str, Any] = {"projects": [{"uuid": "p1", "tags": ["VM.NoLimit"]}]}
    valid = {"expires_at": "2999-01-01 00:00:00 +0000"}
    monkeypatch.setenv("FABRIC_TOKEN_LOCATION", token_file(home, claims, **valid))
    with FabricProcess() as process, pytest.raises(Refusal, match="Permission denied"):
        plan_slice(process, "fabric/gat-amst")
