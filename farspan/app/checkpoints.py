"""Checkpoints of a run whose rank 0 works on a host with a disk of its own: copied to the run's
folder here, and counted where they are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from farspan.app.jobs import read_status
from farspan.domain.cluster import Cluster
from farspan.domain.interpreter import module_command
from farspan.domain.run import RunFolder


def flaw_of(path: Path) -> str:
    """Return why the checkpoint in a folder is not whole; empty where every byte is right. Ctrl-C
    does not reach the process that reads it."""
    verify = module_command(
        sys.executable, "farspan.runtime.checkpoint.checkpoint_folder", str(path)
    )
    verified = subprocess.run(
        verify, stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True
    )
    if verified.returncode == 0:
        return ""
    return verified.stdout.strip() or f"it cannot be read: {verified.stderr.strip()[-300:]}"


def copy_checkpoints(run: RunFolder, cluster: Cluster) -> None:
    """Copy the checkpoints that lie on rank 0's own disk alone, if it has one. Raises Refusal
    (host-unreachable)."""
    from farspan.launch.run_folder_transfer import remote_run

    remote = remote_run(run.load_plan(), run, cluster, flaw_of)
    if remote is not None:
        remote.fetch_checkpoints()


def unmirrored_steps(run: RunFolder) -> int:
    """Count the steps between the newest checkpoint in the run's folder and the newest that was
    saved: 0 unless that lies on another disk alone."""
    saved = read_status(run).saved_step
    if saved is None:
        return 0
    return max(0, saved - max(0, run.newest_checkpoint()))
