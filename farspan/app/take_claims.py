"""Taking a run's hosts at a start: more than half of them, after another supervisor and its workers
have gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

from farspan.app import clusters
from farspan.app.jobs import STOP_TIMEOUT_S
from farspan.app.updates import Note, Progress, Waiting
from farspan.domain.cluster import Cluster, Host
from farspan.domain.problems import Refusal, command
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.struct_files import load
from farspan.domain.suggest import advise, known_names
from farspan.domain.units import counted
from farspan.launch.agent_pool import AgentPool
from farspan.launch.host_claims import HostClaims, needs_claims
from farspan.launch.workers import KILL_TIMEOUT_S

#: How often hosts that are away, and other supervisors, are looked for.
HOST_POLL_S = 1.0

Sleep = Callable[[float], None]


def hosts_without(cluster: Cluster, sites: tuple[str, ...]) -> tuple[Host, ...]:
    """Return the hosts with devices, but for those of sites that are given up. Raises Refusal
    (usage) for a site that the cluster does not have."""
    known = [site.name for site in cluster.sites]
    for site in sites:
        if site not in known:
            raise Refusal(
                "usage",
                what=f"the cluster has no site {site!r}",
                where="--without",
                fact=known_names(site, known),
                remedy=advise(site, known, option="--without"),
            )
    return tuple(host for host in cluster.machines if cluster.site_of(host.name).name not in sites)


def claims_of_run(
    run: RunFolder, agents: AgentPool, without: tuple[str, ...] = ()
) -> HostClaims | None:
    """Return the claims of a run; None where its hosts are not asked."""
    hosts = hosts_without(clusters.whole_cluster_of_run(run), without)
    if not needs_claims(hosts, load(run.record, RunRecord).launcher):
        return None
    return HostClaims(run, hosts, agents)


def wait_for_claims(
    claims: HostClaims, progress: Progress, sleep: Sleep, *, until_done: bool
) -> int:
    """Wait until more than half of the hosts can be reached, and with `until_done` until no other
    supervisor trains the run; return the newest epoch that they have seen. Raises Refusal
    (run-busy, superseded)."""
    noted = ""
    while True:
        answers = claims.ask()
        claims.require_unfinished(answers)
        holder = claims.live_holder(answers)
        if holder is not None and not until_done:
            raise Refusal(
                "run-busy",
                what="this run is being trained already",
                where=claims.path,
                fact=f"{holder} trains it",
                remedy=command("status", claims.path),
            )
        reason = ""
        if holder is not None:
            reason = f"waiting: {holder} trains this run"
        elif not claims.has_majority(answers):
            absent = ", ".join(claims.absent(answers))
            reason = (
                f"waiting for {absent}: half of the run's hosts or fewer do not go on by "
                "themselves, as the others may (--without SITE gives a site up)"
            )
        if not reason:
            return max((answer.epoch for answer in answers.values()), default=0)
        if reason != noted:
            progress(Waiting(reason))
            noted = reason
        sleep(HOST_POLL_S)


def take_claims(claims: HostClaims, epoch: int, progress: Progress, sleep: Sleep) -> None:
    """Claim an epoch on more than half of the hosts, and end what workers of another supervisor are
    left there. Raises Refusal (superseded, run-busy)."""
    others = dict[str, str]()
    while True:
        answers = claims.claim(epoch)
        others |= claims.left_by_others(answers)
        if claims.has_majority(answers):
            break
        sleep(HOST_POLL_S)

    stopped = claims.stop_workers(others)
    if stopped:
        holders = ", ".join(sorted(set(others.values())))
        progress(Note(f"waiting until {counted(stopped, 'worker')} of {holders} have saved"))
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while remaining := claims.count_workers(others):
        now = time.monotonic()
        if now > deadline:
            claims.stop_workers(others, kill=True)
        if now > deadline + KILL_TIMEOUT_S:
            raise Refusal(
                "run-busy",
                what=f"{counted(remaining, 'worker')} of another supervisor do not end",
                where=claims.path,
                fact=f"on {', '.join(others)}: they were killed {KILL_TIMEOUT_S:.0f} s ago",
                remedy=RunFolder(claims.path).resume_command(),
            )
        sleep(HOST_POLL_S)


def wait_for_holder(run: RunFolder, progress: Progress) -> None:
    """Wait until no other supervisor trains a run that was restored here: what it saves meanwhile
    is fetched afterwards. Raises Refusal (superseded) where it finishes the run."""
    with closing(AgentPool()) as agents:
        claims = claims_of_run(run, agents)
        if claims is not None:
            wait_for_claims(claims, progress, time.sleep, until_done=True)
