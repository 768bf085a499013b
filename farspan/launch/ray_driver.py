"""The Ray side of a run: `python -m farspan.launch.ray_driver JOB`, on the first host of a Ray
cluster.

With `describe ADDRESS` instead it says what nodes a cluster has.

Makes one actor a rank on the node of the rank's host, lets each run a worker, writes how workers
failed beside the run's logs, and ends when all workers have. The first line of standard input is
the cluster's token, or empty, the second the secret of the run. The end of standard input asks
workers to save and end, by the word of who started them; a signal is passed on without that word.
The only file that imports Ray.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import ray

from farspan.domain.cluster import GIVEN, Host
from farspan.domain.codec import load, save
from farspan.domain.escapes import shell_word
from farspan.domain.gpus import Gpu, Nvidia, is_kind
from farspan.domain.interpreter import module_command
from farspan.domain.own_files import open_own
from farspan.domain.problems import Problem, Refusal
from farspan.domain.standard_input import STOP, first_line
from farspan.domain.worker_exit import WorkerExit
from farspan.launch.agent import free_ports, interfaces, nvidia
from farspan.launch.launchers.ray import EXITS, Job, Node
from farspan.launch.processes import (
    HostProcess,
    meeting_environment,
    with_environment,
    worker_environment,
)
from farspan.launch.stop_on_stdin import follow_input
from farspan.launch.workers import GRACE_S

POLL_S = 0.2
#: Nodes join within seconds of each other, on busy machines within tens of seconds.
JOIN_S = 60.0
#: A node starts a process and asks its driver within this.
CARDS_S = 40.0


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
        names = [
            card["name"]
            for i, card in enumerate(nvidia()["gpus"])
            if ids[:1] in ([str(i)], [card["uuid"]])
        ]
        return Spot(address, port, interface, ids[0] if ids else None, names[0] if names else "")

    def start(self, folder: str, environment: dict[str, str], secret: str) -> None:
        self._folder = Path(folder).expanduser()
        logs = self._folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        rank = environment["RANK"]
        self._words = logs / f"rank-{rank}.problem.json"
        self._words.unlink(missing_ok=True)
        words = module_command(
            sys.executable, "farspan.runtime.worker", f"{self._folder}/plan.json", str(self._folder)
        )
        here = Host(name="here", devices=(), enter=())
        with open_own(logs / f"rank-{rank}.log", "ab") as log:
            # Its input stays open: the end of it says that this actor is gone.
            self._process = HostProcess(
                here,
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
        return code, load(self._words, Problem) if code and self._words.exists() else None

    def signal(self, number: int, said: bool = False) -> None:
        """Signal the worker, by the word of who started it if that is `said`."""
        if self._process.poll() is None:
            if said:
                self._process.say(STOP)
            os.kill(self._process.pid, number)


class Requests:
    """What has asked this driver to end: standard input, or a signal from elsewhere."""

    def __init__(self) -> None:
        self.said = self.signalled = False

    def say(self) -> None:
        """Take the end of standard input; the signal wakes the main thread."""
        self.said = True
        os.kill(os.getpid(), signal.SIGTERM)


def join(address: str) -> None:
    """Connect this process to a Ray cluster, from a folder in which no user keeps files."""
    if token := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(Path(token).absolute())
    # Ray puts the driver's current folder on the module path of every actor.
    os.chdir("/")
    ray.init(address=address, log_to_driver=False, configure_logging=False)


def nodes_of(job: Job) -> dict[str, str]:
    """Ray's node id of every host, by the label that our own nodes carry, or by name or address."""
    deadline = time.monotonic() + JOIN_S
    while True:
        alive = [node for node in ray.nodes() if node["Alive"]]
        node_ids = {
            name: node["NodeID"] for name in job.hosts for node in alive if name in _names(node)
        }
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
        time.sleep(POLL_S)


def _names(node: dict[str, Any]) -> tuple[str | None, ...]:
    labels = node.get("Labels", {})
    return labels.get("farspan-host"), node["NodeManagerHostname"], node["NodeManagerAddress"]


def run(job: Job, secret: str, requests: Requests) -> list[WorkerExit]:
    """Run the workers; return how those ended that failed."""
    nodes = nodes_of(job)
    remote: Any = ray.remote(RankActor)
    # A GPU that an actor asks for is given to nobody else as long as it lives.
    created = [
        remote.options(
            num_cpus=0,
            num_gpus=int(gpu is not None),
            max_concurrency=2,  # One waits for the worker, one signals it.
            label_selector={"ray.io/node-id": nodes[host]},
        ).remote()
        for host, gpu in zip(job.ranks, job.gpus, strict=True)
    ]
    spots = _spots(job, created)
    order = takers(job, spots)
    actors = [created[k] for k in order]
    places = [spots[k] for k in order]
    for rank, (host, actor, place) in enumerate(zip(job.ranks, actors, places, strict=True)):
        environment = worker_environment(job.threads[rank])
        environment |= meeting_environment(
            places[0].address, places[0].port, place.interface, job.caches.get(host)
        )
        environment |= {"RANK": str(rank), "WORLD_SIZE": str(len(actors))}
        environment |= job.environment
        if place.gpu is not None:  # The only one that the worker sees.
            environment |= {"CUDA_VISIBLE_DEVICES": place.gpu, GIVEN: "0"}
        ray.get(actor.start.remote(job.folders[host], environment, secret), timeout=JOIN_S)

    def end(number: int, frame: object) -> None:
        requests.signalled = True
        for actor in actors:
            actor.signal.remote(number, requests.said)

    signal.signal(signal.SIGTERM, end)
    exits = watch(job, actors)
    if requests.signalled and not requests.said:
        # This driver has passed a signal from elsewhere on to all.
        exits = [msgspec.structs.replace(each, code=-signal.SIGTERM) for each in exits]
    return [each for each in exits if each.code != 0]


def _spots(job: Job, actors: list[Any]) -> list[Spot]:
    """Where the actors live; refuses where Ray has not as many GPUs left as they ask for."""
    try:
        return list(ray.get([actor.place.remote() for actor in actors], timeout=JOIN_S))
    except ray.exceptions.GetTimeoutError:
        if not any(job.gpus):
            raise
        counts = {
            host: sum(
                at == host and gpu is not None for at, gpu in zip(job.ranks, job.gpus, strict=True)
            )
            for host in job.hosts
        }
        wanted = ", ".join(f"{count} on {host}" for host, count in counts.items() if count)
        raise Refusal(
            "device-missing",
            what="Ray does not give the GPUs that the plan needs",
            where=job.address,
            fact=f"it needs {wanted}; within {JOIN_S:.0f} s they were not free",
            remedy=f"ray status --address={shell_word(job.address)}",
        ) from None


def takers(job: Job, spots: Sequence[Spot]) -> list[int]:
    """The actor that each rank takes, of those on its host. Ray chooses who gets which GPU: a rank
    takes the one with its planned GPU, else one with a GPU of that kind, else any."""
    chosen: dict[int, int] = {}
    for fits in (
        lambda spot, gpu: gpu is None or spot.gpu == str(gpu[0]),
        lambda spot, gpu: is_kind(spot.name, gpu[1]),
        lambda spot, gpu: True,
    ):
        for rank, (host, gpu) in enumerate(zip(job.ranks, job.gpus, strict=True)):
            free = (
                k
                for k, spot in enumerate(spots)
                if job.ranks[k] == host
                and (job.gpus[k] is None) == (gpu is None)
                and k not in chosen.values()
            )
            if (
                rank not in chosen
                and (taken := next((k for k in free if fits(spots[k], gpu)), None)) is not None
            ):
                chosen[rank] = taken
    return [chosen[rank] for rank in range(len(spots))]


def watch(job: Job, actors: list[Any]) -> list[WorkerExit]:
    """Return how workers ended, once all have or, after a failure, GRACE_S later: then the others
    are killed, and left out."""
    running = {actor.wait.remote(): rank for rank, actor in enumerate(actors)}
    exits = list[WorkerExit]()
    until = math.inf
    while running and time.monotonic() < until:
        for ended in ray.wait(list(running), timeout=POLL_S)[0]:
            rank = running.pop(ended)
            code = None
            problem = None
            fact = ""
            try:
                code, problem = ray.get(ended)
            except ray.exceptions.RayError as error:
                fact = f"its Ray node does not answer: {' '.join(str(error).split())[:200]}"
            exits.append(
                WorkerExit(rank=rank, host=job.ranks[rank], problem=problem, code=code, fact=fact)
            )
            if code != 0:
                until = min(until, time.monotonic() + GRACE_S)
    for rank in running.values():
        actors[rank].signal.remote(signal.SIGKILL)
    time.sleep(POLL_S)
    return exits


def describe(address: str) -> list[Node]:
    """The nodes of a running cluster, the one that this process is on first."""
    join(address)
    own = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    cards = _cards([node["NodeID"] for node in nodes if node["Resources"].get("GPU", 0)])
    return [
        Node(
            name=node.get("Labels", {}).get("farspan-host") or node["NodeManagerHostname"],
            address=node["NodeManagerAddress"],
            site=node.get("Labels", {}).get("site", "ray"),
            cpus=int(node["Resources"].get("CPU", 1)),
            gpus=int(node["Resources"].get("GPU", 0)),
            accelerator=node.get("Labels", {}).get("ray.io/accelerator-type"),
            memory=int(node["Resources"].get("memory", 0)),
            here=node["NodeID"] == own,
            cards=cards.get(node["NodeID"], ()),
        )
        for node in sorted(
            nodes, key=lambda node: (node["NodeID"] != own, node["NodeManagerAddress"])
        )
    ]


def _cards(nodes: list[str]) -> dict[str, tuple[Gpu, ...]]:
    """The GPUs that the driver of each of these nodes lists; none of a node that does not say."""
    remote: Any = ray.remote(nvidia)
    pending = {
        node: remote.options(
            num_cpus=0, num_gpus=0, label_selector={"ray.io/node-id": node}
        ).remote()
        for node in nodes
    }
    if pending:
        ray.wait(list(pending.values()), num_returns=len(pending), timeout=CARDS_S)
    cards = {}
    for node, answer in pending.items():
        try:
            cards[node] = msgspec.convert(ray.get(answer, timeout=0.1), Nvidia).gpus
        except ray.exceptions.RayError:
            continue
    return cards


def main() -> int:
    if sys.argv[1] == "describe":
        sys.stdout.buffer.write(msgspec.json.encode(describe(sys.argv[2])))
        return 0
    if token := first_line().strip():
        os.environ["RAY_AUTH_TOKEN"] = token
    secret = first_line().strip()
    requests = Requests()
    follow_input(stop=requests.say, ended=requests.say)
    job = msgspec.json.decode(sys.argv[1], type=Job)
    try:
        join(job.address)
        exits = run(job, secret, requests)
    except Refusal as refusal:
        exits = [_not_started(job, refusal.problem)]
    except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
        problem = Problem(
            code="launcher-unusable",
            what="Ray cannot be used",
            where=job.address,
            fact=" ".join(str(error).split())[:400],
            remedy="ray status, with the same RAY_AUTH_TOKEN",
        )
        exits = [_not_started(job, problem)]
    save(exits, Path(job.folders[job.ranks[0]]) / "logs" / EXITS)
    return 1 if exits else 0


def _not_started(job: Job, problem: Problem) -> WorkerExit:
    return WorkerExit(rank=0, host=job.ranks[0], problem=problem)


if __name__ == "__main__":
    raise SystemExit(main())
