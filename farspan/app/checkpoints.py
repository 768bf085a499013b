"""Checkpoints of a run whose rank 0 works on a host with a disk of its own: copied to the run's
folder here, and what is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from farspan.app.jobs import status
from farspan.domain.cluster import Cluster
from farspan.domain.interpreter import module_command
from farspan.domain.run import RunFolder


def flaw_of(path: Path) -> str:
    """Why the checkpoint in a folder is not whole; empty where every byte of it is right."""
    words = module_command(sys.executable, "farspan.runtime.checkpoint.checkpoint", str(path))
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    return done.stdout.strip() or f"it cannot be read: {done.stderr.strip()[-300:]}"


def copy_checkpoints(run: RunFolder, cluster: Cluster) -> None:
    """Copy the checkpoints that lie on rank 0's own disk alone, if it has one. Raises Refusal
    (host-unreachable)."""
    from farspan.launch.remote_run import remote_run

    if (away := remote_run(run.load_plan(), run, cluster, flaw_of)) is not None:
        away.fetch()


def unmirrored_steps(run: RunFolder) -> int:
    """Steps between the newest checkpoint in the run's folder and the newest that was saved: 0
    unless that lies on another disk alone."""
    saved = status(run).saved_step
    return 0 if saved is None else max(0, saved - max(0, run.newest_checkpoint()))
