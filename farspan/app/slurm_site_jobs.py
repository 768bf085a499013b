"""The jobs of a run at other Slurm sites: asked for, submitted again, and waited for, from inside
the run's own job."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from farspan.app.clusters import find_launcher
from farspan.app.updates import Progress, note_reporter
from farspan.domain.config import RunConfig, SlurmConfig
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.struct_files import load, load_yaml
from farspan.launch.slurm_allocation import SLURM, in_allocation
from farspan.launch.slurm_client import submit_script
from farspan.launch.slurm_sites import SiteJob, find_site_job, own_site_jobs, site_job_name
from farspan.planning.slurm_script import parse_wait_s, write_holding_script

#: Queues are asked this often: sites limit how much a user may ask them.
QUEUE_POLL_S = 5.0
#: A site that cannot be asked so often in a row, before anything is trained, is no hiccup.
MAX_FAILURES = 3


def wait_for_sites(config: RunConfig, progress: Progress) -> None:
    """Inside the job of a run that begins: wait until the jobs at its other sites run, `slurm.wait`
    at most. Raises Refusal (out-of-range)."""
    if config.slurm.sites and in_allocation() and find_launcher(config.parallel) == SLURM:
        SiteJobs(config.slurm, progress).wait(parse_wait_s(config.slurm))


def site_jobs_of_run(run: RunFolder, progress: Progress) -> SiteJobs:
    """Return the jobs of a run at other sites: none for a run of another launcher."""
    is_slurm = load(run.record, RunRecord).launcher == SLURM and in_allocation()
    config = load_yaml(run.config, RunConfig).slurm if is_slurm else SlurmConfig()
    return SiteJobs(config, progress)


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
                script = write_holding_script(self._config, name, job_name)
                number = submit_script(script, site.login, f"slurm.sites.{name}")
                self._refusals.pop(name, None)
                self._report_state(name, f"site {name}: job {number} submitted")
                return SiteJob(id=number, nodes=())
        except Refusal as refusal:
            problem = refusal.problem
            self._report_state(name, f"site {name}: {problem.what}: {problem.fact}")
            self._refusals.setdefault(name, []).append(refusal)
            return None
        self._refusals.pop(name, None)
        queued, job = newest
        # One that runs when it is first asked for is no news.
        if queued.state != "RUNNING" or name in self._reported:
            self._report_state(name, f"site {name}: {queued}")
        return job

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
