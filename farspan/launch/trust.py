"""Decides whether a run folder may start what its cluster.json names: commands that enter hosts,
and their Pythons; whether its links may be followed; and whether its index may be searched at a
server.

A folder that this user made on this machine carries a seal that nobody else can make: a signature
over cluster.json, run.json and where copies go, or over the server's location, by a key that lies
in the user's own state folder.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import platform
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from farspan.domain.cluster import Host
from farspan.domain.cluster_json import load_cluster_json
from farspan.domain.config import RunConfig, SlurmSite
from farspan.domain.escapes import shell_line
from farspan.domain.problems import Refusal
from farspan.domain.problems import command as farspan
from farspan.domain.run import RunFolder, RunRecord, state_folder
from farspan.domain.struct_files import load, load_yaml, read_bytes, save, write_atomically
from farspan.launch.hosts import host_command, host_python
from farspan.launch.slurm_allocation import JOB_OPTION, SLURM, in_allocation

#: Hosts whose commands, and links, that a refusal prints.
MAX_SHOWN = 4


def seal_run(run: RunFolder) -> None:
    """Mark a run folder as made, or looked at, by this user on this machine."""
    try:
        write_atomically(run.seal, _sign_run(run))
    except (OSError, RuntimeError):
        # The user's key cannot be made without a home folder that can be written to.
        if list_commands(run) or any(_find_links(run)):
            raise


def save_record(run: RunFolder, record: RunRecord) -> None:
    """Write a run's run.json. A seal that was right stays right; a run without one gets none."""
    sealed = _is_sealed(run)
    save(record, run.record)
    if sealed:
        seal_run(run)


def require_trusted(run: RunFolder) -> None:
    """Refuse a run that somebody else may have made, if it starts commands or holds links.

    Raises Refusal (run-untrusted).
    """
    commands = list_commands(run)
    if commands and not _is_sealed(run):
        raise Refusal(
            "run-untrusted",
            what="this run was not made by you on this machine, and it starts commands",
            where=run.cluster,
            fact=f"it would run: {_list_first(commands)}",
            remedy=(
                f"{farspan('resume', run.path, '--trust')}   "
                "(after a look at cluster.json, run.json and run.yaml)"
            ),
        )
    require_own_links(run)


def require_own_links(run: RunFolder) -> None:
    """Refuse to write to a run that somebody else may have made, if it holds links.

    Raises Refusal (run-untrusted). In a run of this user's own a folder may be a link to another
    disk.
    """
    links = sorted(_find_links(run))
    if not links or _is_sealed(run):
        return
    ends = [f"{link.relative_to(run.path)} -> {link.readlink()}" for link in links]
    raise Refusal(
        "run-untrusted",
        what="this run was not made by you on this machine, and it holds links",
        where=run.path,
        fact=f"farspan would write to where they lead: {_list_first(ends)}",
        remedy=(
            f"{farspan('resume', run.path, '--trust')}   "
            f"(after a look: {shell_line('find', run.path, '-type', 'l', '-ls')})"
        ),
    )


def _list_first(entries: list[str]) -> str:
    text = "; ".join(entries[:MAX_SHOWN])
    more = len(entries) - MAX_SHOWN
    return f"{text}; and {more} more" if more > 0 else text


def _is_sealed(run: RunFolder) -> bool:
    if not run.seal.is_file():
        return False
    return hmac.compare_digest(read_bytes(run.seal), _sign_run(run))


def _find_links(run: RunFolder) -> Iterator[Path]:
    """Yield the links inside a run folder. Raises OSError for a folder that cannot be listed."""

    def refuse_hidden(error: OSError) -> None:
        # A run that is being trained removes old checkpoints meanwhile.
        if not isinstance(error, FileNotFoundError):
            raise error

    for folder, folders, files in os.walk(run.path, onerror=refuse_hidden):
        for name in (*folders, *files):
            path = Path(folder, name)
            if path.is_symlink():
                yield path


def list_commands(run: RunFolder) -> list[str]:
    """List what a run starts besides this Python: how it enters hosts and devices, what it runs
    there, the Ray cluster that it hands a token to, the command that it notifies by, and where it
    is copied."""
    hosts = list(load_cluster_json(run.cluster).hosts)
    if run.whole_cluster.exists():
        hosts += load_cluster_json(run.whole_cluster).hosts
    record = load(run.record, RunRecord)
    notify = None if record.asked is None else record.asked.notify
    sites = _list_sites(run)
    return plain_commands(hosts, record.launcher, notify, _list_copies(run), sites)


def plain_commands(
    hosts: Iterable[Host],
    launcher: str,
    notify: str | None,
    copies: Iterable[str],
    sites: Mapping[str, SlurmSite],
) -> list[str]:
    """List the commands of a run with these hosts, launcher, command to notify by, places of
    copies, and other Slurm sites."""
    commands = [f"a launcher, {launcher}"] if ":" in launcher else []
    if notify is not None:
        commands.append(shell_line("sh", "-c", notify))
    commands += [f"copies of the run, to {place}" for place in copies]
    if launcher == SLURM:
        for site in sites.values():
            commands.append(shell_line("ssh", site.login, "sbatch", *site.options))
    for host in hosts:
        python = [host_python(host)]
        if host.notice is not None:
            commands.append(f"on {host.name}: {host.notice}")
        for device in (None, *range(len(host.devices))):
            words = host_command(host, python, device=device)
            # A job at another Slurm site has another number each time.
            words = [JOB_OPTION if word.startswith(JOB_OPTION) else word for word in words]
            if words != python or host.enter != ():
                commands.append(shell_line(*words))
    return list(dict.fromkeys(commands))


def _list_copies(run: RunFolder) -> tuple[str, ...]:
    """List where the run and its text are copied: by run.yaml, which may be edited."""
    if not run.config.exists():
        return ()
    return load_yaml(run.config, RunConfig).checkpoint.copies


def _list_sites(run: RunFolder) -> dict[str, SlurmSite]:
    """List the other Slurm sites, to which jobs are submitted: by run.yaml, which may be edited."""
    if not run.config.exists() or load(run.record, RunRecord).launcher != SLURM:
        return {}
    return load_yaml(run.config, RunConfig).slurm.sites


def seal_server(path: Path, location: str) -> None:
    """Mark with a seal at `path` that this user put an index's vectors at a server."""
    write_atomically(path, _sign_contents(b"server", location.encode()))


def require_server(path: Path, location: str, remedy: str) -> None:
    """Raise Refusal (run-untrusted) where searching an index would send queries, and the password
    that this user's environment has for it, to a server that somebody else may have named."""
    if path.exists():
        signature = _sign_contents(b"server", location.encode())
        if hmac.compare_digest(read_bytes(path), signature):
            return
    raise Refusal(
        "run-untrusted",
        what="this index was not made by you on this machine, and its vectors lie at a server",
        where=path.parent,
        fact=f"it would ask {location}",
        remedy=remedy,
    )


def _sign_run(run: RunFolder) -> bytes:
    contents = [read_bytes(run.cluster), read_bytes(run.record)]
    if run.whole_cluster.exists():
        contents.append(read_bytes(run.whole_cluster))
    contents += [place.encode() for place in _list_copies(run)]
    if sites := _list_sites(run):
        contents += [b"Slurm sites", msgspec.json.encode(sites)]
    return _sign_contents(*contents)


def _sign_contents(*contents: bytes) -> bytes:
    """Sign some contents, for this machine."""
    machine = platform.node()
    with suppress(OSError):
        machine = Path("/etc/machine-id").read_text().strip() or machine
    # A run in Slurm jobs is trained on another node each time.
    if in_allocation():
        machine = f"slurm {os.environ.get('SLURM_CLUSTER_NAME', '')}"
    signed = b""
    for content in (machine.encode(), *contents):
        signed += len(content).to_bytes(8, "big") + content
    return hmac.new(load_own_key(), signed, hashlib.sha256).hexdigest().encode()


def load_own_key() -> bytes:
    """Return this user's own key, made when it is first needed."""
    path = state_folder() / "key"
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mine = path.with_name(f"key.{secrets.token_hex(8)}")
        with open(os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
        with suppress(FileExistsError):  # Another process has been first.
            os.link(mine, path)
        mine.unlink()
    return read_bytes(path)
