"""What farspan has on hosts: its environment, its runs and its processes; and their removal.
Nothing else there is touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from farspan.domain.cluster import Host
from farspan.domain.decoding import convert_value
from farspan.domain.escapes import shell_word
from farspan.domain.gpus import Nvidia
from farspan.domain.problems import Problem, Refusal
from farspan.launch.cluster_setup import environment_folder
from farspan.launch.host_pythons import forget_python
from farspan.launch.hosts import Agent, with_each_host
from farspan.launch.own_release import release_name

#: Workers that are asked to end get this long to save.
HOST_SAVE_TIMEOUT_S = 120.0
#: A folder of many files is read or removed within this.
FILES_TIMEOUT_S = 600.0


class RunThere(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was sent to a host with a disk of its own."""

    name: str
    bytes: int
    #: `training` while processes work in it, else by its last event.
    state: str
    pids: tuple[int, ...] = ()


class HostState(msgspec.Struct, frozen=True, kw_only=True):
    """A host as it is. `release` is that of its environment, None where there is none."""

    host: str
    python: str
    release: str | None
    is_current: bool
    versions: dict[str, str]
    disk_free: int
    gpus: tuple[str, ...]
    runs: tuple[RunThere, ...]
    corpora_bytes: int
    #: Processes of the environment that belong to no run listed above.
    other_pids: tuple[int, ...]


class TidiedHost(msgspec.Struct, frozen=True, kw_only=True):
    """What was ended and removed on a host, and what is left there."""

    host: str
    ended: tuple[int, ...]
    removed_bytes: int
    runs_left: int
    bytes_left: int


def examine_hosts(hosts: Sequence[Host]) -> list[HostState | Problem]:
    """Look at all hosts side by side."""
    return with_each_host(hosts, examine_host)


def tidy_hosts(hosts: Sequence[Host], *, runs: bool) -> list[TidiedHost | Problem]:
    """End what farspan runs on all hosts and remove its environments, side by side; with `runs`
    also the runs and corpora that were sent there."""
    return with_each_host(hosts, lambda host: tidy_host(host, runs=runs))


def examine_host(host: Host) -> HostState:
    """Look at a host, as its cluster file has it. Raises Refusal (host-unreachable)."""
    with Agent(host, "setup_agent.py") as agent:
        survey = agent.ask("look", base=environment_folder(host), deadline_s=FILES_TIMEOUT_S)
    with Agent(host) as agent:
        nvidia = convert_value(agent.ask("facts")["nvidia"], Nvidia)
    with Agent(host, "tidy_agent.py") as agent:
        runs, others, corpora_bytes = _list_runs(agent, survey["folder"])
    ready = survey["ready"] or {}
    release = ready.get("release")
    is_current = release == release_name() and survey["is_usable"]
    versions = ready.get("versions") or survey["packages"]
    gpus = tuple(gpu.name for gpu in nvidia.gpus)
    return HostState(
        host=host.name,
        python=ready.get("python") or host.python,
        release=release,
        is_current=is_current,
        versions=versions,
        disk_free=survey["disk_free"],
        gpus=gpus,
        runs=runs,
        corpora_bytes=corpora_bytes,
        other_pids=others,
    )


def tidy_host(host: Host, *, runs: bool) -> TidiedHost:
    """End what farspan's environment runs on a host, and remove it. Raises Refusal
    (host-unreachable, run-busy)."""
    with Agent(host, "setup_agent.py") as setup:
        base = environment_folder(host)
        survey = setup.ask("look", base=base, deadline_s=FILES_TIMEOUT_S)
        folder = survey["folder"]
        # Its lock keeps `cluster up` away meanwhile.
        if survey["is_own"] and setup.ask("claim", base=folder).get("is_locked"):
            raise Refusal(
                "run-busy",
                what=f"another farspan cluster up or down works on {host.name}",
                where=f"{host.name}, {folder}",
                fact="it holds the lock of that folder",
                remedy=f"on {shell_word(host.name)}: fuser -v {shell_word(folder)}/lock",
            )
        with Agent(host, "tidy_agent.py") as agent:
            answer = agent.ask(
                "end_processes",
                base=folder,
                seconds=HOST_SAVE_TIMEOUT_S,
                deadline_s=HOST_SAVE_TIMEOUT_S + FILES_TIMEOUT_S,
            )
            removed = _remove(agent, "remove_environment", base=folder)
            if runs and host.folder is not None:
                removed += _remove(agent, "remove_runs", folder=host.folder)
            remaining, _, corpora_bytes = _list_runs(agent, folder)
    forget_python(host)
    return TidiedHost(
        host=host.name,
        ended=tuple(answer["ended"]),
        removed_bytes=removed,
        runs_left=len(remaining),
        bytes_left=corpora_bytes + sum(run.bytes for run in remaining),
    )


def _remove(agent: Agent, what: str, **place: Any) -> int:
    return int(agent.ask(what, **place, deadline_s=FILES_TIMEOUT_S)["bytes"])


def _list_runs(agent: Agent, base: str) -> tuple[tuple[RunThere, ...], tuple[int, ...], int]:
    """Return the runs on a host, the processes of the environment that work in none of them, and
    the bytes of its corpora."""
    processes = agent.ask("list_processes", base=base)["processes"]
    folder = agent.host.folder
    if folder is None:
        return (), tuple(process["pid"] for process in processes), 0
    answer = agent.ask("list_runs", folder=folder, deadline_s=FILES_TIMEOUT_S)
    runs = []
    busy = set[int]()
    for run in answer["runs"]:
        name = run["path"].rpartition("/")[2]
        # A worker is given its folder, which may begin with ~.
        place = f"/runs/{name}"
        pids = [
            process["pid"]
            for process in processes
            if any(word.endswith(place) for word in process["words"])
        ]
        busy.update(pids)
        state = "training" if pids else _state_of(run["event"])
        runs.append(RunThere(name=name, bytes=run["bytes"], state=state, pids=tuple(pids)))
    others = tuple(process["pid"] for process in processes if process["pid"] not in busy)
    return tuple(runs), others, answer["corpora_bytes"]


def _state_of(event: dict[str, Any] | None) -> str:
    """Describe a run that nothing works in by its last event."""
    if event is None:
        return "files of a worker"
    if event.get("event") == "finished":
        return str(event.get("reason", "finished"))
    return f"stopped, step {event.get('step', 0)}"
