"""The interpreters that `farspan cluster up` has made on hosts, as this user's state folder lists
them: a host has that one as long as the same farspan runs here."""

from __future__ import annotations

from pathlib import Path

import msgspec

from farspan.domain.cluster import Host
from farspan.domain.run import state_folder
from farspan.domain.struct_files import content_hash, load, save
from farspan.launch.folder_lock import lock_file
from farspan.launch.own_release import release_name


class HostPython(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One interpreter that was made; `host` is for people."""

    host: str
    python: str
    release: str


Entries = dict[str, HostPython]


def with_own_python(host: Host) -> Host:
    """Return a host with the interpreter that was made there, if it has this farspan; else as the
    cluster file has it."""
    made = _load().get(_key(host))
    if made is None or made.release != release_name():
        return host
    return msgspec.structs.replace(host, python=made.python)


def record_python(host: Host, python: str) -> None:
    """Keep that a host, as its cluster file has it, has this farspan in an interpreter."""
    made = HostPython(host=host.name, python=python, release=release_name())
    _change({_key(host): made}, None)


def forget_python(host: Host) -> None:
    _change({}, _key(host))


def _change(added: Entries, removed: str | None) -> None:
    path = _path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with lock_file(path.with_suffix(".lock"), "the list of hosts is being written", path):
        entries = {**_load(), **added}
        entries.pop(removed or "", None)
        save(entries, path)


def _load() -> Entries:
    try:
        path = _path()
    except RuntimeError:  # A user without a home folder has no state in it.
        return {}
    return load(path, Entries) if path.exists() else {}


def _path() -> Path:
    return state_folder() / "hosts.json"


def _key(host: Host) -> str:
    """Return the key of a host: a hash of how it is entered, and of its interpreter and folder in
    the cluster file."""
    return content_hash(host.name, host.enter, host.python, host.folder)
