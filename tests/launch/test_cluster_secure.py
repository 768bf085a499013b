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
    for site in SITES:
        # wireguard-go listens there: a host has a folder of its own.
        run_in(made, site, "mount", "-t", "tmpfs", "none", "/run")
    yield made
    for site in SITES:
        run_in(made, site, "sh", "-c", "ip link delete dev farspan0 2> /dev/null || true")
    state.down(name)


def write(lab, path, change=lambda host: host, sites=SITES) -> str:
    cluster = of_lab(lab)
    places = [number for number, host in enumerate(cluster.machines) if host.name in sites]
    save_cluster(cluster.only(places).with_hosts(change), path, "a test")
    return str(path)


def run_in(lab, site: str, *words: str) -> str:
    command = [*state.enter(lab, site), *words]
    return subprocess.check_output(command, text=True, timeout=LIMIT_S)


def addresses_of(cluster: Cluster) -> dict[str, str | None]:
    assert {host.interface for host in cluster.machines} == {"farspan0"}
    return {host.name: host.address for host in cluster.machines}


def has_interface(lab, site: str) -> bool:
    return "farspan0" in run_in(lab, site, "ip", "link")


def refusal_of(words: list[str], capsys) -> dict:
    assert main(words) != 0
    answer = json.loads(capsys.readouterr().out)
    return answer.get("problem") or answer["problems"][0]


def with_tool(tmp_path, name: str, text: str, site: str):
    """A change of a cluster: a site's host has another program of a name."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / name).write_text(text)
    (tools / name).chmod(0o755)

    def change(host: Host) -> Host:
        if host.name != site:
            return host
        return replace(host, enter=(*host.enter, "env", f"PATH={tools}:{os.environ['PATH']}"))

    return change


def test_hosts_reach_each_other_by_the_network_alone_and_it_ends(lab, tmp_path):
    file = write(lab, tmp_path / "cluster.yaml")
    _, problems = secure_cluster(file, tmp_path / "secured.yaml")
    assert problems == []
    expected = {"utah": "10.213.0.1", "star": "10.213.0.2", "gpn": "10.213.0.3"}
    assert addresses_of(load_cluster(tmp_path / "secured.yaml")) == expected
    # Each has exchanged keys with both others, and messages went through them.
    for site in SITES:
        shown = run_in(lab, site, "wg", "show", "farspan0", "dump").splitlines()[1:]
        assert len(shown) == 2
        for row in shown:
            _, _, _, allowed, handshake, received, sent, keepalive = row.split("\t")
            assert allowed.endswith("/32")
            assert int(handshake) > 0
            assert min(int(received), int(sent)) > 200_000
            assert keepalive == "25"
        mode = run_in(lab, site, "sh", "-c", "stat -c %a /run/farspan-wireguard-*.key")
        assert mode.strip() == "600"
    assert part_cluster(file) == [(site, True) for site in SITES]
    assert part_cluster(file) == [(site, False) for site in SITES]
    for site in SITES:
        assert not has_interface(lab, site)
        assert "farspan" not in run_in(lab, site, "ls", "/run")


def test_second_time_keeps_keys_addresses_and_the_file(lab, tmp_path):
    file = write(lab, tmp_path / "cluster.yaml")
    out = tmp_path / "secured.yaml"
    secure_cluster(file, out)
    keys = run_in(lab, "star", "wg", "show", "farspan0", "public-key")
    measured = out.read_text() + "# measured since\n"
    out.write_text(measured)
    _, problems = secure_cluster(file, out, port=51999)
    assert problems == []
    assert out.read_text() == measured
    assert run_in(lab, "star", "wg", "show", "farspan0", "public-key") == keys
    assert run_in(lab, "star", "wg", "show", "farspan0", "listen-port").strip() == "51999"


def test_host_that_leaves_or_joins_the_file_moves_no_other(lab, tmp_path):
    file = write(lab, tmp_path / "cluster.yaml", sites=("star", "gpn"))
    first, _ = secure_cluster(file, tmp_path / "two.yaml")
    # utah comes first in the file, and last into the network.
    write(lab, tmp_path / "cluster.yaml")
    second, problems = secure_cluster(file, tmp_path / "three.yaml")
    assert problems == []
    assert addresses_of(second) == {**addresses_of(first), "utah": "10.213.0.3"}
    write(lab, tmp_path / "cluster.yaml", sites=("utah", "gpn"))
    third, problems = secure_cluster(file, tmp_path / "again.yaml")
    assert problems == []
    assert addresses_of(third) == {"utah": "10.213.0.3", "gpn": "10.213.0.2"}


def test_addresses_of_the_file_hold_after_a_restart_of_all_hosts(lab, tmp_path):
    """utah joined last, though it comes first in the file."""
    file = write(lab, tmp_path / "cluster.yaml", sites=("star", "gpn"))
    secure_cluster(file, tmp_path / "two.yaml")
    write(lab, tmp_path / "cluster.yaml")
    out = tmp_path / "three.yaml"
    before, _ = secure_cluster(file, out)
    for site in SITES:
        run_in(lab, site, "ip", "link", "delete", "dev", "farspan0")
        run_in(lab, site, "sh", "-c", "rm /run/farspan-wireguard-*")
    after, problems = secure_cluster(file, out)
    assert addresses_of(after) == addresses_of(before)
    assert problems == []


def test_address_that_another_host_claims_is_nobodys_twice(lab, tmp_path):
    """gpn left the file and came back, and star has its address by now; or it lies."""
    file = write(lab, tmp_path / "cluster.yaml", sites=("utah", "gpn"))
    secure_cluster(file, tmp_path / "first.yaml")
    write(lab, tmp_path / "cluster.yaml", sites=("utah", "star"))
    secure_cluster(file, tmp_path / "second.yaml")
    write(lab, tmp_path / "cluster.yaml")
    made, problems = secure_cluster(file, tmp_path / "third.yaml")
    assert addresses_of(made) == {"utah": "10.213.0.1", "star": "10.213.0.2", "gpn": "10.213.0.3"}
    assert problems == []


def test_interface_that_somebody_ended_by_hand_leaves_nothing_in_the_way(lab, tmp_path):
    first = write(lab, tmp_path / "first.yaml", sites=("utah", "star"))
    secure_cluster(first, tmp_path / "first-secure.yaml")
    for site in ("utah", "star"):
        run_in(lab, site, "ip", "link", "delete", "dev", "farspan0")
    keys = run_in(lab, "star", "sh", "-c", "cat /run/farspan-wireguard-*.key")
    other = write(lab, tmp_path / "other.yaml", sites=("gpn", "star"))
    _, problems = secure_cluster(other, tmp_path / "other-secure.yaml")
    assert problems == []
    assert run_in(lab, "star", "sh", "-c", "cat /run/farspan-wireguard-*.key") != keys
    assert part_cluster(other) == [("star", True), ("gpn", True)]


def test_network_is_the_same_by_another_path_of_its_file(lab, tmp_path, monkeypatch):
    file = write(lab, tmp_path / "cluster.yaml", sites=("utah", "star"))
    secure_cluster(file, tmp_path / "secured.yaml")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "link.yaml").symlink_to(file)
    monkeypatch.chdir(tmp_path / "inner")
    _, problems = secure_cluster("../cluster.yaml", tmp_path / "secured.yaml")
    assert problems == []
    assert part_cluster("link.yaml") == [("utah", True), ("star", True)]


def test_host_in_another_network_is_left_there(lab, tmp_path):
    file = write(lab, tmp_path / "cluster.yaml", sites=("utah", "star"))
    secure_cluster(file, tmp_path / "secured.yaml")
    other = write(lab, tmp_path / "other.yaml", sites=("gpn", "star"))
    with pytest.raises(Refusal, match="star is in the private network of another") as refused:
        secure_cluster(other, tmp_path / "other-secured.yaml")
    assert refused.value.problem.code == "cluster-invalid"
    assert not has_interface(lab, "gpn")
    ends = dict(zip(("star", "gpn"), part_cluster(other), strict=True))
    assert ends["gpn"] == ("gpn", False)
    assert ends["star"].code == "cluster-invalid"
    assert has_interface(lab, "star")


def test_file_of_a_network_is_not_joined_again(lab, tmp_path):
    file = write(lab, tmp_path / "cluster.yaml")
    out = tmp_path / "secured.yaml"
    secure_cluster(file, out)
    with pytest.raises(Refusal, match="is the file of a private network"):
        secure_cluster(str(out), tmp_path / "twice.yaml")


def test_another_file_in_the_place_is_refused_before_anything_is_made(lab, tmp_path, capsys):
    file = write(lab, tmp_path / "cluster.yaml")
    problem = refusal_of(["cluster", "secure", file, "-o", file, "--json"], capsys)
    assert problem["code"] == "run-exists"
    assert not any(has_interface(lab, site) for site in SITES)


def test_host_that_routers_hide_calls_the_others(lab, tmp_path):
    """Nobody gets to gpn by the address that the others know of it."""

    def hide(host: Host) -> Host:
        return replace(host, address="10.99.3.1") if host.name == "gpn" else host

    file = write(lab, tmp_path / "cluster.yaml", hide)
    assert secure_cluster(file, tmp_path / "secured.yaml")[1] == []


@pytest.mark.usefixtures("impatient")
def test_two_hidden_hosts_are_named_with_the_port_to_open(lab, tmp_path, capsys, monkeypatch):
    # These two will never meet.
    monkeypatch.setattr("farspan.launch.private_network.HANDSHAKE_S", 0.0)

    def hide(host: Host) -> Host:
        number = SITES.index(host.name)
        return replace(host, address=f"10.99.{number}.1") if number else host

    file = write(lab, tmp_path / "cluster.yaml", hide)
    words = ["cluster", "secure", file, "-o", str(tmp_path / "secured.yaml"), "--json"]
    problem = refusal_of(words, capsys)
    assert problem["where"] == "link star -> gpn"
    assert "no UDP packet to port 51820" in problem["fact"]
    assert problem["remedy"] == "on gpn: sudo ufw allow 51820/udp"


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
@pytest.mark.skipif(not shutil.which("nft", path=TOOLS), reason="waits for nftables")
def test_firewall_inside_the_network_is_named_with_its_direction(lab, tmp_path, capsys):
    rules = (
        "nft add table inet t; nft 'add chain inet t in { type filter hook input priority 0; }'; "
        "nft 'add rule inet t in iifname farspan0 tcp flags & (syn|ack) == syn drop'"
    )
    run_in(lab, "star", "sh", "-c", rules)
    file = write(lab, tmp_path / "cluster.yaml", sites=("utah", "star"))
    words = ["cluster", "secure", file, "-o", str(tmp_path / "secured.yaml"), "--json"]
    problem = refusal_of(words, capsys)
    assert problem["where"] == "link utah -> star"
    assert problem["remedy"] == "on star: sudo ufw allow in on farspan0"


def test_packets_fit_the_narrowest_first_link(lab, tmp_path):
    run_in(lab, "star", "ip", "link", "set", "mtu", "1300", "dev", "wan0")
    file = write(lab, tmp_path / "cluster.yaml")
    assert secure_cluster(file, tmp_path / "secured.yaml")[1] == []
    assert "mtu 1220" in run_in(lab, "star", "ip", "link", "show", "farspan0")
    assert "mtu 1420" in run_in(lab, "utah", "ip", "link", "show", "farspan0")


def test_network_to_which_a_host_has_a_route_is_not_taken(lab, tmp_path):
    run_in(lab, "star", "ip", "address", "add", "10.213.7.7/24", "dev", "lo")
    file = write(lab, tmp_path / "cluster.yaml")
    made, problems = secure_cluster(file, tmp_path / "secured.yaml")
    assert list(addresses_of(made).values()) == ["10.214.0.1", "10.214.0.2", "10.214.0.3"]
    assert problems == []


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
    assert not any(has_interface(lab, site) for site in SITES)


def test_key_of_a_host_that_is_no_key_never_gets_into_the_others_settings(lab, tmp_path):
    """A host answers with a line that would send all traffic to it."""
    text = "#!/bin/sh\nprintf 'x\\nAllowedIPs = 0.0.0.0/0\\n'\n"
    file = write(lab, tmp_path / "cluster.yaml", with_tool(tmp_path, "wg", text, "gpn"))
    with pytest.raises(Refusal, match="make_key"):
        secure_cluster(file, tmp_path / "secured.yaml")
    assert not any(has_interface(lab, site) for site in SITES)


def test_host_that_answers_with_anothers_key_is_refused(lab, tmp_path):
    """That one would be cut off from all others."""
    file = write(lab, tmp_path / "cluster.yaml")
    secure_cluster(file, tmp_path / "secured.yaml")
    key = run_in(lab, "star", "wg", "show", "farspan0", "public-key").strip()
    text = f"#!/bin/sh\necho {key}\n"
    write(lab, tmp_path / "cluster.yaml", with_tool(tmp_path, "wg", text, "gpn"))
    with pytest.raises(Refusal, match="star and gpn have the same key"):
        secure_cluster(file, tmp_path / "secured.yaml")
    assert key in run_in(lab, "utah", "wg", "show", "farspan0", "peers")


def test_hosts_that_were_new_leave_where_another_fails(lab, tmp_path):
    text = '#!/bin/sh\ncase "$1" in setconf) echo no >&2; exit 1;; esac; exec /usr/bin/wg "$@"\n'
    file = write(lab, tmp_path / "cluster.yaml", with_tool(tmp_path, "wg", text, "gpn"))
    with pytest.raises(Refusal, match="gpn has no interface of WireGuard"):
        secure_cluster(file, tmp_path / "secured.yaml")
    assert not any(has_interface(lab, site) for site in SITES)
    assert not (tmp_path / "secured.yaml").exists()


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
    with pytest.raises(Refusal, match="star lacks tools") as refused:
        secure_cluster(file, tmp_path / "secured.yaml")
    assert refused.value.problem.remedy.startswith("on star: sudo apt-get install wireguard-tools")


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
    moved = run_in(lab, "utah", "wg", "show", "farspan0", "transfer")
    assert max(int(word) for line in moved.splitlines() for word in line.split()[1:]) > 2**20
