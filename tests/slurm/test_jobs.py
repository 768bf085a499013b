"""Runs in jobs of a real Slurm that come to their limit, are preempted, cancelled, or wait: the
losses are those of an undisturbed run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from farspan.app.configs import as_yaml, make_config
from farspan.domain.interpreter import module_command
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Event, Finished, Step, read_events
from tests.slurm.daemons import Slurm
from tests.waiting import wait_for

pytestmark = pytest.mark.slow
#: Steps of a run that is disturbed.
STEPS = 60
LONG_MINUTES = 240
#: What the supervisor prints when it is asked to save and end.
NOTICED = "saving; once more to stop at once"


class Place:
    """A folder with text, from which runs are started."""

    def __init__(self, folder: Path, slurm: Slurm) -> None:
        self.folder = folder
        self.slurm = slurm
        words = [f"word{number % 89} of line {number}" for number in range(6000)]
        (folder / "text").mkdir()
        for part in range(10):
            lines = words[part * 600 : (part + 1) * 600]
            (folder / "text" / f"{part}.txt").write_text("\n".join(lines))

    def write_config(self, name: str, *, steps: int, **slurm: object) -> None:
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
            parallel={"technique": "data", "device": "cpu"},
            slurm={"time": f"{LONG_MINUTES}m", "notice": "100s", **slurm},
        )
        (self.folder / name).write_bytes(as_yaml(config))

    def farspan(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {**self.slurm.environment, "FARSPAN_CACHE": str(self.folder / "cache")}
        return subprocess.run(
            module_command(sys.executable, "farspan", *words),
            cwd=self.folder,
            env=environment,
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

    def bring_limit_near(self, job: str) -> None:
        """Give a job that runs a limit that its notice comes before: Slurm counts it in minutes,
        and looks at limits twice a minute."""
        began = self.slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%M")
        *hours, minutes, _ = re.split("[-:]", began.stdout.strip())
        assert not hours
        changed = self.slurm.run(
            "scontrol", "update", f"JobId={job}", f"TimeLimit={int(minutes) + 2}"
        )
        assert changed.returncode == 0, changed.stderr

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


@pytest.fixture
def place(tmp_path: Path, slurm: Slurm) -> Place:
    return Place(tmp_path, slurm)


def test_run_longer_than_its_limit_ends_after_three_jobs_with_the_losses_of_an_undisturbed_one(
    place: Place,
):
    place.write_config("run.yaml", steps=STEPS, cpus=2)
    undisturbed = place.submit("run.yaml", "undisturbed")
    place.wait_until_ended(undisturbed, "undisturbed")
    job = place.submit("run.yaml", "short")
    for starts in (1, 2):
        # The worker stands still until Slurm gives notice, however fast this machine is.
        place.wait_until_trained(job, "short", place.step("short") + 2)
        worker = place.worker("short")
        worker.suspend()
        notices = place.log("short").count(NOTICED)
        place.bring_limit_near(job)
        wait_for(lambda before=notices: place.log("short").count(NOTICED) > before, "a notice")
        worker.resume()
        wait_for(
            lambda number=starts: place.slurm.job(job).get("Restarts") == str(number),
            "the job is requeued",
        )
        place.slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={LONG_MINUTES}")
    place.wait_until_ended(job, "short")
    assert place.slurm.job(job)["JobState"] == "COMPLETED"
    assert place.slurm.job(job)["Restarts"] == "2"
    plans = [place.run_folder(name).load_plan().hash for name in ("short", "undisturbed")]
    assert plans[0] == plans[1]
    assert place.finished_losses("short") == place.finished_losses("undisturbed")


def test_preempted_run_on_two_nodes_loses_no_step(place: Place):
    place.write_config("run.yaml", steps=60, cpus=1, nodes=2)
    undisturbed = place.submit("run.yaml", "undisturbed")
    place.wait_until_ended(undisturbed, "undisturbed")
    job = place.submit("run.yaml", "preempted")
    place.wait_until_trained(job, "preempted", 5)
    urgent = place.slurm.run(
        *("sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive"),
        *("--output=/dev/null", "--wrap=true"),
    )
    assert urgent.returncode == 0, urgent.stderr
    wait_for(lambda: place.slurm.job(job).get("Restarts") == "1", "the job is preempted")
    place.wait_until_ended(job, "preempted")
    assert place.slurm.job(job)["JobState"] == "COMPLETED", place.log("preempted")[-3000:]
    assert "2 workers on node0, node1 through slurm" in place.log("preempted")
    assert place.finished_losses("preempted") == place.finished_losses("undisturbed")


def test_cancelled_job_saves_and_stays_out_of_the_queue(place: Place):
    place.write_config("run.yaml", steps=STEPS, cpus=2)
    job = place.submit("run.yaml", "stopped")
    place.wait_until_trained(job, "stopped", 2)
    again = place.farspan("slurm", "run.yaml", "--run", "runs/stopped")
    assert again.returncode == 33
    assert f"scancel {job}" in again.stderr
    place.slurm.run("scancel", job)
    place.wait_until_ended(job, "stopped")
    assert place.slurm.job(job)["JobState"] == "CANCELLED"
    assert place.run_folder("stopped").newest_checkpoint() == place.step("stopped")


def test_job_that_saves_nothing_before_its_limit_does_not_go_round_for_ever(place: Place):
    place.write_config("run.yaml", steps=20)
    script = place.farspan("slurm", "run.yaml", "--print").stdout
    # The notice comes while farspan starts.
    script = script.replace("job=$!", "job=$!; kill -USR1 $$")
    (place.folder / "job.sbatch").write_text(script)
    done = subprocess.run(
        ["bash", "job.sbatch"],
        cwd=place.folder,
        env={**os.environ, "FARSPAN_CACHE": str(place.folder / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert "this job saved nothing: raise slurm.time" in done.stderr


def test_job_that_waits_says_why(place: Place):
    place.write_config("run.yaml", steps=20, nodes=9)
    done = place.farspan("slurm", "run.yaml")
    assert done.returncode == 0, done.stderr
    assert "PENDING (PartitionConfig)" in done.stdout
    place.slurm.run("scancel", "--name=farspan-text")
