"""Starts, asks and removes labs. Each has a folder `farspan-lab-NAME`; its supervisor answers on a
socket there."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from farspan.domain.cluster import READY_VARIABLE, SPARE, STARTING_VARIABLE, TAKEN
from farspan.domain.escapes import shell_word
from farspan.domain.interpreter import module_command
from farspan.domain.problems import Problem, Refusal
from farspan.domain.struct_files import load, parse_json, save
from farspan.domain.units import counted
from farspan_lab import INTERFACE, devices
from farspan_lab.lab import Lab, Link, Status, out_of_range, unavailable
from farspan_lab.spec import check_name

_TUN = Path("/dev/net/tun")
_PREFIX = "farspan-lab-"
_ELSEWHERE = (
    "use everything but farspan lab here; for it a Linux machine of your own, or: docker run "
    "--privileged"
)
#: A killed process is gone within milliseconds; the supervisor answers between two packets.
END_S = ANSWER_S = 10.0
#: Who asks is heard for a fifth of a second, as packets wait meanwhile; a machine may be too busy
#: for that once.
ASKS = 3
#: Collectives must not choose another interface than the one that leads to other sites.
_CHOSEN = [f"{library}_SOCKET_IFNAME={INTERFACE}" for library in ("GLOO", "NCCL", "TP")]


def up(lab: Lab) -> Status:
    """Make a lab and leave it up. Raises Refusal, with nothing left behind, when this machine
    cannot have it."""
    command = [*_unshare(), *module_command(sys.executable, "farspan_lab.supervisor")]
    folder = _base() / f"{_PREFIX}{lab.name}"
    lab = devices.placed(lab, sorted(os.sched_getaffinity(0)), devices.parents())
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise Refusal(
            "run-exists",
            what=f"there is a lab {lab.name!r} already",
            where=folder,
            fact="it is up, or ended without farspan lab down",
            remedy=f"farspan lab down --lab {shell_word(lab.name)}",
        ) from None
    try:
        save(lab, folder / "plan.json")
        with open(folder / "log", "wb") as log:
            started = subprocess.Popen(
                [*command, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        assert started.stdout is not None
        if problem := started.stdout.read():
            raise Refusal.of(parse_json(problem, Problem, folder))
        return status(lab.name)
    except BaseException:
        down(lab.name)
        raise


def status(name: str, changed: Sequence[Link] = ()) -> Status:
    """Return a lab as it is, after these links have taken the places of those between the same
    sites."""
    folder = home(name)
    request = msgspec.json.encode(changed)
    words = "no answer"
    for _ in range(ASKS):
        try:
            if answer := _answer(folder, request):
                return parse_json(answer, Status, folder)
        except OSError as error:
            words = error.strerror or str(error)
    lines = (
        (folder / "log").read_text(errors="replace").split("\n")
        if (folder / "log").exists()
        else []
    )
    words = next((line for line in reversed(lines) if line), words)
    raise unavailable(
        f"the lab {name!r} has crashed",
        folder,
        f"its supervisor does not answer: {words}",
        f"farspan lab down --lab {shell_word(name)}",
    )


def _answer(folder: Path, request: bytes) -> bytes:
    """Empty where the supervisor made no sense of the request, or had it too late to wait for."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(ANSWER_S)
        client.connect(str(folder / "control"))
        client.sendall(request)
        return b"".join(iter(lambda: client.recv(2**16), b""))


def change(name: str, between: Sequence[str], values: dict[str, Any], *, one_way: bool) -> Status:
    """Give new values to a link, in both directions or from the first site to the second. Keys are
    those of a Link."""
    source, target = between
    pairs = {(source, target)} if one_way else {(source, target), (target, source)}
    links = status(name).lab.links
    matching = [link for link in links if (link.source, link.target) in pairs]
    if not matching:
        choices = ", ".join(f"{link.source} {link.target}" for link in links)
        raise out_of_range(f"{source} {target}", f"links: {choices}", "farspan lab status")
    return status(name, [msgspec.structs.replace(link, **values) for link in matching])


def enter(status: Status, site: str, device: int | None = None) -> list[str]:
    """Return the words to put before a command that is to run in a site, as one of its devices or
    beside them.

    The process becomes the command: it keeps its id, environment and folder. A worker that starts
    with STARTING set is held to its device's speed only when it has written what READY says: a slow
    device is no slow interpreter.
    """
    entered = next((known for known in status.lab.sites if known.name == site), None)
    if entered is None or not (device is None or 0 <= device < len(entered.devices)):
        choices = ", ".join(
            f"{known.name} with {counted(len(known.devices), 'device')}"
            for known in status.lab.sites
        )
        raise out_of_range(
            f"{site} {'' if device is None else device}",
            f"there are: {choices}",
            "farspan lab status",
        )
    chosen = entered.devices if device is None else [entered.devices[device]]
    cores = ",".join(
        str(core)
        for core in sorted({core for chosen_device in chosen for core in chosen_device.cpus})
    )
    words = ["taskset", "--cpu-list", cores, "nsenter"]
    if not Path(f"/proc/{status.pid}/ns/user").samefile("/proc/self/ns/user"):
        words += [f"--user=/proc/{status.pid}/ns/user", "--preserve-credentials"]
    words += [
        f"--{kind.replace('mnt', 'mount')}={path}" for kind, path in status.namespaces[site].items()
    ]
    groups = () if device is None else chosen[0].cgroups
    quotas = [] if device is None else list(devices.quotas(chosen[0]))
    held, free = (
        [f"echo {word[kind]} > {shlex.quote(str(word[0]))}" for word in quotas] for kind in (1, 2)
    )
    ready = shlex.quote("\n".join(f"{file}={value}" for file, value, _ in quotas))
    starting = " && ".join([*free, f"export {READY_VARIABLE}={ready}"])
    joined = [f"echo $$ > {shlex.quote(group)}/cgroup.procs" for group in groups]
    taken = shlex.quote(
        "\n".join(
            [
                *(f"{file}={value}" for file, _, value in quotas),
                *(f"{group}/cgroup.procs=0" for group in groups),
            ]
        )
    )
    # A spare is confined when it becomes the device's worker: it must neither take from the worker
    # that is there nor set it free.
    spare = f"export {TAKEN}={taken} {READY_VARIABLE}={ready}"
    entering = " && ".join([*held, "true"])
    confined = f'if [ -n "${STARTING_VARIABLE}" ]; then {starting}; else {entering}; fi'
    joins = [f'if [ -n "${SPARE}" ]; then {spare}; else {" && ".join([confined, *joined])}; fi']
    # Entering a mount namespace leads to its top folder; the way back is found by name.
    script = " && ".join(
        [
            *joins,
            f"exec env {' '.join(_CHOSEN)} {shlex.join(words)} "
            """sh -c 'cd "$0" && exec "$@"' "$PWD" "$@" """,
        ]
    )
    return ["sh", "-c", script, "sh"]


def down(name: str) -> None:
    """Remove every trace of a lab: processes, namespaces, control groups, files. It may be half
    made, or crashed."""
    folder = home(name)
    deadline = time.monotonic() + END_S
    plan = folder / "plan.json"
    ending = folder / "ending.json"
    if plan.exists():
        plan.replace(ending)  # A supervisor that is only starting finds nothing to make.
    groups = devices.groups_of(load(ending, Lab)) if ending.exists() else []
    while left := {*_processes(folder), *devices.processes_in(groups)}:
        if time.monotonic() > deadline:
            raise unavailable(
                f"processes of the lab {name!r} do not end",
                folder,
                f"killed, but there: {sorted(left)}",
                f"farspan lab down --lab {shell_word(name)}",
            )
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
    devices.remove_groups(groups)
    shutil.rmtree(folder)


def names() -> list[str]:
    """Return the labs of this user, up or left behind."""
    return sorted(path.name.removeprefix(_PREFIX) for path in _base().glob(f"{_PREFIX}*"))


def home(name: str) -> Path:
    check_name(name, "--lab")
    if (folder := _base() / f"{_PREFIX}{name}").is_dir():
        return folder
    raise Refusal(
        "path-missing",
        what=f"there is no lab {name!r}",
        where=folder,
        fact=f"labs here: {', '.join(names()) or 'none'}",
        remedy="farspan lab up LAB.YAML",
    )


def _base() -> Path:
    """Where labs have their folders: gone after a restart, as the labs are, and nobody else's to
    write in."""
    if os.geteuid() == 0:
        return Path("/run")
    if runtime_folder := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime_folder)
    raise unavailable(
        "a lab needs a folder for its state",
        "XDG_RUNTIME_DIR",
        "not set, and only root may use /run",
        "export XDG_RUNTIME_DIR=$(mktemp -d)",
    )


def _unshare() -> list[str]:
    """Return the words that start a command in namespaces of its own, where need be as the root of
    a user namespace."""
    if sys.platform != "linux":
        raise unavailable(
            "a lab needs Linux", sys.platform, "its sites are network namespaces", _ELSEWHERE
        )
    if missing := [
        tool
        for tool in ("ip", "mount", "nsenter", "taskset", "unshare")
        if shutil.which(tool) is None
    ]:
        raise unavailable(
            "a lab needs tools of the system",
            ", ".join(missing),
            "not installed",
            "apt-get install iproute2 util-linux mount",
        )
    if not os.access(_TUN, os.R_OK | os.W_OK):
        raise unavailable("a lab needs TUN devices", _TUN, "this user may not open it", _ELSEWHERE)
    words = ["unshare", "--net", "--mount", "--propagation=slave", "--uts"]
    said = ""
    for tried in (words, [*words, "--user", "--map-root-user"]):
        done = subprocess.run([*tried, "true"], capture_output=True, text=True)
        if done.returncode == 0:
            return tried
        said = done.stderr.strip()
    raise unavailable("a lab needs namespaces", "unshare", said, _ELSEWHERE)


def _processes(folder: Path) -> Iterator[int]:
    """Yield the supervisor, by its command line, and all in a site, whose /etc/hosts is one of the
    lab's own files.

    No process number is noted down anywhere: another process may have it by now.
    """
    supervisor = b"-m\0farspan_lab.supervisor\0" + os.fsencode(folder) + b"\0"
    hosts = {(file.stat().st_dev, file.stat().st_ino) for file in folder.glob("*.hosts")}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            held = (process / "cmdline").read_bytes().endswith(supervisor)
            seen = (process / "root/etc/hosts").stat() if not held else None
        except OSError:
            continue  # It has ended, or is someone else's.
        if seen is None or (seen.st_dev, seen.st_ino) in hosts:
            yield int(process.name)
