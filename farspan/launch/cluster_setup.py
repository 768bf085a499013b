"""Makes hosts ready that have nothing but a way in and a Python: each gets the farspan that runs
here, in an environment of its own, from an index that it reaches or from wheels sent there.

All over the user's own ssh, without root. No key and no password leaves this machine.
"""

from __future__ import annotations

import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import msgspec

from farspan._version import __version__
from farspan.domain.cluster import Host
from farspan.domain.clusterfile import REMOTE_FOLDER
from farspan.domain.decoding import convert_value
from farspan.domain.escapes import shell_word
from farspan.domain.gpus import Nvidia
from farspan.domain.problems import Problem, Refusal
from farspan.domain.run import make_cache_folder
from farspan.domain.units import counted, format_bytes
from farspan.launch.findings import OLDEST_PYTHON
from farspan.launch.host_pythons import record_python
from farspan.launch.host_wheels import (
    TORCH_INDEX,
    WheelSource,
    WheelTarget,
    collect_wheels,
    torch_build,
)
from farspan.launch.hosts import Agent, with_each_host
from farspan.launch.own_release import (
    EXTRA,
    OwnWheel,
    build_own_wheel,
    find_pip_wheel,
    pinned_versions,
    release_name,
)
from farspan.launch.setup_programs import (
    CHECK_PROGRAM,
    MISSING_PROGRAM,
    TAGS_PROGRAM,
    ask_interpreter,
)

#: Where the environment lies at a host whose cluster file names no folder.
DEFAULT_BASE = "~/.local/share/farspan"
#: Python from here on is not tried (`requires-python`).
NEWEST_PYTHON = (3, 14)
#: Bytes that an environment takes with the wheels it is made of: 1.3 GB for a CPU with PyTorch
#: 2.13, 7.5 GB for CUDA.
CPU_DISK_BYTES = 2 * 10**9
CUDA_DISK_BYTES = 10 * 10**9
#: Deadlines of an answer, in seconds: of what reads many files, and of pip.
READ_TIMEOUT_S = 300.0
INDEX_TIMEOUT_S = 90.0
POLL_S = 0.5
#: Wheels are sent in pieces of so many bytes.
WHEEL_PIECE_BYTES = 1 << 20
#: Rounds of wheels at most: each brings those that the ones before require.
MAX_ROUNDS = 20

Report = Callable[[str], None]


class ReadyHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host that has this farspan; `changed` is False where it had it before."""

    host: str
    python: str
    versions: dict[str, str]
    changed: bool
    seconds: float


class _Base(NamedTuple):
    """The environment's folder on a host that was entered, and its agent's report of it."""

    agent: Agent
    folder: str
    survey: dict[str, Any]


def set_up_hosts(
    hosts: Sequence[Host], source: WheelSource, report: Report
) -> list[ReadyHost | Problem]:
    """Set up all hosts side by side; return what became of each."""

    def set_up(host: Host) -> ReadyHost:
        return set_up_host(host, source, lambda text: report(f"{host.name}: {text}"))

    return with_each_host(hosts, set_up)


def environment_folder(host: Host) -> str:
    """Return where the environment of a host lies, or would."""
    if host.folder is None or host.folder == REMOTE_FOLDER:
        return DEFAULT_BASE
    return str(PurePosixPath(host.folder) / "environment")


def set_up_host(host: Host, source: WheelSource, report: Report) -> ReadyHost:
    """Give a host, as its cluster file has it, the farspan that runs here. Raises Refusal."""
    began = time.monotonic()
    if host.enter == ():
        versions = {"farspan": __version__, "python": platform.python_version()}
        return ReadyHost(
            host=host.name, python=sys.executable, versions=versions, changed=False, seconds=0.0
        )
    with Agent(host, "setup_agent.py") as agent:
        survey = agent.ask("look", base=environment_folder(host), deadline_s=READ_TIMEOUT_S)
        base = _Base(agent, survey["folder"], survey)
        ready = survey["ready"] or {}
        is_made = ready.get("release") == release_name() and survey["is_usable"]
        # Somebody else looks after an interpreter that has farspan already.
        is_others = not is_made and _has_farspan(survey["packages"])
        if is_others:
            versions = {**survey["packages"], "python": survey["python"]}
            ready = {"python": host.python, "versions": versions}
        elif not is_made:
            ready = _install(base, source, report)
    if not is_others:
        record_python(host, ready["python"])
    return ReadyHost(
        host=host.name,
        python=ready["python"],
        versions=ready["versions"],
        changed=not (is_made or is_others),
        seconds=time.monotonic() - began,
    )


def _find_index(
    agent: Agent, place: dict[str, Any], source: WheelSource, build: str, report: Report
) -> list[str] | None:
    """Return pip's options for the index that the host reaches; None where wheels must be sent."""

    def reaches(options: list[str], requirement: str) -> bool:
        values = {**place, "options": options, "requirement": requirement}
        return not agent.ask("try_index", deadline_s=INDEX_TIMEOUT_S, **values)["fault"]

    if source.folder is not None:
        return None
    options = source.options("")
    if not reaches(options, f"msgspec=={pinned_versions()['msgspec']}"):
        report("reaches no index: wheels are sent there")
        return None
    if source.index_url is not None or not build:
        return options
    # A small library that lies there too.
    torch_index = f"{TORCH_INDEX}/{build}"
    if not reaches(["--index-url", torch_index], "typing-extensions"):
        report(f"does not reach {torch_index}: PyTorch's usual build is installed")
        return options
    return source.options(build)


def _has_farspan(packages: dict[str, str]) -> bool:
    """Return whether an interpreter has this version of farspan, and of PyTorch."""
    torch = packages.get("torch", "").partition("+")[0]
    return packages.get("farspan") == __version__ and torch == pinned_versions().get("torch")


def _install(base: _Base, source: WheelSource, report: Report) -> dict[str, Any]:
    agent = base.agent
    host = agent.host
    python = _choose_python(host, agent.ask("list_pythons", deadline_s=READ_TIMEOUT_S)["pythons"])
    with Agent(host) as facts:
        nvidia = convert_value(facts.ask("facts")["nvidia"], Nvidia)
    build = torch_build(host, nvidia, base.survey["system"])
    _require_space(base, CUDA_DISK_BYTES if build.startswith("cu") else CPU_DISK_BYTES)
    _claim(base)
    _require_idle(base)

    own = build_own_wheel(make_cache_folder("wheels"))
    pip = OwnWheel.of(find_pip_wheel())
    _send_wheels(base, [pip, own], report)
    place: dict[str, Any] = {"base": base.folder, "python": python, "pip": pip.path.name}
    pins = [f"{name}=={version}" for name, version in pinned_versions().items()]
    kept = [pip.path.name, own.path.name]
    options = _find_index(agent, place, source, build, report)
    if options is not None:
        report(f"installing farspan[{EXTRA}] from its index")
    else:
        kept = _send_needed(base, python, pip.path.name, build, source, report)
        wheels = f"{base.folder}/wheels"
        options = ["--isolated", "--no-index", "--no-cache-dir", "--find-links", wheels]
        report(f"installing farspan[{EXTRA}] from wheels")
    agent.ask(
        "begin_installation", **place, options=options, wheel=own.path.name, extra=EXTRA, pins=pins
    )
    _follow_installation(base)
    own_python = f"{base.folder}/venv/bin/python"
    versions = ask_interpreter(agent, own_python, CHECK_PROGRAM)
    ready = {"release": release_name(), "versions": versions}
    return agent.ask("finish", base=base.folder, ready=ready, wheels=kept)


def _choose_python(host: Host, candidates: Sequence[dict[str, Any]]) -> str:
    """Choose the interpreter that the environment is made of: the host's own where it will do, else
    the newest that does. Raises Refusal (version-mismatch)."""
    usable = [item["path"] for item in candidates if not item["fault"] and _fits(item["version"])]
    if usable:
        # The first is that of the cluster file.
        own = candidates[0]["path"]
        return str(own if own in usable else usable[-1])
    oldest = ".".join(map(str, OLDEST_PYTHON))
    below = ".".join(map(str, NEWEST_PYTHON))
    seen = [f"{item['path']} {item['version']} {item['fault']}".strip() for item in candidates]
    raise Refusal(
        "version-mismatch",
        what=f"{host.name} has no Python that farspan runs with",
        where=f"host {host.name}",
        fact=f"it has {', '.join(seen)}; farspan needs {oldest} to below {below}",
        remedy=(
            f"on {shell_word(host.name)}: curl -LsSf https://astral.sh/uv/install.sh | sh && "
            "~/.local/bin/uv python install 3.12   (then python: ~/.local/bin/python3.12 in the "
            "cluster file)"
        ),
    )


def _fits(version: str) -> bool:
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    return OLDEST_PYTHON <= numbers < NEWEST_PYTHON


def _require_space(base: _Base, needed: int) -> None:
    """Refuse a disk that is full, or may not be written to, before anything is sent."""
    host = base.agent.host
    free = base.survey["disk_free"]
    if base.survey["is_foreign"]:
        raise _foreign_folder(host, base.folder)
    if not base.survey["is_writable"]:
        raise Refusal(
            "path-unusable",
            what=f"{host.name} does not let farspan write there",
            where=f"{host.name}, {base.folder}",
            fact="Permission denied",
            remedy=f"set folder: of {shell_word(host.name)} in the cluster file to one of yours",
        )
    # What is there of it already needs no space again.
    if free < needed and base.survey["ready"] is None:
        raise Refusal(
            "disk-full",
            what=f"{host.name} has too little disk space",
            where=f"{host.name}, {base.folder}",
            fact=f"{format_bytes(free)} free, an environment takes {format_bytes(needed)}",
            remedy=(
                f"on {shell_word(host.name)}: du -xh ~ | sort -h | tail   "
                "(or set folder: in the cluster file to a larger disk)"
            ),
        )


def _claim(base: _Base) -> None:
    host = base.agent.host
    answer = base.agent.ask("claim", base=base.folder)
    if answer.get("is_foreign"):
        raise _foreign_folder(host, base.folder)
    if answer.get("is_locked"):
        raise Refusal(
            "run-busy",
            what=f"another farspan cluster up or down works on {host.name}",
            where=f"{host.name}, {base.folder}",
            fact="it holds the lock of that folder",
            remedy=f"on {shell_word(host.name)}: fuser -v {shell_word(base.folder)}/lock",
        )


def _require_idle(base: _Base) -> None:
    """Refuse to change an environment that processes use."""
    host = base.agent.host
    if base.survey["ready"] is None:
        return
    with Agent(host, "tidy_agent.py") as tidy:
        processes = tidy.ask("list_processes", base=base.folder)["processes"]
    if processes:
        pids = ", ".join(str(process["pid"]) for process in processes)
        raise Refusal(
            "run-busy",
            what=f"farspan runs on {host.name}, in another version",
            where=f"{host.name}, {base.folder}",
            fact=f"its environment is used by process {pids}",
            remedy="farspan stop",
        )


def _foreign_folder(host: Host, folder: str) -> Refusal:
    return Refusal(
        "path-unusable",
        what=f"{host.name} has something else where farspan's environment would lie",
        where=f"{host.name}, {folder}",
        fact="the folder is not empty, and farspan has not made it",
        remedy=f"set folder: of {shell_word(host.name)} in the cluster file to another one",
    )


def _send_needed(
    base: _Base, python: str, pip: str, build: str, source: WheelSource, report: Report
) -> list[str]:
    """Send wheels until the host has all that farspan needs there, by its own account; return their
    names. Raises Refusal (install-failed)."""
    wheels = f"{base.folder}/wheels"
    pip_path = f"{wheels}/{pip}"
    tags = ask_interpreter(base.agent, python, TAGS_PROGRAM, pip_path)
    target = WheelTarget(tuple(tags), build)
    roots = [f"farspan[{EXTRA}]=={__version__}"]
    asked = msgspec.json.encode({"roots": roots, "pins": pinned_versions()}).decode()
    for _ in range(MAX_ROUNDS):
        answer = ask_interpreter(base.agent, python, MISSING_PROGRAM, pip_path, wheels, asked)
        if not answer["missing"]:
            return [pip, *answer["used"]]
        _send_wheels(base, collect_wheels(answer["missing"], target, source), report)
    raise Refusal(
        "install-failed",
        what=f"the wheels that {base.agent.host.name} needs have no end",
        where=f"{base.agent.host.name}, {wheels}",
        fact=f"still missing: {', '.join(answer['missing'])}",
        remedy="farspan cluster up --index URL, with an index that the host reaches",
    )


def _send_wheels(base: _Base, wheels: Sequence[OwnWheel], report: Report) -> None:
    """Send wheels that are not there, known by their hash; of one that was cut off the rest."""
    ask = base.agent.ask
    files = {wheel.path.name: wheel.sha256 for wheel in wheels}
    sizes = ask("have", base=base.folder, files=files, deadline_s=READ_TIMEOUT_S)["sizes"]
    unsent = [wheel for wheel in wheels if sizes[wheel.path.name] < wheel.size]
    size = sum(wheel.size - sizes[wheel.path.name] for wheel in unsent)
    if size > 10**7:
        report(f"sending {counted(len(unsent), 'wheel')}, {format_bytes(size)}")
    for wheel in unsent:
        name = wheel.path.name
        offset = sizes[name]
        answer = ask(
            "receive",
            base=base.folder,
            name=name,
            digest=wheel.sha256,
            size=wheel.size,
            offset=offset,
            content=_read_pieces(wheel, offset),
            deadline_s=READ_TIMEOUT_S,
        )
        if not answer["is_whole"]:
            host = base.agent.host
            is_full = "space" in answer["fault"] or "quota" in answer["fault"]
            raise Refusal(
                "disk-full" if is_full else "install-failed",
                what=f"{host.name} does not take a wheel",
                where=f"{host.name}, {base.folder}/wheels/{name}",
                fact=answer["fault"],
                remedy=f"on {shell_word(host.name)}: df -h {shell_word(base.folder)}",
            )


def _read_pieces(wheel: OwnWheel, offset: int) -> Iterator[bytes]:
    with open(wheel.path, "rb") as file:
        file.seek(offset)
        while piece := file.read(WHEEL_PIECE_BYTES):
            yield piece


def _follow_installation(base: _Base) -> None:
    """Wait for the installation. Raises Refusal (install-failed, disk-full) with pip's words."""
    while True:
        answer = base.agent.ask("poll_installation")
        if answer["code"] is not None:
            break
        time.sleep(POLL_S)
    if answer["code"] == 0:
        return
    host = base.agent.host
    lines = answer["lines"]
    errors = [line for line in lines if line.lower().startswith("error")] or lines[-3:]
    fact = "; ".join(errors)[-400:]
    is_full = "No space left" in fact or "Disk quota" in fact
    remedy = "farspan cluster up --index URL, with an index that the host reaches"
    if is_full:
        remedy = f"on {shell_word(host.name)}: df -h {shell_word(base.folder)}"
    raise Refusal(
        "disk-full" if is_full else "install-failed",
        what=f"farspan cannot be installed on {host.name}",
        where=f"{host.name}, {base.folder}",
        fact=fact,
        remedy=remedy,
    )
