"""A run directory: where everything of one run lies, and nothing else needs to be known to find
it."""

from __future__ import annotations

import functools
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from farspan.domain.config import RunConfig
from farspan.domain.forecast import Forecast
from farspan.domain.own_files import is_replaced
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal, command
from farspan.domain.struct_files import content_hash, load
from farspan.domain.suggest import any_of, suggest

#: The variable of a worker's environment that names the run's folder where farspan was asked to
#: train: a worker on another host may have a folder of its own.
HOME_VARIABLE = "FARSPAN_RUN"

#: The variable of a worker's environment that holds the secret by which the workers of a run know
#: each other, and its value where the secret is the first line of standard input.
SECRET_VARIABLE = "FARSPAN_SECRET"
ON_STDIN = "-"
#: The variable that names the port of the workers' rendezvous, where that of MASTER_PORT is
#: torchrun's.
STORE_PORT = "FARSPAN_STORE_PORT"
#: A refusal names this many of the runs that there are, the newest first.
RUNS_SHOWN = 10
#: In the folder of checkpoints while the survivors of a lost worker write there. They have done so
#: within SURVIVOR_WRITE_S, or the newest checkpoint stays what it was.
SURVIVORS_FOLDER = ".survivors"
SURVIVOR_WRITE_S = 60.0


def cache_folder() -> Path:
    """Return where prepared corpora lie: $FARSPAN_CACHE or farspan's folder in the user's cache."""
    if given := os.environ.get("FARSPAN_CACHE"):
        return Path(given).expanduser()
    return _own_cache()


def _own_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "farspan"


def state_folder() -> Path:
    """Return where this user's own key lies, and the list of what `farspan cluster up` has made."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "farspan"


def make_cache_folder(name: str) -> Path:
    """Make a folder of the cache if need be: it holds text.

    The user's own cache is for this user alone, also where hosts keep theirs in it. Another that
    is there keeps its mode, as of a group's; one that is made is for this user alone.
    """
    cache = cache_folder()
    with suppress(RuntimeError):  # A user without a home folder has no cache in it.
        own = _own_cache()
        if cache.is_relative_to(own) and not own.is_symlink():
            own.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(PermissionError):  # It belongs to another user, who has let this one in.
                own.chmod(0o700)
    if not cache.exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.mkdir(mode=0o700, exist_ok=True)
    folder = cache / name
    folder.mkdir(exist_ok=True)
    return folder


@functools.cache
def source_commit() -> str | None:
    """Return the commit of a source checkout; None for an installed package, or without git."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    with suppress(OSError, subprocess.TimeoutExpired):
        words = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
        git = subprocess.run(words, capture_output=True, text=True, timeout=5)
        return git.stdout.strip() or None
    return None


#: Inside a Slurm job: the name of the jobs that hold nodes of other sites for its run.
SITE_JOBS_VARIABLE = "FARSPAN_SITE_JOBS"
#: A line of a spare's standard input, and its answer: a spare that stands still gives none.
SPARE_ASKED = b"ready?\n"
SPARE_READY = b"ready\n"


class SpareTask(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a spare process a worker: its command line's two paths, its environment, and its
    log."""

    plan: str
    run: str
    environment: dict[str, str]
    log: str


#: Random bytes of a run's id: two runs have the same one by chance less often than once in 10^9.
ID_BYTES = 8


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`run.json`: where the corpus lies on this machine, and how the run was asked for."""

    corpus: str
    command: tuple[str, ...]
    created: str
    #: Names the run on every host and in every copy of its folder; empty of runs of earlier
    #: versions.
    id: str = ""
    #: Where the run was made, as `MACHINE:PATH`; empty of runs of earlier versions.
    home: str = ""
    warnings: tuple[str, ...] = ()
    #: A Hugging Face folder whose weights the run starts from; None starts from random ones.
    initial: str | None = None
    #: The hash of these weights, where adapters of them are trained: no checkpoint has them.
    initial_weights: str = ""
    #: What starts the run's workers: a file of `launch/launchers/`.
    launcher: str = "local"
    #: run.yaml as it was when the run was made; None of runs whose run.yaml may be edited.
    asked: RunConfig | None = None
    #: Of random weights; None where the text is too short for one.
    forecast: Forecast | None = None

    @property
    def identity(self) -> str:
        """The id; of a run of an earlier version, a hash of when and as what it was made."""
        return self.id or content_hash(self.created, self.command)

    @property
    def corpus_folder(self) -> Path:
        """Of a run that was sent to a host it may begin with ~, the home folder there."""
        return Path(self.corpus).expanduser()


def refuse_replaced(file: IO[bytes], path: Path) -> None:
    """Raise Refusal (path-missing) where another file has taken the place of an open one of a run:
    its folder was replaced."""
    if is_replaced(file, path):
        raise Refusal(
            "path-missing",
            what="the run's folder was replaced while the run was trained",
            where=path,
            fact="the file there is not the one that this process has opened",
            remedy=command("status", os.environ.get(HOME_VARIABLE, path.parent)),
        )


def first_run_command() -> str:
    """Write the command that begins a first run here or, without a run.yaml, makes one."""
    return command("train", "run.yaml") if Path("run.yaml").exists() else command("init", "FOLDER")


class RunFolder:
    """Paths inside one run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan = path / "plan.json"
        self.cluster = path / "cluster.json"
        #: The cluster before hosts or devices were lost; not there where none was.
        self.whole_cluster = path / "cluster.whole.json"
        self.record = path / "run.json"
        self.estimate = path / "estimate.json"
        self.config = path / "run.yaml"
        self.corpus = path / "corpus.json"
        self.tokenizer = path / "tokenizer.json"
        self.events = path / "events.jsonl"
        #: Plans that the run followed before, by their hash.
        self.plans = path / "plans"
        #: The small files of the model that the run continues (`models._base_files`); not there
        #: where it continues none.
        self.base = path / "base"
        self.checkpoints = path / "checkpoints"
        self.best = path / "checkpoints" / "best"
        self.logs = path / "logs"
        self.lock = path / "lock"
        #: Which start of the run may write (`domain.epoch_fence`).
        self.epochs = path / "epochs.json"
        #: There until the first start of a run that was restored from a copy.
        self.restored = path / ".restored"
        self.job = path / "job.json"
        #: The Slurm jobs that have trained the run.
        self.slurm_jobs = path / "logs" / "slurm.json"
        self.slurm_sites = path / "logs" / "slurm-sites.json"
        self.seal = path / "seal"
        self.tensorboard = path / "tensorboard"
        #: Which steps each tracker has, and the files of those that are offline.
        self.trackers = path / "trackers"
        self.report = path / "report.html"
        self.index = path / "index"
        #: Held by the worker of a host that fetches plan and tokens for all of them.
        self.fetch_lock = path / ".fetch.lock"

    @property
    def files(self) -> tuple[Path, ...]:
        """Those of a run that lie in the folder itself; plan.json, which makes it a run, first."""
        made = (self.plan, self.cluster, self.record, self.estimate, self.config, self.corpus)
        return (
            *made,
            self.whole_cluster,
            self.tokenizer,
            self.events,
            self.lock,
            self.epochs,
            self.job,
            self.seal,
            self.report,
            self.fetch_lock,
        )

    def make(self) -> None:
        """Make the folder itself and its logs, for this user alone: it holds text, and what its
        cluster runs."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        self.path.chmod(0o700)  # It may have been there, empty.
        self.logs.mkdir(exist_ok=True)

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        """Return the folder of a run that was started; refuses anything else."""
        run = cls(path)
        if run.plan.exists():
            return run
        plans = Path("runs").glob("*/plan.json")
        newest = sorted(plans, key=lambda plan: plan.stat().st_mtime, reverse=True)
        runs = [str(plan.parent) for plan in newest]
        listed = ", ".join(runs[:RUNS_SHOWN]) or "none"
        more = f" and {len(runs) - RUNS_SHOWN} more" if len(runs) > RUNS_SHOWN else ""
        fix = "see them: farspan status" if runs else f"start one: {first_run_command()}"
        # Their names alone: what all paths begin with makes none of them more like.
        likely = suggest(path.name, [plan.parent.name for plan in newest], synonyms=())
        if likely:
            fix = f"use {any_of([Path('runs', name) for name in likely])}"
        missing = "it has no plan.json" if path.is_dir() else "there is no such folder"
        raise Refusal(
            "not-a-run",
            what="this is not a farspan run",
            where=path,
            fact=f"{missing}; runs here: {listed}{more}",
            remedy=fix,
        )

    def newest_checkpoint(self) -> int:
        """Return the step of the newest checkpoint in this folder, -1 without one.

        A checkpoint is renamed into place when it is whole.
        """
        newest = -1
        for path in self.checkpoints.glob("step-*"):
            number = path.name.removeprefix("step-")
            if number.isdecimal() and (path / "manifest.json").is_file():
                newest = max(newest, int(number))
        return newest

    def require_there(self, *others: Path) -> None:
        """Raise Refusal (path-missing) where the folder was deleted, emptied or moved since the run
        began: it has no plan.json, or lacks one of the other files."""
        missing = [path.name for path in (self.plan, *others) if not path.exists()]
        if missing:
            gone = f"has no {missing[0]}" if self.path.is_dir() else "is not there"
            raise Refusal(
                "path-missing",
                what="the run's folder was deleted or moved while the run was trained",
                where=self.path,
                fact=f"{self.path} {gone}; nothing more can be saved",
                remedy=f"put it back, then: {self.resume_command()}",
            )

    def resume_command(self) -> str:
        """Write the command that resumes the run, on the machine where farspan was asked to
        train. A run of Slurm jobs is submitted again."""
        path = Path(os.environ.get(HOME_VARIABLE, self.path))
        if self.is_of_slurm():
            return command("slurm", path / self.config.name, "--run", path)
        return command("resume", path)

    def is_of_slurm(self) -> bool:
        """Return whether the run is trained in Slurm jobs, by its record."""
        with suppress(Refusal):  # One that is damaged or gone names no launcher.
            return load(self.record, RunRecord).launcher == "slurm"
        return False

    def doctor_command(self) -> str:
        """Write the command that examines the run's hosts and links, on the same machine."""
        folder = Path(os.environ.get(HOME_VARIABLE, self.path))
        return command("doctor", "--cluster", folder / self.cluster.name)

    def prepare_command(self) -> str:
        """Write the command that makes the run's corpus whole, on the same machine."""
        return command("prepare", Path(os.environ.get(HOME_VARIABLE, self.path)) / self.config.name)

    def load_plan(self) -> Plan:
        return load(self.plan, Plan)
