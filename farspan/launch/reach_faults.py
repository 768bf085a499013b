"""Explains why a host could not be entered: the cause in the words of OpenSSH or of the shell
there, and the one command that mends it."""

from __future__ import annotations

import re
from typing import NamedTuple

from farspan.domain.escapes import shell_line, shell_word
from farspan.domain.suggest import suggest
from farspan.launch.ssh_settings import list_ssh_hosts, read_ssh_settings

#: What OpenSSH and shells print, and what it means; OpenSSH's strings are stable. The first that
#: is found counts.
CAUSES = {
    "IDENTIFICATION HAS CHANGED": "changed host key",
    "Host key verification failed": "host key",
    "Permission denied": "authentication",
    "Too many authentication": "authentication",
    "Could not resolve hostname": "name",
    "Connection refused": "port",
    "No route to host": "route",
    "Network is unreachable": "route",
    "timed out": "route",
    "not found": "python",
    "No such file": "python",
}
#: What ssh prints of a connection that a jump host should have made.
LOST_BEHIND_JUMP = "UNKNOWN port 65535"
REFUSED_BY_JUMP = "stdio forwarding failed"


class EntryFault(NamedTuple):
    #: In a word or two, for `what`.
    cause: str
    fact: str
    remedy: str


def explain_fault(name: str, ssh: tuple[str, ...], printed: str, otherwise: str) -> EntryFault:
    """Explain what the command that enters the host `name` has printed before it ended. `ssh` is
    that command where it is ssh, else empty; `otherwise` is the remedy of an unknown cause."""
    words = " ".join(printed.split())
    cause = next((cause for sign, cause in CAUSES.items() if sign in words), "command")
    fact = _shorten(words, cause)
    host_word = shell_word(name)
    jump = _configured(ssh).get("proxyjump", "") if LOST_BEHIND_JUMP in words else ""
    if jump and REFUSED_BY_JUMP in words:
        # The jump host was entered, and did not get to the host.
        asked = f"ssh {shell_word(jump)} ping -c 3 {shell_word(_configured(ssh)['hostname'])}"
        return EntryFault(f"{cause}, behind the jump host {jump}", fact, asked)
    if jump:
        host_word = shell_word(jump)
    remedies = {
        "name": _named_otherwise(name, host_word),
        "route": f"ping {host_word}",
        "port": f"start its ssh server there: sudo systemctl start ssh   (port 22 of {host_word})",
        "authentication": f"ssh-copy-id {host_word}",
        "host key": f"ssh {host_word}   (once, to see and accept its key)",
        "changed host key": (
            f"{_forgetting_command(printed, host_word)}   (only if you know why its key is another)"
        ),
        "python": f"set python: of {host_word} in the cluster file to an interpreter that is there",
    }
    if cause == "authentication" and not jump:
        user = _configured(ssh).get("user")
        if user:
            fact = f"{fact} (as user {user}; User in ~/.ssh/config names another)"
    if jump:
        cause = f"its jump host {jump}: {cause}"
    return EntryFault(cause, fact, remedies.get(cause.rpartition(": ")[2], otherwise))


def _named_otherwise(name: str, host_word: str) -> str:
    """Return the remedy of a name that ssh does not know: the likely one of the user's own
    configuration, if there is one."""
    likely = suggest(name, list_ssh_hosts(), synonyms=())
    if likely:
        return f"name the host {shell_word(likely[0])}, as ~/.ssh/config does"
    return f"add {host_word} to ~/.ssh/config with its HostName"


def _shorten(words: str, cause: str) -> str:
    """Return the part of what was printed that shows the cause."""
    sign = next((sign for sign, known in CAUSES.items() if known == cause and sign in words), "")
    if cause == "changed host key":
        # A banner of @ comes before it.
        key = re.search(r"The fingerprint for the \w+ key sent by the remote host is (\S+)", words)
        return f"it sends a key that is not the known one: {key[1].rstrip('.') if key else sign}"
    at = words.rfind(sign) if sign else len(words)
    return words[max(0, at - 200) : at + 200]


def _forgetting_command(printed: str, host_word: str) -> str:
    """Return ssh's own command that forgets the known key of a host."""
    proposed = re.search(r'ssh-keygen -f "([^"\n]+)" -R "([^"\n]+)"', printed)
    if proposed:
        return shell_line("ssh-keygen", "-f", proposed[1], "-R", proposed[2])
    return f"ssh-keygen -R {host_word}"


def _configured(ssh: tuple[str, ...]) -> dict[str, str]:
    """Return ssh's own reading of its configuration for a command; empty where it has none."""
    return {key: values[-1] for key, values in read_ssh_settings(ssh).items()}
