"""A Ray actor a device, each running one worker.

`ray` starts a Ray cluster on the run's hosts for the time of the run, with a token of its own;
`ray:ADDRESS` uses the one that runs there, with the user's token (RAY_AUTH_TOKEN, or the file that
`ray get-auth-token --generate` writes). Ray itself is imported only by the driver, a process on the
first host (`farspan.launch.ray_driver`).
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import msgspec

from farspan.domain import catalog
from farspan.domain.cluster import Cluster, DataSheet, Device, Host, Site
from farspan.domain.clusterfile import REMOTE_FOLDER
from farspan.domain.codec import load
from farspan.domain.escapes import shell_word
from farspan.domain.gpus import Gpu
from farspan.domain.install import install_command_there
from farspan.domain.interpreter import module_command
from farspan.domain.problems import Refusal
from farspan.domain.worker_exit import WorkerExit
from farspan.launch.examine import address, agents
from farspan.launch.hosts import interpreter
from farspan.launch.processes import (
    HostProcess,
    Process,
    run_folder,
    with_environment,
    worker_environment,
)
from farspan.launch.rendezvous import Rendezvous, arrange
from farspan.launch.workers import Workers

#: Token authentication, and labels that actors are placed by, exist since then.
OLDEST_RAY = (2, 52)
#: Joining a cluster takes Ray seconds.
JOIN_S = 60.0
#: Nodes and the driver start beside the head, which on a busy machine takes more than the 20 s that
#: Ray waits for it.
PATIENT = {"RAY_NUM_REDIS_GET_RETRIES": "60"}
#: Where the driver writes how workers failed.
EXITS = "exits.json"
#: Where Ray's own dashboard may listen: it can start jobs.
LOOPBACK = "127.0.0.1"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver is told: the plan's ranks by host, and each host's run folder and
    environment."""

    address: str
    hosts: tuple[str, ...]
    ranks: tuple[str, ...]
    folders: dict[str, str]
    caches: dict[str, str]
    threads: tuple[int, ...]
    #: The number and the kind of each rank's GPU in its host; None where it needs none.
    gpus: tuple[tuple[int, str] | None, ...]
    #: What all workers are told.
    environment: dict[str, str]


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node of a running Ray cluster: GPUs that Ray gives away, its label of their kind, and those
    that the node's own driver lists."""

    name: str
    address: str
    site: str
    cpus: int
    gpus: int
    accelerator: str | None
    cards: tuple[Gpu, ...]
    memory: int
    #: Whether it is this machine.
    here: bool


def read_cluster(where: str) -> Cluster:
    """The Ray cluster at an address, as a cluster whose sites are its nodes' `site` labels, this
    machine's first.

    Raises Refusal (launcher-unusable) where this machine cannot join it.
    """
    require_ray({"this machine": installed("ray")})
    environment = {**os.environ, "RAY_AUTH_MODE": "token", **require_token(os.environ, Path.home())}
    words = module_command(sys.executable, "farspan.launch.ray_driver", "describe", where)
    try:
        done = subprocess.run(words, capture_output=True, env=environment, timeout=JOIN_S)
    except subprocess.TimeoutExpired:
        raise _unusable(where, f"no answer within {JOIN_S:.0f} s") from None
    if done.returncode:
        raise _unusable(
            where, (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        )
    nodes = msgspec.json.decode(done.stdout, type=list[Node])
    sites = {node.site: [other for other in nodes if other.site == node.site] for node in nodes}
    return Cluster(
        sites=tuple(
            Site(name=site, hosts=tuple(map(_host, members))) for site, members in sites.items()
        )
    )


def _host(node: Node) -> Host:
    """A node's GPUs, or its CPU as one device. Folders are its own: Ray says nothing of shared
    disks."""
    kinds = catalog.devices()
    kind = catalog.kind_of_label(node.accelerator or "")
    devices: tuple[Device, ...]
    if not node.gpus:
        cpu = kinds["cpu-avx2"].device("cpu-avx2", node.memory)
        devices = (cpu.but(threads=node.cpus),) if cpu else ()
    elif node.cards:
        devices = tuple(_gpu(card, node) for card in node.cards[: node.gpus])
    elif kind and (known := kinds[kind].device(kind)):
        devices = (known,) * node.gpus
    else:
        fact = (
            f"nvidia-smi on {node.name} lists none of the {node.gpus} GPUs that Ray gives away "
            "there"
        )
        raise _unusable(node.address, f"{fact}, and the catalogue has no {node.accelerator!r}")
    return Host(
        name=node.name,
        address=node.address,
        devices=devices,
        cpus=node.cpus,
        memory=node.memory,
        enter=() if node.here else None,
        python=sys.executable,
        folder=None if node.here else REMOTE_FOLDER,
    )


def _gpu(card: Gpu, node: Node) -> Device:
    """A GPU by its driver's name: of the catalogue's kind, or of one that only measuring says more
    of. One that shares the machine's memory names none of its own."""
    kind = catalog.kind_of(card.name)
    if kind and (known := catalog.devices()[kind].device(kind, card.memory or None)):
        return known
    bf16 = card.capability is None or card.capability >= (8, 0)
    return Device(
        kind=card.name,
        backend="cuda",
        memory=card.memory or node.memory,
        sheet=DataSheet(dtypes=("fp32", "bf16", "fp16") if bf16 else ("fp32", "fp16")),
    )


def _unusable(where: str, fact: str) -> Refusal:
    return Refusal(
        "launcher-unusable",
        what="the Ray cluster cannot be read",
        where=where,
        fact=fact[:400],
        remedy=(
            f"ray status --address={shell_word(where)}, on this machine, with the same "
            "RAY_AUTH_TOKEN"
        ),
    )


class Launch(Workers):
    def start(self) -> Iterator[Process]:
        head = self.hosts[0]
        running = self.argument
        (self.run.logs / EXITS).unlink(missing_ok=True)
        if running:
            require_ray({"this machine": installed("ray")})
            yield self._driver(
                head, running, require_token(os.environ, Path.home()), secrets.token_hex(32)
            )
            return
        for host in self.hosts:
            refuse_public(host)
        meeting = arrange(self.hosts)
        with agents(self.hosts) as (reached, _):
            require_ray(
                {name: agent.ask("facts")["packages"]["ray"] for name, agent in reached.items()}
            )
        token = {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
        for host in self.hosts:
            yield self._node(host, meeting, token)
        yield self._driver(head, f"{_ip(meeting.address)}:{meeting.port}", token, meeting.secret)

    def failures(self, process: Process) -> list[WorkerExit]:
        """Return what the driver saw of workers that failed."""
        path = self.run.logs / EXITS
        return load(path, list[WorkerExit]) if path.exists() else super().failures(process)

    def _node(self, host: Host, meeting: Rendezvous, token: dict[str, str]) -> HostProcess:
        where = _ip(address(host))
        first = host is self.hosts[0]
        gpus = sum(device.backend == "cuda" for device in host.devices)
        join = (
            [f"--port={meeting.port}", "--head"]
            if first
            else [f"--address={_ip(meeting.address)}:{meeting.port}"]
        )
        words = module_command(
            interpreter(host),
            "farspan.launch.ray_node",
            *join,
            f"--node-ip-address={where}",
            f"--num-cpus={len(host.devices)}",
            f"--num-gpus={gpus}",
            f"--dashboard-host={LOOPBACK}",
            f"--labels=farspan-host={host.name},site={self.cluster.site_of(host.name).name}",
            "--disable-usage-stats",
            "--include-log-monitor=false",
        )
        # Ray's own niceness for workers, 15, leaves them what others leave over. Nothing of ours is
        # served from a node that stops, and for half a minute it would wait for a head that is
        # gone.
        environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_worker_niceness": "0",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            **PATIENT,
        }
        return HostProcess(
            host,
            (),
            with_environment(environment, words),
            log=self.log(f"ray-{host.name}"),
            keep_open=self.keep_open,
            said=first_line(token),
        )

    def _driver(self, head: Host, where: str, token: dict[str, str], secret: str) -> HostProcess:
        plan = self.plan
        job = Job(
            address=where,
            hosts=tuple(host.name for host in self.hosts),
            ranks=tuple(device.host for device in plan.devices),
            folders={host.name: str(run_folder(host, plan, self.run).path) for host in self.hosts},
            caches={
                host.name: str(Path(host.folder) / "cache") for host in self.hosts if host.folder
            },
            threads=tuple(device.threads for device in plan.devices),
            environment=self.environment,
            gpus=tuple(
                (at.index, at.kind or "") if at.backend == "cuda" else None for at in plan.devices
            ),
        )
        words = module_command(
            interpreter(head), "farspan.launch.ray_driver", msgspec.json.encode(job).decode()
        )
        environment = {
            "RAY_AUTH_MODE": token.get("RAY_AUTH_MODE", "token"),
            **worker_environment(1),
            **PATIENT,
        }
        ranks = tuple(range(len(plan.devices)))
        return HostProcess(
            head,
            ranks,
            with_environment(environment, words),
            log=self.log("rank-0"),
            keep_open=self.keep_open,
            said=first_line(token) + f"{secret}\n".encode(),
        )


def installed(package: str) -> str | None:
    """The version of a package of this interpreter."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def require_ray(versions: dict[str, str | None]) -> None:
    """Refuse where Ray, by host, is missing or too old to ask for a token."""
    for host, version in versions.items():
        if version is None:
            raise Refusal(
                "extra-missing",
                what=f"Ray is not installed on {host}",
                where=f"host {host}",
                fact="--launcher ray needs it there",
                remedy=f"on {shell_word(host)}: {install_command_there('ray')}",
            )
        if tuple(map(int, version.split(".")[:2])) < OLDEST_RAY:
            raise Refusal(
                "version-mismatch",
                what=f"Ray of {host} is too old",
                where=f"host {host}",
                fact=(
                    f"{version}; token authentication exists since {'.'.join(map(str, OLDEST_RAY))}"
                ),
                remedy=f"on {shell_word(host)}: {install_command_there('ray')} --upgrade",
            )


def require_token(environment: os._Environ[str] | dict[str, str], home: Path) -> dict[str, str]:
    """The user's own token for a cluster that runs already, as the variables that name it."""
    if environment.get("RAY_AUTH_MODE") == "disabled":
        return {"RAY_AUTH_MODE": "disabled"}
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        if value := environment.get(name):
            return {name: value}
    default = home / ".ray" / "auth_token"
    if default.is_file():
        return {"RAY_AUTH_TOKEN_PATH": str(default)}
    raise Refusal(
        "launcher-unusable",
        what="there is no token for the Ray cluster",
        where="--launcher ray:ADDRESS",
        fact=(
            f"neither RAY_AUTH_TOKEN nor {default}; without one anybody on the network may run "
            "code there"
        ),
        remedy=(
            "ray get-auth-token --generate   (then start Ray with RAY_AUTH_MODE=token, the same "
            "token on each host)"
        ),
    )


def first_line(token: dict[str, str]) -> bytes:
    """What a process on a host reads first: the token itself, as its file is on this machine alone;
    empty for none."""
    path = token.get("RAY_AUTH_TOKEN_PATH")
    return (
        Path(path).read_text().strip() if path else token.get("RAY_AUTH_TOKEN", "")
    ).encode() + b"\n"


def refuse_public(host: Host) -> None:
    """Ray listens on its node's address, and every holder of the token may run code: never on the
    open internet."""
    where = _ip(address(host))
    if ipaddress.ip_address(where).is_global:
        raise Refusal(
            "launcher-unusable",
            what=f"Ray would listen on the public address of {host.name}",
            where=f"host {host.name}",
            fact=f"{where} can be reached from the internet",
            remedy=(
                f"set address: of {shell_word(host.name)} in the cluster file to a private one, "
                "or use --launcher torchrun"
            ),
        )


def _ip(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise Refusal(
            "host-unreachable",
            what=f"the name {name} is not known here",
            where=f"host {name}",
            fact=str(error),
            remedy=f"set address: of {shell_word(name)} in the cluster file",
        ) from None
