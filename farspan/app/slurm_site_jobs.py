"""The jobs of a run at other Slurm sites: asked for, submitted again, and waited for, from inside
the run's own job."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from farspan.app.clusters import find_launcher
from farspan.app.resolving import prepare_run_corpus
from farspan.app.updates import Progress, note_reporter
from farspan.domain.cluster_json import load_cluster_json
from farspan.domain.config import RunConfig, SlurmConfig
from farspan.domain.escapes import shell_line
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.struct_files import load, load_yaml
from farspan.domain.units import counted
from farspan.launch.slurm_allocation import SLURM, in_allocation
from farspan.launch.slurm_client import submit_script
from farspan.launch.slurm_sites import SiteJob, find_site_job, own_site_jobs, site_job_name
from farspan.planning.slurm_script import parse_wait_s, write_holding_script

#: Queues are asked this often: sites limit how much a user may ask them.
QUEUE_POLL_S = 5.0
#: A job that has ended before it ran is submitted again after twice this, then four times, ...
RESUBMIT_S = 30.0
#: A site that cannot be asked so often in a row, before anything is trained, is no hiccup.
MAX_FAILURES = 3


def wait_for_sites(config: RunConfig, progress: Progress) -> None:
    """Inside the job of a run that begins: prepare its text, and wait until the jobs at its other
    sites run, `slurm.wait` at most. Raises Refusal."""
    if config.slurm.sites and in_allocation() and find_launcher(config.parallel) == SLURM:
        # Before: jobs that nobody enters end.
        prepare_run_corpus(config, progress)
        SiteJobs(config.slurm, progress).wait(parse_wait_s(config.slurm))


def site_jobs_of_run(run: RunFolder, progress: Progress, without: Collection[str] = ()) -> SiteJobs:
    """Return the jobs at the other sites that a run was planned for, but for those that are given
    up: none for a run of another launcher."""
    if load(run.record, RunRecord).launcher != SLURM or not in_allocation():
        return SiteJobs(SlurmConfig(), progress)
    config = load_yaml(run.config, RunConfig).slurm
    path = run.whole_cluster if run.whole_cluster.exists() else run.cluster
    planned = {site.name for site in load_cluster_json(path).sites} - set(without)
    sites = {name: site for name, site in config.sites.items() if name in planned}
    return SiteJobs(replace(config, sites=sites), progress)


class SiteJobs:
    """The jobs of a run at other sites, from inside the run's own job. Several threads may ask."""

    def __init__(self, config: SlurmConfig, progress: Progress) -> None:
        self._config = config
        self._report = note_reporter(progress)
        self._lock = threading.Lock()
        self._asked_at = -QUEUE_POLL_S
        self._jobs = dict[str, SiteJob]()
        #: By site, what was reported of its job last, and the refusals since it last answered.
        self._reported = dict[str, str]()
        self._refusals = dict[str, list[Refusal]]()
        #: By site, the jobs that were submitted since one ran, and when the next one may be.
        self._submitted = dict[str, int]()
        self._next_at = dict[str, float]()

    def ask(self) -> dict[str, SiteJob]:
        """Return the job of each site that could be asked. A job that is in no queue is submitted
        again. A site that cannot be asked is reported."""
        with self._lock:
            if self._config.sites and time.monotonic() >= self._asked_at + QUEUE_POLL_S:
                with ThreadPoolExecutor(len(self._config.sites)) as pool:
                    answers = pool.map(self._ask_site, self._config.sites)
                    jobs = dict(zip(self._config.sites, answers, strict=True))
                self._jobs = {name: job for name, job in jobs.items() if job is not None}
                self._asked_at = time.monotonic()
            return self._jobs

    def _ask_site(self, name: str) -> SiteJob | None:
        site = self._config.sites[name]
        job_name = site_job_name(own_site_jobs(), name)
        try:
            newest = find_site_job(site, job_name)
            if newest is None:
                self._require_running(name)
                script = write_holding_script(self._config, name, job_name)
                number = submit_script(script, site.login, f"slurm.sites.{name}")
                self._submitted[name] = self._submitted.get(name, 0) + 1
                pause_s = RESUBMIT_S * 2 ** self._submitted[name]
                self._next_at[name] = time.monotonic() + pause_s
                self._report_state(name, f"site {name}: job {number} submitted")
                return SiteJob(id=number, nodes=())
        except Refusal as refusal:
            problem = refusal.problem
            self._report_state(name, f"site {name}: {problem.what}: {problem.fact}")
            self._refusals.setdefault(name, []).append(refusal)
            return None
        self._refusals.pop(name, None)
        queued, job = newest
        if job.nodes:
            self._submitted.pop(name, None)
            self._next_at.pop(name, None)
        # One that runs when it is first asked for is no news.
        if queued.state != "RUNNING" or name in self._reported:
            self._report_state(name, f"site {name}: {queued}")
        return job

    def _require_running(self, name: str) -> None:
        """Refuse to submit another job at once where those before it have ended without running."""
        if time.monotonic() < self._next_at.get(name, -math.inf):
            login = self._config.sites[name].login
            raise Refusal(
                "launcher-unusable",
                what=f"the job of site {name} has ended before it was seen to run",
                where=f"login node {login}",
                fact=f"{counted(self._submitted.get(name, 0), 'job')} were submitted since one ran",
                remedy=shell_line("ssh", login, "sacct"),
            )

    def _report_state(self, site: str, state: str) -> None:
        if self._reported.get(site) != state:
            self._reported[site] = state
            self._report(state)

    def wait(self, timeout_s: float) -> None:
        """Wait until the jobs of all sites run, for so long at most. Raises Refusal where a site
        refuses its job, or does not answer."""
        deadline = time.monotonic() + timeout_s
        while absent := self._absent_sites():
            for refusals in self._refusals.values():
                if len(refusals) >= MAX_FAILURES:
                    raise refusals[-1]
            if time.monotonic() >= deadline:
                self._report(f"planning without {', '.join(absent)}, whose jobs do not run yet")
                return
            time.sleep(QUEUE_POLL_S)

    def _absent_sites(self) -> list[str]:
        jobs = self.ask()
        return [name for name in self._config.sites if name not in jobs or not jobs[name].nodes]
