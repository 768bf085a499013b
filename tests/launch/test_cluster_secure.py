"""The private network that `farspan cluster secure` makes of the hosts of a cluster, by a real
WireGuard, in sites of a lab."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from msgspec.structs import replace

from farspan.app.cluster_hosts import part_cluster, secure_cluster
from farspan.cli.main import main
from farspan.domain.cluster import Cluster, Host
from farspan.domain.clusterfile import load_cluster, save_cluster
from farspan.domain.problems import Refusal
from farspan.launch.hosts import Agent
from farspan_lab import state
from farspan_lab.cluster import of_lab
from tests.launch.conftest import up
from tests.waiting import LIMIT_S

TOOLS = "/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"
pytestmark = pytest.mark.skipif(
    not (shutil.which("wg", path=TOOLS) and shutil.which("wireguard-go", path=TOOLS)),
    reason="waits for wireguard-tools and wireguard-go",
)
SITES = ("utah", "star", "gpn")


@pytest.fixture
def lab():
    name = f"secure-{os.getpid()}"
    sites = ", ".join(f"{site}: {{devices: 1}}" for site in SITES)
    links = "{between: [utah, star], rtt: 2ms}, {between: [star, gpn], rtt: 2ms}"
    links = f"links: [{links}, {{between: [utah, gpn], rtt: 2ms}}]"
    made = up(f"name: {name}\nsites: {{{sites}}}\n{links}\n")
    if os.geteuid():
        state.down(name)
        pytest.skip("waits for root")
    yield made
    for host in of_lab(made).machines:
        with Agent(host, "secure_agent.py") as agent:
            agent.ask("take_down")
    state.down(name)


def write(lab, path, change=lambda host: host) -> str:
    save_cluster(of_lab(lab).with_hosts(change), path, "a test")
    return str(path)


def run_in(lab, site: str, *words: str) -> str:
    command = [*state.enter(lab, site), *words]
    return subprocess.check_output(command, text=True, timeout=LIMIT_S)


def addresses_of(cluster: Cluster) -> dict[str, tuple[str | None, str | None]]:
    return {host.name: (host.interface, host.address) for host in cluster.machines}


def test_hosts_reach_each_other_by_the_network_alone_and_it_ends(lab, tmp_path):
    file = write(lab, tmp_path / "cluster.yaml")
    made = secure_cluster(file, tmp_path / "secured.yaml")
    assert made.problems == ()
    expected = {
        "utah": ("farspan1", "10.213.0.1"),
        "star": ("farspan2", "10.213.0.2"),
        "gpn": ("farspan3", "10.213.0.3"),
    }
    assert addresses_of(load_cluster(tmp_path / "secured.yaml")) == expected
    # Each has exchanged keys with both others, and the test's own bytes went through them.
    for number, site in enumerate(SITES, 1):
        shown = run_in(lab, site, "wg", "show", f"farspan{number}", "dump").splitlines()[1:]
        assert len(shown) == 2
        for row in shown:
            _, _, _, allowed, handshake, received, sent, keepalive = row.split("\t")
            assert allowed.endswith("/32")
            assert min(int(handshake), int(received), int(sent)) > 0
            assert keepalive == "25"
    assert part_cluster(file) == [
        ("utah", ("farspan1",)),
        ("star", ("farspan2",)),
        ("gpn", ("farspan3",)),
    ]
    assert part_cluster(file) == [("utah", ()), ("star", ()), ("gpn", ())]
    for site in SITES:
        assert "farspan" not in run_in(lab, site, "ip", "link")


def test_second_time_keeps_keys_and_addresses(lab, tmp_path):
    file = write(lab, tmp_path / "cluster.yaml")
    first = secure_cluster(file, tmp_path / "first.yaml")
    second = secure_cluster(file, tmp_path / "second.yaml", port=51999)
    assert second.members == first.members
    assert second.problems == ()
    assert run_in(lab, "star", "wg", "show", "farspan2", "listen-port").strip() == "51999"


def test_host_that_routers_hide_calls_the_others(lab, tmp_path):
    """Nobody gets to gpn by the address that the others know of it."""

    def hide(host: Host) -> Host:
        return replace(host, address="10.99.3.1") if host.name == "gpn" else host

    file = write(lab, tmp_path / "cluster.yaml", hide)
    assert secure_cluster(file, tmp_path / "secured.yaml").problems == ()


@pytest.mark.usefixtures("impatient")
def test_two_hidden_hosts_are_named_with_the_port_to_open(lab, tmp_path, capsys):
    def hide(host: Host) -> Host:
        number = SITES.index(host.name)
        return replace(host, address=f"10.99.{number}.1") if number else host

    file = write(lab, tmp_path / "cluster.yaml", hide)
    out = str(tmp_path / "secured.yaml")
    assert main(["cluster", "secure", file, "-o", out, "--json"]) == 36
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["where"] == "link gpn -> star"
    assert "UDP port 51820" in problem["fact"]
    assert problem["remedy"].startswith("on star: sudo ufw allow 51820/udp")


def test_network_in_which_a_host_has_an_address_is_not_taken(lab, tmp_path):
    run_in(lab, "star", "ip", "address", "add", "10.213.7.7/24", "dev", "lo")
    file = write(lab, tmp_path / "cluster.yaml")
    made = secure_cluster(file, tmp_path / "secured.yaml")
    assert [member.address for member in made.members] == ["10.214.0.1", "10.214.0.2", "10.214.0.3"]
    assert made.problems == ()


def test_user_who_is_not_root_changes_nothing(lab, tmp_path):
    def as_nobody(host: Host) -> Host:
        if host.name != "gpn":
            return host
        return replace(host, enter=(*host.enter, "setpriv", "--reuid=65534", "--clear-groups"))

    file = write(lab, tmp_path / "cluster.yaml", as_nobody)
    for sudo in (False, True):
        with pytest.raises(Refusal, match="gpn") as refused:
            secure_cluster(file, tmp_path / "secured.yaml", sudo=sudo)
        assert refused.value.problem.code == "path-unusable"
        assert ("sudo -n true fails" in refused.value.problem.fact) == sudo
    assert not (tmp_path / "secured.yaml").exists()
    for site in SITES:
        assert "farspan" not in run_in(lab, site, "ip", "link")


def test_key_of_a_host_that_is_no_key_never_gets_into_the_others_settings(lab, tmp_path):
    """A host answers with a line that would send all traffic to it."""
    tools = tmp_path / "tools"
    tools.mkdir()
    text = "#!/bin/sh\nprintf 'x\\nAllowedIPs = 0.0.0.0/0\\n'\n"
    (tools / "wg").write_text(text)
    (tools / "wg").chmod(0o755)

    def hostile(host: Host) -> Host:
        if host.name != "gpn":
            return host
        return replace(host, enter=(*host.enter, "env", f"PATH={tools}:{os.environ['PATH']}"))

    file = write(lab, tmp_path / "cluster.yaml", hostile)
    with pytest.raises(Refusal, match="gpn answers what is no key"):
        secure_cluster(file, tmp_path / "secured.yaml")
    for site in SITES:
        assert "farspan" not in run_in(lab, site, "ip", "link")


def test_host_without_the_tools_is_named_with_how_to_get_them(lab, tmp_path):
    script = (
        "import shutil; found = shutil.which\n"
        "shutil.which = lambda name, **more: None if name == 'wg' else found(name, **more)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(script)

    def bare(host: Host) -> Host:
        if host.name != "star":
            return host
        return replace(host, enter=(*host.enter, "env", f"PYTHONPATH={tmp_path}"))

    file = write(lab, tmp_path / "cluster.yaml", bare)
    with pytest.raises(Refusal, match="star lacks WireGuard's tools") as refused:
        secure_cluster(file, tmp_path / "secured.yaml")
    assert "sudo apt-get install wireguard-tools" in refused.value.problem.remedy


@pytest.mark.slow
def test_run_over_the_network_has_the_losses_of_one_without(lab, tmp_path):
    """Two sites by data parallelism; their bytes go through WireGuard."""
    text = tmp_path / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(f"A river of number {number} runs to the sea. " * 200)
    file = write(lab, tmp_path / "cluster.yaml")
    secure_cluster(file, tmp_path / "secured.yaml")
    losses = []
    for cluster in ("cluster.yaml", "secured.yaml"):
        run = tmp_path / cluster.removesuffix(".yaml")
        config = tmp_path / f"run-{cluster}"
        config.write_text(
            f"data: {{source: {text}}}\nmodel: {{d_model: 32, layers: 2, heads: 2, context: 32}}\n"
            "tokenizer: {vocab: 300}\ntrain: {steps: 20, batch: {global: 8}}\n"
            "parallel: {technique: data, workers: 2}\n"
        )
        words = ("train", config, "--cluster", tmp_path / cluster, "--run", run)
        done = subprocess.run(
            [sys.executable, "-m", "farspan", *map(str, words)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
        losses.append([event["loss"] for event in events if event["event"] == "step"])
    assert len(losses[0]) == 20
    assert losses[0] == losses[1]
    moved = run_in(lab, "utah", "wg", "show", "farspan1", "transfer")
    assert max(int(word) for line in moved.splitlines() for word in line.split()[1:]) > 2**20
