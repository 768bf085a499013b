"""The user's own ssh configuration, as `ssh -G` reads it for a host."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from farspan.domain.escapes import shell_line, shell_word
from farspan.domain.problems import Refusal

#: `ssh -G` only reads files.
CONFIG_TIMEOUT_S = 10.0


class SshAccess(msgspec.Struct, frozen=True, kw_only=True):
    """How ssh enters a host."""

    user: str
    #: Where ssh connects to, from here.
    address: str
    port: int
    #: The first of its keys that is a file here; None leaves it to ssh's agent.
    key: str | None = None
    #: ssh's command that stands for the connection, of a `ProxyJump` or a `ProxyCommand`.
    proxy_command: str | None = None


def read_ssh_settings(ssh: Sequence[str]) -> dict[str, list[str]]:
    """Return ssh's own reading of its configuration for a command, every value of a key; empty
    where it has none."""
    if not ssh:
        return {}
    words = [ssh[0], "-G", *ssh[1:]]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=CONFIG_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    settings = dict[str, list[str]]()
    for line in done.stdout.decode(errors="replace").splitlines():
        key, _, value = line.partition(" ")
        settings.setdefault(key, []).append(value)
    return settings


def list_ssh_hosts() -> list[str]:
    """Return the names of hosts in the user's own configuration, without those in files that it
    includes."""
    try:
        text = Path("~/.ssh/config").expanduser().read_text(encoding="utf-8", errors="replace")
    except (OSError, RuntimeError):  # There is none, or no home.
        return []
    hosts = list[str]()
    for line in text.splitlines():
        key, _, patterns = line.strip().replace("=", " ", 1).partition(" ")
        if key.lower() == "host":
            hosts += [name for name in patterns.split() if not set(name) & set("*?!")]
    return hosts


def find_ssh_access(name: str, enter: Sequence[str]) -> SshAccess:
    """Return how ssh enters a host, by the command that does. Raises Refusal (cannot-export) for
    another command."""
    settings = read_ssh_settings(enter) if enter[:1] == ("ssh",) else {}
    if "hostname" not in settings:
        raise Refusal(
            "cannot-export",
            what=f"{name} is not entered by ssh, which is all that other tools know",
            where=f"host {name}",
            fact=f"it is entered by: {shell_line(*enter)}" if enter else "it is this machine",
            remedy=f"in the cluster file give {shell_word(name)} the name that ssh enters it by",
        )
    last_values = {key: values[-1] for key, values in settings.items()}
    keys = [Path(path).expanduser() for path in settings.get("identityfile", ())]
    key = next((str(path) for path in keys if path.is_file()), None)
    proxy = last_values.get("proxycommand")
    jump = last_values.get("proxyjump")
    if jump not in (None, "none"):
        *before, last = jump.split(",")
        words = ["ssh", *(["-J", ",".join(before)] if before else []), "-W", "%h:%p"]
        proxy = " ".join([*words, last if "://" in last else f"ssh://{last}"])
    return SshAccess(
        user=last_values["user"],
        address=last_values["hostname"],
        port=int(last_values["port"]),
        key=key,
        proxy_command=None if proxy == "none" else proxy,
    )
