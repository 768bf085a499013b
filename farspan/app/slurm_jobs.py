"""Runs as Slurm jobs: the script, its submission, and its state in the queue."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec.structs import replace

from farspan.app.preflight_checks import refuse_existing, refuse_file
from farspan.app.resolving import allowed_techniques, prepare_run_corpus
from farspan.app.updates import Note, Progress, ignore_update
from farspan.domain.config import RunConfig, SlurmConfig, SlurmNodes
from farspan.domain.interpreter import module_command
from farspan.domain.problems import Refusal, command
from farspan.domain.run import RunFolder
from farspan.domain.struct_files import content_hash, write_atomically
from farspan.launch.slurm_allocation import SLURM
from farspan.launch.slurm_client import (
    CLIENT_TIMEOUT_S,
    QueuedJob,
    check_script,
    find_job,
    has_slurm,
    list_jobs,
    require_slurm,
    run_client,
    submit_script,
)
from farspan.launch.slurm_partitions import node_tables, offered_nodes
from farspan.launch.slurm_reasons import find_stuck
from farspan.launch.slurm_sites import login_command, site_job_name
from farspan.planning.slurm_script import (
    LoginNode,
    job_name,
    write_command_script,
    write_holding_script,
    write_training_script,
)

#: The queue is asked this often: sites limit how much a user may ask it.
QUEUE_POLL_S = 5.0
#: A job that can start at once has started within this, on a queue that is not busy; else the
#: reason is shown.
FIRST_LOOK_S = 10.0


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    """A job that was submitted, with its script and log; `queued` is its state in the
    queue, None of one that has ended; `stuck` is why it never starts, if so."""

    id: str
    script: Path
    log: Path
    queued: QueuedJob | None
    stuck: str | None = None


class QueuedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run whose job is in the queue, and that job's log; `stuck` is why it never starts, if
    so."""

    run: str
    job: QueuedJob
    log: str
    stuck: str | None


def training_script(config: RunConfig, run: RunFolder, words: Sequence[object]) -> str:
    """Return the sbatch script that trains `run`; `words` are the arguments of `train` that
    config was read from. Raises Refusal (out-of-range)."""
    launcher = [] if config.parallel.cluster == SLURM else ["--launcher", SLURM]
    where = ["--run", run.path.absolute(), "--until-done"]
    train = [*_farspan(config), "train", *words, *launcher, *where]
    jobs_at = dict[str, list[str]]()
    for name, site in config.slurm.sites.items():
        jobs_at.setdefault(site.login, []).append(site_job_name(site_jobs_of(run), name))
    return write_training_script(
        config.slurm,
        run,
        train=train,
        workdir=Path.cwd(),
        site_jobs=site_jobs_of(run),
        logins=[LoginNode(login_command(login), jobs) for login, jobs in jobs_at.items()],
    )


def site_scripts(config: RunConfig, run: RunFolder) -> dict[str, str]:
    """Return the sbatch scripts of the jobs at other sites, by site. Raises Refusal
    (out-of-range)."""
    scripts = {}
    for site in config.slurm.sites:
        name = site_job_name(site_jobs_of(run), site)
        scripts[site] = write_holding_script(config.slurm, site, name)
    return scripts


def site_jobs_of(run: RunFolder) -> str:
    """Return the prefix of the names of a run's jobs at other sites, which no other run has."""
    path = run.path.absolute()
    digest = content_hash(socket.gethostname(), str(path))
    return f"{job_name(path.name)}-{digest[:8]}"


def probe_script(config: RunConfig, out: Path) -> str:
    """Return the script of a short job that measures the nodes a run would get, and writes them as
    a cluster file at `out`."""
    words = [*_farspan(config), "probe", "--cluster", SLURM, "-o", out.absolute()]
    log = out.absolute().with_suffix(".slurm.log")
    return write_command_script(
        config.slurm, f"probe-{out.stem}", words, log=log, workdir=Path.cwd()
    )


def _farspan(config: RunConfig) -> list[str]:
    """Return the command on the nodes: this installation's, or that of the conda environment."""
    python = sys.executable if config.slurm.conda is None else "python"
    return module_command(python, "farspan")


def require_submittable(config: RunConfig, run: RunFolder, remedy: str) -> None:
    """Refuse a run that is finished or has a job already, and what another site refuses: all that
    needs no submission. `remedy` makes the run in another folder. Raises Refusal."""
    from farspan.report.history import is_complete

    require_slurm()
    allowed_techniques(config.parallel)
    if run.plan.exists():
        if is_complete(run):
            raise Refusal(
                "run-exists",
                what="this run is finished: nothing is left to train",
                where=run.path,
                fact="its events end with its last step",
                remedy=command("report", run.path),
            )
    else:
        refuse_existing(run.path, remedy)
    _refuse_second_job(run)
    for name, text in site_scripts(config, run).items():
        site = config.slurm.sites[name]
        key = f"slurm.sites.{name}"
        with _naming_unmet_key({key: site}, site.login):
            check_script(text, site.login, key)


def submit_training(
    config: RunConfig, run: RunFolder, script: str, progress: Progress = ignore_update
) -> Submitted:
    """Submit the script of a run that `require_submittable` lets pass. Raises Refusal with Slurm's
    reason where it takes no such job."""
    scripts = site_scripts(config, run)
    if config.slurm.offline:
        progress(Note("preparing the text here: nodes have no internet"))
        prepare_run_corpus(config, progress)
    run.path.parent.mkdir(parents=True, exist_ok=True)
    path = run.path.absolute()
    file = path.with_name(f"{path.name}.sbatch")
    submitted = list[tuple[str, str]]()
    try:
        # Jobs elsewhere first: the run's own job submits those that it misses.
        for site, text in scripts.items():
            login = config.slurm.sites[site].login
            if list_jobs(site_job_name(site_jobs_of(run), site), login=login):
                continue
            number = submit_script(text, login, f"slurm.sites.{site}")
            submitted.append((login, number))
            progress(Note(f"site {site}: job {number} submitted at {login}"))
        return _submit(config.slurm, script, file, log_of_jobs(run), progress)
    except Refusal:
        for login, number in submitted:
            run_client(["scancel", number], login)
        raise


def submit_probe(
    config: RunConfig, out: Path, script: str, progress: Progress = ignore_update
) -> Submitted:
    """Submit the script of `probe_script` to a file that `require_probe_file` lets pass."""
    path = out.absolute()
    log = path.with_suffix(".slurm.log")
    return _submit(config.slurm, script, path.with_suffix(".sbatch"), log, progress)


def require_probe_file(out: Path, remedy: str) -> None:
    """Refuse a cluster file that is there; `remedy` writes another. Raises Refusal."""
    require_slurm()
    refuse_file(out, remedy)


def log_of_jobs(run: RunFolder) -> Path:
    """Return the log of a run's jobs."""
    path = run.path.absolute()
    return path.with_name(f"{path.name}.slurm.log")


@contextmanager
def _naming_unmet_key(nodes: Mapping[str, SlurmNodes], login: str | None = None) -> Iterator[None]:
    """Refuse by the key that no node meets, where Slurm refuses the nodes as a whole; `nodes` are
    tables of run.yaml by their key."""
    try:
        yield
    except Refusal as refusal:
        whole = {f"{key}.nodes" for key in nodes}
        if refusal.problem.key not in whole:
            raise
        for key, asked in nodes.items():
            try:
                offered_nodes(asked, key, login)
            except Refusal as unmet:
                if unmet.problem.key is None:  # sinfo does not answer.
                    continue
                fact = f"{unmet.problem.fact}; sbatch: {refusal.problem.fact}"
                raise Refusal.of(replace(unmet.problem, fact=fact)) from None
        raise


def _submit(
    config: SlurmConfig, script: str, file: Path, log: Path, progress: Progress
) -> Submitted:
    with _naming_unmet_key(dict(node_tables(config))):
        number = submit_script(script)
    write_atomically(file, script.encode())
    deadline = time.monotonic() + FIRST_LOOK_S
    queued = find_job(number)
    while queued is not None and queued.state == "PENDING" and time.monotonic() < deadline:
        time.sleep(QUEUE_POLL_S / 5)
        queued = find_job(number)
    progress(Note(str(queued) if queued else f"job {number} has ended"))
    stuck = find_stuck(queued, config) if queued else None
    if stuck is not None:
        progress(Note(str(stuck)))
    return Submitted(
        id=number, script=file, log=log, queued=queued, stuck=str(stuck) if stuck else None
    )


def queued_runs(runs: Sequence[RunFolder], timeout_s: float = CLIENT_TIMEOUT_S) -> list[QueuedRun]:
    """Return those of some runs that have a job in the queue; none where Slurm is not here. Raises
    Refusal (launcher-unusable) where it does not answer by then."""
    if not runs or not has_slurm():
        return []
    by_name = dict[str, list[RunFolder]]()
    for run in runs:
        by_name.setdefault(job_name(run.path.absolute().name), []).append(run)
    queued = dict[Path, QueuedRun]()
    for job in list_jobs(*by_name, timeout_s=timeout_s):
        workdir = Path(os.path.realpath(job.workdir))
        for run in by_name.get(job.name, ()):
            # The components of a heterogeneous job are one job.
            if run.path in queued or not _is_submitted_from(workdir, run):
                continue
            stuck = find_stuck(job)
            queued[run.path] = QueuedRun(
                run=str(run.path),
                job=job,
                log=str(log_of_jobs(run)),
                stuck=str(stuck) if stuck else None,
            )
    return list(queued.values())


def _is_submitted_from(workdir: Path, run: RunFolder) -> bool:
    """Return whether a job of the run's name that begins in a folder is this run's: that is the
    current folder, or the one that holds `runs/NAME`."""
    path = Path(os.path.realpath(run.path))
    return workdir in (Path(os.path.realpath(Path.cwd())), path.parent, path.parent.parent)


def submitted_runs(folder: Path) -> list[RunFolder]:
    """List the runs of a folder that were submitted and have no plan yet."""
    runs = [RunFolder(script.with_suffix("")) for script in sorted(folder.glob("*.sbatch"))]
    return [run for run in runs if not run.plan.exists()]


def _refuse_second_job(run: RunFolder) -> None:
    """Refuse a run whose job is in the queue: both would want its lock."""
    for queued in queued_runs([run]):
        raise Refusal(
            "run-busy",
            what=f"this run has a job already, {queued.job.id}",
            where=run.path,
            fact=str(queued.job),
            remedy=command("status", run.path),
        )


def follow_job(number: str, progress: Progress) -> None:
    """Report each change of a job's state, and why it waits, until it has ended."""
    shown = ""
    while (job := find_job(number)) is not None:
        if str(job) != shown:
            shown = str(job)
            progress(Note(shown))
        time.sleep(QUEUE_POLL_S)
    progress(Note(f"job {number} has ended"))
