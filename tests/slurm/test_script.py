"""The sbatch script of a run, by what run.yaml asks for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from farspan.app.configs import make_config, override_config
from farspan.app.slurm_jobs import site_jobs_of, site_scripts, training_script
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder
from farspan.domain.struct_files import parse_yaml
from farspan.launch.slurm_client import check_script, submit_script
from farspan.planning.slurm_script import HELD_POLL_S, MAX_IDLE_S
from tests.slurm.daemons import Slurm
from tests.waiting import LIMIT_S


def script_of(**slurm: object) -> str:
    config = make_config("text", slurm=slurm)
    return training_script(config, RunFolder(Path("runs/papers")), ["run.yaml"])


def site_script_of(**site: object) -> str:
    config = make_config("text", slurm={"sites": {"mass": {"login": "login.mass", **site}}})
    return site_scripts(config, RunFolder(Path("runs/papers")))["mass"]


def options(script: str) -> list[str]:
    return [
        line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")
    ]


def test_script_asks_for_what_run_yaml_names():
    asked = options(
        script_of(
            partition="gpu",
            account="lab-1",
            qos="long",
            constraint="a100&ib",
            time="1d 2h 30m",
            nodes=4,
            gres="gpu:a100:4",
            cpus=32,
            memory="64G",
            options=["--exclude=node7"],
        )
    )
    for option in (
        "--partition=gpu",
        "--account=lab-1",
        "--qos=long",
        "--constraint=a100&ib",
        "--time=1-02:30:00",
        "--nodes=4",
        "--gres=gpu:a100:4",
        "--cpus-per-task=32",
        "--mem=64G",
        "--exclude=node7",
        "--requeue",
        "--open-mode=append",
        "--signal=B:USR1@180",
        "--job-name=farspan-papers",
        "--ntasks-per-node=1",
    ):
        assert option in asked


def test_script_without_a_slurm_section_leaves_all_choices_to_the_site():
    names = {option.partition("=")[0] for option in options(script_of())}
    assert names.isdisjoint({"--partition", "--account", "--qos", "--time", "--gres", "--mem"})


def test_modules_conda_and_setup_come_before_farspan_in_this_order():
    script = script_of(
        modules=["gcc/12", "cuda/12.4"],
        conda="/opt/envs/my env",
        setup=["export NCCL_DEBUG=INFO"],
        offline=True,
    )
    lines = [
        "module load gcc/12 cuda/12.4 || exit 1",
        "conda activate '/opt/envs/my env' || exit 1",
        "export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1",
        "export NCCL_DEBUG=INFO",
        "env PYTHONSAFEPATH=1 python -m farspan train run.yaml --launcher slurm",
    ]
    places = [script.index(line) for line in lines]
    assert places == sorted(places)


def test_components_are_those_of_a_heterogeneous_job():
    asked = options(script_of(partition="cpu", components=[{"partition": "gpu", "gpus": 2}]))
    at = asked.index("hetjob")
    assert "--partition=cpu" in asked[:at]
    assert asked[at + 1 :] == [
        "--partition=gpu",
        "--nodes=1",
        "--gpus-per-node=2",
        "--ntasks-per-node=1",
    ]


@pytest.mark.parametrize(
    "slurm",
    [
        {},
        {"time": "3m", "notice": "100s"},
        {"modules": ["a"], "conda": "b", "setup": ["if true; then", "echo; fi"], "offline": True},
        {"components": [{"nodes": 2}]},
    ],
)
def test_script_is_one_that_bash_reads(slurm, tmp_path):
    script = tmp_path / "job.sbatch"
    script.write_text(script_of(**slurm))
    subprocess.run(["bash", "-n", script], check=True, timeout=LIMIT_S)


@pytest.mark.parametrize(
    ("saves", "ends", "code", "starts"),
    [
        # Killed at every start: with a new checkpoint each time until the ninth, and without any.
        ("mkdir -p runs/papers/checkpoints/step-0000000$n", "kill -KILL $$", 0, 9),
        ("true", "kill -KILL $$", 137, 4),
        ("true", "kill -SEGV $$", 139, 4),
        ("true", "kill -ABRT $$", 134, 4),
        # A refusal, and a stop that somebody asked for.
        ("true", "exit 15", 15, 1),
        ("true", "exit 130", 130, 1),
        ("true", "kill -TERM $$", 143, 1),
    ],
)
def test_killed_process_begins_again_while_it_saves(saves, ends, code, starts, tmp_path):
    lines = [
        "echo start >> starts",
        "n=$(wc -l < starts)",
        "[ $n -lt 9 ] || exit 0",
        saves,
        ends,
    ]
    (tmp_path / "stub").write_text("\n".join(lines))
    config = make_config("text")
    script = training_script(config, RunFolder(tmp_path / "runs/papers"), ["run.yaml"])
    command = next(line for line in script.splitlines() if "--until-done" in line)
    script = script.replace(command, "    sh stub &").replace("#!/bin/bash -l", "")
    (tmp_path / "job").write_text(script)
    done = subprocess.run(["bash", "job"], cwd=tmp_path, timeout=LIMIT_S, capture_output=True)
    assert done.returncode == code, done.stderr
    assert len((tmp_path / "starts").read_text().split()) == starts


def test_job_at_another_site_asks_for_what_its_table_names():
    asked = options(site_script_of(partition="gpu", account="lab-2", time="8h", nodes=2, gpus=4))
    assert asked == [
        f"--job-name={site_jobs_of(RunFolder(Path('runs/papers')))}-mass",
        "--requeue",
        "--open-mode=append",
        "--output=%x.log",
        "--signal=B:USR1@180",
        "--time=0-08:00:00",
        "--account=lab-2",
        "--partition=gpu",
        "--nodes=2",
        "--gpus-per-node=4",
        "--ntasks-per-node=1",
    ]


#: Stand-ins for Slurm's commands: squeue shows a step for so many times, and the others only log.
QUEUE = """\
sleep() { :; }
squeue() {
    echo asked >> asked
    [ "$(wc -l < asked)" -gt %d ] || echo 7.0
    echo 7.batch
}
scancel() { echo "scancel $*" >> log; rm -f asked; }
scontrol() { echo "scontrol $*" >> log; }
SLURM_JOB_ID=7
"""


def hold(folder: Path, *, steps: int, begin: str = "") -> list[str]:
    """Run the job of another site that is entered for so many looks; return what it asks of
    Slurm."""
    script = site_script_of().replace("#!/bin/bash -l", QUEUE % steps)
    script = script.replace("idle_s=0\n", f"idle_s=0\n{begin}\n", 1)
    (folder / "job").write_text(script)
    done = subprocess.run(["bash", "job"], cwd=folder, timeout=LIMIT_S, capture_output=True)
    assert done.returncode == 0, done.stderr
    log = folder / "log"
    return log.read_text().splitlines() if log.exists() else []


def test_job_at_another_site_ends_once_nobody_has_entered_it_for_long(tmp_path):
    assert hold(tmp_path, steps=5) == []
    looks = len((tmp_path / "asked").read_text().split())
    # `slurm.wait` is half an hour.
    assert looks == 5 + (MAX_IDLE_S + 1800) / HELD_POLL_S


def test_job_at_another_site_gives_notice_to_workers_and_goes_back_into_the_queue(tmp_path):
    log = hold(tmp_path, steps=3, begin="kill -USR1 $$")
    assert log == ["scancel --signal=TERM 7", "scontrol requeue 7"]


@pytest.mark.parametrize(("ends", "code"), [("exit 0", 0), ("exit 15", 15), ("kill -TERM $$", 143)])
def test_end_of_a_run_ends_its_jobs_at_other_sites(ends, code, tmp_path):
    config = make_config("text", slurm={"sites": {"mass": {"login": "login.mass"}}})
    script = training_script(config, RunFolder(tmp_path / "runs/papers"), ["run.yaml"])
    command = next(line for line in script.splitlines() if "--until-done" in line)
    script = script.replace(command, "    sh stub &").replace("#!/bin/bash -l", "")
    (tmp_path / "stub").write_text(ends)
    (tmp_path / "ssh").write_text('#!/bin/sh\nshift 5\necho "$@" > asked\n')
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "job").write_text(script)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "job"], cwd=tmp_path, env=environment, timeout=LIMIT_S, capture_output=True
    )
    assert done.returncode == code, done.stderr
    asked = (tmp_path / "asked").read_text()
    name = site_jobs_of(RunFolder(tmp_path / "runs/papers"))
    queue = f"squeue --me --noheader --format=%i --name={name}-mass"
    assert asked == f"login.mass {queue} | xargs -r scancel\n"


@pytest.mark.parametrize(
    ("slurm", "key"),
    [
        ({"sites": {"mass": {"login": "-oProxyCommand=x"}}}, "slurm.sites"),
        ({"sites": {"mass": {"login": "a b"}}}, "slurm.sites"),
        ({"sites": {"a b": {"login": "a"}}}, "slurm.sites"),
        ({"sites": {"mass": {"login": "a;b"}}}, "slurm.sites"),
        ({"sites": {"mass": {"partition": "gpu"}}}, "slurm.sites"),
        ({"sites": {"mass": {"login": "a"}}, "time": "30m"}, "slurm.wait"),
        ({"time": "4m", "notice": "3m"}, "slurm.time"),
        ({"time": "soon"}, "slurm.time"),
        ({"notice": "0s"}, "slurm.notice"),
        ({"notice": "20h"}, "slurm.notice"),
        ({"gpus": 1, "gres": "gpu:1"}, "slurm.gres"),
        ({"components": [{"gpus": 1, "gres": "gpu:1"}]}, "slurm.components[0].gres"),
        ({"partition": "a b"}, "slurm.partition"),
        ({"partition": "--wrap=x"}, "slurm.partition"),
        ({"account": "a\n#SBATCH --uid=0"}, "slurm.account"),
        ({"options": ["node7"]}, "slurm.options[0]"),
        ({"options": ["--x\nrm -rf /"]}, "slurm.options[0]"),
        ({"modules": ["$(id)"]}, "slurm.modules[0]"),
        ({"nodes": 0}, "slurm.nodes"),
    ],
)
def test_values_that_no_job_can_have_are_refused_with_their_key(slurm, key):
    with pytest.raises(Refusal) as refused:
        script_of(**slurm)
    assert refused.value.problem.code == "out-of-range"
    assert key in (refused.value.problem.key, refused.value.problem.where) or key in str(
        refused.value
    )


@pytest.mark.parametrize(
    ("time", "option"),
    [
        ("4h", "0-04:00:00"),
        ("04:00:00", "0-04:00:00"),
        ("90:00", "0-01:30:00"),
        ("1-00:00:00", "1-00:00:00"),
        ("1-12", "1-12:00:00"),
        ("2-06:30", "2-06:30:00"),
    ],
)
def test_times_are_those_of_farspan_and_of_slurm(time, option):
    assert f"--time={option}" in options(script_of(time=time))


@pytest.mark.parametrize("time", ["12:00:00", "04:00:00", "1:30:00", "30:00", "1-12:00:00"])
def test_times_of_slurm_need_no_quotes_in_a_run_file(time):
    assert parse_yaml(f"slurm: {{time: {time}, nodes: 2}}", "run.yaml") == {
        "slurm": {"time": time, "nodes": 2}
    }


@pytest.mark.parametrize("time", [240, "240", "1:2:3:4", "-4:00", "4:00:00:", "1-"])
def test_times_without_a_unit_and_other_forms_are_refused(time):
    with pytest.raises(Refusal) as refused:
        script_of(time=time)
    assert refused.value.problem.key == "slurm.time"


@pytest.mark.parametrize(
    ("slurm", "example"),
    [
        ({"time": "3m"}, "--set slurm.notice=60s"),
        ({"time": "4m", "notice": "3m"}, "--set slurm.notice=90s"),
        ({"time": "2m", "notice": "2m"}, "--set slurm.notice=30s"),
        ({"time": "90s"}, "--set slurm.time=1h"),
        ({"time": "30m", "sites": {"mass": {"login": "mass"}}}, "--set slurm.wait=780s"),
        ({"time": "4h", "notice": "1h", "wait": "3h", "sites": {"mass": {"login": "mass"}}}, ""),
    ],
)
def test_remedy_of_a_job_without_time_to_train_is_a_value_that_works(slurm, example):
    with pytest.raises(Refusal) as refused:
        script_of(**slurm)
    remedy = refused.value.problem.remedy
    assert remedy.startswith(example)
    config = override_config(make_config("text", slurm=slurm), remedy.removeprefix("--set "))
    training_script(config, RunFolder(Path("runs/papers")), ["run.yaml"])


@pytest.mark.parametrize(
    ("site", "wait", "key"),
    [
        ({"time": "4m"}, "30m", "slurm.sites.mass.time"),
        ({"time": "soon"}, "30m", "slurm.sites.mass.time"),
        ({"gpus": 1, "gres": "gpu:1"}, "30m", "slurm.sites.mass.gres"),
        ({}, "0s", "slurm.wait"),
    ],
)
def test_values_of_another_site_that_no_job_can_have_are_refused_with_their_key(site, wait, key):
    sites = {"mass": {"login": "login.mass", **site}}
    config = make_config("text", slurm={"sites": sites, "wait": wait})
    with pytest.raises(Refusal) as refused:
        site_scripts(config, RunFolder(Path("runs/papers")))
    assert refused.value.problem.code == "out-of-range"
    assert refused.value.problem.key == key


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"time": "30m", "nodes": 2, "cpus": 1, "memory": "1G", "partition": "main"},
        {"gpus": 1},
        {"gres": "gpu:a30:1"},
        {"components": [{"gpus": 1}]},
        {"options": ["--nice=10", "--exclude=n1"]},
    ],
)
def test_a_real_slurm_takes_the_script(asked, in_slurm: Slurm):
    check_script(script_of(**asked))
    if "components" not in asked:
        check_script(site_script_of(**asked))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "key"),
    [
        ({"partition": "nope"}, "slurm.partition"),
        ({"gres": "foo:1"}, "slurm.gres"),
        ({"constraint": "nope"}, "slurm.constraint"),
        ({"memory": "999G"}, "slurm.memory"),
        ({"memory": "much"}, "slurm.memory"),
    ],
)
def test_what_a_real_slurm_refuses_is_named_by_its_key(asked, key, in_slurm: Slurm):
    with pytest.raises(Refusal) as refused:
        submit_script(script_of(**asked))
    assert refused.value.problem.key == key
    assert refused.value.problem.fact
