"""The same training on two emulated sites by every launcher: the same losses, nothing shared,
losses named."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from farspan.domain.cluster import Cluster, Host, Site
from farspan.domain.cluster_json import parse_cluster_json
from farspan.domain.plan import Edge, Mesh, PlannedDevice, Replica, Sync
from farspan.domain.problems import Refusal
from farspan.domain.run import HOME_VARIABLE
from farspan.domain.run_events import Finished, Step, Validated, read_events
from farspan.domain.train import Optimizer, Schedule, TrainSpec
from farspan.launch.launchers import launch_workers, launcher_names
from farspan.launch.launchers.ray import (
    package_version,
    refuse_public,
    require_ray,
    require_token,
)
from farspan.launch.processes import run_folder
from farspan.runtime.checkpoint import checkpoint_folder
from farspan_lab import state
from farspan_lab.cluster import of_lab
from tests import tiny
from tests.examples import slow_but
from tests.launch.conftest import up
from tests.launch.ray_nodes import TOKEN, end_node, ray_environment, start_head, start_node
from tests.waiting import LIMIT_S, wait_for

TRAIN = TrainSpec(
    steps=6,
    batch=8,
    seq_len=16,
    precision="fp32",
    optimizer=Optimizer(lr=3e-3),
    schedule=Schedule(warmup_steps=2),
    validate_every=3,
    seed=3,
)
#: Longer than any test waits.
LONG = replace(TRAIN, steps=100_000, validate_every=100_000)
#: As long, with validations: a test ends it when it has seen enough steps.
ENDLESS = replace(LONG, validate_every=3)


@pytest.fixture(scope="module")
def sites():
    """Two sites of two devices, 20 ms apart, and the cluster that they are."""
    name = f"launchers-{os.getpid()}"
    links = "links: [{between: [utah, star], rtt: 20ms}]"
    made = up(f"name: {name}\nsites: {{utah: {{devices: 2}}, star: {{devices: 2}}}}\n{links}\n")
    yield made, of_lab(made)
    state.down(name)


def planned(train: TrainSpec = TRAIN):
    devices = tuple(
        PlannedDevice(host=host, backend="cpu", index=index, threads=1)
        for host in ("utah", "star")
        for index in (0, 1)
    )
    return replace(tiny.plan(train, rows=(2, 2, 2, 2), micro_rows=2), devices=devices)


def divided(kind: str, train: TrainSpec = TRAIN):
    """Over the same devices: a stage a site, parameters divided over all, or a replica a site."""
    flat = planned(train)
    (whole,) = flat.replicas[0].stages

    def stage(ranks, units=(0, 4), **changes):
        mesh = Mesh(ranks=ranks, shape=(len(ranks),), axes=("data",))
        rows = (train.batch // len(ranks),) * len(ranks)
        return replace(whole, **({"units": units, "mesh": mesh, "rows": rows} | changes))

    if kind == "pipeline":
        stages = (stage((0, 1), (0, 2)), stage((2, 3), (2, 4)))
        made = (
            Replica(
                stages=stages, edges=(Edge(bits=32, streams=2),), microbatches=4, in_flight=(4, 4)
            ),
        )
    elif kind == "zero3":
        made = (Replica(stages=(stage((0, 1, 2, 3), zero=3),)),)
    else:
        made = tuple(Replica(stages=(stage(ranks, rows=(2, 2)),)) for ranks in ((0, 1), (2, 3)))
    return replace(flat, replicas=made, sync=Sync(every=5) if kind == "replicas" else None)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of the same training by one process on this machine."""
    run = tiny.run_folder(tmp_path_factory.mktemp("alone") / "run", tiny.plan(TRAIN, micro_rows=2))
    return losses(run, "local", tiny.this_machine(run.load_plan()))


def losses(run, launcher, cluster):
    with launch_workers(launcher, run.load_plan(), run, cluster) as workers:
        events = list(workers)
    return [event.loss for event in events if isinstance(event, Step | Validated)]


def losses_until(step, run, cluster):
    """The losses of a run that is interrupted once it has made `step`, by step and split."""
    found = {}
    with launch_workers("local", run.load_plan(), run, cluster) as workers:
        for event in workers:
            if isinstance(event, Step):
                found[event.step, "train"] = event.loss
                if event.step == step:
                    workers.interrupt()
            elif isinstance(event, Validated):
                found[event.step, "validation"] = event.loss
            last = event
    assert isinstance(last, Finished) and last.reason == "interrupted"
    return found


def assert_resumed(before, after, expected):
    """Two parts of a run have each step once, with the losses of a run that was not interrupted."""
    resumed = before | after
    assert len(resumed) == len(before) + len(after), "no step is made twice"
    assert resumed.keys() == {key for key in expected if key[0] <= last_step(resumed)}
    assert resumed == pytest.approx({key: expected[key] for key in resumed}, abs=1e-6)


def last_step(losses):
    return max(step for step, split in losses if split == "train")


@pytest.mark.parametrize("launcher", slow_but(["local", "torchrun"], ["local", "torchrun", "ray"]))
def test_two_sites_of_two_workers_lose_what_one_process_loses(sites, alone, tmp_path, launcher):
    if launcher == "ray":
        pytest.importorskip("ray", reason="waits for farspan[ray]")
    run = tiny.run_folder(tmp_path / "run", planned())
    # To star the run and the corpus are empty folders: it has a file system of its own.
    hide = [*state.enter(sites[0], "star"), "mount", "-t", "tmpfs", "none", str(tmp_path)]
    subprocess.run(hide, check=True, timeout=LIMIT_S)
    found = losses(run, launcher, sites[1])
    assert found == pytest.approx(alone, abs=1e-5)
    there = run_folder(sites[1].hosts[1], run.load_plan(), run)
    assert there.path != run.path, "star shares no folder with utah"
    assert there.plan.read_bytes() == run.plan.read_bytes()
    sent = Path(sites[1].hosts[1].folder) / "cache" / "corpora" / f"sent-{tiny.CORPUS_HASH}"
    assert (sent / "train.bin").read_bytes() == (tmp_path / "corpus" / "train.bin").read_bytes()
    wait_until_all_ended(run)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipeline", "zero3"])
def test_divided_models_on_two_sites_lose_what_one_process_loses(sites, alone, tmp_path, kind):
    run = tiny.run_folder(tmp_path / "run", divided(kind))
    assert losses(run, "local", sites[1]) == pytest.approx(alone, abs=1e-5)
    # What workers on hosts with a disk of their own have recorded was fetched for the report.
    assert all((run.logs / f"rank-{rank}.events.jsonl").exists() for rank in (1, 2, 3))
    assert not [log.name for log in run.logs.glob("*.log") if "Warning" in log.read_text()]


def wait_until_all_ended(run):
    """No process of a run, or of a Ray cluster on its hosts, is left."""
    far = run_folder(Host(name="star", devices=(), folder="/"), run.load_plan(), run).path.name
    words = [
        "pgrep",
        "-af",
        rf"{run.path.parent.name}|/runs/{far}|ray_node.*farspan-host=(utah|star)",
    ]
    wait_for(lambda: not subprocess.run(words, capture_output=True).stdout, "all have ended")


@pytest.mark.slow
def test_resumed_run_on_two_sites_has_the_losses_of_an_uninterrupted_one(sites, tmp_path):
    cut = tiny.run_folder(tmp_path / "cut" / "run", planned(ENDLESS))
    before = losses_until(4, cut, sites[1])
    after = losses_until(last_step(before) + 4, cut, sites[1])
    whole = tiny.run_folder(tmp_path / "whole" / "run", planned(ENDLESS))
    assert_resumed(before, after, losses_until(last_step(after), whole, sites[1]))


def worker_of(run, rank):
    """The process id of a rank's worker, once it trains."""

    def find():
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
                environment = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            ours = words[1:3] == [b"-m", b"farspan.runtime.worker"] or words[2:4] == [
                b"-m",
                b"farspan.runtime.worker",
            ]
            told = {f"{HOME_VARIABLE}={run.path.absolute()}".encode(), f"RANK={rank}".encode()}
            if ours and told <= set(environment):
                return int(process.name)
        return None

    return wait_for(find, f"rank {rank} trains")


def lost(run, launcher, cluster, harm):
    """The problem that the job ends with when `harm` is done after its first step."""
    harmed = False
    with (
        pytest.raises(Refusal) as refusal,
        launch_workers(launcher, run.load_plan(), run, cluster) as workers,
    ):
        for event in workers:
            if isinstance(event, Step) and not harmed:
                harmed = True
                harm()
    assert harmed
    return refusal.value.problem


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "ray"])
def test_a_killed_worker_is_named_with_host_rank_and_cause(sites, tmp_path, launcher):
    if launcher == "ray":
        pytest.importorskip("ray", reason="waits for farspan[ray]")
    run = tiny.run_folder(tmp_path / f"killed-{launcher}", planned(LONG))
    problem = lost(run, launcher, sites[1], lambda: os.kill(worker_of(run, 3), signal.SIGKILL))
    assert (problem.code, problem.what) == ("worker-lost", "rank 3 on star was lost")
    assert "SIGKILL" in problem.fact
    wait_until_all_ended(run)


@pytest.mark.slow
def test_of_two_workers_that_torchrun_finds_failed_at_once_the_killed_one_is_named(sites, tmp_path):
    run = tiny.run_folder(tmp_path / "at-once", planned(LONG))

    def harm():
        """Kill rank 3; torchrun looks when rank 2 has ended because of it."""
        killed = worker_of(run, 3)
        other = worker_of(run, 2)
        torchrun = int(Path(f"/proc/{killed}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(torchrun, signal.SIGSTOP)
        try:
            os.kill(killed, signal.SIGKILL)
            stat = Path(f"/proc/{other}/stat")
            wait_for(lambda: " Z " in stat.read_text(), "rank 2 has ended")
        finally:
            os.kill(torchrun, signal.SIGCONT)

    problem = lost(run, "torchrun", sites[1], harm)
    assert (problem.code, problem.what) == ("worker-lost", "rank 3 on star was lost")
    assert "SIGKILL" in problem.fact


@pytest.mark.slow
def test_a_link_that_is_cut_while_training_names_a_rank_behind_it(sites, tmp_path):
    lab, cluster = sites
    run = tiny.run_folder(tmp_path / "cut-link", planned(LONG))
    try:
        problem = lost(
            run,
            "local",
            cluster,
            lambda: state.change(lab.lab.name, ["utah", "star"], {"up": False}, one_way=False),
        )
    finally:
        state.change(lab.lab.name, ["utah", "star"], {"up": True}, one_way=False)
    assert problem.code == "worker-lost"
    assert re.fullmatch(r"rank [23] on star was lost", problem.what)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "host"), [(0, "utah"), (3, "star")])
@pytest.mark.parametrize("kind", ["pipeline", "replicas"])
def test_killed_worker_ends_all_others_and_is_named_for_any_kind_of_plan(
    sites, tmp_path, kind, rank, host
):
    run = tiny.run_folder(
        tmp_path / f"{kind}-{rank}", divided(kind, replace(LONG, checkpoint_every_s=0.01))
    )
    problem = lost(run, "local", sites[1], lambda: os.kill(worker_of(run, rank), signal.SIGKILL))
    assert (problem.code, problem.what) == ("worker-lost", f"rank {rank} on {host} was lost")
    assert "SIGKILL" in problem.fact
    assert "resume" in problem.remedy
    wait_until_all_ended(run)
    assert all(
        checkpoint_folder.verify(path) for path in checkpoint_folder.newest_first(run.checkpoints)
    )


@pytest.mark.slow
def test_pipeline_run_ends_when_its_link_is_cut_mid_step_and_resumes_later(sites, tmp_path):
    lab, cluster = sites
    run = tiny.run_folder(
        tmp_path / "cut-pipe", divided("pipeline", replace(ENDLESS, checkpoint_every_s=0.01))
    )
    try:
        problem = lost(
            run,
            "local",
            cluster,
            lambda: state.change(lab.lab.name, ["utah", "star"], {"up": False}, one_way=False),
        )
    finally:
        state.change(lab.lab.name, ["utah", "star"], {"up": True}, one_way=False)
    assert problem.code == "worker-lost" and re.fullmatch(
        r"rank [23] on star was lost", problem.what
    )
    made = [event.step for event in read_events(run.events) if isinstance(event, Step)]
    resumed = losses_until(max(made) + 3, run, cluster)
    assert min(step for step, _ in resumed) <= max(made) + 1


@pytest.mark.slow
def test_a_link_that_is_cut_far_from_rank_0_ends_all_workers_too(tmp_path):
    """Rank 0 hears both ends of it: their connection alone can tell."""
    name = f"far-{os.getpid()}"
    train = replace(LONG, batch=6)
    links = ", ".join(
        f"{{between: [{pair}], rtt: 20ms}}" for pair in ("utah, star", "utah, gpn", "star, gpn")
    )
    sites = ", ".join(f"{site}: {{devices: 1}}" for site in ("utah", "star", "gpn"))
    made = up(f"name: {name}\nsites: {{{sites}}}\nlinks: [{links}]\n")
    try:
        devices = tuple(
            PlannedDevice(host=host, backend="cpu", index=0, threads=1)
            for host in ("utah", "star", "gpn")
        )
        plan = replace(tiny.plan(train, rows=(2, 2, 2), micro_rows=2), devices=devices)
        run = tiny.run_folder(tmp_path / "far", plan)
        problem = lost(
            run,
            "local",
            of_lab(made),
            lambda: state.change(name, ["star", "gpn"], {"up": False}, one_way=False),
        )
    finally:
        state.down(name)
    assert problem.code == "worker-lost" and re.fullmatch(
        r"rank (1 on star|2 on gpn) was lost", problem.what
    )
    assert "connection" in problem.fact
    wait_until_all_ended(run)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_host_that_cannot_be_reached_ends_the_job_before_it_starts(sites, tmp_path):
    lab, cluster = sites
    run = tiny.run_folder(tmp_path / "unreachable", planned())
    state.change(lab.lab.name, ["utah", "star"], {"up": False}, one_way=False)
    try:
        with (
            pytest.raises(Refusal) as refusal,
            launch_workers("local", run.load_plan(), run, cluster),
        ):
            pass
    finally:
        state.change(lab.lab.name, ["utah", "star"], {"up": True}, one_way=False)
    assert refusal.value.problem.code == "host-unreachable"
    assert "star cannot reach utah" in refusal.value.problem.what


@pytest.mark.slow
def test_workers_started_by_hand_with_the_variables_of_torchrun(tmp_path, sites):
    """RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and a secret are all that a worker needs; rank 1
    has no folder yet. In a site, whose ports nobody else takes."""
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN, rows=(4, 4), micro_rows=2))
    elsewhere = tmp_path / "elsewhere" / "run"
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29417",
        "FARSPAN_SECRET": "of these two workers",
        "FARSPAN_CACHE": str(tmp_path / "elsewhere" / "cache"),
    }
    processes = [
        subprocess.Popen(
            [
                *state.enter(sites[0], "utah"),
                sys.executable,
                "-m",
                "farspan.runtime.worker",
                str(folder / "plan.json"),
                str(folder),
            ],
            env=environment | {"RANK": str(rank)},
        )
        for rank, folder in enumerate((run.path, elsewhere))
    ]
    assert [process.wait(timeout=LIMIT_S) for process in processes] == [0, 0]
    assert (elsewhere / "plan.json").read_bytes() == run.plan.read_bytes()


@pytest.mark.slow
def test_an_interrupt_through_torchrun_saves(sites, tmp_path):
    run = tiny.run_folder(tmp_path / "run", planned(LONG))
    with launch_workers("torchrun", run.load_plan(), run, sites[1]) as workers:
        asked = False
        for event in workers:
            if isinstance(event, Step) and not asked:
                asked = True
                workers.interrupt()
            last = event
    assert last.reason == "interrupted"
    assert list(run.checkpoints.glob("step-*"))


# -- what is refused
#   ------------------------------------------------------------------------------------------------


def test_a_launcher_that_does_not_exist(tmp_path):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN))
    with pytest.raises(Refusal) as refusal:
        launch_workers("torchrum", run.load_plan(), run, Cluster(sites=()))
    assert (refusal.value.problem.code, refusal.value.problem.remedy) == (
        "launcher-unusable",
        "--launcher torchrun",
    )
    assert launcher_names() == ["local", "ray", "slurm", "torchrun"]


def test_a_running_ray_cluster_needs_a_token(tmp_path):
    with pytest.raises(Refusal) as refusal:
        require_token({}, tmp_path)
    assert refusal.value.problem.code == "launcher-unusable"
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("x")
    assert "RAY_AUTH_TOKEN_PATH" in require_token({}, tmp_path)
    assert require_token({"RAY_AUTH_TOKEN": "t"}, tmp_path) == {"RAY_AUTH_TOKEN": "t"}
    assert require_token({"RAY_AUTH_MODE": "disabled"}, tmp_path) == {"RAY_AUTH_MODE": "disabled"}


@pytest.mark.parametrize(
    ("version", "code"), [(None, "extra-missing"), ("2.9.3", "version-mismatch"), ("2.52.0", None)]
)
def test_ray_must_be_there_and_know_tokens(version, code):
    if code is None:
        require_ray({"star": version})
    else:
        with pytest.raises(Refusal, match=rf"error\[{code}\].*star"):
            require_ray({"star": version})


@pytest.fixture(scope="module")
def ray_home(tmp_path_factory):
    """Two Ray nodes on loopback, started by hand with a token as a user would: their address, and
    the environment of who may use them."""
    if package_version("ray") is None:
        pytest.skip("waits for farspan[ray]")
    folder = tmp_path_factory.mktemp("ray-home")
    (folder / "token").write_text(TOKEN)
    environment = ray_environment(folder) | {"RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    one, two = (f"--labels=farspan-host={name},site=home" for name in ("one", "two"))
    head, where = start_head([one], environment, folder / "one.log")
    node = start_node([f"--address={where}", two], environment, folder / "two.log")
    yield f"ray:{where}", environment
    end_node(node)
    end_node(head)


def read(where, environment, hosts):
    """The cluster at an address, once it has so many hosts."""
    show = [sys.executable, "-m", "farspan", "cluster", "show", where, "--json"]

    def ask():
        done = subprocess.run(show, capture_output=True, env=environment, timeout=LIMIT_S)
        if done.returncode:
            return None
        found = parse_cluster_json(done.stdout, "ray")
        return found if len(found.hosts) == hosts else None

    return wait_for(ask, f"a cluster of {hosts} hosts")


@pytest.mark.slow
def test_a_running_ray_cluster_is_read_and_used(tmp_path, alone, ray_home):
    where, environment = ray_home
    cluster = read(where, environment, hosts=2)
    assert [(site.name, [host.name for host in site.hosts]) for site in cluster.sites] == [
        ("home", ["one", "two"])
    ]
    assert (cluster.hosts[0].enter, cluster.hosts[0].devices[0].slot.threads) == ((), 1)
    refused = subprocess.run(
        [sys.executable, "-m", "farspan", "cluster", "show", where, "--json"],
        capture_output=True,
        env=environment | {"RAY_AUTH_TOKEN": "x" * 64},
        timeout=LIMIT_S,
    )
    assert b"launcher-unusable" in refused.stdout
    plan = tiny.plan(TRAIN, micro_rows=2)
    run = tiny.run_folder(
        tmp_path / "run", replace(plan, devices=(replace(plan.devices[0], host="one"),))
    )
    train = [sys.executable, "-c", DRIVE, str(run.path), where]
    subprocess.run(
        train, check=True, env=environment, input=msgspec.json.encode(cluster), timeout=LIMIT_S
    )
    found = [event.loss for event in read_events(run.events) if isinstance(event, Step | Validated)]
    assert found == pytest.approx(alone, abs=1e-6)


@pytest.mark.slow
def test_a_matrix_is_measured_on_a_running_ray_cluster(tmp_path, ray_home):
    where, environment = ray_home
    read(where, environment, hosts=2)
    (tmp_path / "matrix.yaml").write_text(f"""\
name: mine
clusters: {{home: '{where}'}}
models: {{tiny: {{layers: 2, d_model: 32, vocab: 300, context: 32}}}}
techniques: [data, 'published:Pipeshard']
batch: [4]
devices: [all, 1]
steps: 3
""")
    bench = [sys.executable, "-m", "farspan", "bench", "matrix.yaml", "--json"]

    def rows():
        done = subprocess.run(
            bench, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=900
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)["rows"]

    first = rows()
    found = {(row["cell"]["technique"], row["cell"]["devices"]): row for row in first}
    for name, used in (
        (("data", "all"), 2),
        (("data", "1"), 1),
        (("published:Pipeshard", "all"), 2),
    ):
        assert (found[name]["status"], found[name]["used"]) == ("ok", used), found[name]["cause"]
    assert rows() == first


#: Launches a run in a process whose environment holds the token.
DRIVE = """
import sys, msgspec
from pathlib import Path
from farspan.domain.cluster import Cluster
from farspan.domain.run import RunFolder
from farspan.launch.launchers import launch_workers
run, cluster = RunFolder(Path(sys.argv[1])), msgspec.json.decode(sys.stdin.buffer.read(), type=Cluster)
with launch_workers(sys.argv[2], run.load_plan(), run, cluster) as workers:
    list(workers)
"""  # noqa: E501


@pytest.mark.parametrize(
    ("address", "public"), [("8.8.8.8", True), ("10.1.2.3", False), ("192.168.1.1", False)]
)
def test_ray_never_listens_on_the_open_internet(address, public):
    host = Host(name="x", devices=(), address=address)
    if public:
        with pytest.raises(Refusal, match="public"):
            refuse_public(host)
    else:
        refuse_public(host)


@pytest.mark.slow
def test_a_plan_for_hosts_that_the_cluster_lacks(tmp_path):
    run = tiny.run_folder(tmp_path / "run", planned())
    with pytest.raises(Refusal) as refusal:
        launch_workers(
            "local",
            run.load_plan(),
            run,
            Cluster(sites=(Site(name="a", hosts=(Host(name="utah", devices=()),)),)),
        )
    assert refusal.value.problem.code == "plan-mismatch"
