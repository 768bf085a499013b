"""Clusters as other tools' files: what they hold of a cluster and of the user's ssh configuration,
judged by Ray's own schema, and by SkyPilot's in an environment of its own."""

from __future__ import annotations

import json
import re
import subprocess
import venv
from pathlib import Path

import pytest
import yaml

from farspan.app.cluster_hosts import export_cluster
from farspan.cli.main import main
from farspan.domain.clusterfile import load_cluster
from farspan.domain.problems import Refusal
from farspan.launch.host_pythons import record_python
from farspan.launch.own_release import find_pip_wheel
from tests.waiting import LIMIT_S

SKYPILOT = "skypilot==0.14.1"


@pytest.fixture
def ssh_config(tmp_path) -> Path:
    """North is entered directly and south through a gateway, by two users."""
    (tmp_path / "key").write_text("")
    path = tmp_path / "config"
    path.write_text(
        f"Host *\n IdentityFile {tmp_path}/key\n"
        "Host north\n HostName 203.0.113.7\n User ada\n"
        "Host east\n HostName 203.0.113.8\n User ada\n"
        "Host south\n HostName 10.0.0.7\n User grace\n ProxyJump gateway.example.org\n"
        "Host odd\n HostName 203.0.113.9\n User ada\n Port 2222\n"
    )
    return path


def write_cluster(folder: Path, config: Path, **hosts: str) -> str:
    """A cluster file of hosts, each a site of its own with these devices."""
    lines = ["sites:"]
    for name, devices in hosts.items():
        enter = f"enter: [ssh, -F, {config}, {name}]"
        address = f"address: 10.1.0.{len(lines)}"
        lines.append(f"  at-{name}: {{hosts: {{{name}: {{{enter}, {address}, {devices}}}}}}}")
    names = [f"at-{name}" for name in hosts]
    link = f"{{between: [{', '.join(names[:2])}], rtt: 57ms, bandwidth: 1Gbit/s}}"
    lines.append(f"links: [{link}]")
    path = folder / "own.yaml"
    path.write_text("\n".join([*lines, ""]))
    return str(path)


GPUS = "devices: [a30, a30]"
CPU = "devices: [{kind: cpu-avx2, memory: 8GB}]"


@pytest.fixture
def cluster(tmp_path, ssh_config) -> str:
    return write_cluster(tmp_path, ssh_config, north=GPUS, east=CPU)


def run_start(
    content: dict, kind: str, own_addresses: str, folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run the commands by which Ray would start a head or a worker on a machine with these
    addresses."""
    text = f"{content['setup_commands'][0]}\n{content[f'{kind}_start_ray_commands'][-1]}"
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, printed in (("hostname", own_addresses), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\necho "{printed}" "$@"\n')
        (tools / name).chmod(0o755)
    return subprocess.run(
        ["bash", "-c", text],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(folder)},
    )


def test_ray_accepts_the_file_and_finds_the_machines_in_it(cluster, tmp_path):
    util = pytest.importorskip("ray.autoscaler._private.util", reason="waits for Ray")
    out = tmp_path / "out"
    exported = export_cluster(cluster, "ray", out)
    content = yaml.safe_load((out / "ray-cluster.yaml").read_text())
    util.validate_config(util.prepare_config(dict(content)))
    assert content["cluster_name"] == "own"
    assert content["provider"]["head_ip"] == "203.0.113.7"
    # The head enters it, not this machine.
    assert content["provider"]["worker_ips"] == ["10.1.0.2"]
    assert content["auth"] == {"ssh_user": "ada", "ssh_private_key": f"{tmp_path}/key"}
    assert any("--launcher ray:10.1.0.1:6379" in note for note in exported.notes)


def test_start_of_ray_has_the_labels_and_the_interpreter_of_its_machine(cluster, tmp_path):
    for host in load_cluster(Path(cluster)).machines:
        record_python(host, f"{tmp_path}/tools/python")
    export_cluster(cluster, "ray", tmp_path)
    content = yaml.safe_load((tmp_path / "ray-cluster.yaml").read_text())
    head = run_start(content, "head", "127.0.0.1 10.1.0.1", tmp_path)
    assert head.returncode == 0, head.stderr
    assert "--head --port=6379" in head.stdout
    assert "--node-ip-address=10.1.0.1 --num-cpus=2 --num-gpus=2" in head.stdout
    assert "--labels=farspan-host=north,site=at-north" in head.stdout
    worker = run_start(content, "worker", "10.1.0.2 fe80::1", tmp_path)
    assert worker.returncode == 0, worker.stderr
    assert "--address=10.1.0.1:6379 --node-ip-address=10.1.0.2 --num-cpus=1" in worker.stdout
    assert "--labels=farspan-host=east,site=at-east" in worker.stdout
    # Of an address that only begins or ends as one of the file.
    foreign = run_start(content, "worker", "10.1.0.21 110.1.0.2", tmp_path)
    assert foreign.returncode == 1
    assert "no host of the cluster file" in foreign.stderr


def test_ray_is_refused_hosts_that_it_cannot_enter_alike_with_every_reason(
    tmp_path, ssh_config, capsys
):
    path = write_cluster(tmp_path, ssh_config, north=GPUS, south=GPUS, odd=CPU)
    assert main(["cluster", "export", path, "--to", "ray", "-o", str(tmp_path)]) == 40
    fact = capsys.readouterr().err
    for reason in ("one user, not ada, grace", "odd: 2222"):
        assert reason in fact
    assert not (tmp_path / "ray-cluster.yaml").exists()


@pytest.mark.parametrize(
    ("jump", "command"),
    [
        ("gateway.example.org", "ssh -W %h:%p ssh://gateway.example.org"),
        ("ada@outer,inner:2222", "ssh -J ada@outer -W %h:%p ssh://inner:2222"),
    ],
)
def test_jump_to_the_first_host_is_in_rays_file(tmp_path, ssh_config, jump, command):
    path = write_cluster(tmp_path, ssh_config, south=GPUS, north=GPUS)
    text = ssh_config.read_text().replace("gateway.example.org", jump)
    ssh_config.write_text(text.replace("grace", "ada"))
    export_cluster(path, "ray", tmp_path)
    content = yaml.safe_load((tmp_path / "ray-cluster.yaml").read_text())
    assert content["auth"]["ssh_proxy_command"] == command


def test_host_that_is_not_entered_by_ssh_is_refused_by_name(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(f"sites: {{a: {{hosts: {{box: {{enter: [docker, exec, box], {CPU}}}}}}}}}\n")
    with pytest.raises(Refusal, match="box is not entered by ssh") as refused:
        export_cluster(str(path), "ray", tmp_path)
    assert "docker exec box" in refused.value.problem.fact


@pytest.mark.parametrize(
    ("changes", "code", "fact"),
    [
        ({"10.1.0.1": "8.8.8.8"}, "launcher-unusable", "reached from the internet"),
        ({"10.1.0.1": "fd00::1"}, "cannot-export", "address: of north is no address of IPv4"),
        ({"10.1.0.1": "north.lab"}, "cannot-export", "address: of north is no address of IPv4"),
        ({"at-north": "the north"}, "cannot-export", "a label has letters"),
    ],
)
def test_ray_is_refused_what_it_could_not_start(cluster, tmp_path, changes, code, fact):
    path = Path(cluster)
    for old, new in changes.items():
        path.write_text(path.read_text().replace(old, new))
    with pytest.raises(Refusal) as refused:
        export_cluster(cluster, "ray", tmp_path)
    assert refused.value.problem.code == code
    assert fact in refused.value.problem.fact


@pytest.mark.parametrize("tool", ["ray", "skypilot"])
def test_file_that_is_there_is_not_written_over(cluster, tmp_path, tool):
    exported = export_cluster(cluster, tool, tmp_path)
    for file in exported.files:
        (tmp_path / file).write_text("mine")
    with pytest.raises(Refusal, match="exists") as refused:
        export_cluster(cluster, tool, tmp_path)
    assert refused.value.problem.code == "run-exists"
    assert all((tmp_path / file).read_text() == "mine" for file in exported.files)


def test_tool_that_is_not_known_gets_the_nearest_one(cluster, capsys):
    assert main(["cluster", "export", cluster, "--to", "skypilott"]) == 15
    assert "--to skypilot" in capsys.readouterr().err


def test_skypilot_gets_a_pool_for_each_site_and_a_task_for_any_machine(cluster, tmp_path):
    exported = export_cluster(cluster, "skypilot", tmp_path)
    assert exported.version == SKYPILOT.replace("==", " ")
    pools = yaml.safe_load((tmp_path / "ssh_node_pools.yaml").read_text())
    entries = {}
    for number, name in ((7, "at-north"), (8, "at-east")):
        entry = {"ip": f"203.0.113.{number}", "user": "ada", "identity_file": f"{tmp_path}/key"}
        entries[name] = {"hosts": [entry]}
    assert pools == entries
    task = yaml.safe_load((tmp_path / "farspan-task.yaml").read_text())
    assert task["resources"]["any_of"] == [
        {"infra": "ssh/at-north", "accelerators": {"A30": 2}},
        {"infra": "ssh/at-east", "cpus": "1+"},
    ]
    ((there, here),) = task["file_mounts"].items()
    assert Path(here).is_file()
    assert there.removeprefix("~/") in task["setup"]


def test_hosts_that_ssh_knows_by_name_have_it_in_skypilots_pools(cluster, tmp_path):
    path = Path(cluster)
    path.write_text(re.sub(r"enter: [^]]*], ", "", path.read_text()))
    export_cluster(cluster, "skypilot", tmp_path)
    pools = yaml.safe_load((tmp_path / "ssh_node_pools.yaml").read_text())
    assert pools == {"at-north": {"hosts": ["north"]}, "at-east": {"hosts": ["east"]}}


def test_skypilot_is_refused_names_and_ways_that_it_does_not_know(tmp_path, ssh_config):
    path = Path(write_cluster(tmp_path, ssh_config, south=GPUS, north=GPUS))
    odd = path.rename(tmp_path / "my cluster.yaml")
    with pytest.raises(Refusal, match="'my cluster' cannot be the name of a task") as refused:
        export_cluster(str(odd), "skypilot", tmp_path)
    assert "south is entered by an ssh command with options" in refused.value.problem.fact


@pytest.mark.slow
def test_skypilots_own_reader_accepts_pools_and_task(cluster, tmp_path):
    """It does not install beside our pins: it has an environment of its own."""
    export_cluster(cluster, "skypilot", tmp_path)
    own = tmp_path / "own"
    venv.create(own, with_pip=False)
    python = str(own / "bin" / "python")
    pip = [python, f"{find_pip_wheel()}/pip", "install", "--quiet", SKYPILOT]
    subprocess.run(pip, check=True, timeout=10 * LIMIT_S)
    program = (
        "import json, sys, yaml\n"
        "import sky\n"
        "from sky.ssh_node_pools import utils\n"
        "pools = utils.load_ssh_targets(sys.argv[1])\n"
        "hosts = [host['ip'] for name, pool in pools.items()\n"
        "         for host in utils.prepare_hosts_info(name, pool)]\n"
        "task = sky.Task.from_yaml(sys.argv[2])\n"
        "print(json.dumps([hosts, len(task.resources), task.run]))\n"
    )
    paths = [str(tmp_path / name) for name in ("ssh_node_pools.yaml", "farspan-task.yaml")]
    done = subprocess.run(
        [python, "-c", program, *paths],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=tmp_path,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    hosts, choices, run = json.loads(done.stdout.splitlines()[-1])
    assert (hosts, choices) == (["203.0.113.7", "203.0.113.8"], 2)
    assert run == "~/farspan/bin/farspan train run.yaml --until-done\n"
