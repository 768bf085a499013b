"""Taking a run's hosts at a start: more than half of them, after another supervisor and its workers
have gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

from farspan.app import clusters
from farspan.app.jobs import STOP_TIMEOUT_S
from farspan.app.updates import Note, Progress
from farspan.domain.cluster import Cluster, Host
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.struct_files import load
from farspan.domain.suggest import advise, known_names
from farspan.domain.units import counted
from farspan.launch.agent_pool import AgentPool
from farspan.launch.host_claims import HostClaims, needs_claims

#: How often hosts that are away, and other supervisors, are looked for.
HOST_POLL_S = 1.0

Sleep = Callable[[float], None]


def hosts_without(cluster: Cluster, sites: tuple[str, ...]) -> tuple[Host, ...]:
    """Return the hosts with devices, but for those of sites that are given up. Raises Refusal
    (usage) for a site that the cluster does not have."""
    names = [site.name for site in cluster.sites]
    for site in sites:
        if site not in names:
            raise Refusal(
                "usage",
                what=f"the cluster has no site {site!r}",
                where="--without",
                fact=known_names(site, names),
                remedy=advise(site, names, option="--without"),
            )
    return tuple(host for host in cluster.machines if cluster.site_of(host.name).name not in sites)


def claims_of_run(
    run: RunFolder, agents: AgentPool, without: tuple[str, ...] = ()
) -> HostClaims | None:
    """Return the claims of a run; None where its hosts are not asked."""
    hosts = hosts_without(clusters.cluster_of_run(run), without)
    if not needs_claims(hosts, load(run.record, RunRecord).launcher):
        return None
    return HostClaims(run, hosts, agents)


def take_claims(claims: HostClaims, epoch: int, progress: Progress, sleep: Sleep) -> None:
    """Claim an epoch on more than half of the hosts, as soon as they can be reached, and end what
    workers of another supervisor are left there. Raises Refusal (superseded, run-busy)."""
    noted = ""
    others = dict[str, str]()
    while True:
        answers = claims.claim(epoch)
        others |= claims.left_by_others(answers)
        if claims.has_majority(answers):
            break
        absent = ", ".join(claims.absent(answers))
        if absent != noted:
            progress(
                Note(
                    f"waiting for {absent}: half of the run's hosts or fewer do not go on by "
                    "themselves, as the others may (--without SITE gives a site up)"
                )
            )
            noted = absent
        sleep(HOST_POLL_S)

    left = claims.stop_workers(others)
    if left:
        holders = ", ".join(sorted(set(others.values())))
        progress(Note(f"waiting until {counted(left, 'worker')} of {holders} have saved"))
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while claims.count_workers(others):
        if time.monotonic() > deadline:
            claims.stop_workers(others, kill=True)
        sleep(HOST_POLL_S)


def wait_for_holder(run: RunFolder, progress: Progress) -> bool:
    """Wait until no other supervisor renews its claim of a run; return whether there was one."""
    waited = False
    with closing(AgentPool()) as agents:
        claims = claims_of_run(run, agents)
        while claims is not None and (holder := claims.live_holder(claims.ask())):
            if not waited:
                progress(Note(f"{holder} trains this run; waiting in case it ends before the run"))
            waited = True
            time.sleep(HOST_POLL_S)
    return waited
