"""Where disturbed runs train: sites of a lab that are entered directly or by ssh (`slurm_place.py`:
nodes of Slurm). Each place gives the command of a run and makes what can go wrong there: labs also
cut links and lose disks."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import combinations
from pathlib import Path

import yaml

from farspan.domain.interpreter import module_command
from farspan.domain.run import RunFolder
from farspan.domain.struct_files import convert, parse_yaml
from farspan_lab import spec, state
from farspan_lab.lab import Status
from tests.faults.scenarios import Kind, Launcher, Scenario
from tests.launch.ssh_hosts import SshHosts
from tests.slurm import daemons
from tests.waiting import LIMIT_S, wait_for

ROOT = Path(__file__).parents[2]
RTT = "20ms"
#: Of the disk that holds a run: it fills within a fraction of a second.
DISK_BYTES = 128 * 2**20


class Place(ABC):
    """A machine of one scenario: its disk, its cache, and the command of its run."""

    #: Whether a unit of systemd, or a host that boots, gives the command again after a kill.
    has_unit = True
    #: The sites, or the nodes.
    sites: tuple[str, ...]

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.folder = folder
        self.scenario = scenario
        self.sites = tuple(f"s{number}" for number in range(scenario.sites))
        self.disk = folder / "disk"
        self.run = RunFolder(self.disk / "run")
        self.log = folder / "log"
        self._stack = ExitStack()
        self._command: subprocess.Popen[bytes] | None = None
        self.environment = {
            **os.environ,
            "FARSPAN_CACHE": str(folder / "cache"),
            "XDG_STATE_HOME": str(folder / "state"),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }

    def prepare(self, text: Path) -> None:
        """Make the place. `close` ends what there is of it."""
        (self.folder / "copies").mkdir(parents=True)
        # Before a lab is up: its sites see no later mounts.
        for disk in self._disks():
            self._mount(disk)
        (self.folder / "run.yaml").write_text(yaml.safe_dump(self._config(text)))

    def _config(self, text: Path) -> dict[str, object]:
        config: dict[str, object] = {
            "data": {"source": str(text), "val": "10%"},
            "tokenizer": {"vocab": 300},
            "model": {"layers": 4, "d_model": 64, "heads": 2, "context": 128},
            "train": {
                "steps": self.scenario.steps,
                "batch": {"global": "12 sequences"},
                "precision": "fp32",
                "recipe": "plain",
                # At the usual rate rounding grows to 1e-4 within 30 steps: text is memorized.
                "optimizer": {"kind": "adamw", "lr": 3e-4},
                "compile": False,
                "reshuffle": False,
                "validate_every": self.scenario.steps,
            },
            "parallel": {"technique": self.scenario.technique},
            "checkpoint": {"every": self.scenario.save_every},
            "on_fault": self.scenario.on_fault,
        }
        return config

    def _disks(self) -> list[Path]:
        """Return the folders that are disks of their own."""
        return [self.disk]

    # -- the command
    #   --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Give the command of the run: the first time, and after each end."""
        words = module_command(sys.executable, "farspan", *self._words())
        with open(self.log, "ab") as log:
            self._command = subprocess.Popen(
                [*self._enter_home(), *words],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _is_about(self, kind: Kind) -> bool:
        fault = self.scenario.fault
        return fault is not None and fault.kind == kind

    def _words(self) -> list[str]:
        return ["train", "run.yaml", "--run", str(self.run.path), "--until-done"]

    def _enter_home(self) -> list[str]:
        return []

    def poll(self) -> int | None:
        """Return the exit code of the command, None while it runs."""
        assert self._command is not None
        return self._command.poll()

    def signal_command(self, number: signal.Signals) -> None:
        assert self._command is not None
        with suppress(ProcessLookupError):
            os.kill(self._command.pid, number)

    # -- processes
    #   --------------------------------------------------------------------------------------------

    def workers(self) -> dict[int, int]:
        """Return the processes of the run's workers by their rank."""
        return dict(find_workers(self.folder))

    # -- what goes wrong
    #   --------------------------------------------------------------------------------------------

    @abstractmethod
    def lose_site(self, site: int) -> None: ...

    @abstractmethod
    def return_site(self, site: int) -> None: ...

    def fill_disk(self) -> None:
        """Write to the disk of the run until not a byte is left."""
        fill(self.disk / "filler")

    def free_disk(self) -> None:
        (self.disk / "filler").unlink(missing_ok=True)

    # -- life
    #   --------------------------------------------------------------------------------------------

    def _mount(self, folder: Path) -> None:
        """Give a folder a disk of its own."""
        folder.mkdir(parents=True)
        options = f"size={DISK_BYTES},mode=0755"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
        self._stack.callback(subprocess.run, ["umount", "--lazy", str(folder)], check=True)

    def close(self) -> None:
        """End all that belongs to this place; its folder stays."""
        if self._command is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._command.pid, signal.SIGKILL)
            self._command.wait(LIMIT_S)
        for pid in self.workers().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._stack.close()


class LabPlace(Place):
    """Sites of a lab, entered without a network: the launcher `local`."""

    lab: Status
    #: Sites without devices of the run.
    homes: tuple[str, ...] = ()

    @property
    def lab_name(self) -> str:
        return f"f{os.getpid()}-{self.scenario.number}"

    def prepare(self, text: Path) -> None:
        super().prepare(text)
        sites = ", ".join(f"{site}: {{}}" for site in (*self.homes, *self.sites))
        yaml_text = f"name: {self.lab_name}\nsites: {{{sites}}}\ndefault_link: {{rtt: {RTT}}}\n"
        file = convert(parse_yaml(yaml_text, "lab"), spec.LabFile, "lab", yaml_text)
        self.lab = state.up(spec.read(file, "lab"))
        self._stack.callback(state.down, self.lab_name)

    def _config(self, text: Path) -> dict[str, object]:
        config = super()._config(text)
        config["parallel"] = {
            "technique": self.scenario.technique,
            "cluster": f"lab:{self.lab_name}",
        }
        if self._is_about("disk"):
            config["checkpoint"] = {
                "every": self.scenario.save_every,
                "copy": str(self.folder / "copies"),
            }
        return config

    def cut(self, link: int, *, one_way: bool, up: bool) -> None:
        pairs = list(combinations((*self.homes, *self.sites), 2))
        a, b = pairs[link % len(pairs)]
        # Odd targets cut the other direction.
        between = (b, a) if link % 2 else (a, b)
        state.change(self.lab_name, between, {"up": up}, one_way=one_way)

    def lose_site(self, site: int) -> None:
        """Cut all links of a site, and kill all its processes."""
        name = self.sites[site % len(self.sites)]
        self._link_site(name, up=False)
        for pid in self._processes_in(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def return_site(self, site: int) -> None:
        self._link_site(self.sites[site % len(self.sites)], up=True)

    def lose_disk(self) -> None:
        """Lose this machine, which has the run's folder and rank 0: the command is killed too."""
        self.signal_command(signal.SIGKILL)
        self.lose_site(0)
        clear_folder(self.disk)

    def return_disk(self) -> None:
        self.return_site(0)

    def _link_site(self, name: str, *, up: bool) -> None:
        for other in (*self.homes, *self.sites):
            if other != name:
                state.change(self.lab_name, (name, other), {"up": up}, one_way=False)

    def _processes_in(self, site: str) -> Iterator[int]:
        inode = Path(self.lab.namespaces[site]["net"]).stat().st_ino
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (process / "ns/net").stat().st_ino == inode:
                    yield int(process.name)


class SshPlace(LabPlace):
    """Sites of a lab that only ssh leads to, each with a disk of its own. The command runs at
    home, a site without devices."""

    homes = ("home",)

    def prepare(self, text: Path) -> None:
        super().prepare(text)
        self.hosts = SshHosts(self.lab, self.folder / "ssh")
        self._stack.callback(self.hosts.close)
        for site in self.sites:
            self._serve(site)
        self.hosts.know(*self.sites)
        for site in self.sites:
            self.hosts.configure(site, site)
        self.environment["PATH"] = f"{self.hosts.folder}/bin:{os.environ['PATH']}"
        self._write_cluster()

    def _config(self, text: Path) -> dict[str, object]:
        config = super()._config(text)
        config["parallel"] = {
            "technique": self.scenario.technique,
            "cluster": str(self.folder / "cluster.yaml"),
        }
        config["checkpoint"] = {"every": self.scenario.save_every}
        return config

    def _disks(self) -> list[Path]:
        return [*super()._disks(), self.folder / "ssh" / self.sites[0]]

    def _write_cluster(self) -> None:
        sites: dict[str, object] = {}
        for site in self.sites:
            host = {
                "devices": [{"kind": "cpu-avx2", "memory": "2GB"}],
                "address": self.hosts.address(site),
                "enter": ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", site],
                "python": sys.executable,
            }
            sites[f"site-{site}"] = {"hosts": {site: host}}
        links = [
            {"between": [f"site-{a}", f"site-{b}"], "rtt": RTT}
            for a, b in combinations(self.sites, 2)
        ]
        cluster = {"sites": sites, "links": links}
        (self.folder / "cluster.yaml").write_text(yaml.safe_dump(cluster))

    def _serve(self, site: str) -> None:
        variables = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        self.hosts.start(site, variables=variables)

    def _enter_home(self) -> list[str]:
        return state.enter(self.lab, "home")

    def lose_site(self, site: int) -> None:
        super().lose_site(site)
        self.hosts.servers[self.sites[site % len(self.sites)]].wait(LIMIT_S)

    def return_site(self, site: int) -> None:
        super().return_site(site)
        self._serve(self.sites[site % len(self.sites)])

    def lose_disk(self) -> None:
        """Lose rank 0's host, and what its disk holds."""
        self.lose_site(0)
        clear_folder(self.hosts.folder / self.sites[0])

    def fill_disk(self) -> None:
        """Fill the disk of rank 0's host, or for odd targets that of the run's folder."""
        fill(self._filler())

    def free_disk(self) -> None:
        self._filler().unlink(missing_ok=True)

    def _filler(self) -> Path:
        fault = self.scenario.fault
        is_home = fault is not None and fault.target % 2
        return (self.disk if is_home else self.hosts.folder / self.sites[0]) / "filler"


def missing(launcher: Launcher) -> str | None:
    """Return why this machine has no such place; None where it has."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    if launcher == "slurm":
        return daemons.missing()
    if launcher == "ssh" and shutil.which("sshd", path="/usr/sbin:/usr/bin") is None:
        return "needs openssh-server"
    return None


def find_workers(folder: Path) -> Iterator[tuple[int, int]]:
    """Yield rank and process of each worker of the run in a place's folder."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if b"python" not in words[0].rpartition(b"/")[2]:
                continue
            if b"farspan.runtime.spare" in words:
                # A spare has become a worker once it writes to that worker's log.
                log = (process / "fd/1").readlink()
                if log.is_relative_to(folder) and log.stem.startswith("rank-"):
                    yield int(log.stem.removeprefix("rank-")), int(process.name)
            elif b"farspan.runtime.worker" in words:
                lines = (process / "environ").read_bytes().split(b"\0")
                variables = dict(line.partition(b"=")[::2] for line in lines)
                home = os.fsdecode(variables.get(b"FARSPAN_RUN", b""))
                if Path(home).is_relative_to(folder) and b"RANK" in variables:
                    yield int(variables[b"RANK"]), int(process.name)


def fill(path: Path) -> None:
    """Write a file until its disk is full."""
    with open(path, "ab", buffering=0) as file:
        for block in (2**20, 2**12, 1):
            try:
                while file.write(b"\0" * block):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def clear_folder(folder: Path) -> None:
    """Delete all that a folder holds, while others may write there."""

    def is_empty() -> bool:
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        return not any(folder.iterdir())

    wait_for(is_empty, f"{folder} is empty")
