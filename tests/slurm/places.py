"""A folder with text on the login node of a real Slurm, from which runs are submitted."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil

from farspan.app.configs import as_yaml, make_config
from farspan.domain.interpreter import module_command
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Event, Finished, Step, read_events
from tests.slurm.daemons import Slurm
from tests.waiting import wait_for

LONG_MINUTES = 240


class Place:
    """A folder with text, from which runs are started."""

    def __init__(self, folder: Path, slurm: Slurm) -> None:
        self.folder = folder
        self.slurm = slurm
        self.environment = {**slurm.environment, "FARSPAN_CACHE": str(folder / "cache")}
        words = [f"word{number % 89} of line {number}" for number in range(6000)]
        (folder / "text").mkdir()
        for part in range(10):
            lines = words[part * 600 : (part + 1) * 600]
            (folder / "text" / f"{part}.txt").write_text("\n".join(lines))

    def write_config(
        self,
        name: str,
        *,
        steps: int,
        on_fault: str = "recover",
        device: str = "cpu",
        **slurm: object,
    ) -> None:
        config = make_config(
            "text",
            size="177216",
            tokenizer={"vocab": 300},
            model={"context": 128},
            train={
                "steps": steps,
                "batch": {"global": "8 sequences"},
                "precision": "fp32",
                "recipe": "plain",
                "optimizer": "adamw",
                "compile": False,
                "validate_every": steps,
            },
            parallel={"technique": "data", "device": device},
            on_fault=on_fault,
            slurm={"time": f"{LONG_MINUTES}m", "notice": "100s", **slurm},
        )
        (self.folder / name).write_bytes(as_yaml(config))

    def farspan(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            module_command(sys.executable, "farspan", *words),
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def submit(self, config: str, name: str) -> str:
        """Submit a run; the number of its job."""
        done = self.farspan("slurm", config, "--run", f"runs/{name}")
        assert done.returncode == 0, done.stderr
        return done.stdout.split("squeue --jobs ")[1].split()[0]

    def run_folder(self, name: str) -> RunFolder:
        return RunFolder(self.folder / "runs" / name)

    def events(self, name: str) -> list[Event]:
        path = self.run_folder(name).events
        return list(read_events(path)) if path.exists() else []

    def step(self, name: str) -> int:
        """The last step of a run, 0 before the first."""
        steps = [event.step for event in self.events(name) if isinstance(event, Step)]
        return steps[-1] if steps else 0

    def log(self, name: str) -> str:
        path = self.folder / "runs" / f"{name}.slurm.log"
        return path.read_text() if path.exists() else ""

    def wait_until_trained(self, job: str, name: str, step: int) -> None:
        """Wait until a job has made a step after `step`."""

        def has_trained() -> bool:
            assert not self._has_ended(job), self.log(name)[-3000:]
            return self.step(name) > step

        wait_for(has_trained, f"a step of {name} after {step}")

    def wait_until_ended(self, job: str, name: str) -> None:
        """Wait until a job has left the queue, however long it trains."""
        step = -1
        while not self._has_ended(job):
            wait_for(
                lambda before=step: self._has_ended(job) or self.step(name) > before,
                f"another step of {name}: {self.log(name)[-2000:]}",
            )
            step = self.step(name)

    def worker(self, name: str) -> psutil.Process:
        """The worker of a run that has one."""
        folder = str(self.run_folder(name).path)
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "farspan.runtime.worker" in words and folder in words:
                return process
        raise AssertionError(f"{name} has no worker")

    def _has_ended(self, job: str) -> bool:
        return not self.slurm.run("squeue", "--noheader", f"--jobs={job}").stdout.strip()

    def finished_losses(self, name: str) -> dict[int, float]:
        """The losses of a run that has made its last step; each step was made once."""
        events = self.events(name)
        end = events[-1]
        assert isinstance(end, Finished) and end.reason == "done", self.log(name)[-3000:]
        steps = [event for event in events if isinstance(event, Step)]
        (most,) = Counter(event.step for event in steps).most_common(1)
        assert most[1] == 1, f"step {most[0]} was made {most[1]} times"
        return {event.step: event.loss for event in steps}
