"""Agents that run as root on a host: as the user that ssh logs in as, or by sudo where that was
asked for."""

from __future__ import annotations

from farspan.domain.cluster import Host
from farspan.domain.escapes import shell_line
from farspan.launch.hosts import SUDO, Agent, ask_shell


def why_not_root(host: Host, user: int, sudo: bool) -> str:
    """Return why nothing can be done as root on a host that is entered as this user; empty where
    it can."""
    if user == 0:
        return ""
    if not sudo:
        return f"only root may, and it is entered as user {user}; --sudo was not given"
    if ask_shell(host, shell_line(*SUDO, "true")) is None:
        return "sudo -n true fails there: it is not installed, not allowed, or asks for a password"
    return ""


def root_agent(host: Host, program: str, user: int) -> Agent:
    """Return the agent of a program that runs as root, where `why_not_root` has no reason."""
    return Agent(host, program, sudo=user != 0)
