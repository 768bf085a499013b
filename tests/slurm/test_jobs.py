"""Runs in jobs of a real Slurm that come to their limit, are preempted, cancelled, or wait: the
losses are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from farspan.domain.problems import EXIT_CODES
from tests.slurm.daemons import Slurm
from tests.slurm.places import LONG_MINUTES, Place
from tests.waiting import wait_for

pytestmark = pytest.mark.slow
#: Steps of a run that is disturbed.
STEPS = 60
#: What the supervisor prints when it is asked to save and end.
NOTICED = "saving; once more to stop at once"


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
        place.slurm.bring_limit_near(job)
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


def test_components_of_a_heterogeneous_job_train_as_the_nodes_of_one(place: Place):
    place.write_config("nodes.yaml", steps=20, cpus=1, nodes=2)
    place.write_config("components.yaml", steps=20, cpus=1, components=[{"cpus": 1}])
    for name in ("nodes", "components"):
        job = place.submit(f"{name}.yaml", name)
        place.wait_until_ended(job, name)
    assert "2 workers on node0, node1 through slurm" in place.log("components")
    assert place.finished_losses("components") == place.finished_losses("nodes")


def test_cancelled_job_saves_and_stays_out_of_the_queue(place: Place):
    place.write_config("run.yaml", steps=STEPS, cpus=2)
    job = place.submit("run.yaml", "stopped")
    place.wait_until_trained(job, "stopped", 2)
    again = place.farspan("slurm", "run.yaml", "--run", "runs/stopped")
    assert again.returncode == 33
    assert "farspan status runs/stopped" in again.stderr and f"job {job}: " in again.stderr
    assert "#SBATCH" not in again.stdout
    place.slurm.run("scancel", job)
    place.wait_until_ended(job, "stopped")
    assert place.slurm.job(job)["JobState"] == "CANCELLED"
    assert place.run_folder("stopped").newest_checkpoint() == place.step("stopped")


def test_job_that_is_cancelled_before_its_first_step_names_the_command_that_submits_it(
    place: Place,
):
    place.write_config("run.yaml", steps=STEPS, cpus=2)
    job = place.submit("run.yaml", "early")
    wait_for(lambda: place.log("early"), "farspan prints")
    place.slurm.run("scancel", job)
    place.wait_until_ended(job, "early")
    (fix,) = re.findall("fix: .*", place.log("early"))
    assert "farspan slurm " in fix and "--until-done" not in fix


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="this PyTorch can use GPUs")
def test_job_whose_gpu_pytorch_does_not_see_trains_nothing(place: Place):
    place.write_config("run.yaml", steps=20, device="auto", gres="gpu:a30:1")
    job = place.submit("run.yaml", "unseen")
    place.wait_until_ended(job, "unseen")
    assert place.slurm.job(job)["ExitCode"] == "28:0", place.log("unseen")[-3000:]
    assert "error[device-missing]" in place.log("unseen")
    assert "Slurm: 1 GPU; PyTorch sees: none" in place.log("unseen")
    assert not place.run_folder("unseen").path.exists()


def test_job_that_never_starts_says_why(place: Place):
    place.write_config("run.yaml", steps=20, nodes=9)
    done = place.farspan("slurm", "run.yaml")
    assert done.returncode == 0, done.stderr
    assert re.search(r"PENDING \(Partition(Config|NodeLimit)\)", done.stdout)
    assert "partition main has fewer than 9 such nodes (sinfo: 2)" in done.stdout
    assert "then set slurm.nodes: 2" in done.stdout
    for words in ((), ("runs/text",)):
        status = place.farspan("status", *words)
        assert status.returncode == 0, status.stderr
        assert "runs/text: not begun; its Slurm job waits in the queue" in status.stdout
        assert "it never starts" in status.stdout
    place.slurm.run("scancel", "--name=farspan-text")


def test_status_shows_the_job_of_a_run_that_has_not_begun_or_is_requeued(place: Place):
    place.write_config("run.yaml", steps=STEPS, cpus=2)
    assert place.farspan("status", "runs/held").returncode == EXIT_CODES["not-a-run"]
    place.write_config("held.yaml", steps=STEPS, cpus=2, options=["--hold"])
    job = place.submit("held.yaml", "held")
    answer = json.loads(place.farspan("status", "runs/held", "--json").stdout)
    (queued,) = answer["queued"]
    assert (queued["job"]["id"], queued["job"]["state"]) == (job, "PENDING")
    assert queued["job"]["reason"] == "JobHeldUser"
    assert queued["log"] == str(place.folder / "runs" / "held.slurm.log")
    assert f"scontrol release {job}" in queued["stuck"]
    place.slurm.run("scontrol", "release", job)
    place.wait_until_trained(job, "held", 2)
    place.slurm.run("scontrol", "requeuehold", job)
    wait_for(
        lambda: (
            place.slurm.run("squeue", "-h", f"--jobs={job}", "-o", "%T").stdout.strip() == "PENDING"
        ),
        "the job is requeued",
    )
    status = place.farspan("status", "runs/held").stdout
    assert f"job {job}: PENDING" in status and "farspan slurm" not in status
    place.slurm.run("scancel", job)
    place.wait_until_ended(job, "held")
    assert "next: farspan slurm" in place.farspan("status", "runs/held").stdout
