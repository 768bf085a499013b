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
from farspan.domain.decoding import decode_json
from farspan.domain.escapes import shell_word
from farspan.domain.gpus import Gpu
from farspan.domain.install import install_command_there
from farspan.domain.interpreter import module_command
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import load
from farspan.domain.worker_exit import WorkerExit
from farspan.launch.hosts import host_python
from farspan.launch.network_examination import host_address
from farspan.launch.processes import (
    HostProcess,
    Process,
    run_folder,
    with_environment,
    worker_environment,
)
from farspan.launch.rendezvous import arrange_rendezvous
from farspan.launch.workers import Workers

#: Token authentication, and labels that actors are placed by, exist since then.
OLDEST_RAY = (2, 52)
#: Joining a cluster takes Ray seconds.
JOIN_S = 60.0
#: Nodes and the driver start together with the head, which on a busy machine takes more than the
#: 20 s that Ray waits for it.
HEAD_WAIT = {"RAY_NUM_REDIS_GET_RETRIES": "60"}
#: Where the driver writes how workers failed.
EXITS = "exits.json"
#: Where Ray's own dashboard may listen: it can start jobs.
LOOPBACK = "127.0.0.1"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The driver's task: the plan's ranks by host, and each host's run folder and environment."""

    address: str
    hosts: tuple[str, ...]
    ranks: tuple[str, ...]
    folders: dict[str, str]
    caches: dict[str, str]
    threads: tuple[int, ...]
    #: The number and the kind of each rank's GPU in its host; None where it needs none.
    gpus: tuple[tuple[int, str] | None, ...]
    #: The variables of all workers.
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
    """Read the Ray cluster at an address: its sites are its nodes' `site` labels, this
    machine's first.

    Raises Refusal (launcher-unusable) where this machine cannot join it.
    """
    require_ray({"this machine": package_version("ray")})
    environment = {**os.environ, "RAY_AUTH_MODE": "token", **require_token(os.environ, Path.home())}
    words = module_command(sys.executable, "farspan.launch.ray_driver", "describe", where)
    try:
        done = subprocess.run(words, capture_output=True, env=environment, timeout=JOIN_S)
    except subprocess.TimeoutExpired:
        raise _unusable_cluster(where, f"no answer within {JOIN_S:.0f} s") from None
    if done.returncode:
        printed = done.stderr.decode(errors="replace").strip().splitlines()
        raise _unusable_cluster(where, printed[-1] if printed else "no message")
    hosts = dict[str, list[Host]]()
    for node in decode_json(done.stdout, list[Node]):
        hosts.setdefault(node.site, []).append(_host_of_node(node))
    sites = [Site(name=name, hosts=tuple(members)) for name, members in hosts.items()]
    return Cluster(sites=tuple(sites))


def _host_of_node(node: Node) -> Host:
    """Return a node's GPUs, or its CPU as one device. Folders are its own: Ray knows no shared
    disks."""
    kinds = catalog.load_devices()
    kind = catalog.find_kind_of_label(node.accelerator or "")
    devices: tuple[Device, ...]
    if not node.gpus:
        cpu = kinds["cpu-avx2"].device("cpu-avx2", node.memory)
        devices = (cpu.but(threads=node.cpus),) if cpu else ()
    elif node.cards:
        devices = tuple(_device_of_gpu(card, node) for card in node.cards[: node.gpus])
    elif kind and (known := kinds[kind].device(kind)):
        devices = (known,) * node.gpus
    else:
        fact = (
            f"nvidia-smi on {node.name} lists none of the {node.gpus} GPUs that Ray gives away "
            f"there, and the catalogue has no {node.accelerator!r}"
        )
        raise _unusable_cluster(node.address, fact)
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


def _device_of_gpu(card: Gpu, node: Node) -> Device:
    """Return a GPU by its driver's name: of the catalogue's kind, or of one that is to be measured.

    One that shares the machine's memory names none of its own.
    """
    kind = catalog.find_kind(card.name)
    if kind and (known := catalog.load_devices()[kind].device(kind, card.memory or None)):
        return known
    has_bf16 = card.capability is None or card.capability >= (8, 0)
    sheet = DataSheet(dtypes=("fp32", "bf16", "fp16") if has_bf16 else ("fp32", "fp16"))
    memory = card.memory or node.memory
    return Device(kind=card.name, backend="cuda", memory=memory, sheet=sheet)


def _unusable_cluster(where: str, fact: str) -> Refusal:
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
            require_ray({"this machine": package_version("ray")})
            token = require_token(os.environ, Path.home())
            yield self._start_driver(head, running, token, secrets.token_hex(32))
            return
        for host in self.hosts:
            refuse_public(host)
        rendezvous = arrange_rendezvous(self.hosts, self.agents)
        reached, _ = self.agents.reach(self.hosts)
        facts = {name: agent.ask("facts") for name, agent in reached.items()}
        require_ray({name: answer["packages"]["ray"] for name, answer in facts.items()})
        token = {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
        where = f"{_resolve_ip(rendezvous.address)}:{rendezvous.port}"
        for host in self.hosts:
            yield self._start_node(host, where, token)
        yield self._start_driver(head, where, token, rendezvous.secret)

    def failures(self, process: Process) -> list[WorkerExit]:
        """Return the driver's records of workers that failed."""
        path = self.run.logs / EXITS
        return load(path, list[WorkerExit]) if path.exists() else super().failures(process)

    def _start_node(self, host: Host, head: str, token: dict[str, str]) -> HostProcess:
        options = [f"--address={head}"]
        if host is self.hosts[0]:
            options = [f"--port={head.rpartition(':')[2]}", "--head"]
        gpus = sum(device.backend == "cuda" for device in host.devices)
        site = self.cluster.site_of(host.name).name
        options += [
            f"--node-ip-address={_resolve_ip(host_address(host))}",
            f"--num-cpus={len(host.devices)}",
            f"--num-gpus={gpus}",
            f"--dashboard-host={LOOPBACK}",
            f"--labels=farspan-host={host.name},site={site}",
            "--disable-usage-stats",
            "--include-log-monitor=false",
        ]
        words = module_command(host_python(host), "farspan.launch.ray_node", *options)
        # Ray's own niceness for workers, 15, leaves them what others leave over. Nothing of ours is
        # served from a node that stops, and for half a minute it would wait for a head that is
        # gone.
        environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_worker_niceness": "0",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            **HEAD_WAIT,
        }
        return HostProcess(
            host,
            (),
            with_environment(environment, words),
            log=self.log(f"ray-{host.name}"),
            keep_open=self.keep_open,
            first_input=token_line(token),
        )

    def _start_driver(
        self, head: Host, where: str, token: dict[str, str], secret: str
    ) -> HostProcess:
        folders = {}
        caches = {}
        for host in self.hosts:
            folders[host.name] = str(run_folder(host, self.plan, self.run).path)
            if host.folder:
                caches[host.name] = str(Path(host.folder) / "cache")
        devices = self.plan.devices
        gpus = list[tuple[int, str] | None]()
        for device in devices:
            gpus.append((device.index, device.kind or "") if device.backend == "cuda" else None)
        job = Job(
            address=where,
            hosts=tuple(folders),
            ranks=tuple(device.host for device in devices),
            folders=folders,
            caches=caches,
            threads=tuple(device.threads for device in devices),
            environment=self.environment,
            gpus=tuple(gpus),
        )
        task = msgspec.json.encode(job).decode()
        words = module_command(host_python(head), "farspan.launch.ray_driver", task)
        environment = {
            "RAY_AUTH_MODE": token.get("RAY_AUTH_MODE", "token"),
            **worker_environment(1),
            **HEAD_WAIT,
        }
        return HostProcess(
            head,
            tuple(range(len(gpus))),
            with_environment(environment, words),
            log=self.log("rank-0"),
            keep_open=self.keep_open,
            first_input=token_line(token) + f"{secret}\n".encode(),
        )


def package_version(package: str) -> str | None:
    """Return the version of a package of this interpreter."""
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
        release = version.split(".")[:2]
        if tuple(map(int, release)) < OLDEST_RAY:
            oldest = ".".join(map(str, OLDEST_RAY))
            raise Refusal(
                "version-mismatch",
                what=f"Ray of {host} is too old",
                where=f"host {host}",
                fact=f"{version}; token authentication exists since {oldest}",
                remedy=f"on {shell_word(host)}: {install_command_there('ray')} --upgrade",
            )


def require_token(environment: os._Environ[str] | dict[str, str], home: Path) -> dict[str, str]:
    """Find the user's own token for a cluster that runs already, as the variables that name it."""
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


def token_line(token: dict[str, str]) -> bytes:
    """Return a process's first input line: the token itself, as its file is on this machine alone;
    empty for none."""
    text = token.get("RAY_AUTH_TOKEN", "")
    if path := token.get("RAY_AUTH_TOKEN_PATH"):
        text = Path(path).read_text().strip()
    return f"{text}\n".encode()


def refuse_public(host: Host) -> None:
    """Refuse a host with a public address: Ray listens on it, and every holder of the token may run
    code."""
    where = _resolve_ip(host_address(host))
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


def _resolve_ip(name: str) -> str:
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
