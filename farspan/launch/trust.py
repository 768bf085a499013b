"""Whether a run folder may start what its cluster.json says: commands that enter hosts, and their
Pythons; whether its links may be followed; and whether its index may be searched at a server.

A folder that this user made on this machine carries a seal that nobody else can make: a signature
over cluster.json and run.json, or over the server's location, by a key that lies in the user's own
state folder.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import platform
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from farspan.domain.cluster_json import load_cluster_json
from farspan.domain.codec import load, read_bytes, save, write_atomically
from farspan.domain.escapes import shell_line
from farspan.domain.problems import Refusal
from farspan.domain.problems import command as farspan
from farspan.domain.run import RunFolder, RunRecord
from farspan.launch.hosts import command, interpreter

#: Hosts whose commands, and links, that a refusal prints.
SHOWN = 4


def seal(run: RunFolder) -> None:
    """Mark a run folder as made, or looked at, by this user on this machine."""
    try:
        write_atomically(run.seal, _signature(run).encode())
    except (OSError, RuntimeError):
        # The user's key cannot be made without a home folder that can be written to.
        if _commands(run) or any(_links(run)):
            raise


def save_record(run: RunFolder, record: RunRecord) -> None:
    """Write a run's run.json. A seal that was right stays right; a run without one gets none."""
    sealed = _is_sealed(run)
    save(record, run.record)
    if sealed:
        seal(run)


def require(run: RunFolder) -> None:
    """Refuse a run that somebody else may have made, if it starts commands or holds links.

    Raises Refusal (run-untrusted).
    """
    commands = _commands(run)
    if commands and not _is_sealed(run):
        raise Refusal(
            "run-untrusted",
            what="this run was not made by you on this machine, and it starts commands",
            where=run.cluster,
            fact=f"it would run: {_first(commands)}",
            remedy=(
                f"{farspan('resume', run.path, '--trust')}   "
                "(after a look at cluster.json and run.json)"
            ),
        )
    require_own_links(run)


def require_own_links(run: RunFolder) -> None:
    """Refuse to write to a run that somebody else may have made, if it holds links.

    Raises Refusal (run-untrusted). In a run of this user's own a folder may be a link to another
    disk.
    """
    links = sorted(_links(run))
    if not links or _is_sealed(run):
        return
    ends = [f"{link.relative_to(run.path)} -> {link.readlink()}" for link in links]
    raise Refusal(
        "run-untrusted",
        what="this run was not made by you on this machine, and it holds links",
        where=run.path,
        fact=f"farspan would write to where they lead: {_first(ends)}",
        remedy=(
            f"{farspan('resume', run.path, '--trust')}   "
            f"(after a look: {shell_line('find', run.path, '-type', 'l', '-ls')})"
        ),
    )


def _first(entries: list[str]) -> str:
    more = f"; and {len(entries) - SHOWN} more" if len(entries) > SHOWN else ""
    return f"{'; '.join(entries[:SHOWN])}{more}"


def _is_sealed(run: RunFolder) -> bool:
    if not run.seal.is_file():
        return False
    return hmac.compare_digest(read_bytes(run.seal), _signature(run).encode())


def _links(run: RunFolder) -> Iterator[Path]:
    """The links inside a run folder. Raises OSError for a folder that cannot be listed."""

    def refuse_hidden(error: OSError) -> None:
        # A run that is being trained removes old checkpoints meanwhile.
        if not isinstance(error, FileNotFoundError):
            raise error

    for folder, folders, files in os.walk(run.path, onerror=refuse_hidden):
        yield from filter(Path.is_symlink, (Path(folder, name) for name in (*folders, *files)))


def _commands(run: RunFolder) -> list[str]:
    """What a run starts beside this Python: how it enters hosts and devices, what it runs there,
    and the Ray cluster that it hands a token to."""
    cluster = load_cluster_json(run.cluster)
    launcher = load(run.record, RunRecord).launcher
    joined = [f"a launcher, {launcher}"] if ":" in launcher else []
    for host in cluster.hosts:
        for device in (None, *range(len(host.devices))):
            words = command(host, [interpreter(host)], device=device)
            if words != [interpreter(host)] or host.enter != ():
                joined.append(shell_line(*words))
    return list(dict.fromkeys(joined))


def seal_server(path: Path, location: str) -> None:
    """Mark with a seal at `path` that this user put an index's vectors at a server."""
    write_atomically(path, _sealed(b"server", location.encode()).encode())


def require_server(path: Path, location: str, remedy: str) -> None:
    """Raises Refusal (run-untrusted) where searching an index would send queries, and the password
    that this user's environment has for it, to a server that somebody else may have named."""
    if not path.exists() or not hmac.compare_digest(
        read_bytes(path), _sealed(b"server", location.encode()).encode()
    ):
        raise Refusal(
            "run-untrusted",
            what="this index was not made by you on this machine, and its vectors lie at a server",
            where=path.parent,
            fact=f"it would ask {location}",
            remedy=remedy,
        )


def _signature(run: RunFolder) -> str:
    return _sealed(read_bytes(run.cluster), read_bytes(run.record))


def _sealed(*parts: bytes) -> str:
    """A signature over this machine and some contents."""
    machine = platform.node()
    with suppress(OSError):
        machine = Path("/etc/machine-id").read_text().strip() or machine
    content = b"".join(len(part).to_bytes(8, "big") + part for part in (machine.encode(), *parts))
    return hmac.new(_key(), content, hashlib.sha256).hexdigest()


def _key() -> bytes:
    """This user's own key, made when it is first needed."""
    base = os.environ.get("XDG_STATE_HOME")
    path = (Path(base) if base else Path.home() / ".local" / "state") / "farspan" / "key"
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mine = path.with_name(f"key.{secrets.token_hex(8)}")
        with open(os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
        with suppress(FileExistsError):  # Another process has been first.
            os.link(mine, path)
        mine.unlink()
    return read_bytes(path)
