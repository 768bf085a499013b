"""Where disturbed runs train as jobs: the nodes of a real Slurm."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from farspan.domain.interpreter import module_command
from tests.faults.places import Place
from tests.faults.scenarios import Scenario
from tests.slurm import daemons
from tests.waiting import LIMIT_S

#: How often Slurm is asked whether a job has ended.
QUEUE_POLL_S = 2.0


class SlurmPlace(Place):
    """Nodes of a real Slurm, whose job trains the run. Nobody submits it again."""

    has_unit = False

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        super().__init__(scenario, folder)
        self._job = ""
        self._asked_at = 0.0

    def prepare(self, text: Path) -> None:
        super().prepare(text)
        nodes = len(self.sites)
        self.slurm = self._stack.enter_context(daemons.running(nodes=nodes))
        self.environment = {**self.environment, "SLURM_CONF": str(self.slurm.config)}

    def _config(self, text: Path) -> dict[str, object]:
        config = super()._config(text)
        config["parallel"] = {"technique": self.scenario.technique, "device": "cpu"}
        config["slurm"] = {"time": "4h", "cpus": 1, "nodes": self.scenario.sites}
        return config

    def start(self) -> None:
        """Submit the run."""
        words = ["slurm", "run.yaml", "--run", str(self.run.path)]
        done = subprocess.run(
            module_command(sys.executable, "farspan", *words),
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        with open(self.log, "a") as log:
            log.write(done.stdout + done.stderr)
        assert done.returncode == 0, done.stderr
        self._job = done.stdout.split("squeue --jobs ")[1].split()[0]

    def poll(self) -> int | None:
        """Return the exit code of the job, None while it is in the queue."""
        if time.monotonic() < self._asked_at + QUEUE_POLL_S:
            return None
        self._asked_at = time.monotonic()
        queued = self.slurm.run("squeue", "--noheader", f"--jobs={self._job}").stdout.strip()
        if queued:
            return None
        code, _, number = self.slurm.job(self._job).get("ExitCode", "0:0").partition(":")
        self._append_job_log()
        return int(code) or -int(number)

    def _append_job_log(self) -> None:
        path = self.run.path.with_name(f"{self.run.path.name}.slurm.log")
        if path.exists():
            with open(self.log, "a") as log:
                log.write(path.read_text(errors="replace"))

    def signal_command(self, number: signal.Signals) -> None:
        """Send a signal to the supervisor; SIGTERM stands for a job of a higher priority."""
        if number == signal.SIGTERM:
            size = f"--nodes={self.scenario.sites}"
            urgent = ("sbatch", "--partition=urgent", size, "--exclusive", "--wrap=true")
            self.slurm.run(*urgent, "--output=/dev/null")
            return
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            is_python = bool(words) and "python" in Path(words[0]).name
            if is_python and "--until-done" in words and str(self.run.path) in words:
                process.send_signal(number)

    def lose_site(self, site: int) -> None:
        """Take a node down: Slurm kills the jobs on it, and puts them back into the queue."""
        node = self.slurm.nodes[site % len(self.slurm.nodes)]
        words = ("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")
        self.slurm.run(*words)

    def return_site(self, site: int) -> None:
        node = self.slurm.nodes[site % len(self.slurm.nodes)]
        self.slurm.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
