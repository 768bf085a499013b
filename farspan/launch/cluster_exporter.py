"""A cluster in the words of another tool that starts machines or jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from farspan.domain.cluster import Cluster
from farspan.launch.ssh_settings import SshAccess


class ExportedCluster(msgspec.Struct, frozen=True, kw_only=True):
    """Files for another tool, by name. `notes` is what their user must know besides."""

    tool: str
    #: Of the tool, as the files were written for it.
    version: str
    files: dict[str, str]
    notes: tuple[str, ...]


class ClusterExporter(msgspec.Struct, frozen=True, kw_only=True):
    """One tool. An entry point of `farspan.cluster_exports` names it."""

    name: str
    version: str
    #: The files of a cluster of a name, whose hosts are entered so, and notes. Raises Refusal
    #: (cannot-export) with every reason why the tool cannot have it.
    write: Callable[[str, Cluster, Mapping[str, SshAccess]], tuple[dict[str, str], tuple[str, ...]]]

    def export(
        self, name: str, cluster: Cluster, accesses: Mapping[str, SshAccess]
    ) -> ExportedCluster:
        """Return a cluster in the tool's own files. Raises Refusal (cannot-export)."""
        files, notes = self.write(name, cluster, accesses)
        return ExportedCluster(tool=self.name, version=self.version, files=files, notes=notes)
