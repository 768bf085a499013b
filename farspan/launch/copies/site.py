"""Copies of runs on a host with a disk of its own, in the folder where it keeps its runs."""

from __future__ import annotations

import os
import select
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from farspan.domain.cluster import Cluster, Host
from farspan.domain.clusterfile import REMOTE_FOLDER
from farspan.domain.problems import Refusal
from farspan.domain.units import format_bytes
from farspan.launch.copies import ByteSource, CopyError, CopyPlace
from farspan.launch.hosts import ask_shell, quote_path, start_shell

PIPE_CHUNK_BYTES = 2**16
#: A host that takes or sends no byte for this long is gone, or a link to it is cut.
SILENCE_TIMEOUT_S = 30.0
#: A host has the last bytes of a file on its disk, or its checksum, within this.
DISK_TIMEOUT_S = 600.0
#: Bytes of a list of files at most.
MAX_LIST_BYTES = 2**24
COPIES_FOLDER = "copies"
PARTIAL = ".partial"


def open_places(location: str, hosts: Sequence[Host]) -> list[CopyPlace]:
    return [HostDisk(host) for host in hosts]


def hosts_for_copies(cluster: Cluster, first: str | None) -> list[Host]:
    """List the hosts with disks of their own, the best for copies first: in a site that holds
    neither the run's folder nor rank 0's host (`first`), then in another site than the folder, then
    any other host than `first`. Empty where the cluster has none."""
    ranked = list[tuple[int, Host]]()
    for site in cluster.sites:
        has_folder = any(host.folder is None for host in site.hosts)
        has_first = any(host.name == first for host in site.hosts)
        for host in site.hosts:
            if host.folder is not None and host.name != first:
                ranked.append((2 * has_folder + has_first, host))
    ranked.sort(key=lambda entry: entry[0])
    return [host for _, host in ranked]


class HostDisk:
    def __init__(self, host: Host) -> None:
        self.name = f"host {host.name}"
        self._host = host
        self._root = Path(host.folder or REMOTE_FOLDER) / COPIES_FOLDER

    def list_folders(self) -> list[str]:
        script = f"cd {quote_path(self._root)} 2>/dev/null || exit 0; ls -1"
        return self._ask(script).decode(errors="replace").split("\n")[:-1]

    def list_files(self, folder: str) -> dict[str, int]:
        script = (
            f"cd {quote_path(self._root / folder)} 2>/dev/null || exit 0; "
            "find . -type f -exec wc -c {} \\;"
        )
        sizes = dict[str, int]()
        for line in self._ask(script).decode(errors="replace").splitlines():
            size, _, name = line.strip().partition(" ./")
            if size.isdecimal() and not name.endswith(PARTIAL):
                sizes[name] = int(size)
        return sizes

    def read_file(self, name: str, most: int) -> bytes | None:
        path = quote_path(self._root / name)
        content = self._ask(f"[ -e {path} ] || exit 0; echo; head -c {most + 1} {path}", most + 2)
        if len(content) > most + 1:
            raise CopyError(f"{name} has more than {format_bytes(most)}")
        return content[1:] if content else None

    def put_file(self, name: str, content: ByteSource, size: int) -> None:
        path = self._root / name
        target = quote_path(path)
        partial = quote_path(path.with_name(path.name + PARTIAL))
        script = (
            f"umask 077 && mkdir -p {quote_path(path.parent)} && cat > {partial} && "
            f"[ $(wc -c < {partial}) -eq {size} ] && {{ sync {partial} || sync; }} 2>/dev/null && "
            f"mv -f {partial} {target} && exit 0; code=$?; rm -f {partial}; exit $code"
        )
        with self._start(script, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stderr is not None
            try:
                while chunk := content.read(PIPE_CHUNK_BYTES):
                    _write_all(process.stdin.fileno(), chunk)
                process.stdin.close()
                process.wait(DISK_TIMEOUT_S)
            except BrokenPipeError:
                pass  # Its own message explains more.
            except (CopyError, subprocess.TimeoutExpired) as error:
                process.kill()
                raise CopyError(str(error)) from None
            except BaseException:
                process.kill()
                raise
            message = process.stderr.read(2000).decode(errors="replace").strip()
        if process.returncode:
            raise CopyError(message[-300:] or f"it ended with exit code {process.returncode}")

    def fetch_file(self, name: str, file: IO[bytes], size: int) -> None:
        script = f"cat {quote_path(self._root / name)}"
        with self._start(
            script, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            descriptor = process.stdout.fileno()
            remaining = size
            try:
                while remaining:
                    if not select.select([descriptor], [], [], SILENCE_TIMEOUT_S)[0]:
                        break
                    chunk = os.read(descriptor, min(remaining, PIPE_CHUNK_BYTES))
                    if not chunk:
                        break
                    file.write(chunk)
                    remaining -= len(chunk)
            finally:
                process.kill()
        if remaining:
            raise CopyError(f"{name} has not come whole")

    def delete_files(self, file_names: Sequence[str]) -> None:
        script = f"cd {quote_path(self._root)} 2>/dev/null || exit 0; "
        for name in file_names:
            script += f"rm -f {shlex.quote(name)} {shlex.quote(name + PARTIAL)}; "
        for folder in dict.fromkeys(str(Path(name).parent) for name in file_names):
            script += f"rmdir {shlex.quote(folder)} 2>/dev/null; "
        self._ask(f"{script}:")

    def checksum(self, name: str) -> str:
        path = quote_path(self._root / name)
        script = f"{{ sha256sum {path} 2>/dev/null || shasum -a 256 {path}; }} | cut -c1-64"
        return self._ask(script, seconds=DISK_TIMEOUT_S).decode(errors="replace").strip()

    def _ask(self, script: str, most: int = MAX_LIST_BYTES, seconds: float | None = None) -> bytes:
        timeout_s = SILENCE_TIMEOUT_S if seconds is None else seconds
        answer = ask_shell(self._host, script, timeout_s, most)
        if answer is None:
            raise CopyError("the host does not answer, or refuses")
        return answer

    def _start(self, script: str, **streams: int) -> subprocess.Popen[bytes]:
        try:
            return start_shell(self._host, script, bufsize=0, **streams)
        except Refusal as refusal:
            raise CopyError(refusal.problem.fact) from None


def _write_all(descriptor: int, content: bytes) -> None:
    """Write to a pipe. Raises CopyError where its reader takes nothing for SILENCE_TIMEOUT_S."""
    deadline = time.monotonic() + SILENCE_TIMEOUT_S
    unsent = memoryview(content)
    os.set_blocking(descriptor, False)
    while unsent:
        remaining_s = max(0.0, deadline - time.monotonic())
        if not select.select([], [descriptor], [], remaining_s)[1]:
            raise CopyError(f"it has taken nothing for {SILENCE_TIMEOUT_S:.0f} s")
        unsent = unsent[os.write(descriptor, unsent) :]
