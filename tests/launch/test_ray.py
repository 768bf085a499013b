"""Ray's token reaches hosts through standard input alone; a node has a folder of its own, which
goes with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from farspan.domain.cluster import Cluster, Device, Host, Site
from farspan.launch.launchers import launch_workers
from farspan.launch.launchers.ray import package_version
from tests import tiny
from tests.launch.test_launchers import TRAIN
from tests.waiting import LIMIT_S, wait_for

pytestmark = pytest.mark.slow

#: An `enter` command that runs all but Ray; of its node and driver it keeps what they are given,
#: until they are to end.
KEEP = """\
case "$*" in
  *ray_node*) name=node ;;
  *ray_driver*) name=driver ;;
  *) exec "$@" ;;
esac
printf "%s\\n" "$@" > {folder}/$name.words
cat > {folder}/$name.input
"""
SECRET = "0123456789abcdef" * 4


def given(tmp_path: Path, launcher: str, expected: list[str]) -> dict[str, tuple[str, str]]:
    """Words and standard input of each Ray process that a launcher starts on a host that is
    entered."""
    enter = ("sh", "-c", KEEP.format(folder=tmp_path), "sh")
    device = Device(kind="cpu-avx2", backend="cpu", memory=2**30)
    host = Host(
        name="here", devices=(device,), address="127.0.0.1", enter=enter, python=sys.executable
    )
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN))
    with launch_workers(
        launcher, run.load_plan(), run, Cluster(sites=(Site(name="here", hosts=(host,)),))
    ):
        wait_for(
            lambda: all((tmp_path / f"{name}.input").exists() for name in expected),
            "the words of all",
        )
    return {
        name: ((tmp_path / f"{name}.words").read_text(), (tmp_path / f"{name}.input").read_text())
        for name in expected
    }


@pytest.fixture(autouse=True)
def _ray():
    if package_version("ray") is None:
        pytest.skip("waits for farspan[ray]")


def test_ray_token_of_a_job_is_sent_to_each_host_by_standard_input(tmp_path):
    found = given(tmp_path, "ray", ["node", "driver"])
    (token,) = {said.splitlines()[0] for _, said in found.values()}
    secret = found["driver"][1].splitlines()[
        1
    ]  # Of the run, which the driver hands to its workers.
    assert len(secret) == 64 and all(secret not in words for words, _ in found.values())
    assert len(token.strip()) == 64
    for words, _ in found.values():
        assert (
            token.strip() not in words
            and "RAY_AUTH_TOKEN" not in words
            and "RAY_AUTH_MODE=token" in words
        )
        assert "temp-dir" not in words, "folders of this machine mean nothing there"


@pytest.mark.parametrize("how", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_the_token_of_a_user_stands_on_no_command_line(tmp_path, monkeypatch, how):
    (tmp_path / "token").write_text(f"{SECRET}\n")
    for name, value in {
        "RAY_AUTH_TOKEN": SECRET,
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"),
    }.items():
        monkeypatch.setenv(name, value) if name == how else monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    words, said = given(tmp_path, "ray:10.0.0.1:6379", ["driver"])["driver"]
    assert said.splitlines()[0] == SECRET and SECRET not in words and "RAY_AUTH_TOKEN" not in words


def test_ray_cluster_with_authentication_disabled_gets_no_token(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    words, said = given(tmp_path, "ray:10.0.0.1:6379", ["driver"])["driver"]
    assert said.splitlines()[0] == "" and "RAY_AUTH_MODE=disabled" in words


def test_a_node_takes_the_token_from_its_input_and_its_folder_with_it(tmp_path):
    """With a stand-in for `ray start`, which says what it is given."""
    (tmp_path / "ray" / "scripts").mkdir(parents=True)
    for package in ("ray", "ray/scripts"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "ray" / "scripts" / "scripts.py").write_text(
        "import os, sys, time\nprint(os.environ['RAY_AUTH_TOKEN'], *sys.argv[1:], "
        "flush=True)\ntime.sleep(100000)\n"
    )
    node = subprocess.Popen(
        [sys.executable, "-m", "farspan.launch.ray_node", "--head"],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "RAY_AUTH_TOKEN": "of the user"},
    )
    with node:
        assert node.stdin is not None and node.stdout is not None
        node.stdin.write(f"{SECRET}\n".encode())
        token, *words = node.stdout.readline().decode().split()
        assert (token, words[:2], words[-1]) == (SECRET, ["start", "--block"], "--head")
        folder = Path(words[2].removeprefix("--temp-dir="))
        assert folder.is_dir() and len(str(folder)) < 20
        node.stdin.close()
        assert node.wait(timeout=LIMIT_S) == 143
    assert not folder.exists()
