"""Hosts with nothing but an ssh server and a Python, in sites of a lab, as a user's own ssh
configuration leads to them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from farspan_lab import state
from farspan_lab.lab import Status
from tests.waiting import LIMIT_S, wait_for

SSHD = "/usr/sbin/sshd"
#: A Python of this machine without any of farspan's libraries: that of no environment.
BARE_PYTHON = Path(sys.base_prefix, "bin", "python3")


class SshHosts:
    """Servers in sites, and the ssh of a user at home, another site. `close` ends them."""

    def __init__(self, lab: Status, folder: Path, home: str = "home") -> None:
        if not shutil.which("sshd", path="/usr/sbin:/usr/bin"):
            pytest.skip("waits for openssh-server")
        self.lab = lab
        self.folder = folder
        self.home = home
        self.servers = dict[str, subprocess.Popen[bytes]]()
        self.ssh = folder / ".ssh"
        self.ssh.mkdir(mode=0o700)
        (folder / "bin").mkdir()
        # The user's own configuration: ssh looks for it in the home of the password file.
        wrapper = folder / "bin" / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {self.ssh}/config "$@"\n')
        wrapper.chmod(0o755)
        (self.ssh / "config").touch()
        (self.ssh / "known_hosts").touch()
        for key in ("user", "stranger"):
            self.make_key(key)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)

    def make_key(self, name: str) -> None:
        path = self.ssh / name
        path.unlink(missing_ok=True)
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(path)], check=True
        )

    def start(
        self, site: str, *, python: Path = BARE_PYTHON, variables: dict[str, str] | None = None
    ) -> Path:
        """Start a site's server; return the home folder of the user there.

        A session sees that home, a search path with `python` first, and no settings of pip's.
        """
        home = self.folder / site
        home.mkdir(exist_ok=True)
        tools = home / "tools"
        tools.mkdir(exist_ok=True)
        link = tools / "python3"
        link.unlink(missing_ok=True)
        link.symlink_to(python)
        settings = {
            "HOME": str(home),
            "PATH": f"{tools}:/usr/bin:/bin",
            "PIP_CONFIG_FILE": "/dev/null",
            **(variables or {}),
        }
        if not (self.ssh / f"host-{site}").exists():
            self.make_key(f"host-{site}")
        words = " ".join(f'"{name}={value}"' for name, value in settings.items())
        config = home / "sshd_config"
        config.write_text(
            f"Port 22\nHostKey {self.ssh}/host-{site}\nStrictModes no\nPidFile none\n"
            f"AuthorizedKeysFile {self.ssh}/user.pub\nSetEnv {words}\nMaxStartups 100\n"
            "PasswordAuthentication no\n"
        )
        enter = state.enter(self.lab, site)
        log = (home / "sshd.log").open("wb")
        # Only what a session is given by its server counts.
        environment = {"PATH": os.environ["PATH"]}
        server = subprocess.Popen(
            [*enter, SSHD, "-D", "-e", "-f", str(config)], stderr=log, env=environment
        )
        self.servers[site] = server
        listens = [
            *enter,
            sys.executable,
            "-c",
            "import socket; socket.create_connection(('127.0.0.1', 22))",
        ]
        wait_for(
            lambda: not subprocess.run(listens, stderr=subprocess.DEVNULL).returncode,
            f"the server of {site} listens",
            server,
        )
        return home

    def address(self, site: str) -> str:
        return next(known.address for known in self.lab.lab.sites if known.name == site)

    def know(self, *sites: str) -> None:
        """Let the user know these servers' keys."""
        lines = []
        for site in sites:
            key = (self.ssh / f"host-{site}.pub").read_text().split()[:2]
            lines.append(f"{self.address(site)} {' '.join(key)}\n")
        (self.ssh / "known_hosts").write_text("".join(lines))

    def configure(self, name: str, site: str, *, key: str = "user", **options: object) -> None:
        """Add a host to the user's ssh configuration."""
        lines = [
            f"Host {name}",
            f" HostName {self.address(site)}",
            f" IdentityFile {self.ssh}/{key}",
        ]
        lines += [" IdentitiesOnly yes", f" UserKnownHostsFile {self.ssh}/known_hosts"]
        lines += [f" {option} {value}" for option, value in options.items()]
        with (self.ssh / "config").open("a") as file:
            file.write("\n".join([*lines, ""]))

    def farspan(
        self, *words: object, variables: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of farspan at home, with that ssh and with folders of its own."""
        environment = {
            **os.environ,
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "XDG_STATE_HOME": str(self.folder / "state"),
            "FARSPAN_CACHE": str(self.folder / "cache"),
            **(variables or {}),
        }
        command = [*state.enter(self.lab, self.home), sys.executable, "-m", "farspan", *words]
        return subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            timeout=5 * LIMIT_S,
            env=environment,
            cwd=self.folder,
        )

    def close(self) -> None:
        for server in self.servers.values():
            server.terminate()
        for server in self.servers.values():
            server.wait(timeout=LIMIT_S)


def write_cluster(path: Path, hosts: Sequence[str], **keys: str) -> Path:
    """Write a cluster file of CPU hosts, each a site of its own; `keys` are of every host."""
    extra = "".join(f", {key}: {value}" for key, value in keys.items())
    lines = ["sites:"]
    for host in hosts:
        entry = f"{{devices: [{{kind: cpu-avx2, memory: 2GB}}]{extra}}}"
        lines.append(f"  site-{host}: {{hosts: {{{host}: {entry}}}}}")
    path.write_text("\n".join([*lines, ""]))
    return path
