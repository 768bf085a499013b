"""Runs of Slurm jobs outside of a job: what is refused there, and which command resumes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from farspan.app import training
from farspan.app.jobs import read_status
from farspan.cli.main import main
from farspan.domain.catalog import load_devices
from farspan.domain.cluster import Cluster, Host, Site
from farspan.domain.problems import EXIT_CODES, Refusal
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.struct_files import load, save
from farspan.estimate.assumption_sentences import _probe_command
from tests import tiny
from tests.app.supervised import Watched, made
from tests.launch.test_launchers import TRAIN
from tests.waiting import LIMIT_S


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def stop(watched: Watched, step: int) -> None:
    if step == 1:
        watched.supervisor.request_stop()


def stopped(path: Path, launcher: str) -> RunFolder:
    """A run that was stopped after its first step."""
    run = made(path, tiny.plan(replace(TRAIN, steps=500)))
    Watched(run, at_step=stop).supervisor.train_run()
    save(replace(load(run.record, RunRecord), launcher=launcher), run.record)
    return run


@pytest.mark.parametrize("launcher", ["slurm", "none-such"])
def test_run_that_no_launcher_can_start_stays_stopped(launcher, tmp_path):
    run = stopped(tmp_path / "run", launcher)
    before = read_status(run, lambda: 0.0)
    assert before.state == "stopped"
    for until_done in (False, True):
        with pytest.raises(Refusal) as refused:
            training.train_run(run, until_done=until_done)
        assert refused.value.problem.code == "launcher-unusable"
        assert read_status(run, lambda: 0.0) == before


def test_run_that_has_never_begun_keeps_what_it_was_refused(tmp_path):
    run = made(tmp_path / "run", tiny.plan(TRAIN), launcher="slurm")
    with pytest.raises(Refusal):
        training.train_run(run)
    status = read_status(run)
    assert status.state == "failed" and status.problem is not None
    assert status.problem.code == "launcher-unusable"


@pytest.mark.parametrize("words", [(), ("--until-done",)])
def test_train_of_slurm_jobs_is_refused_before_anything_is_made(
    words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("my run.yaml").write_text("data: text\n")
    code = main(["train", "my run.yaml", "--launcher", "slurm", "--set", "size=3M", *words])
    assert code == EXIT_CODES["launcher-unusable"]
    assert "farspan slurm 'my run.yaml' --set size=3M\n" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["my run.yaml"]


def test_run_of_slurm_jobs_is_resumed_by_submitting_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = stopped(Path("run"), "slurm")
    fix = f"farspan slurm {run.config} --run {run.path}"
    assert run.resume_command() == fix
    assert main(["resume", "run"]) == EXIT_CODES["launcher-unusable"]
    assert f"fix:   {fix}\n" in capsys.readouterr().err
    main(["status", "run"])
    assert f"next: {fix}\n" in capsys.readouterr().out
    main(["report", "run"])
    assert f"go on with it: {fix}\n" in capsys.readouterr().out


def test_nodes_of_slurm_are_measured_by_a_job(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = main(["probe", "--cluster", "slurm", "-o", "my nodes.yaml"])
    assert code == EXIT_CODES["launcher-unusable"]
    assert "fix:   farspan slurm run.yaml --probe 'my nodes.yaml'\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("enter", "probe"),
    [
        (("srun", "--overlap"), "farspan slurm run.yaml --probe measured.yaml"),
        (None, "farspan probe --cluster CLUSTER -o measured.yaml"),
    ],
)
def test_assumed_link_between_nodes_of_slurm_names_the_command_that_measures_it(enter, probe):
    device = load_devices()["a30"].device("a30")
    assert device is not None
    hosts = [Host(name=f"node{number}", devices=(device,), enter=enter) for number in range(2)]
    cluster = Cluster(sites=(Site(name="x", hosts=tuple(hosts)),))
    assert _probe_command(cluster) == probe


def test_status_reports_that_slurm_does_not_answer(tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "squeue"):
        client = tmp_path / "bin" / name
        client.write_text("#!/bin/sh\necho Unable to contact slurm controller >&2\nexit 1\n")
        client.chmod(0o755)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/papers.sbatch").touch()
    done = subprocess.run(
        [sys.executable, "-m", "farspan", "status"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert "Slurm's queue is not known: Unable to contact" in done.stdout, done.stderr
    assert "no run here" in done.stderr
