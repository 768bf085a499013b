"""The Ray side of a run: `python -m farspan.launch.ray_driver JOB`, on the first host of a Ray
cluster.

With `describe ADDRESS` instead it lists the nodes of a cluster.

Makes one actor a rank on the node of the rank's host, lets each run a worker, writes how workers
failed into the folder of the run's logs, and ends when all workers have. The first line of standard
input is the cluster's token, or empty, the second the secret of the run. The end of standard input
asks workers to save and end, with STOP on their own standard input; a signal is passed on without.
The only file that imports Ray.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import ray

from farspan.domain.cluster import GIVEN_GPU_VARIABLE
from farspan.domain.decoding import convert_value, decode_json
from farspan.domain.escapes import shell_word
from farspan.domain.gpus import Gpu, Nvidia, is_kind
from farspan.domain.interpreter import module_command
from farspan.domain.own_files import open_own
from farspan.domain.problems import Problem, Refusal
from farspan.domain.standard_input import STOP, first_line
from farspan.domain.struct_files import load, save
from farspan.domain.worker_exit import WorkerExit
from farspan.launch.agent import free_ports, interfaces, nvidia
from farspan.launch.launchers.ray import EXITS, Job, Node
from farspan.launch.probe_client import LOCAL_HOST
from farspan.launch.processes import (
    HostProcess,
    meeting_environment,
    with_environment,
    worker_environment,
)
from farspan.launch.stop_on_stdin import follow_input
from farspan.launch.workers import FAILURE_GRACE_S

ACTOR_POLL_S = 0.2
#: Nodes join within seconds of each other, on busy machines within tens of seconds.
JOIN_S = 60.0
#: A node starts a process and asks its driver within this.
DRIVER_TIMEOUT_S = 40.0


class Spot(NamedTuple):
    """Where an actor lives: its node's address, a free port of it, the interface of that address,
    and the GPU that Ray gave it, by Ray's number or UUID and its driver's name."""

    address: str
    port: int
    interface: str
    gpu: str | None
    name: str


class RankActor:
    """Runs one worker as a process of the node that the actor lives on."""

    def place(self) -> Spot:
        address = ray.util.get_node_ip_address()
        port = int(free_ports(1)["ports"][0])
        interface = next((name for name, ip in interfaces().items() if ip == address), "")
        ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        gpu = ids[0] if ids else None
        gpu_name = ""
        for i, card in enumerate(nvidia()["gpus"]):
            if gpu in (str(i), card["uuid"]):
                gpu_name = card["name"]
        return Spot(address, port, interface, gpu, gpu_name)

    def start(self, folder: str, environment: dict[str, str], secret: str) -> None:
        self._folder = Path(folder).expanduser()
        logs = self._folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        rank = environment["RANK"]
        self._problem_path = logs / f"rank-{rank}.problem.json"
        self._problem_path.unlink(missing_ok=True)
        paths = (f"{self._folder}/plan.json", str(self._folder))
        words = module_command(sys.executable, "farspan.runtime.worker", *paths)
        with open_own(logs / f"rank-{rank}.log", "ab") as log:
            # Its input stays open: the end of it means that this actor is gone.
            self._process = HostProcess(
                LOCAL_HOST,
                (int(rank),),
                with_environment(environment, words),
                log=log,
                keep_open=log.fileno(),
                secret=secret,
            )

    def wait(self) -> tuple[int, Problem | None]:
        """Return the exit code of the worker, and the problem that it wrote, once it has ended."""
        self._process.wait(None)
        code = self._process.poll() or 0
        problem = None
        if code and self._problem_path.exists():
            problem = load(self._problem_path, Problem)
        return code, problem

    def signal(self, number: int, send_stop: bool = False) -> None:
        """Signal the worker, with `send_stop` after STOP on its standard input."""
        if self._process.poll() is None:
            if send_stop:
                self._process.write_input(STOP)
            os.kill(self._process.pid, number)


class Requests:
    """What has asked this driver to end: standard input, or a signal from elsewhere."""

    def __init__(self) -> None:
        self.stopped_on_stdin = False
        self.signalled = False

    def stop_on_stdin(self) -> None:
        """Record the end of standard input; the signal wakes the main thread."""
        self.stopped_on_stdin = True
        os.kill(os.getpid(), signal.SIGTERM)


def join_cluster(address: str) -> None:
    """Connect this process to a Ray cluster, from a folder in which no user keeps files."""
    if token := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(Path(token).absolute())
    # Ray puts the driver's current folder on the module path of every actor.
    os.chdir("/")
    ray.init(address=address, log_to_driver=False, configure_logging=False)


def nodes_of(job: Job) -> dict[str, str]:
    """Return Ray's node id of every host, by the label that our own nodes carry, or by name or
    address."""
    deadline = time.monotonic() + JOIN_S
    while True:
        alive = [node for node in ray.nodes() if node["Alive"]]
        node_ids = {}
        for node in alive:
            label = node.get("Labels", {}).get("farspan-host")
            known_as = (label, node["NodeManagerHostname"], node["NodeManagerAddress"])
            for host in job.hosts:
                if host in known_as:
                    node_ids[host] = node["NodeID"]
        missing = [name for name in job.hosts if name not in node_ids]
        if not missing:
            return node_ids
        if time.monotonic() > deadline:
            known = ", ".join(node["NodeManagerHostname"] for node in alive)
            raise Refusal(
                "host-unreachable",
                what=f"{missing[0]} did not join the Ray cluster",
                where=f"host {missing[0]}",
                fact=f"nodes there: {known}",
                remedy=(
                    f"on {shell_word(missing[0])}: ray start --address={shell_word(job.address)}"
                ),
            )
        time.sleep(ACTOR_POLL_S)


def run_workers(job: Job, secret: str, requests: Requests) -> list[WorkerExit]:
    """Run the workers; return how those ended that failed."""
    nodes = nodes_of(job)
    remote: Any = ray.remote(RankActor)
    # A GPU that an actor asks for is given to nobody else as long as it lives.
    created = []
    for host, gpu in zip(job.ranks, job.gpus, strict=True):
        actor_class = remote.options(
            num_cpus=0,
            num_gpus=int(gpu is not None),
            max_concurrency=2,  # One waits for the worker, one signals it.
            label_selector={"ray.io/node-id": nodes[host]},
        )
        created.append(actor_class.remote())
    spots = _place_actors(job, created)
    order = assign_actors(job, spots)
    actors = [created[k] for k in order]
    head = spots[order[0]]
    for rank, host in enumerate(job.ranks):
        spot = spots[order[rank]]
        cache = job.caches.get(host)
        environment = worker_environment(job.threads[rank])
        environment |= meeting_environment(head.address, head.port, spot.interface, cache)
        environment |= {"RANK": str(rank), "WORLD_SIZE": str(len(actors))}
        environment |= job.environment
        if spot.gpu is not None:  # The only one that the worker sees.
            environment |= {"CUDA_VISIBLE_DEVICES": spot.gpu, GIVEN_GPU_VARIABLE: "0"}
        started = actors[rank].start.remote(job.folders[host], environment, secret)
        ray.get(started, timeout=JOIN_S)

    def end(number: int, frame: object) -> None:
        requests.signalled = True
        for actor in actors:
            actor.signal.remote(number, requests.stopped_on_stdin)

    signal.signal(signal.SIGTERM, end)
    exits = watch_workers(job, actors)
    if requests.signalled and not requests.stopped_on_stdin:
        # This driver has passed a signal from elsewhere on to all.
        exits = [msgspec.structs.replace(each, code=-signal.SIGTERM) for each in exits]
    return [each for each in exits if each.code != 0]


def _place_actors(job: Job, actors: list[Any]) -> list[Spot]:
    """Return where the actors live; refuse where Ray has fewer GPUs left than they ask for."""
    try:
        return list(ray.get([actor.place.remote() for actor in actors], timeout=JOIN_S))
    except ray.exceptions.GetTimeoutError:
        if not any(job.gpus):
            raise
        needed = Counter(itertools.compress(job.ranks, job.gpus))
        wanted = ", ".join(f"{needed[host]} on {host}" for host in job.hosts if needed[host])
        raise Refusal(
            "device-missing",
            what="Ray does not give the GPUs that the plan needs",
            where=job.address,
            fact=f"it needs {wanted}; within {JOIN_S:.0f} s they were not free",
            remedy=f"ray status --address={shell_word(job.address)}",
        ) from None


def assign_actors(job: Job, spots: Sequence[Spot]) -> list[int]:
    """Assign each rank an actor on its host. Ray chooses which actor gets which GPU: a rank
    takes the one with its planned GPU, else one with a GPU of that kind, else any."""
    chosen: dict[int, int] = {}
    for fits in (
        lambda spot, gpu: gpu is None or spot.gpu == str(gpu[0]),
        lambda spot, gpu: is_kind(spot.name, gpu[1]),
        lambda spot, gpu: True,
    ):
        for rank, (host, gpu) in enumerate(zip(job.ranks, job.gpus, strict=True)):
            if rank in chosen:
                continue
            for k, spot in enumerate(spots):
                alike = job.ranks[k] == host and (job.gpus[k] is None) == (gpu is None)
                if alike and k not in chosen.values() and fits(spot, gpu):
                    chosen[rank] = k
                    break
    return [chosen[rank] for rank in range(len(spots))]


def watch_workers(job: Job, actors: list[Any]) -> list[WorkerExit]:
    """Return how workers ended, once all have or, after a failure, FAILURE_GRACE_S later: then the
    others are killed, and left out."""
    running = {actor.wait.remote(): rank for rank, actor in enumerate(actors)}
    exits = list[WorkerExit]()
    deadline = math.inf
    while running and time.monotonic() < deadline:
        for ended in ray.wait(list(running), timeout=ACTOR_POLL_S)[0]:
            rank = running.pop(ended)
            code = None
            problem = None
            fact = ""
            try:
                code, problem = ray.get(ended)
            except ray.exceptions.RayError as error:
                words = " ".join(str(error).split())
                fact = f"its Ray node does not answer: {words[:200]}"
            host = job.ranks[rank]
            exits.append(WorkerExit(rank=rank, host=host, problem=problem, code=code, fact=fact))
            if code != 0:
                deadline = min(deadline, time.monotonic() + FAILURE_GRACE_S)
    for rank in running.values():
        actors[rank].signal.remote(signal.SIGKILL)
    time.sleep(ACTOR_POLL_S)
    return exits


def list_nodes(address: str) -> list[Node]:
    """List the nodes of a running cluster, the one that this process is on first."""
    join_cluster(address)
    own = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    alive.sort(key=lambda node: (node["NodeID"] != own, node["NodeManagerAddress"]))
    cards = _list_cards([node["NodeID"] for node in alive if node["Resources"].get("GPU", 0)])
    nodes = []
    for node in alive:
        labels = {"site": "ray", **node.get("Labels", {})}
        name = labels.get("farspan-host") or node["NodeManagerHostname"]
        amounts = {"CPU": 1, "GPU": 0, "memory": 0, **node["Resources"]}
        cpus, gpus, memory = (int(amounts[key]) for key in ("CPU", "GPU", "memory"))
        described = Node(
            name=name,
            address=node["NodeManagerAddress"],
            site=labels["site"],
            cpus=cpus,
            gpus=gpus,
            accelerator=labels.get("ray.io/accelerator-type"),
            memory=memory,
            here=node["NodeID"] == own,
            cards=cards.get(node["NodeID"], ()),
        )
        nodes.append(described)
    return nodes


def _list_cards(nodes: list[str]) -> dict[str, tuple[Gpu, ...]]:
    """List the GPUs that each node's driver reports; none of a node that does not answer."""
    remote: Any = ray.remote(nvidia)
    pending = {}
    for node in nodes:
        selector = {"ray.io/node-id": node}
        question = remote.options(num_cpus=0, num_gpus=0, label_selector=selector)
        pending[node] = question.remote()
    if pending:
        ray.wait(list(pending.values()), num_returns=len(pending), timeout=DRIVER_TIMEOUT_S)
    cards = {}
    for node, answer in pending.items():
        try:
            cards[node] = convert_value(ray.get(answer, timeout=0.1), Nvidia).gpus
        except ray.exceptions.RayError:
            continue
    return cards


def main() -> int:
    if sys.argv[1] == "describe":
        nodes = list_nodes(sys.argv[2])
        sys.stdout.buffer.write(msgspec.json.encode(nodes))
        return 0
    if token := first_line().strip():
        os.environ["RAY_AUTH_TOKEN"] = token
    secret = first_line().strip()
    requests = Requests()
    follow_input(stop=requests.stop_on_stdin, ended=requests.stop_on_stdin)
    job = decode_json(sys.argv[1], Job)
    problem = None
    exits = list[WorkerExit]()
    try:
        join_cluster(job.address)
        exits = run_workers(job, secret, requests)
    except Refusal as refusal:
        problem = refusal.problem
    except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
        words = " ".join(str(error).split())
        problem = Problem(
            code="launcher-unusable",
            what="Ray cannot be used",
            where=job.address,
            fact=words[:400],
            remedy="ray status, with the same RAY_AUTH_TOKEN",
        )
    if problem is not None:
        exits = [WorkerExit(rank=0, host=job.ranks[0], problem=problem)]
    folder = Path(job.folders[job.ranks[0]])
    save(exits, folder / "logs" / EXITS)
    return 1 if exits else 0


if __name__ == "__main__":
    raise SystemExit(main())
