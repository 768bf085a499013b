"""Which supervisor may train a run: each start claims its epoch on the run's hosts, and needs more
than half of them.

A host keeps the newest epoch that it has seen and refuses older ones. So a run folder that was
copied to another machine, and the one that it was copied from, are never trained at once: of the
two halves of a cut cluster one waits. A supervisor renews its claims, by which others see that it
is there.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import msgspec

from farspan.domain.cluster import Host
from farspan.domain.decoding import convert_value
from farspan.domain.escapes import shell_line
from farspan.domain.problems import Problem, Refusal, command
from farspan.domain.run import RunFolder, RunRecord, cache_folder
from farspan.domain.struct_files import load
from farspan.launch.agent_pool import AgentPool
from farspan.launch.hosts import Agent

#: A host answers a claim within this.
CLAIM_ANSWER_S = 10.0
#: A supervisor renews its claims this often. One that has not for LEASE_S is gone: long enough for
#: a host that is busy, and for a link that is cut for some seconds. Choices.
RENEW_S = 10.0
LEASE_S = 60.0


#: What the supervisor of a claim does, as far as it said.
ClaimState = Literal["trains", "stopped", "finished"]


class ClaimAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A host's answer to a claim: whether it was made, the claim that was there before, and the
    workers of the run that are there."""

    claimed: bool
    epoch: int
    holder: str
    state: ClaimState
    #: Seconds since its supervisor has made or renewed it.
    age: float
    workers: tuple[int, ...]


def claim_path(host: Host, identity: str) -> str:
    """Return where a host keeps the claim of a run: next to its runs, or in the cache here where
    it shares this machine's folders."""
    folder = cache_folder().absolute() if host.folder is None else Path(host.folder)
    return str(folder / "claims" / f"{identity}.json")


def describe_holder(path: Path) -> str:
    """Return the name of a run folder in claims: `MACHINE:PATH`."""
    return f"{socket.gethostname()}:{path.absolute()}"


def needs_claims(hosts: Sequence[Host], launcher: str) -> bool:
    """Return whether hosts can be asked, and others may ask them: not those of this machine alone,
    nor those of a Ray cluster that runs already, which are entered by nobody."""
    alone = len(hosts) == 1 and hosts[0].enter == ()
    return not alone and ":" not in launcher


class HostClaims:
    """The claims of one run on its hosts, those of its whole cluster that were not given up."""

    def __init__(self, run: RunFolder, hosts: Sequence[Host], agents: AgentPool) -> None:
        record = load(run.record, RunRecord)
        #: The run folder here.
        self.path = run.path
        self._hosts = hosts
        self._agents = agents
        self._identity = record.identity
        self._holder = describe_holder(run.path)
        #: Of two halves, that where the run was made goes on.
        self._is_home = record.home in ("", self._holder)

    def ask(self) -> dict[str, ClaimAnswer]:
        """Ask the hosts that can be reached what stands."""
        return self.claim(0)

    def claim(self, epoch: int) -> dict[str, ClaimAnswer]:
        """Claim an epoch, or renew it, on the hosts that can be reached. Raises Refusal
        (superseded) where one has seen another supervisor's start of that number, or a later
        one."""
        reached, _ = self._agents.reach(self._hosts)
        values = {"epoch": epoch, "holder": self._holder}
        answers = self._ask_agents(reached, "claim", **values)
        claims = {host: convert_value(answer, ClaimAnswer) for host, answer in answers.items()}
        refused = {host: answer for host, answer in claims.items() if not answer.claimed}
        if refused and epoch:
            host, newest = max(refused.items(), key=lambda item: item[1].epoch)
            fact = (
                f"host {host} has seen start {newest.epoch}, by {newest.holder}; this folder is at "
                f"start {epoch}"
            )
            raise Refusal.of(self._superseded_by(newest.holder, fact))
        return claims

    def reach(self) -> set[str]:
        """Return the names of the hosts that can be reached."""
        reached, _ = self._agents.reach(self._hosts)
        return set(reached)

    def renew(self, epoch: int, state: ClaimState = "trains") -> None:
        """Renew the claim where it stands, with what the supervisor does. What refuses it now
        refuses the next start."""
        reached = self._agents.known
        self._ask_agents(reached, "claim", epoch=epoch, holder=self._holder, state=state)

    def left_by_others(self, answers: Mapping[str, ClaimAnswer]) -> dict[str, str]:
        """Return the hosts where workers of another supervisor are left, with its name."""
        orphans = {}
        for host, answer in answers.items():
            if answer.workers and answer.holder not in ("", self._holder):
                orphans[host] = answer.holder
        return orphans

    def stop_workers(self, hosts: Collection[str], *, kill: bool = False) -> int:
        """Ask the run's workers on these hosts to save and end, or kill them; return how many there
        were."""
        number = signal.SIGKILL if kill else signal.SIGTERM
        return self._signal_workers(hosts, number)

    def count_workers(self, hosts: Collection[str]) -> int:
        """Count the run's workers on these hosts."""
        return self._signal_workers(hosts, 0)

    def _signal_workers(self, hosts: Collection[str], number: int) -> int:
        known = self._agents.known
        reached = {host: known[host] for host in hosts if host in known}
        answers = self._ask_agents(reached, "signal_workers", number=int(number))
        return sum(len(answer["workers"]) for answer in answers.values())

    def live_holder(self, answers: Mapping[str, ClaimAnswer]) -> str | None:
        """Return another supervisor that renews its claim; None where there is none."""
        for answer in answers.values():
            is_renewed = answer.state == "trains" and answer.age < LEASE_S
            if is_renewed and answer.holder != self._holder:
                return answer.holder
        return None

    def require_unfinished(self, answers: Mapping[str, ClaimAnswer]) -> None:
        """Raise Refusal (superseded) where another supervisor has finished the run."""
        for answer in answers.values():
            if answer.state == "finished" and answer.holder != self._holder:
                fact = f"{answer.holder} has finished it"
                raise Refusal.of(self._superseded_by(answer.holder, fact))

    def has_majority(self, present: Collection[str]) -> bool:
        """Return whether the hosts that are present are more than half of the run's. Exactly half
        is enough where the run was made: there is one such place."""
        twice = 2 * sum(host.name in present for host in self._hosts)
        total = len(self._hosts)
        return twice > total or (twice == total and self._is_home)

    def absent(self, present: Collection[str]) -> list[str]:
        """List the other hosts."""
        return sorted(host.name for host in self._hosts if host.name not in present)

    def _ask_agents(
        self, agents: Mapping[str, Agent], question: str, **values: Any
    ) -> dict[str, dict[str, Any]]:
        """Ask hosts about their claims, side by side. One that does not answer is left out."""
        hosts = [host for host in self._hosts if host.name in agents]

        def ask(host: Host) -> dict[str, Any] | None:
            path = claim_path(host, self._identity)
            try:
                return agents[host.name].ask(
                    question, deadline_s=CLAIM_ANSWER_S, path=path, **values
                )
            except Refusal:
                return None

        with ThreadPoolExecutor(max(1, len(hosts))) as pool:
            answers = list(pool.map(ask, hosts))
        pairs = zip(hosts, answers, strict=True)
        return {host.name: answer for host, answer in pairs if answer is not None}

    def _superseded_by(self, holder: str, fact: str) -> Problem:
        machine, _, path = holder.partition(":")
        return Problem(
            code="superseded",
            what="the run was taken over by another machine",
            where=str(self.path),
            fact=fact,
            remedy=shell_line("ssh", machine, command("status", Path(path))),
        )


class ClaimRenewal:
    """Renews the claim of a job's newest start every RENEW_S, from a thread, until it is closed:
    then it ends."""

    def __init__(self) -> None:
        self._closed = threading.Event()
        self._claims: HostClaims | None = None
        self._epoch = 0
        #: What the claim says once it is closed.
        self.last_state: ClaimState = "stopped"
        self._thread: threading.Thread | None = None

    def keep(self, claims: HostClaims, epoch: int) -> None:
        """Renew this claim from now on."""
        self._claims = claims
        self._epoch = epoch
        if self._thread is None:
            self._thread = threading.Thread(target=self._renew_until_closed, daemon=True)
            self._thread.start()

    def _renew_until_closed(self) -> None:
        while not self._closed.wait(RENEW_S):
            if self._claims is not None:
                self._claims.renew(self._epoch)

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(CLAIM_ANSWER_S)
        if self._claims is not None:
            self._claims.renew(self._epoch, self.last_state)
