"""The Ray side of a run: `python -m farspan.launch.ray_driver JOB`, on the first host of a Ray cluster.

With `describe ADDRESS` instead it says what nodes a cluster has.

Makes one actor a rank on the node of the rank's host, lets each run a worker, passes SIGTERM on, writes what ended a
worker beside the run's logs, and ends when all workers have. The first line of standard input is the cluster's token,
or empty; the end of standard input is as SIGTERM. The only file that imports Ray.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import ray

from farspan.domain.codec import save
from farspan.domain.problems import Problem, Refusal, command
from farspan.domain.run import HOME
from farspan.launch.agent import free_port, interfaces
from farspan.launch.held import at_end_of_input
from farspan.launch.launchers.ray import LOST, Job, Node
from farspan.launch.workers import GRACE_S, worker_environment

POLL_S = 0.2
#: A node that does not answer for so long is lost; Ray's own health check takes 15 s and more.
ANSWER_S = 15.0
#: Nodes join within seconds of each other, on busy machines within tens of seconds.
JOIN_S = 60.0


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker ended: well, with a problem that it `said`, or with one that was seen from outside."""

    problem: Problem | None = None
    said: bool = False


class RankActor:
    """Runs one worker as a process of the node that the actor lives on."""

    def place(self) -> tuple[str, int, str]:
        """The node's address, a free port of it, and the interface of that address."""
        address, port = ray.util.get_node_ip_address(), int(free_port()["port"])
        return address, port, next((name for name, ip in interfaces().items() if ip == address), "")

    def start(self, folder: str, environment: dict[str, str]) -> None:
        self._folder = Path(folder).expanduser()
        self._logs = self._folder / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._rank = environment["RANK"]
        self._words = self._logs / f"rank-{self._rank}.problem.json"
        self._words.unlink(missing_ok=True)
        words = [sys.executable, "-m", "farspan.runtime.worker", str(self._folder / "plan.json"), str(self._folder)]
        # Empty, Ray up to 2.55 sets it for an actor that asks for no GPU; the plan says which one a worker takes.
        own = {name: value for name, value in os.environ.items() if (name, value) != ("CUDA_VISIBLE_DEVICES", "")}
        with open(self._logs / f"rank-{self._rank}.log", "ab") as log:
            self._process = subprocess.Popen(
                words, env={**own, **environment}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def poll(self) -> tuple[int | None, bytes | None]:
        """The exit code, if it has ended, and the problem that the worker wrote."""
        code = self._process.poll()
        return code, self._words.read_bytes() if code and self._words.exists() else None

    def signal(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)


def nodes_of(job: Job) -> dict[str, str]:
    """Ray's node id of every host, by the label that our own nodes carry, or by name or address."""
    deadline = time.monotonic() + JOIN_S
    while True:
        alive = [node for node in ray.nodes() if node["Alive"]]
        found = {name: node["NodeID"] for name in job.hosts for node in alive if name in _names(node)}
        missing = [name for name in job.hosts if name not in found]
        if not missing:
            return found
        if time.monotonic() > deadline:
            known = ", ".join(node["NodeManagerHostname"] for node in alive)
            raise Refusal(
                "host-unreachable", what=f"{missing[0]} did not join the Ray cluster", where=f"host {missing[0]}",
                fact=f"nodes there: {known}", remedy=f"on {missing[0]}: ray start --address={job.address}",
            )  # fmt: skip
        time.sleep(POLL_S)


def _names(node: dict[str, Any]) -> tuple[str | None, ...]:
    labels = node.get("Labels", {})
    return labels.get("farspan-host"), node["NodeManagerHostname"], node["NodeManagerAddress"]


def run(job: Job) -> list[Ended | None]:
    """How each rank ended."""
    nodes = nodes_of(job)
    remote: Any = ray.remote(RankActor)
    actors = [remote.options(num_cpus=0, label_selector={"ray.io/node-id": nodes[host]}).remote() for host in job.ranks]
    places = ray.get([actor.place.remote() for actor in actors], timeout=JOIN_S)
    for rank, (host, actor, place) in enumerate(zip(job.ranks, actors, places, strict=True)):
        environment = worker_environment(job.threads[rank]) | {
            "RANK": str(rank), "WORLD_SIZE": str(len(actors)), "MASTER_ADDR": places[0][0],
            "MASTER_PORT": str(places[0][1]), HOME: job.home,
        }  # fmt: skip
        if place[2]:
            environment |= {"GLOO_SOCKET_IFNAME": place[2], "NCCL_SOCKET_IFNAME": place[2]}
        if host in job.caches:
            environment["FARSPAN_CACHE"] = job.caches[host]
        ray.get(actor.start.remote(job.folders[host], environment), timeout=JOIN_S)
    signal.signal(signal.SIGTERM, lambda number, frame: [actor.signal.remote(number) for actor in actors])
    return watch(job, actors)


def watch(job: Job, actors: list[Any]) -> list[Ended | None]:
    ended: list[Ended | None] = [None] * len(actors)
    failed_at: float | None = None
    while None in ended:
        for rank, actor in enumerate(actors):
            if ended[rank] is None:
                ended[rank] = _poll(job, rank, actor)
        if failed_at is None and any(one is not None and one.problem for one in ended):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
            for rank, actor in enumerate(actors):
                if ended[rank] is None:
                    actor.signal.remote(signal.SIGKILL)
                    # Ended by this driver: its end is not what the others failed of.
                    ended[rank] = Ended()
        time.sleep(POLL_S)
    return ended


def _poll(job: Job, rank: int, actor: Any) -> Ended | None:
    """None while the worker runs."""
    host = job.ranks[rank]
    try:
        code, words = ray.get(actor.poll.remote(), timeout=ANSWER_S)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
        cause = f"its Ray node does not answer: {' '.join(str(error).split())[:200]}"
    else:
        if not code:
            return Ended() if code == 0 else None
        if words:
            return Ended(problem=msgspec.json.decode(words, type=Problem), said=True)
        cause = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return Ended(problem=Problem(
        code="worker-lost", what=f"rank {rank} on {host} was lost", where=f"host {host}", fact=cause,
        remedy=command("resume", job.home),
    ))  # fmt: skip


def describe(address: str) -> list[Node]:
    """The nodes of a running cluster, the one that this process is on first."""
    ray.init(address=address, log_to_driver=False, configure_logging=False)
    own = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return [
        Node(
            name=node.get("Labels", {}).get("farspan-host") or node["NodeManagerHostname"],
            address=node["NodeManagerAddress"], site=node.get("Labels", {}).get("site", "ray"),
            cpus=int(node["Resources"].get("CPU", 1)), gpus=int(node["Resources"].get("GPU", 0)),
            accelerator=node.get("Labels", {}).get("ray.io/accelerator-type"),
            memory=int(node["Resources"].get("memory", 0)), here=node["NodeID"] == own,
        )
        for node in sorted(nodes, key=lambda node: (node["NodeID"] != own, node["NodeManagerAddress"]))
    ]  # fmt: skip


def main() -> int:
    if sys.argv[1] == "describe":
        sys.stdout.buffer.write(msgspec.json.encode(describe(sys.argv[2])))
        return 0
    if token := sys.stdin.readline().strip():
        os.environ["RAY_AUTH_TOKEN"] = token
    at_end_of_input(lambda: os.kill(os.getpid(), signal.SIGTERM))
    job = msgspec.json.decode(sys.argv[1], type=Job)
    logs = Path(job.folders[job.ranks[0]]) / "logs"
    try:
        ray.init(address=job.address, log_to_driver=False, configure_logging=False)
        ended = dict(enumerate(run(job)))
    except Refusal as refusal:
        ended = {0: Ended(problem=refusal.problem)}
    except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
        ended = {0: Ended(problem=Problem(
            code="launcher-unusable", what="Ray cannot be used", where=job.address,
            fact=" ".join(str(error).split())[:400], remedy="ray status, with the same RAY_AUTH_TOKEN",
        ))}  # fmt: skip
    problems = {rank: one for rank, one in ended.items() if one is not None and one.problem}
    for rank, one in problems.items():
        if one.said:
            save(one.problem, logs / f"rank-{rank}.problem.json")
    save({rank: one.problem for rank, one in problems.items() if not one.said}, logs / LOST)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
