"""The places that a run.yaml names for copies of checkpoints: checked before a run begins, and
opened."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from farspan.domain.cluster import Cluster
from farspan.domain.config import CheckpointConfig
from farspan.domain.escapes import shell_line, shell_word
from farspan.domain.problems import Refusal
from farspan.launch.copies import CopyError, CopyPlace, known_kind, open_places, place_kind
from farspan.launch.copies.site import hosts_for_copies
from farspan.planning.quantities import copy_rate

KEY = "checkpoint.copy"


def open_copy_places(location: str, cluster: Cluster | None, first: str | None) -> list[CopyPlace]:
    """Open what a value of `checkpoint.copy` names: places, the best first; one of them holds the
    copy. `first` is rank 0's host. Raises Refusal (copy-unusable, extra-missing)."""
    if not known_kind(location):
        raise _unusable(
            location, "there is no such kind of place", "set checkpoint.copy: s3://BUCKET/PREFIX"
        )
    if place_kind(location) == "folder" and not location.startswith(("/", "~")):
        raise _unusable(
            location,
            "from another folder it would be another place",
            f"set checkpoint.copy: {shell_word(Path(location).absolute())}",
        )
    hosts = [] if cluster is None else hosts_for_copies(cluster, first)
    places = open_places(location, hosts)
    if not places:
        raise _unusable(
            location,
            "the cluster has no other host with a disk of its own",
            "set checkpoint.copy to a folder on another disk, or to s3://BUCKET/PREFIX",
        )
    return places


def refuse_unusable_places(config: CheckpointConfig, *, site: Cluster | None = None) -> None:
    """Refuse places that cannot hold copies: no folder, no bucket, no credentials. Those of `site`
    are looked at where the cluster is given."""
    copy_rate(config)
    for location in config.copies:
        kind = place_kind(location)
        if kind == "site" and site is None:
            continue
        for place in open_copy_places(location, site, _first_host(site)):
            _require_usable(place, location)
            if kind == "folder":
                _require_writable(Path(place.name))
            break


def shared_disk(config: CheckpointConfig, run: Path) -> str | None:
    """Return the first folder for copies that lies on the same disk as a run's; None without."""
    folder = run.absolute()
    while not folder.exists():
        folder = folder.parent
    for location in config.copies:
        if place_kind(location) == "folder":
            place = Path(location).expanduser()
            if place.is_dir() and place.stat().st_dev == folder.stat().st_dev:
                return location
    return None


def _first_host(cluster: Cluster | None) -> str | None:
    return None if cluster is None else cluster.machines[0].name


def _require_usable(place: CopyPlace, location: str) -> None:
    try:
        place.list_folders()
    except CopyError as error:
        remedy = "look whether it is there and lets you in, or leave checkpoint.copy out"
        if place_kind(location) == "folder":
            remedy = shell_line("mkdir", "-p", place.name)
        elif place_kind(location) == "s3":
            remedy = shell_line("aws", "s3", "ls", location)
        raise _unusable(location, str(error), remedy) from None


def _require_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unusable(
            str(folder), "it cannot be written to", shell_line("ls", "-ld", str(folder))
        )


def _unusable(location: str, fact: str, remedy: str) -> Refusal:
    return Refusal(
        "copy-unusable",
        what="copies of checkpoints cannot be kept there",
        where=f"{KEY}: {location}",
        fact=fact,
        remedy=remedy,
        key=KEY,
    )


def reachable_places(
    config: CheckpointConfig, cluster: Cluster | None, first: str | None = None
) -> Iterator[CopyPlace]:
    """Yield every place that may hold a copy, of all values of `checkpoint.copy`. Raises Refusal
    (copy-unusable, extra-missing)."""
    for location in config.copies:
        yield from open_copy_places(location, cluster, first)
