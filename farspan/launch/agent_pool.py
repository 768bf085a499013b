"""The agents of a run's supervisor, one a host, kept over all its starts: a recovery waits for no
ssh connection."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from farspan.domain.cluster import Host
from farspan.domain.problems import Problem, Refusal
from farspan.launch.hosts import Agent

#: An agent that does not answer within this is started again: its host was cut off or restarted.
ANSWER_S = 4.0


class AgentPool:
    """Agents by host. An agent that answers is used again. Several threads may ask for them."""

    def __init__(self) -> None:
        self._agents = dict[str, Agent]()
        #: Held while a host's agent is looked at or started.
        self._locks = dict[str, threading.Lock]()
        self._closed = False

    def reach(self, hosts: Sequence[Host]) -> tuple[dict[str, Agent], dict[str, Problem]]:
        """Return the agents of the hosts that can be reached, and why the others cannot. Hosts are
        asked side by side."""
        reached = dict[str, Agent]()
        unreachable = dict[str, Problem]()
        with ThreadPoolExecutor(max(1, len(hosts))) as pool:
            for host, agent in zip(hosts, pool.map(self._reach_host, hosts), strict=True):
                if isinstance(agent, Problem):
                    unreachable[host.name] = agent
                else:
                    reached[host.name] = agent
        return reached, unreachable

    def require(self, hosts: Sequence[Host]) -> dict[str, Agent]:
        """Return the agents of all hosts. Raises Refusal (host-unreachable) where one is away."""
        reached, unreachable = self.reach(hosts)
        for problem in unreachable.values():
            raise Refusal.of(problem)
        return reached

    def _reach_host(self, host: Host) -> Agent | Problem:
        with self._locks.setdefault(host.name, threading.Lock()):
            known = self._agents.get(host.name)
            if known is not None and known.host == host and known.is_alive(ANSWER_S):
                return known
            self._drop_agent(host.name)
            try:
                agent = Agent(host).__enter__()
            except Refusal as refusal:
                return refusal.problem
            self._agents[host.name] = agent
            if self._closed:  # While it was started.
                self._drop_agent(host.name)
            return agent

    def _drop_agent(self, host: str) -> None:
        agent = self._agents.pop(host, None)
        if agent is not None:
            agent.kill()

    @property
    def known(self) -> dict[str, Agent]:
        """Those that answered when they were last asked, by host."""
        return dict(self._agents)

    def drop(self) -> None:
        """End all agents: each host is entered again when it is asked for."""
        for host in list(self._agents):
            self._drop_agent(host)

    def close(self) -> None:
        self._closed = True
        self.drop()
