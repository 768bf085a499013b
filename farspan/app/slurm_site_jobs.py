"""The jobs of a run at other Slurm sites: asked for, submitted again, and waited for, from inside
the run's own job."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection
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
        report = note_reporter(progress)
        self._sites = {name: _SiteQueue(config, name, report) for name in config.sites}
        self._report = report
        self._lock = threading.Lock()
        self._asked_at = -QUEUE_POLL_S
        self._jobs = dict[str, SiteJob]()

    def ask(self) -> dict[str, SiteJob]:
        """Return the job of each site that could be asked. A job that is in no queue is submitted
        again. A site that cannot be asked is reported."""
        with self._lock:
            if self._sites and time.monotonic() >= self._asked_at + QUEUE_POLL_S:
                with ThreadPoolExecutor(len(self._sites)) as pool:
                    answers = pool.map(_SiteQueue.ask, self._sites.values())
                    jobs = dict(zip(self._sites, answers, strict=True))
                self._jobs = {name: job for name, job in jobs.items() if job is not None}
                self._asked_at = time.monotonic()
            return self._jobs

    def wait(self, timeout_s: float) -> None:
        """Wait until the jobs of all sites run, for so long at most. Raises Refusal where a site
        refuses its job, or does not answer."""
        deadline = time.monotonic() + timeout_s
        while absent := self._absent_sites():
            for queue in self._sites.values():
                if len(queue.refusals) >= MAX_FAILURES:
                    raise queue.refusals[-1]
            if time.monotonic() >= deadline:
                self._report(f"planning without {', '.join(absent)}, whose jobs do not run yet")
                return
            time.sleep(QUEUE_POLL_S)

    def _absent_sites(self) -> list[str]:
        jobs = self.ask()
        return [name for name in self._sites if name not in jobs or not jobs[name].nodes]


class _SiteQueue:
    """The queue of one site, as far as a run's job there is concerned."""

    def __init__(self, config: SlurmConfig, name: str, report: Callable[[str], None]) -> None:
        self._config = config
        self._name = name
        self._login = config.sites[name].login
        self._report = report
        self._reported = ""
        #: Since it last answered.
        self.refusals = list[Refusal]()
        #: The jobs that were submitted since one ran, and when the next one may be.
        self._num_submitted = 0
        self._next_at = -math.inf

    def ask(self) -> SiteJob | None:
        """Return the run's job at the site, submitted if there is none; None where the site cannot
        be asked, or refuses it."""
        job_name = site_job_name(own_site_jobs(), self._name)
        try:
            newest = find_site_job(self._config.sites[self._name], job_name)
            if newest is None:
                return self._submit(job_name)
        except Refusal as refusal:
            problem = refusal.problem
            self._report_state(f"{problem.what}: {problem.fact}")
            self.refusals.append(refusal)
            return None
        self.refusals.clear()
        queued, job = newest
        if job.nodes:
            self._num_submitted = 0
            self._next_at = -math.inf
        # One that runs when it is first asked for is no news.
        if queued.state != "RUNNING" or self._reported:
            self._report_state(str(queued))
        return job

    def _submit(self, job_name: str) -> SiteJob:
        """Submit the job. Raises Refusal, also where those before it have just ended without
        running."""
        if time.monotonic() < self._next_at:
            raise Refusal(
                "launcher-unusable",
                what=f"the job of site {self._name} has ended before it was seen to run",
                where=f"login node {self._login}",
                fact=f"{counted(self._num_submitted, 'job')} submitted since one ran",
                remedy=shell_line("ssh", self._login, "sacct"),
            )
        script = write_holding_script(self._config, self._name, job_name)
        number = submit_script(script, self._login, f"slurm.sites.{self._name}")
        self._num_submitted += 1
        self._next_at = time.monotonic() + RESUBMIT_S * 2**self._num_submitted
        self._report_state(f"job {number} submitted")
        return SiteJob(id=number, nodes=())

    def _report_state(self, state: str) -> None:
        if state != self._reported:
            self._reported = state
            self._report(f"site {self._name}: {state}")
