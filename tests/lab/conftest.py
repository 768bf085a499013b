"""Labs for tests, on the real kernel. Whatever a test does, nothing of its labs may be left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farspan.domain.problems import Refusal
from farspan.domain.struct_files import convert, parse_yaml
from farspan_lab import devices, spec, state
from farspan_lab.lab import Lab, Status

PEER = Path(__file__).with_name("peer.py")
#: Of this run alone: other labs may be up on the machine.
OWN = f"test{os.getpid()}"
Start = Callable[..., Status]


def two(name: str) -> str:
    """The text of a lab of two sites, 20 ms apart; its name is of this run alone."""
    return (
        f"name: {OWN}-{name}\nsites: {{utah: {{}}, star: {{}}}}\nlinks: [{{between: [utah, star], "
        f"rtt: 20ms}}]\n"
    )


def parsed(text: str) -> Lab:
    return spec.read(
        convert(parse_yaml(text, "lab.yaml"), spec.LabFile, "lab.yaml", text), "lab.yaml"
    )


def traces() -> list[str]:
    """What there is of this run's labs on the machine: folders, processes, control groups, mounts,
    interfaces."""
    found = [
        str(path)
        for parent in [Path("/run"), *devices.parents()]
        for path in parent.glob(f"farspan-lab-{OWN}*")
    ]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if f"farspan-lab-{OWN}".encode() in words and b"farspan_lab.supervisor" in words:
            found.append(f"{process.name}: {words!r}")
    for command in (["cat", "/proc/self/mountinfo"], ["ip", "-o", "link"]):
        lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        found += [line for line in lines if any(word in line for word in (OWN, "wan0", "near"))]
    return found


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of forty short papers."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        words = (
            " ".join(f"{word}{number % 7}" for word in ("wind", "list", "blow", "where", "they"))
            * 30
        )
        (folder / f"{number:02}.txt").write_text(f"Paper {number}\n\n{words}.\n")
    return folder


def occupants(namespaces: list[int]) -> list[str]:
    """Processes in network namespaces that are held open here, so that no number of theirs can mean
    another."""
    held = [os.fstat(fd).st_ino for fd in namespaces]
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "ns/net").stat().st_ino in held:
                found.append(process.name)
        except OSError:
            continue
    return found


@pytest.fixture(scope="session", autouse=True)
def _permitted() -> None:
    try:
        state._unshare()
    except Refusal as refusal:
        pytest.skip(f"waits for a system that allows labs: {refusal.problem.fact}")


@pytest.fixture
def start() -> Iterator[Start]:
    """Makes labs from YAML text; they are gone without a trace afterwards."""
    namespaces = []
    names = []

    def make(text: str) -> Status:
        lab = parsed(text)
        names.append(lab.name)
        made = state.up(lab)
        namespaces.extend(os.open(paths["net"], os.O_RDONLY) for paths in made.namespaces.values())
        return made

    yield make
    for name in {*names} & {*state.names()}:
        state.down(name)
    assert (traces(), occupants(namespaces)) == ([], [])
    for fd in namespaces:
        os.close(fd)


@pytest.fixture(scope="module")
def lab() -> Iterator[Status]:
    """Three sites: 20 ms between utah and star, next to nothing between star and mass, nothing
    between the others."""
    name = f"{OWN}-links"
    yield state.up(
        parsed(
            f"name: {name}\nsites: {{utah: {{}}, star: {{}}, mass: {{}}}}\n"
            "links: [{between: [utah, star], rtt: 20ms}, {between: [star, mass], rtt: 0.1ms}]\n"
        )
    )
    state.down(name)
    assert traces() == []


class Peer:
    """A process in a site that plays a part of peer.py."""

    def __init__(self, lab: Status, site: str, *words: object) -> None:
        # Whoever measures delays must not wait for a core behind whatever else the machine does.
        first = ["chrt", "--fifo", "1"] if lab.realtime and words[0] in ("ping", "echo") else []
        command = [*state.enter(lab, site), *first, sys.executable, str(PEER), *map(str, words)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def result(self, after_s: float = 0.0) -> Any:
        """What it prints at its end. Who listens ends when its input does: `after_s` is for what is
        under way."""
        time.sleep(after_s)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        said = self.process.stdout.read()
        assert self.process.wait(timeout=60) == 0
        return json.loads(said)


def play(lab: Status, site: str, *words: object) -> Any:
    return Peer(lab, site, *words).result()
